"""Which driver has an NVMe controller, who uses it, and the move to VFIO and back.

Reads and writes the kernel's files below /sys; so `bind` and `unbind` need root. A controller whose
namespaces are mounted, open or part of another device is never taken from its driver.

``python -m flashwarp.nvme.binding`` lists the controllers, and ``... bind BDF`` binds one.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from flashwarp.errors import ArgumentError, FlashwarpError, LockedError, PathError
from flashwarp.storage.block_users import names_in, processes_with, text_of, users_of

DRIVER = "vfio-pci"
"""The kernel's driver that gives devices to processes."""

_CLASS = "0x010802"  # mass storage, NVM, NVM Express I/O controller
_BDF = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_BOUND_S = 10.0
_POLL_S = 0.05


@dataclass(frozen=True)
class PciController:
    """An NVMe controller, as the kernel shows it."""

    bdf: str  # PCI address: domain, bus, device, function
    driver: str  # name of the driver that has it; empty: none
    group: str  # number of its IOMMU group; empty: there is no IOMMU
    cdev: str  # name of its file in /dev/vfio/devices, for iommufd; empty: the kernel makes none
    disks: tuple[str, ...]  # names of its namespaces, as block devices of the kernel

    def users(self, root: Path = Path("/")) -> list[str]:
        """Return who uses its namespaces, for people; may miss processes of other users."""
        return [user for disk in self.disks for user in users_of(disk, root)]


def controllers(root: Path = Path("/")) -> list[PciController]:
    """Return the NVMe controllers of the machine, by PCI address."""
    folder = root / "sys/bus/pci/devices"
    return [
        _look(name, root) for name in names_in(folder) if text_of(folder / name / "class") == _CLASS
    ]


def find(bdf: str, root: Path = Path("/")) -> PciController:
    """Return the controller with a PCI address, such as "0000:01:00.0" or "01:00.0".

    Raises ArgumentError if there is none, with the addresses of those that exist.
    """
    if not isinstance(bdf, str) or not _BDF.fullmatch(bdf.lower()):
        raise ArgumentError(
            f"bdf={bdf!r} is no PCI address such as '0000:01:00.0'{_existing(root)}"
        )
    name = bdf.lower() if bdf.count(":") == 2 else f"0000:{bdf.lower()}"
    device = root / "sys/bus/pci/devices" / name
    if not device.exists():
        raise ArgumentError(f"there is no PCI device {name}{_existing(root)}")
    kind = text_of(device / "class")
    if kind != _CLASS:
        raise ArgumentError(
            f"{name} is no NVMe controller: its class is {kind}, not {_CLASS}{_existing(root)}"
        )
    return _look(name, root)


def bind(bdf: str, root: Path = Path("/")) -> PciController:
    """Take a controller that nobody uses from its driver, and give it to vfio-pci. Blocks.

    Returns
    -------
    PciController
        As it is now. `flashwarp.nvme.VfioController` opens it.

    Raises
    ------
    ArgumentError
        If there is no such controller.
    LockedError
        If one of its namespaces is mounted, open, or part of another device; it says by whom.
    PathError
        If this takes root, the module vfio-pci, or an IOMMU.
    """
    before = find(bdf, root)
    if before.driver == DRIVER:
        return before
    if not before.group:
        raise no_iommu(before.bdf)
    _refuse_used(before, root)
    if not (root / "sys/bus/pci/drivers" / DRIVER).exists():
        raise PathError(
            errno.ENOENT, "the driver is not loaded: sudo modprobe vfio-pci", "vfio-pci"
        )
    return _move(before, DRIVER, root)


def unbind(bdf: str, root: Path = Path("/")) -> PciController:
    """Give a controller back to the kernel's own driver. Blocks.

    Raises ArgumentError, LockedError if a process drives it, or PathError.
    """
    before = find(bdf, root)
    if before.driver != DRIVER:
        return before
    files = {f"/dev/vfio/{before.group}", f"/dev/vfio/devices/{before.cdev}"}
    for holder in processes_with(root, files.__contains__):
        raise LockedError(
            errno.EBUSY,
            f"process {holder} drives {before.bdf}: end it first (kill {holder})",
            f"/dev/vfio/{before.group}",
            holder,
        )
    return _move(before, "", root)


def no_iommu(bdf: str) -> PathError:
    """Return the error of a machine without an IOMMU."""
    return PathError(
        errno.ENODEV,
        f"{bdf} is in no IOMMU group, so nothing would keep it out of the rest of the memory: "
        "enable the IOMMU in the firmware (VT-d, AMD-Vi) and in the kernel (intel_iommu=on or "
        "amd_iommu=on, in GRUB_CMDLINE_LINUX of /etc/default/grub; then sudo update-grub)",
        f"/sys/bus/pci/devices/{bdf}/iommu_group",
    )


def bind_command(bdf: str) -> str:
    """Return the command that gives a controller to vfio-pci."""
    return f"sudo {sys.executable} -m flashwarp.nvme.binding bind {bdf}"


def _look(bdf: str, root: Path) -> PciController:
    device = root / "sys/bus/pci/devices" / bdf
    return PciController(
        bdf,
        _link(device / "driver"),
        _link(device / "iommu_group"),
        next(iter(names_in(device / "vfio-dev")), ""),
        tuple(
            name
            for controller in names_in(device / "nvme")
            for name in _disks_of(device / "nvme" / controller)
        ),
    )


def _disks_of(controller: Path) -> list[str]:
    # With the kernel's multipath, the namespaces lie below the subsystem: nvme0c1n1 here, and
    # nvme0n1 is what people mount.
    found = [re.sub(r"c\d+n", "n", name) for name in names_in(controller) if "n" in name[4:]]
    return sorted({name for name in found if re.fullmatch(r"nvme\d+n\d+", name)})


def _move(before: PciController, driver: str, root: Path) -> PciController:
    device = root / "sys/bus/pci/devices" / before.bdf
    try:
        (device / "driver_override").write_text(f"{driver}\n")
        if before.driver:
            (device / "driver" / "unbind").write_text(before.bdf)
        (root / "sys/bus/pci/drivers_probe").write_text(before.bdf)
    except OSError as error:
        number = error.errno or errno.EIO
        raise PathError(
            number,
            f"{os.strerror(number)}; moving a device to another driver takes root: "
            + bind_command(before.bdf).replace(" bind ", " bind " if driver else " unbind "),
            str(device),
        ) from error
    end = time.monotonic() + _BOUND_S
    while True:
        now = _look(before.bdf, root)
        if now.driver != before.driver and (now.driver == driver if driver else now.driver):
            return now
        if time.monotonic() > end:
            raise PathError(
                errno.ETIMEDOUT,
                f"{driver or 'no driver'} has not taken {before.bdf} within {_BOUND_S:g} s; it has "
                f"{now.driver or 'no driver'}: see sudo dmesg",
                str(device),
            )
        time.sleep(_POLL_S)


def _refuse_used(controller: PciController, root: Path) -> None:
    users = controller.users(root)
    if users:
        raise LockedError(
            errno.EBUSY,
            f"{controller.bdf} is in use: {'; '.join(users)}",
            controller.disks[0],
        )


def _link(path: Path) -> str:
    try:
        return Path(os.readlink(path)).name
    except OSError:
        return ""


def _existing(root: Path) -> str:
    names = [each.bdf for each in controllers(root)]
    return f"; the NVMe controllers here are {', '.join(names)}" if names else "; there is none"


def main(arguments: list[str] | None = None) -> int:
    """List the controllers of this machine, or bind or unbind one; return an exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashwarp.nvme.binding", description=__doc__)
    parser.add_argument("action", nargs="?", choices=("list", "bind", "unbind"), default="list")
    parser.add_argument("bdf", nargs="?")
    options = parser.parse_args(arguments)
    try:
        if options.action == "list":
            for each in controllers():
                print(f"{each.bdf}  {each.driver or 'no driver'}  IOMMU group {each.group or '-'}")
                for user in each.users():
                    print(f"    {user}")
        elif options.bdf is None:
            parser.error("name a controller, such as 0000:01:00.0")
        else:
            now = (bind if options.action == "bind" else unbind)(options.bdf)
            print(f"{now.bdf} has {now.driver}, IOMMU group {now.group or '-'}")
    except FlashwarpError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
