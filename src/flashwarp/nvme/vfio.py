"""Real drives: an NVMe controller that this process drives through VFIO.

A `VfioController` owns the PCI function: it resets the controller, and creates queue pairs for each
array. Device threads ring the drive's own doorbells, and the drive moves data by DMA, into the
cache's frames if it can reach them; no thread of the host takes part. An IOMMU keeps the drive out
of all other memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from flashwarp import _native, config, endings
from flashwarp._names import renamed
from flashwarp.config import choice, flag, integer, number
from flashwarp.device import CudaDevice
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    ControllerLost,
    DeviceError,
    FlashwarpError,
    LockedError,
)
from flashwarp.nvme import binding, gpu_mapping
from flashwarp.nvme.controller import Controller, Destination, Service
from flashwarp.nvme.drive_extents import DriveExtents, on_drive
from flashwarp.nvme.drive_namespace import DriveNamespace, drive_errors
from flashwarp.nvme.queue_pair import DriveAddressingStruct, DriveSide, QueuePairs, Transfers
from flashwarp.storage import Namespace

_DEPTH_DEFAULT = 128
_TIMEOUT_S = 10.0


@renamed
class VfioController(Controller, endings.Closing):
    """An NVMe controller of this machine, driven by this process.

    Parameters
    ----------
    bdf : str
        Its PCI address, such as "0000:01:00.0". It must be bound to vfio-pci, see
        `flashwarp.nvme.binding.bind`, and no other process may drive it.
    queue_pairs, depth : int, optional
        Rings of each array and their entries; `depth` is a power of two. Default: a queue pair for
        each core, of 128 entries; fewer if the drive has fewer.
    iommu : {"type1", "iommufd"}, optional
        How memory is mapped for the drive. Default: "iommufd" if the kernel offers it and the files
        may be opened, else "type1".
    route : {"direct", "bounce"}, optional
        Whether the drive moves data into the frames, or into pinned buffers that kernels copy.
        Default: "direct" where the device's memory can be mapped for the drive.
    allow_raw_writes : bool
        Let a namespace be written that carries a partition table, a file system, or another known
        format. Default: such a namespace is read-only.
    timeout_s : float
        Limit of each command of the host's own, in seconds. Waits of kernels have the library's,
        `Config.command_timeout_s`.

    Attributes
    ----------
    bdf : str
        Its PCI address.

    Notes
    -----
    `namespace` returns what `flashwarp.open` takes. Any number of arrays may use a controller, up
    to the queue pairs that the drive has. Opening resets the controller. `close` ends it after the
    last array; if it is not closed, that happens when the interpreter ends. Any thread may call. In
    a forked child it is not usable.

    The arrays' device is the CPU or a GPU. What a GPU needs is asked for when an array opens;
    `flashwarp doctor` asks before. Without I/O memory for its doorbells the array is refused, and a
    `SoftwareController` serves the namespace. If a drive is lost, the waits of CPU threads end at
    once, and those of a GPU's after their time limit. No drive has been driven by a GPU yet: see
    docs/hardware.md.

    Raises
    ------
    ArgumentError
        If there is no such controller.
    LockedError
        If it has another driver, or another process drives it.
    PathError
        If there is no IOMMU, or no permission; the message has the command that helps.
    ControllerTimeout
        If it does not become ready, or does not answer.
    ControllerLost
        If it has a fatal status, or does not answer at all.

    Examples
    --------
    >>> import flashwarp as fw
    >>> with fw.nvme.VfioController("0000:01:00.0") as drive:  # doctest: +SKIP
    ...     with fw.open(drive.namespace(1), "r", "f4", device="cpu", controller=drive) as x:
    ...         print(x[:4])
    """

    serves_members = True

    def __init__(
        self,
        bdf: str,
        queue_pairs: int | None = None,
        depth: int | None = None,
        *,
        iommu: Literal["type1", "iommufd"] | None = None,
        route: Literal["direct", "bounce"] | None = None,
        allow_raw_writes: bool = False,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.queue_pairs = (
            None if queue_pairs is None else integer("queue_pairs", queue_pairs, 1, 1024)
        )
        self.depth = None if depth is None else integer("depth", depth, 2, 32768)
        if self.depth is not None and self.depth & (self.depth - 1):
            raise ArgumentError(f"depth={depth} is not a power of two between 2 and 32768")
        if iommu is not None:
            choice("iommu", iommu, ("type1", "iommufd"))
        if route is not None:
            choice("route", route, ("direct", "bounce"))
        self.asked_route = route
        self.allow_raw_writes = flag("allow_raw_writes", allow_raw_writes)
        limit_ms = int(number("timeout_s", timeout_s, 0.001, 3600.0) * 1000)
        endings.check_not_ended()
        found = _check_bound(binding.find(bdf))
        self.bdf = found.bdf
        self._lock = endings.Lock()
        self._namespaces: dict[int, DriveNamespace] = {}
        self._services: set[VfioService] = set()
        self._closed = False
        self._pid = os.getpid()
        cdev = found.cdev if _by_iommufd(found, iommu) else ""
        with drive_errors(f"/dev/vfio/{found.group}"):
            self._native = _native.Drive.open(found.bdf, found.group, cdev, limit_ms)
        self._facts: dict[str, Any] = self._native.identity()
        _open.add(self)
        if self.depth is not None and self.depth > self._facts["entries_max"]:
            self.close()
            raise ArgumentError(
                f"depth={depth} is more than the {self._facts['entries_max']} entries that "
                f"{self.bdf} takes"
            )

    @property
    def native(self) -> _native.Drive:
        """The C++ drive; ClosedError after `close`."""
        if self._closed:
            raise ClosedError(f"the controller {self.bdf} is closed")
        return self._native

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def lost(self) -> str:
        """Why the drive completes nothing any more, for people; empty while it does."""
        return str(self._native.lost)

    def describe(self) -> dict[str, Any]:
        """Return what the drive says of itself: model, serial, firmware, limits."""
        return {"bdf": self.bdf, **self._facts}

    def namespaces(self) -> tuple[int, ...]:
        """Return the numbers of the active namespaces. Asks the drive."""
        with drive_errors(self.bdf):
            return tuple(self.native.namespaces())

    def namespace(self, nsid: int = 1, *, writable: bool = True) -> DriveNamespace:
        """Return a namespace of the drive as a storage; the same object while it is open.

        Parameters
        ----------
        nsid : int
            Its number, from 1 on.
        writable : bool
            False: it takes no writes. True: it takes them, unless it is write protected, or carries
            what `allow_raw_writes` is about.

        Raises
        ------
        ArgumentError
            If the drive has no such namespace, or its blocks have a format other than 512 or 4096
            bytes without metadata. If it is open with another `writable`.
        """
        integer("nsid", nsid, 1, 0xFFFFFFFE)
        flag("writable", writable)
        return endings.holding([self._lock], lambda: self._namespace(nsid, writable))

    def _namespace(self, nsid: int, writable: bool) -> DriveNamespace:
        held = self._namespaces.get(nsid)
        if held is None or held.closed:
            held = self._namespaces[nsid] = DriveNamespace(
                self.native, self.bdf, nsid, writable, self.allow_raw_writes
            )
        elif held.asked_writable != writable:
            raise ArgumentError(
                f"{held!r} is open with writable={held.asked_writable}: close it first"
            )
        return held

    def error_log(self) -> list[dict[str, Any]]:
        """Return the drive's own log of failed commands (log page 01h), newest first.

        Each entry has "count", "queue", "cid", "status", "lba" and "nsid". Drives fill it as they
        please; some leave it empty.
        """
        with drive_errors(self.bdf):
            return self.native.error_log()

    def reset(self, *, function: bool = False) -> None:
        """Reset the controller, and make it ready again. Blocks, for seconds.

        Arrays that are open on it are lost: their calls raise ControllerLost, and what they had not
        flushed is gone. Arrays that are opened later work.

        Parameters
        ----------
        function : bool
            Reset the PCI function, or its slot, and not only the controller. Refused while a GPU
            has the registers mapped, since a late store of its kernels would fail on the bus.
        """
        with self._lock:
            gpus = sorted({each.device.name for each in self._services if each.on_gpu})
            if function and gpus:
                raise ArgumentError(
                    f"reset(function=True) of {self.bdf} while arrays on {', '.join(gpus)} use it: "
                    "close them first, or reset the controller alone"
                )
            with drive_errors(self.bdf):
                self.native.reset(function)

    def attach(self, storage: Namespace, destination: Destination) -> VfioService:
        """Create queue pairs in the drive for one of its namespaces, or for a file on it.

        A file is a `MappedFile` by a namespace of this controller; its extents then lie in device
        memory, and kernels look them up. See `Controller.attach`.
        """
        extents = on_drive(storage)
        if extents is None or extents.namespace.drive is not self._native:
            raise ArgumentError(
                f"{storage!r} is no namespace of {self!r}: give it {self.bdf}'s own, "
                "controller.namespace(1), a MappedFile by it, or a ControllerGroup of the members' "
                "controllers"
            )
        with self._lock:  # so that no reset of the function comes in between
            service = VfioService(storage, extents, destination, self)
            self._services.add(service)
        return service

    def _ended(self, service: VfioService) -> None:
        with self._lock:
            self._services.discard(service)
            if self._closed and not self._services:
                self._native.close()

    def close(self) -> None:
        """Notify the drive of the shutdown, and give it back. May be called twice, in any state.

        If arrays are open on it, the last one to close does it.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            for namespace in self._namespaces.values():
                namespace.close()
            if not self._services:
                self._native.close()

    def _end(self) -> None:
        """Close it, whoever uses it: the interpreter ends."""
        self._closed = True
        self._native.close()

    def __repr__(self) -> str:
        return f"<flashwarp.nvme.VfioController of {self.bdf}>"


_open: weakref.WeakSet[VfioController] = weakref.WeakSet()


@endings.at_exit
def _end_drives() -> None:
    """Shut drives down that nobody closed; the arrays are closed by now."""
    for controller in list(_open):
        controller._end()


os.register_at_fork(after_in_child=_open.clear)


class VfioService(Service):
    """Queue pairs in a drive for one array."""

    route = "direct"
    reason = "the drive moves data into the frames itself, which are mapped for it"

    def __init__(
        self,
        storage: Namespace,
        extents: DriveExtents,
        destination: Destination,
        controller: VfioController,
    ) -> None:
        self._storage = storage
        self._extents = extents
        self._controller = controller
        self._native: _native.DriveQueues | None = None
        self._queues: QueuePairs | None = None
        self._owned = contextlib.ExitStack()
        namespace = extents.namespace
        shift = namespace.block_bytes.bit_length() - 1
        drive, line = controller.native, destination.line_bytes
        extents.check_line(line)
        extents.check_end(storage.nbytes, storage.writable)
        _check_transfer(line, drive.transfer_bytes_max(shift), controller.bdf)
        count, depth = self._geometry()
        device = self.device = destination.device
        gpu = device if isinstance(device, CudaDevice) else None
        self.on_gpu = gpu is not None
        try:
            with drive_errors(controller.bdf):
                lease = _native.QueueLease(drive, count)
                self._owned.callback(lease.release)
                doorbells = tuple(lease.doorbells)
                if gpu is not None:
                    registers, doorbells = gpu_mapping.map_doorbells(gpu, lease, controller.bdf)
                    self._owned.callback(registers.close)
                data = self._map_frames(destination, gpu)
                queues = self._queues = QueuePairs(
                    device,
                    count,
                    depth,
                    Transfers(self.route, buffer_bytes=line if data is None else 0),
                    config.current().command_timeout_s,
                    DriveSide(
                        tuple(lease.ids),
                        doorbells,
                        rings_on_device=self.on_gpu and data is not None,
                    ),
                )
                self._owned.callback(queues.close)
                if data is None:
                    (buffers,) = queues.buffer_regions
                    data = _native.DriveData(drive, buffers, line)
                names = data.addressing(namespace.nsid, shift)
                queues.address_for_drive(
                    DriveAddressingStruct.from_buffer_copy(names), extents.parts
                )
                with self._rings_file(queues, gpu) as rings_file:
                    native = self._native = _native.DriveQueues(
                        lease,
                        queues.native,
                        queues.ring_region,
                        data,
                        (*destination.owners, *queues.owners),
                        rings_file,
                    )
                del data  # its mapping ends with the queues
                with extents.using(self._retire) as ended:
                    self._owned.callback(ended)
                    self._owned.callback(native.stop)
                    if gpu is None:
                        # The host can store to them while kernels run.
                        queues.moved = lambda: native.set_failed_words(queues.failed_words)
                        queues.moved()
                    native.start()
        except BaseException:
            self._owned.close()
            raise

    def _map_frames(
        self, destination: Destination, gpu: CudaDevice | None
    ) -> _native.DriveData | None:
        """Map the frames for the drive. None: data goes through buffers, and `reason` says why."""
        drive, asked = self._controller.native, self._controller.asked_route
        frames, line = destination.frames, destination.line_bytes
        if asked == "bounce":
            self.route, self.reason = "bounce", "the controller's route='bounce' asks for it"
            return None
        if gpu is None:
            return _native.DriveData(drive, frames, line)
        refusal = gpu_mapping.direct_refusal(gpu, str(self._controller.describe()["iommu"]))
        if not refusal:
            try:
                with gpu_mapping.dma_buf(gpu, frames) as file:
                    return _native.DriveData(drive, frames, line, file)
            except DeviceError as error:
                refusal = str(error)
            except _native.DriveFailure as failure:
                refusal = f"{failure.args[1]}: the kernel maps no memory of this GPU for drives"
        if asked == "direct":
            raise ArgumentError(
                f"route='direct', but the drive does not reach the memory of {gpu.name}: "
                f"{refusal}; leave route out, or take 'bounce'"
            )
        self.route = "bounce"
        self.reason = f"the drive does not reach {gpu.name}'s memory: {refusal}"
        return None

    def _rings_file(
        self, queues: QueuePairs, gpu: CudaDevice | None
    ) -> contextlib.AbstractContextManager[int]:
        """Open what the rings are mapped by for the drive: a GPU's dma-buf, or nothing."""
        if gpu is None or self.route != "direct":
            return contextlib.nullcontext(-1)
        return gpu_mapping.dma_buf(gpu, queues.ring_region)

    def _geometry(self) -> tuple[int, int]:
        """Return how many queue pairs, and entries of each."""
        settings, facts = self._controller, self._controller.describe()
        count, depth = settings.queue_pairs, settings.depth
        if count is None:
            # The host's own commands have one of them.
            count = max(1, min(config.cores(), int(facts["queue_pairs_max"]) - 1))
        if depth is None:
            depth = min(_DEPTH_DEFAULT, 1 << (int(facts["entries_max"]).bit_length() - 1))
        return count, depth

    @property
    def queues(self) -> QueuePairs:
        """The queue pairs in the drive; ClosedError after `stop`."""
        if self._queues is None:
            raise ClosedError("the controller serves no array")
        return self._queues

    @property
    def natives(self) -> tuple[Any, ...]:
        """The queues' native object, which launches hold."""
        if self._native is None:
            raise ClosedError("the controller serves no array")
        return (self._native,)

    def take_errors(self) -> Sequence[dict[str, Any]]:
        """Return []: a failed command has its status, and the drive its own log."""
        return []

    def _retire(self) -> None:
        """End all commands: the blocks may become another file's."""
        if self._native is not None:
            with drive_errors(self._controller.bdf):
                self._native.retire(str(self._extents.ended))

    def failure(self) -> FlashwarpError | None:
        """Return why no command completes any more."""
        if (ended := self._extents.ended) is not None:
            return ended
        lost = "" if self._native is None else self._native.lost
        return _lost_error(lost) if lost else None

    def wake(self) -> None:
        """Raise ControllerLost if the drive is lost, StorageError if a file's map is stale."""
        failure = self.failure()
        if failure is not None:
            raise failure

    def silent(self) -> str:
        """Name what did not answer in time."""
        return f"the drive {self._controller.bdf}"

    def describe(self) -> dict[str, Any]:
        """Return facts for people: engine, serial, queue pairs."""
        return {} if self._native is None else self._native.describe()

    def stop(self) -> None:
        """Delete the queues in the drive, and free their memory; blocks. May be called twice."""
        try:
            self._owned.close()
        finally:
            self._native = self._queues = None
            self._controller._ended(self)

    def __repr__(self) -> str:
        of = "stopped" if self._native is None else f"of {self._storage!r}"
        return f"<flashwarp drive queues {of}>"


# Checks.


def _check_bound(found: binding.PciController) -> binding.PciController:
    """Refuse a controller that VFIO does not have; say who has it."""
    if not found.group:
        raise binding.no_iommu(found.bdf)
    if found.driver != binding.DRIVER:
        users = found.users()
        used = f", and is in use: {'; '.join(users)}" if users else ""
        raise LockedError(
            errno.EBUSY,
            f"{found.bdf} has {f'the driver {found.driver}' if found.driver else 'no driver'}"
            f"{used}. Bind it to {binding.DRIVER}: {binding.bind_command(found.bdf)}",
            f"/sys/bus/pci/devices/{found.bdf}",
        )
    return found


def _by_iommufd(found: binding.PciController, asked: str | None) -> bool:
    if asked is not None:
        if asked == "iommufd" and not found.cdev:
            raise ArgumentError(
                f"iommu='iommufd', but the kernel offers no file in /dev/vfio/devices for "
                f"{found.bdf}: it needs Linux 6.6 with CONFIG_VFIO_DEVICE_CDEV; take iommu='type1'"
            )
        return asked == "iommufd"
    files = (Path("/dev/iommu"), Path("/dev/vfio/devices", found.cdev))
    return bool(found.cdev) and all(os.access(path, os.R_OK | os.W_OK) for path in files)


def _check_transfer(line: int, most: int, bdf: str) -> None:
    if line > most:
        raise ArgumentError(
            f"line={line}, but {bdf} moves at most {most} bytes in a command (MDTS): take "
            f"line={most} or less"
        )


# Errors.


def _lost_error(text: str) -> ControllerLost:
    return ControllerLost(f"{text}: close the array; VfioController.reset, or a new one, may help")
