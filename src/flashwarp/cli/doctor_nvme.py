"""NVMe drives in `flashwarp doctor`: which there are, who has them, and the ways to them.

Each step has a check of its own, with the command that makes up for what is missing, and
docs/hardware.md explains it. On a machine without NVMe drives there is one finding.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import re
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flashwarp import _native
from flashwarp._jit import cuda_api
from flashwarp.cli.finding import Finding, State
from flashwarp.device import CudaDevice
from flashwarp.device.memory import align_up
from flashwarp.errors import DeviceError, FlashwarpError
from flashwarp.nvme import binding, gpu_mapping
from flashwarp.nvme.binding import PciController
from flashwarp.probe.text import binary
from flashwarp.storage.block_users import text_of

Check = tuple[str, Callable[[], Finding]]

_URING_COMMANDS = (5, 19)
_UNPRIVILEGED_COMMANDS = (6, 2)
_VFIO_FILES = (6, 6)
_CAP_SYS_ADMIN = 21

# What an array's rings and frames take of a user's locked memory, at least.
_MEMLOCK_MIN = 256 << 20

# GPU memory that is exported to see whether it can be.
_TRIAL_BYTES = 2 << 20


def _has_privilege() -> bool:
    held = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(held and int(held[1], 16) >> _CAP_SYS_ADMIN & 1)


@dataclass(frozen=True)
class GpuFacts:
    """What a GPU has for drives."""

    error: str = ""  # why nothing is known of it; empty if there is one
    export_refusal: str = ""  # why its memory is not exported as a dma-buf; empty if it was
    mapping_errno: int = 0  # what the kernel's iommufd says to that dma-buf; 0: it maps it
    orders: bool = False  # whether it keeps the order of a device's writes to its memory


@dataclass(frozen=True)
class Machine:
    """Where the checks look; tests give another machine."""

    root: Path = Path("/")  # what lies at "/"
    release: str = platform.release()  # of the kernel
    # Whether this user may access a path, as `os.access`.
    may: Callable[[Path, int], bool] = os.access
    # Whether this process may send any NVMe command (CAP_SYS_ADMIN).
    privileged: Callable[[], bool] = _has_privilege
    # Bytes that this user may lock; -1: no limit.
    memlock: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    gpu: Callable[[], GpuFacts] = lambda: _look_at_gpu()  # what the GPU has for drives

    def checks(self) -> list[Check]:
        """Return names and checks, in the order of the steps; one alone if there is no drive."""
        drives: Check = ("drives", self._check_drives)
        if not binding.controllers(self.root):
            return [drives]
        return [
            drives,
            ("passthrough", self._check_passthrough),
            ("IOMMU", self._check_iommu),
            ("vfio-pci", self._check_driver),
            ("permission", self._check_permission),
            ("iommufd", self._check_iommufd),
            ("GPU doorbells", self._check_doorbells),
            ("GPU dma-buf", self._check_export),
            ("GPU mapping", self._check_mapping),
            ("GPU order", self._check_order),
            ("GPU route", self._check_path),
        ]

    @property
    def _kernel(self) -> tuple[int, int]:
        found = re.match(r"(\d+)\.(\d+)", self.release)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def _here(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _check_drives(self) -> Finding:
        found = binding.controllers(self.root)
        if not found:
            return Finding("missing", "none on the PCI bus; files of any drive can be used")
        values = {
            "controllers": [
                {
                    "bdf": each.bdf,
                    "driver": each.driver,
                    "iommu_group": each.group,
                    "disks": list(each.disks),
                    "users": each.users(self.root),
                }
                for each in found
            ]
        }
        return Finding("ok", "; ".join(map(self._described, found)), values=values)

    def _described(self, drive: PciController) -> str:
        has = f"{drive.bdf} has {drive.driver or 'no driver'}"
        disks = f" ({', '.join(drive.disks)})" if drive.disks else ""
        users = drive.users(self.root)
        if users:
            return f"{has}{disks}: {', '.join(user.split(' (')[0] for user in users)}"
        return f"{has}{disks}, used by nobody" if drive.driver == "nvme" else f"{has}{disks}"

    # The kernel's driver keeps the drive: storage.Passthrough.

    def _check_passthrough(self) -> Finding:
        disks = [disk for each in binding.controllers(self.root) for disk in each.disks]
        if not disks:
            return Finding("missing", "the kernel's driver has no namespace")
        files = [Path("dev", f"ng{disk.removeprefix('nvme')}") for disk in disks]
        there = [f"/{file}" for file in files if (self.root / file).exists()]
        if not there:
            return Finding(
                "missing", "the kernel makes no /dev/ng* files", "take Linux 5.13 or later"
            )
        ours = [each for each in there if self.may(self._here(each), os.R_OK | os.W_OK)]
        if not ours:
            return Finding(
                "limited",
                f"{', '.join(there)}: no permission",
                f"sudo setfacl -m u:$USER:rw {there[0]}, until the next start; for ever by a udev "
                "rule, see docs/hardware.md",
            )
        if self._kernel < _UNPRIVILEGED_COMMANDS and not self.privileged():
            return Finding(
                "limited",
                f"{', '.join(ours)}: Linux {self.release} takes NVMe commands from root only",
                "take Linux 6.2 or later, or run as root",
            )
        if self._kernel < _URING_COMMANDS:
            return Finding(
                "limited",
                f"{', '.join(ours)}: by ioctl, from threads",
                "take Linux 5.19 or later: it has commands by io_uring",
            )
        return Finding("ok", f"{', '.join(ours)}, by io_uring", values={"files": ours})

    # This process drives the drive: VfioController.

    def _check_iommu(self) -> Finding:
        groups = self._here("/sys/kernel/iommu_groups")
        count = len(list(groups.iterdir())) if groups.is_dir() else 0
        if count:
            return Finding("ok", f"{count} groups", values={"groups": count})
        command_line = text_of(self._here("/proc/cmdline"))
        is_amd = "AuthenticAMD" in text_of(self._here("/proc/cpuinfo"))
        argument = "amd_iommu=on" if is_amd else "intel_iommu=on"
        firmware = "AMD-Vi (IOMMU)" if is_amd else "VT-d"
        if argument in command_line or (is_amd and "amd_iommu=off" not in command_line):
            advice = f"enable {firmware} in the firmware's set-up, and start again"
        else:
            advice = (
                f"enable {firmware} in the firmware's set-up; add {argument} to "
                "GRUB_CMDLINE_LINUX in /etc/default/grub; sudo update-grub; start again"
            )
        return Finding("missing", "no groups: VFIO needs an IOMMU", advice)

    def _check_driver(self) -> Finding:
        found = binding.controllers(self.root)
        bound = [each for each in found if each.driver == binding.DRIVER]
        if bound:
            return Finding(
                "ok",
                ", ".join(f"has {each.bdf} (group {each.group})" for each in bound),
                values={"bound": [each.bdf for each in bound]},
            )
        if not self._here(f"/sys/bus/pci/drivers/{binding.DRIVER}").exists():
            return Finding("missing", "the driver is not loaded", "sudo modprobe vfio-pci")
        free = [each for each in found if not each.users(self.root)]
        if not free:
            return Finding(
                "missing", "it has no drive, and each is in use", "buy another: docs/hardware.md"
            )
        shared = self._others_in_group(free[0])
        if shared:
            return Finding(
                "limited",
                f"{free[0].bdf} shares IOMMU group {free[0].group} with {', '.join(shared)}",
                "put the drive into another slot; VFIO gives away whole groups",
            )
        return Finding(
            "missing",
            f"it has no drive; {free[0].bdf} is used by nobody",
            f"all its contents will be yours to overwrite: {binding.bind_command(free[0].bdf)}",
        )

    def _others_in_group(self, drive: PciController) -> list[str]:
        """Other devices in the group, but for bridges, which VFIO lets be."""
        devices = self._here(f"/sys/kernel/iommu_groups/{drive.group}/devices")
        if not drive.group or not devices.is_dir():
            return []
        return sorted(
            each.name
            for each in devices.iterdir()
            if each.name != drive.bdf and not text_of(each / "class").startswith("0x0604")
        )

    def _check_permission(self) -> Finding:
        bound = [e for e in binding.controllers(self.root) if e.driver == binding.DRIVER]
        if not bound:
            return Finding("missing", "not looked at: vfio-pci has no drive")
        refused = [
            f"/dev/vfio/{each.group}"
            for each in bound
            if not self.may(self._here(f"/dev/vfio/{each.group}"), os.R_OK | os.W_OK)
        ]
        if refused:
            return Finding(
                "limited",
                f"{', '.join(refused)}: no permission",
                f"sudo chown $USER {refused[0]}, until the next start; for ever by a group and a "
                "udev rule, see docs/hardware.md",
            )
        limit = self.memlock()
        if limit != -1 and limit < _MEMLOCK_MIN and not self.privileged():
            return Finding(
                "limited",
                f"this user may lock {binary(limit)} (RLIMIT_MEMLOCK), and what a drive reaches "
                "is locked: caches and rings must be smaller",
                'add "* - memlock unlimited" to /etc/security/limits.conf, and log in again',
            )
        return Finding("ok", "this user may drive what vfio-pci has")

    def _check_iommufd(self) -> Finding:
        without = "VFIO's older interface (type1) does the same"
        if not self._here("/dev/iommu").exists():
            what = f"no /dev/iommu: {without}"
            if self._kernel < _VFIO_FILES:
                return Finding("missing", what, "nothing to do; Linux 6.6 has it")
            return Finding("missing", what, "nothing to do; sudo modprobe iommufd loads it")
        files = [each.cdev for each in binding.controllers(self.root) if each.cdev]
        paths = ["/dev/iommu", *(f"/dev/vfio/devices/{each}" for each in files)]
        refused = [each for each in paths if not self.may(self._here(each), os.R_OK | os.W_OK)]
        if not files:
            return Finding("missing", f"no drive has a file in /dev/vfio/devices: {without}")
        if refused:
            return Finding(
                "limited",
                f"{', '.join(refused)}: no permission: {without}",
                f"sudo chown $USER {' '.join(refused)}",
            )
        return Finding("ok", ", ".join(paths[1:]))

    # The drive and kernels of a GPU, without a thread of the host: see nvme/gpu_mapping.py.

    @functools.cached_property
    def _gpu_facts(self) -> GpuFacts:
        return self.gpu()

    def _check_doorbells(self) -> Finding:
        facts = self._gpu_facts
        if facts.error:
            return Finding("missing", facts.error)
        options = text_of(self._here("/proc/driver/nvidia/params"))
        if self.privileged() or "PeerMappingOverride=1" in options:
            return Finding("ok", "the driver takes I/O memory from this user; tried with a drive")
        return Finding(
            "limited",
            "kernels ring none: NVIDIA's driver takes I/O memory from root only",
            gpu_mapping.doorbell_advice(),
        )

    def _check_export(self) -> Finding:
        facts = self._gpu_facts
        if facts.error:
            return Finding("missing", facts.error)
        if facts.export_refusal:
            return Finding("missing", f"GPU memory is not exported: {facts.export_refusal}")
        return Finding("ok", f"{binary(_TRIAL_BYTES)} of GPU memory were exported as a dma-buf")

    def _check_mapping(self) -> Finding:
        facts = self._gpu_facts
        if facts.error or facts.export_refusal:
            return Finding("missing", "not tried: there is no dma-buf")
        if facts.mapping_errno == 0:
            return Finding("ok", "the kernel's iommufd maps the GPU's dma-buf for drives")
        text = os.strerror(facts.mapping_errno)
        if facts.mapping_errno in (errno.EACCES, errno.EPERM):
            return Finding(
                "limited", f"not tried: /dev/iommu: {text}", "sudo chown $USER /dev/iommu"
            )
        if facts.mapping_errno == errno.ENOENT:
            return Finding("missing", "no iommufd, which alone maps a dma-buf: see NVMe iommufd")
        return Finding(
            "missing",
            f"the kernel's iommufd does not map the GPU's dma-buf ({text}): Linux 6.19 maps those "
            "of VFIO only",
        )

    def _check_order(self) -> Finding:
        facts = self._gpu_facts
        if facts.error:
            return Finding("missing", facts.error)
        if facts.orders:
            return Finding("ok", "the GPU keeps the order of a device's writes to its memory")
        return Finding("missing", "the GPU does not keep the order of a device's writes")

    def _check_path(self) -> Finding:
        steps = (self._check_export(), self._check_mapping(), self._check_order())
        never = "no drive has been driven by a GPU yet, see docs/hardware.md"
        if self._gpu_facts.error or self._check_doorbells().state != "ok":
            path, detail = "software", "a SoftwareController's threads read and write the drive"
        elif all(step.state == "ok" for step in steps):
            path, detail = "direct", f"the drive would move data to GPU memory itself; {never}"
        else:
            path, detail = "bounce", f"kernels would copy data from pinned buffers; {never}"
        state: State = "ok" if path == "direct" else "limited"
        return Finding(state, detail, values={"route": path, "gpu": asdict(self._gpu_facts)})


def _look_at_gpu() -> GpuFacts:
    """Try what can be tried with a GPU and no drive."""
    try:
        if cuda_api.device_count() == 0:
            return GpuFacts(error="no GPU")
        with CudaDevice(0) as device:
            context = device.context
            if not context.exports_dma_buf:
                refusal = gpu_mapping.NO_EXPORT
                return GpuFacts(export_refusal=refusal, orders=context.orders_dma_writes)
            return replace(_try_export(device), orders=context.orders_dma_writes)
    except FlashwarpError as error:
        return GpuFacts(error=f"no GPU ({error})")


def _try_export(device: CudaDevice) -> GpuFacts:
    with device.allocate(2 * _TRIAL_BYTES) as memory:
        region = align_up(memory.address, _TRIAL_BYTES), _TRIAL_BYTES
        try:
            with gpu_mapping.dma_buf(device, region) as file:
                return GpuFacts(mapping_errno=_native.try_iommufd(file, _TRIAL_BYTES))
        except DeviceError as error:
            return GpuFacts(export_refusal=str(error))
