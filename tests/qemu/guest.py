"""What tests inside of the guest need: its drives, their drivers, and a way to QEMU's monitor.

Only root in the guest uses this. Nothing here imports flashwarp.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qemu.machine import SHARED

_PCI = Path("/sys/bus/pci")
_NVME_CLASS = "0x010802"
_numbers = itertools.count()


def in_guest() -> bool:
    return os.environ.get("FLASHWARP_QEMU_GUEST") == "1"


def load(*modules: str) -> None:
    """Load kernel modules, and those that they need."""
    folder = os.environ["FLASHWARP_QEMU_MODULES"]
    for module in modules:
        subprocess.run(["modprobe", "-d", folder, module], check=True)


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = 30) -> Any:
    """Return what `condition` returns once it is true. Raises TimeoutError."""
    end = time.monotonic() + limit_s
    while True:
        if found := condition():
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.05)


# Controllers, by PCI address.


def controllers() -> list[str]:
    """PCI addresses of the NVMe controllers that are there, in the order of `Machine.drives`."""
    found = (_PCI / "devices").iterdir()
    return sorted(each.name for each in found if _read(each / "class") == _NVME_CLASS)


def address_of(index: int) -> str:
    """PCI address of controller `index` of the machine, also if others were pulled out."""
    return f"0000:{index + 1:02x}:00.0"


def driver_of(bdf: str) -> str:
    """Return the name of the driver that has the controller; empty if none has it."""
    link = _PCI / "devices" / bdf / "driver"
    return link.resolve().name if link.exists() else ""


def unbind(bdf: str) -> None:
    """Take the controller from its driver, if it has one."""
    if driver_of(bdf):
        (_PCI / "devices" / bdf / "driver" / "unbind").write_text(bdf)


def bind(bdf: str, driver: str) -> None:
    """Give the controller to `driver`: "nvme" or "vfio-pci"."""
    load(driver)
    if driver_of(bdf) == driver:
        return
    unbind(bdf)
    (_PCI / "devices" / bdf / "driver_override").write_text(driver + "\n")
    (_PCI / "drivers_probe").write_text(bdf)
    if driver_of(bdf) != driver:
        raise RuntimeError(f"{driver} did not take {bdf}; it has {driver_of(bdf) or 'no driver'}")
    if driver == "nvme":
        wait_until((_PCI / "devices" / bdf / "nvme").is_dir, f"nvme takes {bdf}")


# Namespaces, as the kernel's driver shows them.


def block_device(drive: int = 0, nsid: int = 1) -> Path:
    """Path such as /dev/nvme0n1 of a namespace of `Machine.drives[drive]`, once it is there."""

    def find() -> Path | None:
        for disk in Path("/sys/block").glob("nvme*"):
            if (
                _read(disk / "device" / "serial") == f"drive{drive}"
                and _read(disk / "nsid") == str(nsid)
                and Path("/dev", disk.name).exists()
            ):
                return Path("/dev", disk.name)
        return None

    path: Path = wait_until(find, f"the kernel shows namespace {nsid} of drive {drive}")
    return path


def character_device(drive: int = 0, nsid: int = 1) -> Path:
    """Path such as /dev/ng0n1 of the same."""
    path = Path("/dev", block_device(drive, nsid).name.replace("nvme", "ng"))
    wait_until(path.exists, f"the kernel makes {path}")
    return path


# QEMU.


def monitor(execute: str, **arguments: Any) -> Any:
    """Have QEMU's monitor execute a command (QMP), and return what it returns.

    Raises RuntimeError with QEMU's message.
    """
    number = f"{os.getpid()}-{next(_numbers)}"
    request = {"execute": execute, "arguments": arguments}
    unfinished = SHARED / f"unfinished-{number}"
    unfinished.write_text(json.dumps(request))
    unfinished.rename(SHARED / f"request-{number}")
    path = SHARED / f"answer-{number}"
    wait_until(path.exists, f"QEMU answers {execute}", 60)
    answer = json.loads(path.read_text())
    if "error" in answer:
        raise RuntimeError(f"{execute}: {answer['error']['desc']}")
    return answer.get("return")


def pull(index: int) -> None:
    """Ask for controller `index` of the machine to be taken out of its slot. Does not wait."""
    monitor("device_del", id=f"nvme{index}")


def remove_controller(index: int) -> None:
    """Pull controller `index` of the machine, and wait until it is gone."""
    pull(index)
    wait_until(lambda: not is_there(index), f"{address_of(index)} goes away")


def is_there(index: int) -> bool:
    """Whether controller `index` of the machine is in its slot."""
    return address_of(index) in controllers()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
