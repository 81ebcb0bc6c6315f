"""A machine with NVMe drives, as QEMU emulates it: what it has, and how a command runs in it.

QEMU's NVMe controller is a peer that flashwarp's authors did not write. The processor is emulated
(TCG), so timings mean nothing. The guest has the host's root, read-only, and so this checkout and
its virtual environment, at the same paths; /tmp, /run and /dev/shm are its own and empty.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qemu.image import ROOT, GuestImage

# Compiled kernels of the host, of which each guest has a copy: to compile is slow there.
COMPILED = ROOT / "build" / "qemu" / "compiled"

# Where the guest finds what the two sides share.
SHARED = Path("/run/flashwarp")

_POLL_S = 0.05


@dataclass(frozen=True)
class Namespace:
    """What a namespace holds, and how it misbehaves.

    Attributes
    ----------
    nbytes, lba_bytes, metadata_bytes : int
        Size, that of a logical block, and of the metadata behind each. flashwarp takes blocks of
        512 and 4096 without metadata.
    stores : bool
        False: writes are lost and reads are zeros, as fast as QEMU can.
    iops_max : int
        Commands a second; 0: no limit.
    unreadable, unwritable : tuple of int
        Logical blocks whose reads, or writes, the drive fails: unrecovered read error, write fault.
    """

    nbytes: int = 64 << 20
    lba_bytes: int = 512
    metadata_bytes: int = 0
    stores: bool = True
    iops_max: int = 0
    unreadable: tuple[int, ...] = ()
    unwritable: tuple[int, ...] = ()


@dataclass(frozen=True)
class Drive:
    """One NVM subsystem, with controllers that share its namespaces.

    Attributes
    ----------
    namespaces : tuple of Namespace
        Numbered from 1. All controllers have all of them.
    controllers : int
        Each is a PCI function behind a root port of its own.
    mdts : int
        The largest transfer is 2**mdts pages of 4 KiB; 0: no limit.
    queue_pairs_max : int
        I/O queue pairs that a controller offers.
    """

    namespaces: tuple[Namespace, ...] = (Namespace(),)
    controllers: int = 1
    mdts: int = 7
    queue_pairs_max: int = 64


@dataclass(frozen=True)
class Outcome:
    """How a command in the guest ended: `status` is None if it never did."""

    status: int | None
    output: str
    console: str
    seconds: float


@dataclass(frozen=True)
class Machine:
    """A machine that is not running; `run` boots it, each time with empty drives.

    Attributes
    ----------
    drives : tuple of Drive
        Controller i of all drives, counted in order, is "nvme{i}" to QEMU (`device_del`), sits
        behind root port "port{i}", and has the PCI address 0000:{i + 1:02x}:00.0. Its serial number
        is "drive{n}" for drive n.
    cores, memory_mib : int
        Of the guest.
    iommu : bool
        Whether there is an IOMMU (Intel's), which VFIO needs.
    modules : tuple of str
        Loaded before the command runs.
    kernel_arguments : str
        Appended to the kernel's command line.
    """

    drives: tuple[Drive, ...] = (Drive(),)
    cores: int = 2
    memory_mib: int = 1024
    iommu: bool = True
    modules: tuple[str, ...] = ("nvme",)
    kernel_arguments: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, image: GuestImage, command: Sequence[str], limit_s: float = 120) -> Outcome:
        """Boot, run `command` in this checkout's root, and switch off.

        After `limit_s` seconds the machine is switched off wherever it is.
        """
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="flashwarp-qemu-") as scratch:
            folder = Path(scratch)
            shared = folder / "shared"
            shared.mkdir()
            (shared / "command").write_text(self._script(image, command))
            (shared / "root").write_text(str(ROOT))
            with (folder / "qemu.log").open("wb") as log:
                process = subprocess.Popen(
                    self._arguments(image, folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
                monitor = _Monitor(folder / "monitor", shared)
                try:
                    monitor.start()
                    process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    pass  # there is no status, which the caller sees
                finally:
                    process.kill()
                    process.wait()
                    monitor.stop()
            status = _text(shared / "status").strip()
            console = _text(folder / "qemu.log") + _text(folder / "console")
            return Outcome(
                int(status) if status else None,
                _text(shared / "output"),
                console,
                time.monotonic() - start,
            )

    def _script(self, image: GuestImage, command: Sequence[str]) -> str:
        environment = {
            "HOME": "/tmp",
            "LC_ALL": "C.UTF-8",
            "PATH": f"{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": f"{ROOT}/tests",
            "PYTHONUNBUFFERED": "1",
            "FLASHWARP_CACHE_DIR": "/tmp/compiled",
            "FLASHWARP_QEMU_GUEST": "1",
            "FLASHWARP_QEMU_MODULES": str(image.modules),
            **self.environment,
        }
        lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
        lines += [f"modprobe -d {image.modules} {name} || exit 125" for name in self.modules]
        lines += [f"cp -r {COMPILED} /tmp/compiled 2>/dev/null"]
        return "\n".join([*lines, f"cd {shlex.quote(str(ROOT))}", f"exec {shlex.join(command)}\n"])

    def _arguments(self, image: GuestImage, folder: Path) -> list[str]:
        # Where the host is busy, the kernel's test of its timer fails.
        kernel_arguments = "console=ttyS0 quiet panic=-1 nokaslr tsc=nowatchdog no_timer_check"
        # It ends with this process, however that ends.
        arguments = ["setpriv", "--pdeathsig", "KILL"]
        arguments += ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max"]
        arguments += ["-machine", "q35,kernel-irqchip=split", "-m", str(self.memory_mib)]
        arguments += ["-smp", str(self.cores), "-nodefaults", "-display", "none", "-no-reboot"]
        if self.iommu:
            # The kernel's drivers bypass the IOMMU; those of user space cannot.
            kernel_arguments += " intel_iommu=on iommu=pt"
            arguments += ["-device", "intel-iommu,intremap=on,caching-mode=on"]
        arguments += ["-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
        arguments += ["-append", f"{kernel_arguments} {self.kernel_arguments}".strip()]
        arguments += ["-serial", f"file:{folder / 'console'}"]
        arguments += ["-qmp", f"unix:{folder / 'monitor'},server=on,wait=off"]
        arguments += _folder_arguments("hostroot", "/", "readonly=on")
        arguments += _folder_arguments("share", str(folder / "shared"), "readonly=off")
        first = 0
        for number, drive in enumerate(self.drives):
            arguments += _drive_arguments(drive, number, first, folder)
            first += drive.controllers
        return arguments


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _folder_arguments(tag: str, path: str, access: str) -> list[str]:
    options = f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap,{access}"
    return ["-virtfs", options]


def _drive_arguments(drive: Drive, number: int, first: int, folder: Path) -> list[str]:
    subsystem = f"drive{number}"
    arguments = []
    shares = ""
    if drive.controllers > 1:
        arguments += ["-device", f"nvme-subsys,id={subsystem},nqn={subsystem}"]
        shares = f",subsys={subsystem}"
    for index in range(first, first + drive.controllers):
        port = f"pcie-root-port,id=port{index},chassis={index + 1},addr={index + 16:#x}"
        controller = (
            f"nvme,id=nvme{index},bus=port{index},serial={subsystem}{shares},"
            f"mdts={drive.mdts},max_ioqpairs={drive.queue_pairs_max},"
            f"msix_qsize={drive.queue_pairs_max + 1}"
        )
        arguments += ["-device", port, "-device", controller]
    for nsid, namespace in enumerate(drive.namespaces, 1):
        name = f"{subsystem}n{nsid}"
        arguments += _block_arguments(namespace, name, folder)
        size = f"logical_block_size={namespace.lba_bytes},physical_block_size={namespace.lba_bytes}"
        size += f",ms={namespace.metadata_bytes}"
        arguments += ["-device", f"nvme-ns,drive={name},nsid={nsid},bus=nvme{first},{size}"]
    return arguments


def _block_arguments(namespace: Namespace, name: str, folder: Path) -> list[str]:
    """The layers of a block device, from the host's file to the node called `name`."""
    arguments: list[str] = []
    if namespace.stores:
        file = folder / name
        with file.open("wb") as empty:
            empty.truncate(namespace.nbytes)
        node: dict[str, Any] = {"driver": "file", "filename": str(file), "discard": "unmap"}
    else:
        node = {"driver": "null-co", "size": namespace.nbytes, "read-zeroes": True}
    sectors = namespace.lba_bytes // 512
    errors = [
        {"event": "none", "iotype": kind, "errno": errno.EIO, "sector": lba * sectors}
        for kind, lbas in (("read", namespace.unreadable), ("write", namespace.unwritable))
        for lba in lbas
    ]
    if errors:
        node = {"driver": "blkdebug", "image": node, "inject-error": errors}
    if namespace.iops_max:
        limit = {"qom-type": "throttle-group", "id": f"{name}-limit"}
        limits = {"limits": {"iops-total": namespace.iops_max}}
        arguments += ["-object", json.dumps({**limit, **limits})]
        node = {"driver": "throttle", "throttle-group": limit["id"], "file": node}
    node = {"driver": "raw", "node-name": name, "file": node}
    return [*arguments, "-blockdev", json.dumps(node)]


class _Monitor:
    """Passes requests that the guest leaves in the shared folder to QEMU (QMP), and answers back.

    The guest renames a finished request to `request-N`, and finds the answer in `answer-N`.
    """

    def __init__(self, path: Path, shared: Path) -> None:
        self._path = path
        self._shared = shared
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        done: set[str] = set()
        while not self._stop.wait(_POLL_S):
            for request in sorted(self._shared.glob("request-*")):
                if request.name not in done:
                    done.add(request.name)
                    self._answer(request)

    def _answer(self, request: Path) -> None:
        try:
            answer = self._execute(json.loads(request.read_text()))
        except (OSError, ValueError) as error:
            answer = {"error": {"desc": str(error)}}
        unfinished = self._shared / "unfinished"
        unfinished.write_text(json.dumps(answer))
        os.rename(unfinished, self._shared / request.name.replace("request", "answer"))

    def _execute(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one command on a connection of its own; events in between are skipped."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self._path))
            lines = connection.makefile("rw")
            answer: dict[str, Any] = json.loads(lines.readline())
            for command in ({"execute": "qmp_capabilities"}, request):
                lines.write(json.dumps(command) + "\n")
                lines.flush()
                answer = json.loads(lines.readline())
                while "event" in answer:
                    answer = json.loads(lines.readline())
            return answer
