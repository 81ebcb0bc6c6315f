"""A directory of checkpoints: which versions there are, and how one is written, read and removed.

The order of versions is that of their numbers; no clock is read. One process at a time writes a
rank; the kernel ends its lock when it dies. Any process reads any rank at any time.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flashwarp import endings
from flashwarp.checkpoint.directory import lock, manifest, names
from flashwarp.checkpoint.directory.buffers import page_aligned
from flashwarp.checkpoint.directory.catalog import Catalog, exists
from flashwarp.checkpoint.directory.local import FileSource
from flashwarp.checkpoint.directory.reader import VersionReader
from flashwarp.checkpoint.directory.writer import (
    VersionWriter,
    empty_record,
)
from flashwarp.checkpoint.region import Region
from flashwarp.config import flag, parse_bytes
from flashwarp.errors import (
    ArgumentError,
    DamagedVersionError,
    ExistingVersionError,
    FlashwarpError,
    MissingFileError,
    MissingVersionError,
    PathError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.storage import files
from flashwarp.storage.files import sync_folder
from flashwarp.storage.progress import counting

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Directory(Catalog):
    """Versions of checkpoints in a folder.

    Parameters
    ----------
    path : path-like
        The folder; made if it does not exist and `writable` is true. Ranks share it.
    rank : int
        Which rank writes, and is read by default.
    writable : bool
        Lock the rank, remove what crashed writers left, and allow writing. Readers take no lock.
    chunk_bytes : int or str
        Bytes that share a checksum, in new versions: a power of two from 4 KiB to 256 MiB.
    o_direct : bool, optional
        Transfer past the page cache. Default: if the file system can.

    Raises
    ------
    LockedError
        If another process, or another object in this one, writes this rank here.
    MissingFileError, PathError
        If the folder cannot be used.

    Notes
    -----
    Thread-safe. All calls block.

    Examples
    --------
    >>> from flashwarp.checkpoint.directory import Directory
    >>> from flashwarp.checkpoint.region import Region
    >>> with Directory("checkpoints") as directory:
    ...     with directory.begin("run", 7, [Region("step", "<i8", (2,), 16)]) as writer:
    ...         writer.write("step", 0, b"flash" + bytes(11))
    ...         writer.commit()
    ...     with directory.open("run", directory.latest("run")) as reader:
    ...         reader.load("step").tobytes()[:5]
    b'flash'
    """

    _poll_s = 0.05

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int = 0,
        *,
        writable: bool = True,
        chunk_bytes: int | str = "1 MiB",
        o_direct: bool | None = None,
    ) -> None:
        super().__init__()
        self.path = Path(files.check_name(path)).absolute()
        self.rank = names.check_rank(rank)
        self.writable = flag("writable", writable)
        self.chunk_bytes = _check_chunk(chunk_bytes)
        self._o_direct = None if o_direct is None else flag("o_direct", o_direct)
        self._writers: dict[tuple[str, int], VersionWriter | None] = {}
        self._guard = endings.Lock()
        # Of two threads that publish, begin and discard one version, one goes first. Without a
        # limit: who has the turn renames or removes files, and syncs.
        self._turns = [endings.Lock() for _ in range(_TURNS)]
        self._pool = endings.Pool(_THREADS, "flashwarp-checkpoint")
        self._lock: lock.RankLock | None = None
        if self.writable:
            files.make_folder(self.path)
            self._lock = lock.RankLock(self.path, self.rank)
            if self._lock.held:
                self._remove_leftovers()
        elif os.path.isfile(self.path):
            why = "is a file: give the folder that a Checkpointer was given"
            raise PathError(errno.ENOTDIR, why, str(self.path))
        elif not os.path.isdir(self.path):
            raise MissingFileError(errno.ENOENT, "no such folder", str(self.path))
        _open.add(self)

    @property
    def locked(self) -> bool:
        """Whether this process has the lock of its rank: not on a file system without locks."""
        return self._lock is not None and self._lock.held

    def begin(
        self,
        name: str,
        version: int,
        regions: Sequence[Region],
        *,
        replace: bool = False,
        metadata: Mapping[str, Any] | None = None,
        identity: str | None = None,
    ) -> VersionWriter:
        """Begin to write a version; space for all of it is taken from the disk at once.

        Parameters
        ----------
        name : str
            The checkpoint: 1 to 100 letters, digits, ".", "_" or "-".
        version : int
            From 0 to 2^63 - 1. Versions are ordered by it, and may come in any order.
        regions : sequence of Region
            What it will hold. All bytes must be written before the commit.
        replace : bool
            Replace a version that exists: the commit does so at once, and readers that have the
            old one open keep it. If False, such a version is refused.
        metadata : mapping, optional
            Stored beside the regions as JSON, at most 1 MiB.
        identity : str, optional
            For a copy: that of the version that is copied. Default: a new one.

        Raises
        ------
        ExistingVersionError
            If the version exists, or is being written.
        PathError
            If the disk is full or read-only.
        ReadOnlyError
            If the directory was not opened for writing.
        """
        self._check_writable()
        name, version = names.check_name(name), names.check_version(version)
        replace = flag("replace", replace)
        kept = manifest.check_metadata(metadata)
        identity = names.identity_of(identity)
        record = empty_record(name, version, self.rank, regions, self.chunk_bytes, kept, identity)
        folder = self._folder(name)
        key = name, version
        with self._guard:
            if key in self._writers:
                raise ExistingVersionError(
                    errno.EEXIST,
                    f"version {version} of {name!r} is being written: commit or abort it first",
                    str(folder),
                )
            self._writers[key] = None
        try:
            with self._turn(version):
                begin = partial(self._begin, folder, record, replace)
                writer = endings.uninterrupted(begin, VersionWriter.abort)
        except BaseException:
            with self._guard:
                self._writers.pop(key, None)
            self._release_if_idle()
            raise
        with self._guard:
            self._writers[key] = writer
            closed = self._closed
        if closed:
            writer.abort()
            self._check_usable()
        return writer

    def _begin(self, folder: Path, record: manifest.Manifest, replaces: bool) -> VersionWriter:
        path = folder / names.manifest_name(record.version)
        if not replaces and os.path.lexists(path):
            raise exists(record.name, record.version, str(path))
        files.make_folder(folder)
        if os.path.lexists(folder / record.data):  # another copy of the same, perhaps a damaged one
            number = int.from_bytes(os.urandom(8), "little")
            record = dataclasses.replace(record, data=names.data_name(record.version, number))
        return VersionWriter(
            folder,
            record,
            replaces=replaces,
            o_direct=self._o_direct,
            run=self._run,
            turn=self._turn(record.version),
            ended=self._writer_ended,
        )

    def upload(self, reader: VersionReader, *, replace: bool = False) -> bool:
        """Store a version that is open elsewhere; see `Catalog.upload`."""
        if self._has(reader, replace):
            return False
        with self.begin_copy(reader, replace) as writer:
            copy_regions(reader, writer)
            writer.commit()
        return True

    def begin_copy(self, reader: VersionReader, replace: bool) -> VersionWriter:
        """Begin to write a version that is open elsewhere; see `begin`."""
        return self.begin(
            reader.name,
            reader.version,
            reader.regions,
            replace=replace,
            metadata=reader.metadata,
            identity=reader.identity,
        )

    def note_discarded(self, name: str, versions: Iterable[int]) -> None:
        """Note, durably, that versions are discarded of which another store may have copies."""
        folder = self._folder(name)
        files.make_folder(folder)
        for version in versions:
            try:
                (folder / names.discarded_name(version)).touch()
            except OSError as error:
                raise files.write_error(error, str(folder / "")) from error
        sync_folder(folder)

    def forget_discarded(self, name: str, version: int) -> None:
        """Remove such a note: there are no copies any more, or none that is not of the version."""
        _remove(self._folder(name) / names.discarded_name(version))

    def discarded(self, name: str) -> set[int]:
        """Return the versions of this rank that have such notes."""
        return set(names.versions_among(self._listed(*self._folders(name, None)), "discarded"))

    def may_be(self, name: str, version: int, identity: str) -> bool:
        """Return whether a version that cannot be read here may be the one of an identity.

        If its manifest cannot be read either, the name of its data file says it.
        """
        try:
            return self._manifest(name, version, None)[1].identity == identity
        except MissingVersionError:
            return True  # nothing here says otherwise
        except DamagedVersionError:
            data = names.data_name(version, int(identity[:16], 16))
            return data in self._listed(*self._folders(name, None))

    def discard(self, name: str, version: int) -> None:
        """Remove a version of this rank; raises MissingVersionError if there is none.

        It is gone for good when the call returns. Readers that have it open keep it.
        """
        if not self.discard_all(name, [version]):
            raise MissingVersionError(
                f"{self.path} has no version {version} of {name!r} to discard"
            )

    def discard_all(self, name: str, versions: Iterable[int]) -> list[int]:
        """Remove several versions of this rank; return those that were there."""
        self._check_writable()
        numbers = [names.check_version(version) for version in versions]
        turns = [self._turns[place] for place in sorted({each % _TURNS for each in numbers})]
        discard = partial(self._discard, self._folder(name), numbers)
        return endings.uninterrupted(partial(endings.holding, turns, discard))

    def _discard(self, folder: Path, versions: list[int]) -> list[int]:
        removed: dict[int, str | None] = {}
        for version in versions:
            data = self._data_of(folder, version)
            try:
                (folder / names.manifest_name(version)).unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise files.write_error(error, str(folder / "")) from error
            removed[version] = data
        if removed:
            # The manifests must be gone before the data: a crash leaves no version without data.
            sync_folder(folder)
            self._remove_named(folder, removed)
        return list(removed)

    def close(self) -> None:
        """Abort what is being written and release the lock. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._in_child:
            return
        _open.discard(self)
        for writer in list(self._writers.values()):
            if writer is not None:
                writer.abort()
        self._release_if_idle()
        self._pool.close()

    def _release_if_idle(self) -> None:
        """Give up the lock: not before every commit has ended, or its data would be a leftover."""
        with self._guard:
            if self._closed and not self._writers and self._lock is not None:
                self._lock.release()

    # Inside.

    def _folder(self, name: str) -> Path:
        return self.path.joinpath(*self._folders(name, None))

    def _listed(self, *folders: str) -> list[str]:
        return names.listed(self.path.joinpath(*folders))

    def _stamp(self, *folders: str) -> object:
        folder = self.path.joinpath(*folders)
        try:
            status = os.stat(folder)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise files.path_error(error, str(folder), writable=False) from error
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size

    def _read(self, *parts: str) -> tuple[str, bytes]:
        path = str(self.path.joinpath(*parts))
        try:
            with files.open_for_reading(path) as file:
                size = os.fstat(file.fileno()).st_size
                return path, file.read(min(size, manifest.MANIFEST_BYTES_MAX) + 1)
        except FlashwarpError:
            raise
        except OSError as error:
            why = f"read: {error.strerror}"
            raise StorageError(error.errno or errno.EIO, why, path) from error

    def _source(self, nbytes: int, *parts: str) -> FileSource:
        return FileSource(self.path.joinpath(*parts), nbytes, self._o_direct)

    def _run(self, act: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in another thread; in this one if the interpreter is ending."""
        return self._pool.submit(act, *arguments)

    def _writer_ended(self, writer: VersionWriter) -> None:
        if writer.committed and writer.replaces:
            try:
                self._remove_data(self._folder(writer.name), {writer.version})
            except FlashwarpError as error:  # the version is committed, whatever is left over
                _log.warning("the old data of version %d is left over: %s", writer.version, error)
        with self._guard:
            self._writers.pop((writer.name, writer.version), None)
        self._release_if_idle()

    def _turn(self, version: int) -> endings.Lock:
        return self._turns[version % _TURNS]

    def _remove_leftovers(self) -> None:
        """Remove what writers of this rank left that were killed. The lock is held."""
        for name in self.names():
            folder = self._folder(name)
            found = names.listed(folder)
            for each in found:
                if each.startswith(_DRAFT):
                    _remove(folder / each)
            committed = set(names.versions_among(found))
            data = [v for v in map(names.data_version, found) if v is not None]
            self._remove_data(folder, {v for v in data if v not in committed or data.count(v) > 1})

    def _remove_named(self, folder: Path, data: Mapping[int, str | None]) -> None:
        """Remove the data files that manifests named; a listing takes 1 us for each file there."""
        for name in filter(None, data.values()):
            _remove(folder / name)
        # Of these the manifest could not be read.
        self._remove_data(folder, {version for version, name in data.items() if not name})

    def _remove_data(self, folder: Path, versions: set[int]) -> None:
        """Remove the data files of versions, except those that a manifest names."""
        if not versions:
            return
        with self._guard:
            writers = [each for each in self._writers.values() if each is not None]
        written = {each.data for each in writers if not each.committed}
        kept: dict[int, str | None] = {}
        for each in names.listed(folder):
            version = names.data_version(each)
            if version is None or version not in versions or each in written:
                continue
            if version not in kept:
                kept[version] = self._data_of(folder, version)
            if kept[version] not in (each, _UNKNOWN):
                _remove(folder / each)

    def _data_of(self, folder: Path, version: int) -> str | None:
        """Return the data file that a manifest names; None without one."""
        try:
            return self._manifest(folder.parent.name, version, None)[1].data
        except MissingVersionError:
            return None
        except FlashwarpError:
            return _UNKNOWN

    def _check_writable(self) -> None:
        self._check_usable()
        if not self.writable:
            raise ReadOnlyError(f"{self!r} was opened with writable=False")

    def __repr__(self) -> str:
        return f"Directory({str(self.path)!r}, rank={self.rank})"


_open: weakref.WeakSet[Directory] = weakref.WeakSet()


@endings.at_exit
def _close_all() -> None:
    for each in list(_open):
        each.close()


_THREADS = 4
"""They compute checksums while callers write, and read parts of large reads: mostly they wait."""

_PIECE_BYTES = 8 << 20
_PIECES_IN_FLIGHT = 4
_TURNS = 64
_DRAFT = ".flashwarp-"
_UNKNOWN = ""
"""In place of a data file's name: the manifest cannot be read, so nobody knows."""


def copy_regions(reader: VersionReader, writer: VersionWriter) -> None:
    """Copy all bytes of a version, several pieces at a time; each is checked when it is read."""
    with endings.Pool(_PIECES_IN_FLIGHT, "flashwarp-copy") as pool:
        pending: list[endings.Future[None]] = []
        count = counting(f"copying {reader.name} {reader.version}", reader.nbytes)
        for name, offset, nbytes in _pieces(reader):
            count(nbytes)
            if len(pending) == _PIECES_IN_FLIGHT:
                pending.pop(0).result()
            pending.append(pool.submit(_copy_piece, reader, writer, name, offset, nbytes))
        for each in pending:
            each.result()


def _pieces(reader: VersionReader) -> Iterator[tuple[str, int, int]]:
    step = max(_PIECE_BYTES, reader.manifest.chunk_bytes)
    for region in reader.regions:
        for offset in range(0, region.nbytes, step):
            yield region.name, offset, min(step, region.nbytes - offset)


def _copy_piece(
    reader: VersionReader, writer: VersionWriter, name: str, offset: int, nbytes: int
) -> None:
    memory = page_aligned(nbytes)
    reader.read_into(name, offset, memory)
    writer.write(name, offset, memory)


def _check_chunk(chunk_bytes: int | str) -> int:
    found = parse_bytes(chunk_bytes, "chunk_bytes")
    low, high = manifest.CHUNK_BYTES_MIN, manifest.CHUNK_BYTES_MAX
    if not low <= found <= high or found & (found - 1):
        raise ArgumentError(
            f"chunk_bytes={chunk_bytes!r} is no power of two between {low} and {high}"
        )
    return found


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is left over and cannot be removed: %s", path, error)
