"""Writing a version: data first, then the manifest, whose rename makes the version exist.

Checksums are computed while the disk writes, by other threads. If a transfer fails, the version
cannot be committed any more: the kernel reports lost writes once, and a later flush would succeed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashwarp import _native, endings
from flashwarp.checkpoint.directory import manifest, names
from flashwarp.checkpoint.directory.buffers import bytes_of
from flashwarp.checkpoint.directory.catalog import exists
from flashwarp.checkpoint.directory.checksums import Checksums, chunk_checksums
from flashwarp.checkpoint.directory.local import choose_o_direct
from flashwarp.checkpoint.region import Region
from flashwarp.config import integer
from flashwarp.endings import Closing, uninterrupted
from flashwarp.errors import (
    ArgumentError,
    CheckpointError,
    ClosedError,
    ExistingFileError,
)
from flashwarp.storage import File, files
from flashwarp.storage.file_access import Choice
from flashwarp.storage.files import sync_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INLINE_BYTES = 256 << 10
"""Below, another thread takes longer to start than the checksum takes."""

# What a file system without fallocate(2) answers.
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.ENOSYS)


class VersionWriter(Closing):
    """A version that is being written; made by `Directory.begin`.

    Until `commit` returns, nobody sees the version. The end of the ``with`` statement aborts a
    version that was not committed.

    Attributes
    ----------
    name : str
        The checkpoint.
    version : int
        Which version of it.
    regions : tuple of Region
        What it holds.
    identity : str
        Of what is written; see `VersionReader.identity`.
    data : str
        Name of its data file.
    replaces : bool
        Whether it may take the place of a version that exists.

    Notes
    -----
    `write` may be called from any number of threads at the same time; all calls block.
    """

    def __init__(
        self,
        folder: Path,
        record: manifest.Manifest,
        *,
        replaces: bool,
        o_direct: bool | None,
        run: Callable[..., Future[Any]],
        turn: endings.Lock,
        ended: Callable[[VersionWriter], None],
    ) -> None:
        self.name = record.name
        self.version = record.version
        self.regions = tuple(each.region for each in record.regions)
        self.identity = record.identity
        self.data = record.data
        self.replaces = replaces
        self._record = record
        self._folder = folder
        self._run = run
        self._turn = turn
        self._ended = ended
        self._path = folder / record.data
        self._offsets = {each.region.name: each.offset for each in record.regions}
        self._checksums = {
            each.region.name: Checksums(each.region.name, each.region.nbytes, record.chunk_bytes)
            for each in record.regions
        }
        self._lock = endings.Lock()
        self._writing = 0
        self._state = "open"
        self._failure: BaseException | None = None
        self._published = False
        self._draft: files.Draft | None = None
        self._held = contextlib.ExitStack()
        self._process = os.getpid()
        self._file, self._choice = create_data(self._path, record.data_bytes, o_direct)

    @property
    def o_direct(self) -> bool:
        """Whether aligned buffers are written past the page cache."""
        return self._choice.o_direct

    @property
    def o_direct_why(self) -> str:
        """Why they are, or are not."""
        return self._choice.why

    @property
    def committed(self) -> bool:
        """Whether `commit` has returned."""
        return self._state == "committed"

    def write(self, region: str | Region, offset: int, buffer: Any) -> None:
        """Store bytes of a region, and compute their checksums.

        Parameters
        ----------
        region : str or Region
            Which region, or its name.
        offset : int
            First byte in it. Any order, size and number of writes covers a region; each byte is
            written once. Writes that begin and end on multiples of 4096 bytes, from memory that is
            aligned likewise, are the fastest.
        buffer : contiguous buffer
            The bytes. They must not change until the call has returned; otherwise the version
            does not verify.

        Raises
        ------
        ArgumentError
            For an unknown region, and for bytes outside of it or written before.
        StorageError
            If the transfer failed, such as on a full disk. The version can only be aborted then.
        CheckpointError
            If an earlier write failed.
        ClosedError
            After `commit` or `abort`.
        """
        name = region.name if isinstance(region, Region) else region
        checksums = self._checksums.get(name)
        if checksums is None:
            raise ArgumentError(f"version {self.version} has no region {str(name)[:200]!r}")
        offset = integer("offset", offset)
        view = bytes_of(buffer, writable=False)
        with self._lock:
            self._check_usable()
            checksums.reserve(offset, view.nbytes)
            self._writing += 1
        try:
            if view.nbytes:
                found = self._transfer(self._offsets[name] + offset, view, checksums, offset)
                checksums.put(offset, view.nbytes, found)
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            with self._lock:
                self._writing -= 1

    def _transfer(
        self, place: int, view: memoryview, checksums: Checksums, offset: int
    ) -> NDArray[Any]:
        chunk, first = self._record.chunk_bytes, checksums.first_bytes(offset)
        if view.nbytes <= _INLINE_BYTES:
            self._file.write(place, view)
            return chunk_checksums(view, chunk, first)

        def write() -> NDArray[Any]:
            computed = self._run(chunk_checksums, view, chunk, first)
            try:
                self._file.write(place, view)
            finally:
                found: NDArray[Any] = computed.result()
            return found

        # A signal could leave the other thread with memory that its owner frees.
        return uninterrupted(write)

    def commit(self) -> None:
        """Make the version durable, and let it appear.

        Blocks until data, manifest and folder are on the medium. After it has returned, neither the
        end of the process nor a power cut loses the version. If it raises, the version does not
        exist, or the one that it would have replaced still does; unless the error says that the
        folder could not be synced: then either may be true after a crash.

        Raises
        ------
        CheckpointError
            If bytes were never written, writes are in progress, or one of them failed. In the
            first two cases the version stays open.
        ExistingVersionError
            If the version appeared meanwhile.
        StorageError, PathError
            If the medium did not take it. The version can only be aborted then.
        ClosedError
            After `commit` or `abort`.
        """
        regions = self._finish()

        def commit() -> None:
            self._prepare(regions)
            self._publish()

        self._become("committed", commit)

    def prepare(self) -> None:
        """Do all of `commit` but the last step, in which the manifest takes its name.

        When it returns, data and manifest are on the medium, and nobody sees the version. Call
        `publish` then, or `abort`. Raises as `commit`.
        """
        regions = self._finish()
        self._become("prepared", lambda: self._prepare(regions))

    def publish(self) -> None:
        """Commit a version that is prepared. Raises as `commit`."""
        with self._lock:
            self._check_usable("prepared")
            self._state = "committing"
        self._become("committed", self._publish)

    def _finish(self) -> tuple[manifest.StoredRegion, ...]:
        """Return the regions with all checksums; nothing can be written any more."""
        with self._lock:
            self._check_usable()
            if self._writing:
                raise CheckpointError(
                    f"{self._writing} writes of version {self.version} are in progress: commit "
                    "after they have returned"
                )
            regions = tuple(
                manifest.StoredRegion(
                    each.region, each.offset, self._checksums[each.region.name].finish()
                )
                for each in self._record.regions
            )
            self._state = "committing"
        return regions

    def _become(self, state: str, act: Callable[[], object]) -> None:
        def do() -> None:
            act()
            self._state = state

        try:
            uninterrupted(do)
        except BaseException as error:
            if self._state != state:  # and not a signal that came while it was
                self._held.close()
                self._failure = error
                self._state = "open"
            raise

    def _prepare(self, regions: tuple[manifest.StoredRegion, ...]) -> None:
        record = self._record
        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = manifest.encode(replace(record, regions=regions, written=written))
        self._file.flush()
        target = str(self._folder / names.manifest_name(self.version))
        # The data must have its name before a manifest names it: a manifest means that it is there.
        sync_folder(self._folder)
        draft = self._held.enter_context(files.Draft(target, self.replaces, lock=False))
        try:
            write_all(draft.descriptor, text)
            os.fsync(draft.descriptor)
        except OSError as error:
            raise files.write_error(error, target) from error
        self._draft = draft

    def _publish(self) -> None:
        assert self._draft is not None
        with self._turn:
            self._published = True
            try:
                self._draft.publish()
            except ExistingFileError as error:
                self._published = False
                raise exists(self.name, self.version, self._draft.target) from error
            self._held.close()
            self._end("committed")

    def abort(self) -> None:
        """Remove what was written. May be called twice, and does nothing after `commit`."""
        if os.getpid() != self._process:  # the version is the parent's
            return
        with self._lock:
            if self._state not in ("open", "prepared"):
                return
            self._state = "aborted"
        self._held.close()
        self._end("aborted")
        # If the manifest may have got its name, it may name this file; the next opening looks.
        if not self._published:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def close(self) -> None:
        """Abort the version if it was not committed."""
        self.abort()

    def _end(self, state: str) -> None:
        self._state = state
        self._file.close()
        self._ended(self)

    def _check_usable(self, state: str = "open") -> None:
        if self._state != state:
            raise ClosedError(
                f"version {self.version} of {self.name!r} is {self._state}: begin another"
            )
        if self._failure is not None:
            raise CheckpointError(
                f"version {self.version} of {self.name!r} cannot be committed, because a write "
                f"failed ({self._failure}): abort it"
            ) from self._failure


def create_data(path: Path, nbytes: int, o_direct: bool | None) -> tuple[File, Choice]:
    """Make a data file of its full size, with space for all of it, and open it for writing.

    Raises PathError if there is no space; nothing is left then.
    """
    with contextlib.ExitStack() as unless_done:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            unless_done.callback(path.unlink)
            try:
                _allocate(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise files.write_error(error, str(path)) from error
        choice = choose_o_direct(path, o_direct)
        file = File(path, writable=True, o_direct=choice.o_direct, lock=False)
        unless_done.pop_all()
    return file, choice


def _allocate(descriptor: int, nbytes: int) -> None:
    try:
        _native.allocate(descriptor, nbytes)
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            raise
        os.ftruncate(descriptor, nbytes)


def write_all(descriptor: int, text: bytes) -> None:
    """Write all of a text to a descriptor."""
    rest = memoryview(text)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def empty_record(
    name: str,
    version: int,
    rank: int,
    regions: Sequence[Region],
    chunk_bytes: int,
    metadata: Mapping[str, Any],
    identity: str,
) -> manifest.Manifest:
    """Return the manifest of a version without checksums; raises ArgumentError."""
    found = tuple(regions)
    if not all(isinstance(each, Region) for each in found):
        raise ArgumentError("regions is no sequence of Region")
    if len(found) > manifest.REGIONS_MAX:
        raise ArgumentError(f"{len(found)} regions, more than {manifest.REGIONS_MAX}")
    if len({each.name for each in found}) != len(found):
        raise ArgumentError("two regions have one name")
    offsets, data_bytes = manifest.lay_out(found)
    if manifest.least_bytes(data_bytes, chunk_bytes) > manifest.MANIFEST_BYTES_MAX:
        raise ArgumentError(
            f"the checksums of {data_bytes} bytes in chunks of {chunk_bytes} exceed the "
            f"{manifest.MANIFEST_BYTES_MAX} bytes of a manifest: take larger chunks (chunk_bytes)"
        )
    nothing = chunk_checksums(memoryview(b""), chunk_bytes)
    return manifest.Manifest(
        name,
        version,
        rank,
        names.data_name(version, int(identity[:16], 16)),
        data_bytes,
        chunk_bytes,
        tuple(
            manifest.StoredRegion(region, offset, nothing)
            for region, offset in zip(found, offsets, strict=True)
        ),
        metadata,
        identity=identity,
    )
