"""Controllers as the kernel shows them, on a tree of files in the place of /sys and /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, LockedError, PathError
from flashwarp.nvme import binding

BDF = "0000:01:00.0"


class Machine:
    """A file system that shows one NVMe controller, and one device that is none."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.device = root / "sys/bus/pci/devices" / BDF
        self._write("sys/bus/pci/devices/0000:00:00.0/class", "0x060000\n")
        self._write(f"sys/bus/pci/devices/{BDF}/class", "0x010802\n")
        self._write("proc/self/mountinfo", "")
        self._write("proc/swaps", "Filename Type Size Used Priority\n")
        (root / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
        self.link("driver", "nvme")
        self.link("iommu_group", "17")
        (self.device / "nvme/nvme0/nvme0n1").mkdir(parents=True)
        self._write("sys/block/nvme0n1/dev", "259:0\n")
        self._write("sys/block/nvme0n1/nvme0n1p1/dev", "259:1\n")

    def link(self, name: str, target: str) -> None:
        (self.device / name).unlink(missing_ok=True)
        folder = self.root / "sys/kernel" / name / target
        folder.mkdir(parents=True, exist_ok=True)
        (self.device / name).symlink_to(folder)

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_controller_is_found_with_its_driver_group_and_disks(machine: Machine) -> None:
    found = binding.find("01:00.0", machine.root)
    assert found == binding.PciController(BDF, "nvme", "17", "", ("nvme0n1",))
    assert binding.controllers(machine.root) == [found]
    assert found.users(machine.root) == []


def test_disks_below_a_subsystem_are_found(machine: Machine) -> None:
    (machine.device / "nvme/nvme0/nvme0n1").rmdir()
    (machine.device / "nvme/nvme0/nvme0c0n1").mkdir()
    (machine.device / "nvme/nvme0/ng0n1").mkdir()
    assert binding.find(BDF, machine.root).disks == ("nvme0n1",)


@pytest.mark.parametrize("bdf", ["", "nvme0", "01:00", "0000:01:00.9", "/dev/nvme0", 5])
def test_what_is_no_address_is_refused(machine: Machine, bdf: str) -> None:
    with pytest.raises(ArgumentError, match=f"no PCI address.*the NVMe controllers here are {BDF}"):
        binding.find(bdf, machine.root)


def test_absent_and_other_devices_are_refused(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"there is no PCI device 0000:09:00\.0; the NVMe"):
        binding.find("09:00.0", machine.root)
    with pytest.raises(ArgumentError, match="is no NVMe controller: its class is 0x060000"):
        binding.find("00:00.0", machine.root)
    with pytest.raises(ArgumentError, match="; there is none"):
        binding.find("09:00.0", tmp_path / "empty")


def _mount(machine: Machine) -> str:
    line = "36 35 259:1 / /mnt/data rw shared:1 - ext4 /dev/nvme0n1p1 rw\n"
    (machine.root / "proc/self/mountinfo").write_text(line)
    return r"/dev/nvme0n1p1 is mounted on /mnt/data \(sudo umount /mnt/data\)"


def _hold(machine: Machine) -> str:
    (machine.root / "sys/block/nvme0n1/holders/dm-0").mkdir(parents=True)
    return "/dev/nvme0n1 is part of /dev/dm-0"


def _swap(machine: Machine) -> str:
    with (machine.root / "proc/swaps").open("a") as file:
        file.write("/dev/nvme0n1p1 partition 8388604 0 -2\n")
    return "/dev/nvme0n1p1 is swap space"


def _open(machine: Machine) -> str:
    folder = machine.root / "proc/4711/fd"
    folder.mkdir(parents=True)
    (folder / "3").symlink_to("/dev/nvme0n1")
    return r"process 4711 has /dev/nvme0n1 open"


@pytest.mark.parametrize("use", [_mount, _hold, _swap, _open])
def test_controller_in_use_is_not_taken(machine: Machine, use: object) -> None:
    assert callable(use)
    who = use(machine)
    with pytest.raises(LockedError, match=who):
        binding.bind(BDF, machine.root)
    assert not (machine.device / "driver_override").exists()


def test_machine_without_iommu_says_how_to_get_one(machine: Machine) -> None:
    (machine.device / "iommu_group").unlink()
    with pytest.raises(PathError, match=r"in no IOMMU group.*intel_iommu=on"):
        binding.bind(BDF, machine.root)


def test_driver_that_is_not_loaded_is_named(machine: Machine) -> None:
    (machine.root / "sys/bus/pci/drivers/vfio-pci").rmdir()
    with pytest.raises(PathError, match="sudo modprobe vfio-pci"):
        binding.bind(BDF, machine.root)


def test_driver_that_does_not_take_it_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These files move nothing; the driver stays what it was."""
    monkeypatch.setattr(binding, "_BOUND_S", 0.1)
    (machine.root / "sys/kernel/driver/nvme/unbind").touch()
    with pytest.raises(PathError, match=r"vfio-pci has not taken 0000:01:00\.0.*it has nvme"):
        binding.bind(BDF, machine.root)
    assert (machine.device / "driver_override").read_text() == "vfio-pci\n"


def test_bound_controller_stays_and_one_in_use_is_not_unbound(machine: Machine) -> None:
    machine.link("driver", "vfio-pci")
    assert binding.bind(BDF, machine.root).driver == "vfio-pci"
    folder = machine.root / "proc/4711/fd"
    folder.mkdir(parents=True)
    (folder / "3").symlink_to("/dev/vfio/17")
    with pytest.raises(LockedError, match=r"process 4711 drives 0000:01:00\.0") as caught:
        binding.unbind(BDF, machine.root)
    assert caught.value.holder == 4711


def test_unbound_controller_has_the_kernels_driver_already(machine: Machine) -> None:
    assert binding.unbind(BDF, machine.root).driver == "nvme"


def test_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert binding.main(["list"]) == 0
    assert binding.main(["bind", "7f:1f.7"]) == 1
    assert "there is no PCI device 0000:7f:1f.7" in capsys.readouterr().err


def test_controller_that_does_not_exist_is_not_opened() -> None:
    with pytest.raises(ArgumentError, match=r"there is no PCI device 0000:7f:1f\.7"):
        fw.nvme.VfioController("7f:1f.7")
    with pytest.raises(ArgumentError, match="depth=100 is not a power of two"):
        fw.nvme.VfioController("7f:1f.7", depth=100)
    with pytest.raises(ArgumentError, match="iommu='none'"):
        fw.nvme.VfioController("7f:1f.7", iommu="none")  # type: ignore[arg-type]
    assert not os.path.exists("/sys/bus/pci/devices/0000:7f:1f.7")
