"""`MappedFile`: a file of a mounted file system, read and written by its blocks on the device.

The file is leased from open to close, and its map is derived under the lease. So no block can be
freed or moved meanwhile, and Linux has no page of the file that is newer, or, if it is written
here, any page at all. A process that wants the file waits until the transfers in flight have ended
and are durable; after that, every transfer by the map fails.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from flashwarp import _native
from flashwarp.config import flag, integer
from flashwarp.errors import ArgumentError, LockedError, PathError, ReadOnlyError, StorageError
from flashwarp.file.block_map import BLOCK_BYTES, STALE, BlockMap
from flashwarp.nvme.drive_extents import DriveExtents, OnDrive
from flashwarp.nvme.drive_namespace import DriveNamespace
from flashwarp.nvme.queue_pair import NamespacePart
from flashwarp.storage import BlockDevice, Passthrough, Storage, files
from flashwarp.storage.block_users import text_of
from flashwarp.storage.lease import Lease

# A process that wants the file waits for so long at most, and Linux takes the lease back after
# /proc/sys/fs/lease-break-time, 45 s by default.
_BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_BREAK_TIME_DEFAULT_S = 45


class MappedFile(Storage, OnDrive):
    """A file as the blocks that it has on its device, past the file system.

    Parameters
    ----------
    file : path-like or BlockMap
        An existing file on ext4 or xfs. A map that was derived before is checked first.
    namespace : DriveNamespace or Passthrough, optional
        The whole namespace that the file system lies on, by another controller of the drive
        (`VfioController.namespace`), or by the kernel's own (`storage.Passthrough`). Default: the
        file system's block device, which this process must be allowed to open.
    offset, nbytes : int, optional
        The part of the file to use, from a multiple of 4096 on; default the whole file. The data of
        an image of type fixed (docs/files.md) begins at its `data_offset`.
    writable : bool
        Take writes. Then no other process can have the file open, not even for reading.
    allow_raw_writes : bool
        Needed for `writable`: the device has a file system, which knows nothing of these writes.

    Raises
    ------
    MissingFileError, PathError
        If the file has no blocks that can be used, or the device cannot be opened.
    LockedError
        If another process has the file open: for writing, or at all if `writable`. If the file is
        another user's: only its owner, and root, can lease it.
    StorageError
        If the map that was given is stale (errno EREMCHG).
    ArgumentError
        If the namespace is not the one that the file lies on, or the part is not in the file.

    Notes
    -----
    Any number of threads may call. If a process opens the file, or truncates it, it waits until
    transfers in flight have ended. Then this storage is stale: every call, and every array on it,
    raises StorageError with errno EREMCHG. Open it again to continue. What an array on it has
    cached and not flushed is lost then.

    Removing or renaming the file changes nothing: it keeps its blocks until this is closed.

    With a `DriveNamespace`, an array may have the `VfioController` itself as its controller. Then
    its kernels look the extents up in device memory, and drive the drive. If another process wants
    the file, the drive first ends their commands, and fetches no more of them.

    Examples
    --------
    >>> import flashwarp as fw
    >>> with fw.file.MappedFile("/data/table.bin") as blocks:  # doctest: +SKIP
    ...     with fw.open(blocks, dtype="f4", device="cpu") as x:
    ...         print(x[:4])
    """

    def __init__(
        self,
        file: files.PathLike | BlockMap,
        namespace: DriveNamespace | Passthrough | None = None,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        writable: bool = False,
        allow_raw_writes: bool = False,
    ) -> None:
        given = file if isinstance(file, BlockMap) else None
        name = given.path if given is not None else files.check_name(file)
        writable = flag("writable", writable)
        if writable and not flag("allow_raw_writes", allow_raw_writes):
            raise ArgumentError(
                f"{name}: writes by a block map go past the file system, which nothing undoes: "
                "give allow_raw_writes=True, or open the file by its name"
            )
        files.check(name, writable)
        with contextlib.ExitStack() as undo:
            lease = self._lease = _lease(name, writable)
            undo.callback(lease.close)
            if given is not None:
                given.check(lease.descriptor)
            self.block_map = given or BlockMap.derive(lease.descriptor, name)
            """Where the bytes lie, on the volume of the file."""
            if writable:
                _drop_pages(lease.descriptor, self.block_map)
            offset, nbytes = _part(self.block_map, offset, nbytes)
            device, used = _device_of(self.block_map, namespace, writable)
            if device is not namespace:
                undo.callback(device.close)
            extents = used.extents_of(offset, nbytes)
            try:
                native = _native.MappedStorage(device.native, extents, nbytes, writable, name)
            except ValueError as error:
                raise ArgumentError(f"{name}: {error}") from error
            if isinstance(device, DriveNamespace):
                parts = [
                    NamespacePart(e.logical + e.nbytes, (e.physical - e.logical) % (1 << 64))
                    for e in extents
                ]
                self.drive_extents = DriveExtents(device, parts, name)
            lease.watch(functools.partial(_leave, native, self.drive_extents, name), _nothing)
            self._owned = undo.pop_all()
        super().__init__(native)
        self._file = name

    @property
    def path(self) -> str:
        """The file as it was named."""
        return self._file

    @property
    def stale(self) -> bool:
        """Whether another process wanted the file, so that its blocks are not used any more."""
        return not self._lease.closed and not self._lease.held

    def check_unchanged(self) -> None:
        """Raise StorageError when another process wanted the file."""
        if self.stale:
            raise _stale(self._file)

    def describe(self) -> dict[str, Any]:
        """Return facts for people: file system, device, extents, lease."""
        facts = super().describe()
        facts["file_system"] = self.block_map.file_system
        facts["lease"] = "given up" if self.stale else "held"
        return facts

    def _let_go(self) -> None:
        native = self._native
        super()._let_go()
        try:
            if native is not None:
                _leave(native, self.drive_extents, self._file)
        finally:
            self._owned.close()


def _part(block_map: BlockMap, offset: int, nbytes: int | None) -> tuple[int, int]:
    size = block_map.nbytes
    begin = integer("offset", offset, 0, size)
    if begin % BLOCK_BYTES:
        raise ArgumentError(
            f"offset={begin} is no multiple of {BLOCK_BYTES}, the blocks of the file system"
        )
    return begin, integer("nbytes", size - begin if nbytes is None else nbytes, 1, size - begin)


def _lease(path: str, writable: bool) -> Lease:
    try:
        return Lease(path, excludes_readers=writable, once=True)
    except OSError as error:
        number = error.errno or errno.EIO
        if number == errno.EAGAIN:
            how = "open" if writable else "open for writing, or maps it"
            raise LockedError(
                number,
                f"another open file excludes its use by blocks: somebody has it {how}; lsof shows "
                "who",
                path,
            ) from error
        if number in (errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
            raise PathError(
                number, f"cannot be used by its blocks: {Lease.refusal(error)}", path
            ) from error
        if number == errno.EACCES:
            raise LockedError(
                number, f"cannot be leased: {Lease.refusal(error)}; take it over with chown", path
            ) from error
        raise files.path_error(error, path, writable=False) from error


def _stale(path: str) -> StorageError:
    return StorageError(
        STALE, "stale block map: another process wanted the file; open it again", path
    )


def _leave(native: _native.MappedStorage, extents: DriveExtents | None, path: str) -> bool:
    """End all transfers before the file's next user begins; return that there may have been any."""
    try:
        if extents is not None:
            extents.end(functools.partial(_stale, path))
    finally:
        native.revoke(_limit_ms())
    return True


def _limit_ms() -> int:
    try:
        seconds = int(_BREAK_TIME.read_text())
    except (OSError, ValueError):
        seconds = _BREAK_TIME_DEFAULT_S
    # Half of it, so that the lease is still ours when the transfers have ended.
    return max(seconds, 1) * 500


def _nothing(_: StorageError | None) -> None:
    """Do nothing: after a break, every transfer fails by itself."""


def _drop_pages(descriptor: int, block_map: BlockMap) -> None:
    """Empty the page cache of a file that nobody else has open, so that nobody reads it later."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(descriptor, block_map.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as pages:
        view = np.frombuffer(pages, np.uint8)
        left = _native.residency(int(view.ctypes.data), block_map.nbytes)
        del view
    if left > 0:
        raise PathError(
            errno.EBUSY,
            f"stays in the page cache ({left:.0%}), which would be older than its blocks: "
            "sync, and echo 1 > /proc/sys/vm/drop_caches",
            block_map.path,
        )


def _device_of(
    block_map: BlockMap, namespace: Storage | None, writable: bool
) -> tuple[Storage, BlockMap]:
    """Return the storage that has the blocks, and the map by its bytes."""
    if namespace is None:
        path = block_map.volume.path
        status = os.stat(path)
        if status.st_rdev != block_map.state.device:
            raise PathError(
                errno.ENXIO, f"is not the device of {block_map.path}: run udevadm trigger", path
            )
        # Other files there are others' business; this one is kept by its lease.
        return BlockDevice(path, writable=writable, lock=False), block_map
    used = block_map.on_disk()
    if isinstance(namespace, DriveNamespace):
        _check_same_drive(namespace, used)
    elif not isinstance(namespace, Passthrough):
        raise ArgumentError(
            f"{namespace!r} is no namespace of a drive: give controller.namespace(1) of a "
            "VfioController, or a storage.Passthrough"
        )
    elif namespace.disk != used.volume.disk:
        raise ArgumentError(
            f"{namespace.path} is a namespace of {namespace.disk}, and {block_map.path} lies on "
            f"{used.volume.disk}"
        )
    in_part = isinstance(namespace, Passthrough) and namespace.offset != 0
    if in_part or namespace.nbytes != used.volume.nbytes:
        raise ArgumentError(
            f"{namespace!r} is not the whole of {used.volume.disk}, which has "
            f"{used.volume.nbytes} bytes: give it without a range"
        )
    if writable and not namespace.writable:
        raise ReadOnlyError(
            f"{namespace.path} takes no writes{namespace.refusal and f': {namespace.refusal}'}"
        )
    return namespace, used


def _check_same_drive(namespace: DriveNamespace, used: BlockMap) -> None:
    """Refuse a namespace that is not the one that the kernel shows as the file's disk."""
    facts = namespace.drive.identity()
    mine = (str(facts["serial"]), str(facts["subsystem"]), str(namespace.nsid))
    block = Path("/sys/block", used.volume.disk)
    kernels = tuple(text_of(block / name) for name in ("device/serial", "device/subsysnqn", "nsid"))
    if mine != kernels:
        names = ("serial number", "NVM subsystem", "namespace")
        differ = [
            f"{name} {a or 'none'} and {b or 'none'}"
            for name, a, b in zip(names, mine, kernels, strict=True)
            if a != b
        ]
        raise ArgumentError(
            f"{namespace!r} is not {used.volume.disk}, on which {used.path} lies: "
            f"{'; '.join(differ)}"
        )
