"""The doctor's NVMe section on machines that a folder stands for."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flashwarp.cli.doctor_nvme import GpuFacts, Machine
from flashwarp.cli.finding import Finding

STEPS = ["drives", "passthrough", "IOMMU", "vfio-pci", "permission", "iommufd"]
GPU_STEPS = ("doorbells", "dma-buf", "mapping", "order")
STEPS += [f"GPU {step}" for step in (*GPU_STEPS, "route")]


@dataclass
class Tree:
    """Builds what /sys, /proc and /dev show."""

    root: Path
    refused: set[str] = field(default_factory=set)

    def write(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, to: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(Path("/", to))

    def drive(self, bdf: str, disk: str = "", *, driver: str = "nvme", group: str = "") -> None:
        device = f"sys/bus/pci/devices/{bdf}"
        self.write(f"{device}/class", "0x010802")
        if driver:
            (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.link(f"{device}/driver", f"sys/bus/pci/drivers/{driver}")
        if disk:
            controller = disk.rpartition("n")[0]
            (self.root / device / "nvme" / controller / disk).mkdir(parents=True)
            self.write(f"sys/block/{disk}/dev", "259:0")
            self.write(f"dev/{disk.replace('nvme', 'ng')}")
        if group:
            self.link(f"{device}/iommu_group", f"sys/kernel/iommu_groups/{group}")
            self.in_group(bdf, group, "0x010802")

    def in_group(self, bdf: str, group: str, kind: str) -> None:
        self.write(f"sys/kernel/iommu_groups/{group}/devices/{bdf}/class", kind)

    def findings(self, **options: Any) -> dict[str, Finding]:
        machine = Machine(
            self.root,
            release="6.8.0",
            may=lambda path, _: str(path.relative_to(self.root)) not in self.refused,
            privileged=lambda: False,
            memlock=lambda: -1,
            gpu=lambda: GpuFacts(error="no GPU"),
        )
        machine = replace(machine, **options)
        return {name: check() for name, check in machine.checks()}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_machine_without_drives_gets_one_line(tree: Tree) -> None:
    found = tree.findings()

    assert list(found) == ["drives"]
    assert found["drives"].state == "missing"
    assert found["drives"].detail.startswith("none on the PCI bus")


def test_other_devices_are_no_drives(tree: Tree) -> None:
    tree.write("sys/bus/pci/devices/0000:00:02.0/class", "0x020000")

    assert list(tree.findings()) == ["drives"]


def test_drives_are_named_with_their_users(tree: Tree) -> None:
    tree.drive("0000:01:00.0", "nvme0n1")
    tree.drive("0000:02:00.0", "nvme1n1")
    tree.write("sys/block/nvme1n1/dev", "259:7")
    tree.write("proc/self/mountinfo", "36 35 259:7 / /data rw,noatime - ext4 /dev/nvme1n1 rw")

    found = tree.findings()

    assert list(found) == STEPS
    detail = found["drives"].detail
    assert "0000:01:00.0 has nvme (nvme0n1), used by nobody" in detail
    assert "0000:02:00.0 has nvme (nvme1n1): /dev/nvme1n1 is mounted on /data" in detail
    assert [each["bdf"] for each in found["drives"].values["controllers"]] == [
        "0000:01:00.0",
        "0000:02:00.0",
    ]


# Passthrough.


def test_passthrough_works_with_permission(tree: Tree) -> None:
    tree.drive("0000:01:00.0", "nvme0n1")

    found = tree.findings()["passthrough"]

    assert (found.state, found.detail) == ("ok", "/dev/ng0n1, by io_uring")


@pytest.mark.parametrize(
    ("release", "privileged", "detail", "advice"),
    [
        ("6.1.0-56-amd64", False, "from root only", "Linux 6.2"),
        ("5.15.0", True, "by ioctl", "Linux 5.19"),
    ],
)
def test_older_kernels_limit_passthrough(
    tree: Tree, release: str, privileged: bool, detail: str, advice: str
) -> None:
    tree.drive("0000:01:00.0", "nvme0n1")

    found = tree.findings(release=release, privileged=lambda: privileged)["passthrough"]

    assert found.state == "limited"
    assert detail in found.detail
    assert advice in found.advice


def test_passthrough_without_permission_names_the_command(tree: Tree) -> None:
    tree.drive("0000:01:00.0", "nvme0n1")
    tree.refused.add("dev/ng0n1")

    found = tree.findings()["passthrough"]

    assert found.state == "limited"
    assert "sudo setfacl -m u:$USER:rw /dev/ng0n1" in found.advice


def test_passthrough_without_files_needs_a_newer_kernel(tree: Tree) -> None:
    tree.drive("0000:01:00.0", "nvme0n1")
    (tree.root / "dev/ng0n1").unlink()

    found = tree.findings()["passthrough"]

    assert found.state == "missing"
    assert "5.13" in found.advice


# VFIO, step by step.


@pytest.mark.parametrize(
    ("processor", "command_line", "advice"),
    [
        ("GenuineIntel", "quiet", "add intel_iommu=on to GRUB_CMDLINE_LINUX"),
        ("GenuineIntel", "quiet intel_iommu=on", "enable VT-d in the firmware"),
        ("AuthenticAMD", "quiet", "enable AMD-Vi (IOMMU) in the firmware"),
        ("AuthenticAMD", "amd_iommu=off", "add amd_iommu=on"),
    ],
)
def test_iommu_that_is_off(tree: Tree, processor: str, command_line: str, advice: str) -> None:
    tree.drive("0000:01:00.0", "nvme0n1")
    tree.write("proc/cpuinfo", f"vendor_id : {processor}")
    tree.write("proc/cmdline", command_line)

    found = tree.findings()["IOMMU"]

    assert found.state == "missing"
    assert advice in found.advice


def test_driver_that_is_not_loaded(tree: Tree) -> None:
    tree.drive("0000:01:00.0", "nvme0n1", group="9")

    found = tree.findings()

    assert found["IOMMU"].state == "ok"
    assert found["vfio-pci"].advice == "sudo modprobe vfio-pci"
    assert found["permission"].state == "missing"


def test_unused_drive_is_offered_with_the_command(tree: Tree) -> None:
    tree.drive("0000:01:00.0", "nvme0n1", group="9")
    tree.in_group("0000:00:10.0", "9", "0x060400")  # the bridge above it
    (tree.root / "sys/bus/pci/drivers/vfio-pci").mkdir()

    found = tree.findings()["vfio-pci"]

    assert "0000:01:00.0 is used by nobody" in found.detail
    assert "flashwarp.nvme.binding bind 0000:01:00.0" in found.advice


def test_drive_in_use_is_not_offered(tree: Tree) -> None:
    tree.drive("0000:01:00.0", "nvme0n1", group="9")
    tree.write("proc/self/mountinfo", "36 35 259:0 / / rw - ext4 /dev/nvme0n1 rw")
    (tree.root / "sys/bus/pci/drivers/vfio-pci").mkdir()

    found = tree.findings()["vfio-pci"]

    assert "each is in use" in found.detail
    assert "bind" not in found.advice


def test_shared_group_is_named(tree: Tree) -> None:
    tree.drive("0000:01:00.0", "nvme0n1", group="9")
    tree.in_group("0000:01:00.1", "9", "0x020000")
    (tree.root / "sys/bus/pci/drivers/vfio-pci").mkdir()

    found = tree.findings()["vfio-pci"]

    assert found.state == "limited"
    assert "shares IOMMU group 9 with 0000:01:00.1" in found.detail


def test_bound_drive_needs_permission_and_locked_memory(tree: Tree) -> None:
    tree.drive("0000:01:00.0", driver="vfio-pci", group="9")
    tree.write("dev/vfio/9")

    ready = tree.findings()
    limited = tree.findings(memlock=lambda: 8 << 20)["permission"]
    tree.refused.add("dev/vfio/9")
    refused = tree.findings()["permission"]

    assert ready["vfio-pci"].detail == "has 0000:01:00.0 (group 9)"
    assert ready["permission"].state == "ok"
    assert ready["passthrough"].detail == "the kernel's driver has no namespace"
    assert "8 MiB" in limited.detail
    assert "memlock unlimited" in limited.advice
    assert "sudo chown $USER /dev/vfio/9" in refused.advice


def test_iommufd(tree: Tree) -> None:
    tree.drive("0000:01:00.0", driver="vfio-pci", group="9")

    absent = tree.findings()["iommufd"]
    old = tree.findings(release="6.1.0")["iommufd"]
    tree.write("dev/iommu")
    (tree.root / "sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio0").mkdir(parents=True)
    present = tree.findings()["iommufd"]
    tree.refused.add("dev/vfio/devices/vfio0")
    refused = tree.findings()["iommufd"]

    assert "modprobe iommufd" in absent.advice
    assert "Linux 6.6" in old.advice
    assert (present.state, present.detail) == ("ok", "/dev/vfio/devices/vfio0")
    assert "chown $USER /dev/vfio/devices/vfio0" in refused.advice


def test_without_a_gpu_threads_serve_it(tree: Tree) -> None:
    tree.drive("0000:01:00.0", "nvme0n1")

    found = tree.findings()

    for step in ("doorbells", "dma-buf", "order"):
        assert (found[f"GPU {step}"].state, found[f"GPU {step}"].detail) == ("missing", "no GPU")
    assert found["GPU mapping"].detail == "not tried: there is no dma-buf"
    assert found["GPU route"].values["route"] == "software"


def test_gpu_with_all_pieces_takes_data_directly(tree: Tree) -> None:
    tree.drive("0000:01:00.0", driver="vfio-pci", group="9")

    found = tree.findings(gpu=lambda: GpuFacts(orders=True), privileged=lambda: True)

    assert [found[f"GPU {step}"].state for step in GPU_STEPS] == ["ok"] * 4
    path = found["GPU route"]
    assert (path.state, path.values["route"]) == ("ok", "direct")
    assert "no drive has been driven by a GPU yet" in path.detail


@pytest.mark.parametrize(
    ("facts", "step", "state", "text"),
    [
        (GpuFacts(export_refusal="why"), "dma-buf", "missing", "not exported: why"),
        (
            GpuFacts(orders=True, mapping_errno=errno.EOPNOTSUPP),
            "mapping",
            "missing",
            "not support",
        ),
        (GpuFacts(orders=True, mapping_errno=errno.ENOENT), "mapping", "missing", "no iommufd"),
        (GpuFacts(orders=True, mapping_errno=errno.EACCES), "mapping", "limited", "Permission"),
        (GpuFacts(orders=False), "order", "missing", "does not keep the order"),
    ],
)
def test_missing_piece_leaves_the_buffers(
    tree: Tree, facts: GpuFacts, step: str, state: str, text: str
) -> None:
    tree.drive("0000:01:00.0", driver="vfio-pci", group="9")
    tree.write("proc/driver/nvidia/params", 'RegistryDwords: "PeerMappingOverride=1;"')

    found = tree.findings(gpu=lambda: facts)

    assert found["GPU doorbells"].state == "ok"
    assert found[f"GPU {step}"].state == state
    assert text in found[f"GPU {step}"].detail
    assert found["GPU route"].values["route"] == "bounce"


def test_user_whose_kernels_ring_no_doorbells_is_told_how(tree: Tree) -> None:
    tree.drive("0000:01:00.0", driver="vfio-pci", group="9")

    found = tree.findings(gpu=lambda: GpuFacts(orders=True))

    assert found["GPU doorbells"].state == "limited"
    assert "PeerMappingOverride=1" in found["GPU doorbells"].advice
    assert found["GPU route"].values["route"] == "software"


def test_this_machine_has_findings_for_each_check() -> None:
    for _, check in Machine().checks():
        assert check().detail
