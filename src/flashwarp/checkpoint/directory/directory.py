"""A directory of checkpoints: which versions there are, and how one is written, read and removed.

The order of versions is that of their numbers; no clock is read. One process at a time writes a
rank; the kernel ends its lock when it dies. Any process reads any rank at any time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flashwarp import endings
from flashwarp.checkpoint.directory import lock, manifest, names
from flashwarp.checkpoint.directory.follow import Watch
from flashwarp.checkpoint.directory.reader import VersionReader
from flashwarp.checkpoint.directory.writer import (
    VersionWriter,
    direct_works,
    empty_record,
    exists,
    sync_folder,
)
from flashwarp.checkpoint.region import Region
from flashwarp.config import flag, parse_bytes
from flashwarp.endings import Closing
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DamagedVersionError,
    ExistingVersionError,
    FlashwarpError,
    ForkError,
    MissingFileError,
    MissingVersionError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.storage import File, files

__all__ = ["Directory", "Finding"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """What was found of a version.

    Attributes
    ----------
    version : int
        Its number.
    nbytes : int
        Bytes of its regions; 0 if its manifest cannot be read.
    problem : str
        Why it cannot be used; empty if it can.
    """

    version: int
    nbytes: int
    problem: str


class Directory(Closing):
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
    >>> import tempfile
    >>> from flashwarp.checkpoint.directory import Directory
    >>> from flashwarp.checkpoint.region import Region
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Directory(folder.name) as directory:
    ...     with directory.begin("run", 7, [Region("step", "<i8", (2,), 16)]) as writer:
    ...         writer.write("step", 0, b"flash" + bytes(11))
    ...         writer.commit()
    ...     with directory.open("run", directory.latest("run")) as reader:
    ...         reader.load("step").tobytes()[:5]
    b'flash'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int = 0,
        *,
        writable: bool = True,
        chunk_bytes: int | str = "1 MiB",
        o_direct: bool | None = None,
    ) -> None:
        self.path = Path(files.check_name(path)).absolute()
        self.rank = names.check_rank(rank)
        self.writable = flag("writable", writable)
        self.chunk_bytes = _check_chunk(chunk_bytes)
        self._o_direct = None if o_direct is None else flag("o_direct", o_direct)
        self._writers: dict[tuple[str, int], VersionWriter | None] = {}
        self._guard = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._lock: lock.RankLock | None = None
        if self.writable:
            self._make_folder(self.path)
            self._lock = lock.RankLock(self.path, self.rank)
            if self._lock.held:
                self._remove_leftovers()
        elif not self.path.is_dir():
            raise MissingFileError(errno.ENOENT, "no such folder", str(self.path))
        _open.add(self)

    # What there is.

    def names(self) -> list[str]:
        """Return the names of the checkpoints in the folder, sorted."""
        self._check_open()
        found = []
        for each in _listed(self.path):
            with contextlib.suppress(ArgumentError):
                if (self.path / each).is_dir():
                    found.append(names.check_name(each))
        return sorted(found)

    def ranks(self, name: str) -> list[int]:
        """Return the ranks that have versions of a checkpoint, or had, sorted."""
        self._check_open()
        found = map(names.rank_of, _listed(self.path / names.check_name(name)))
        return sorted(rank for rank in found if rank is not None)

    def versions(self, name: str, rank: int | None = None) -> list[int]:
        """Return the committed versions of a checkpoint, ascending; reads none of them."""
        self._check_open()
        return names.versions_among(_listed(self._folder(name, rank)))

    def examine(
        self, name: str, *, verify: bool = False, rank: int | None = None
    ) -> Iterator[Finding]:
        """Look at each version, the newest first.

        Parameters
        ----------
        name : str
            The checkpoint.
        verify : bool
            Read all bytes and check them. Otherwise only the manifest and the size of the data.
        rank : int, optional
            Whose versions; default this directory's.

        Yields
        ------
        Finding
            Versions that were discarded meanwhile are left out.
        """
        for version in reversed(self.versions(name, rank)):
            nbytes = 0
            try:
                with self.open(name, version, rank=rank) as reader:
                    nbytes = reader.nbytes
                    if verify:
                        reader.verify()
            except MissingVersionError:
                continue
            except (DamagedVersionError, OSError) as error:
                yield Finding(version, nbytes, str(error))
            else:
                yield Finding(version, nbytes, "")

    def latest(self, name: str, *, verify: bool = False, rank: int | None = None) -> int | None:
        """Return the newest version that can be used, or None.

        A damaged version is skipped, and a warning logs the reason. Arguments as for `examine`.
        """
        for found in self.examine(name, verify=verify, rank=rank):
            if not found.problem:
                return found.version
            _log.warning("skipped version %d of %r: %s", found.version, name, found.problem)
        return None

    # Reading.

    def open(self, name: str, version: int, *, rank: int | None = None) -> VersionReader:
        """Open a version for reading.

        Parameters
        ----------
        name, version
            Which version of which checkpoint.
        rank : int, optional
            The rank that wrote it; default this directory's. Any may be read.

        Raises
        ------
        MissingVersionError
            If there is no such version.
        DamagedVersionError
            If its manifest is not what was written, or its data file is missing or has another
            size.
        PathError, StorageError
            If its files cannot be read.
        """
        self._check_open()
        version = names.check_version(version)
        folder = self._folder(name, rank)
        # A version that is replaced between two steps has another data file: look again.
        for _ in range(_OPEN_ATTEMPTS):
            record = self._read_manifest(folder, name, version)
            try:
                source = _FileSource(folder / record.data, record.data_bytes, self._o_direct)
            except MissingFileError:
                continue
            return VersionReader(record, source, self._run)
        raise DamagedVersionError(str(folder / record.data), "its data file is missing")

    def _read_manifest(self, folder: Path, name: str, version: int) -> manifest.Manifest:
        path = folder / names.manifest_name(version)
        try:
            with files.open_for_reading(str(path)) as file:
                size = os.fstat(file.fileno()).st_size
                text = file.read(min(size, manifest.MANIFEST_BYTES_MAX) + 1)
        except MissingFileError as error:
            raise MissingVersionError(
                f"{self.path} has no version {version} of {name!r} by rank "
                f"{folder.name.removeprefix('rank-')}; it was never committed, or discarded"
            ) from error
        except FlashwarpError:
            raise
        except OSError as error:
            why = f"read: {error.strerror}"
            raise StorageError(error.errno or errno.EIO, why, str(path)) from error
        return manifest_of(text, str(path), name, version, names.rank_of(folder.name))

    def follow(
        self,
        name: str,
        *,
        timeout_s: float,
        rank: int | None = None,
        until: int | None = None,
        poll_s: float = 0.05,
    ) -> Iterator[int]:
        """Yield the versions of a checkpoint as they are committed, in this or another process.

        Parameters
        ----------
        name : str
            The checkpoint; it need not exist yet.
        timeout_s : float
            Seconds without a new version after which `WaitTimeout` is raised.
        rank : int, optional
            Whose versions; default this directory's.
        until : int, optional
            End after this version was yielded.
        poll_s : float
            Seconds between two looks at the folder, at least 1 ms. A look is one call of stat(2);
            the folder is listed only if it changed. (inotify would miss changes by other nodes.)

        Yields
        ------
        int
            Each version once; of those found together, the lowest first. A version that was
            discarded before the next look is left out, and `open` of one that was discarded since
            raises `MissingVersionError`.
        """
        self._check_open()
        watch = Watch(self._folder(name, rank), timeout_s, poll_s, f"a version of {name!r}")
        return watch.versions(self._check_open, until)

    # Writing.

    def begin(
        self,
        name: str,
        version: int,
        regions: Sequence[Region],
        *,
        replace: bool = False,
        metadata: Mapping[str, Any] | None = None,
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
        record = empty_record(name, version, self.rank, regions, self.chunk_bytes, kept)
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
            path = folder / names.manifest_name(version)
            if not replace and path.exists():
                raise exists(name, version, str(path))
            self._make_folder(folder)
            writer = VersionWriter(
                folder,
                record,
                replace=replace,
                o_direct=self._o_direct,
                run=self._run,
                ended=self._writer_ended,
            )
        except BaseException:
            with self._guard:
                del self._writers[key]
            self._release_if_idle()
            raise
        with self._guard:
            self._writers[key] = writer
            closed = self._closed
        if closed:
            writer.abort()
            self._check_open()
        return writer

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
        folder = self._folder(name)
        removed = []
        for version in map(names.check_version, versions):
            try:
                (folder / names.manifest_name(version)).unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise files.write_error(error, str(folder / "")) from error
            removed.append(version)
        if removed:
            # The manifests must be gone before the data: a crash leaves no version without data.
            sync_folder(folder)
            self._remove_data(folder, set(removed))
        return removed

    def close(self) -> None:
        """Abort what is being written and release the lock. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return
        _open.discard(self)
        for writer in list(self._writers.values()):
            if writer is not None:
                writer.abort()
        self._release_if_idle()
        if self._pool is not None:
            self._pool.shutdown()

    def _release_if_idle(self) -> None:
        """Give up the lock: not before every commit has ended, or its data would be a leftover."""
        with self._guard:
            if self._closed and not self._writers and self._lock is not None:
                self._lock.release()

    # Inside.

    def _folder(self, name: str, rank: int | None = None) -> Path:
        rank = self.rank if rank is None else names.check_rank(rank)
        return self.path / names.check_name(name) / names.rank_folder(rank)

    def _run(self, act: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in another thread; in this one if the interpreter is ending."""
        with self._guard:
            if self._pool is None and not self._closed:
                self._pool = ThreadPoolExecutor(_THREADS, "flashwarp-checkpoint")
        try:
            if self._pool is not None:
                return self._pool.submit(act, *arguments)
        except RuntimeError:
            pass
        done: Future[T] = Future()
        try:
            done.set_result(act(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done

    def _writer_ended(self, writer: VersionWriter) -> None:
        if writer.committed and writer.replaces:
            self._remove_data(self._folder(writer.name), {writer.version})
        with self._guard:
            self._writers.pop((writer.name, writer.version), None)
        self._release_if_idle()

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and what lies above it, durably."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise files.write_error(error, str(folder)) from error
        sync_folder(folder.parent)

    def _remove_leftovers(self) -> None:
        """Remove what writers of this rank left that were killed. The lock is held."""
        for name in self.names():
            folder = self._folder(name)
            found = _listed(folder)
            for each in found:
                if each.startswith(_DRAFT):
                    _remove(folder / each)
            committed = set(names.versions_among(found))
            data = [v for v in map(names.data_version, found) if v is not None]
            self._remove_data(folder, {v for v in data if v not in committed or data.count(v) > 1})

    def _remove_data(self, folder: Path, versions: set[int]) -> None:
        """Remove the data files of versions, except those that a manifest names."""
        if not versions:
            return
        with self._guard:
            writers = [each for each in self._writers.values() if each is not None]
        written = {each.data for each in writers if not each.committed}
        kept: dict[int, str | None] = {}
        for each in _listed(folder):
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
            return self._read_manifest(folder, folder.parent.name, version).data
        except MissingVersionError:
            return None
        except FlashwarpError:
            return _UNKNOWN

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise ForkError(f"{self!r} was opened before fork(): open it again here")
        if self._closed:
            raise ClosedError(f"{self!r} is closed")

    def _check_writable(self) -> None:
        self._check_open()
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

_OPEN_ATTEMPTS = 3
_DRAFT = ".flashwarp-"
_UNKNOWN = ""
"""In place of a data file's name: the manifest cannot be read, so nobody knows."""


def manifest_of(
    text: bytes, path: str, name: str, version: int, rank: int | None
) -> manifest.Manifest:
    """Parse a manifest that must be of this version; raises DamagedVersionError."""
    try:
        if len(text) > manifest.MANIFEST_BYTES_MAX:
            raise ValueError(f"it has more than {manifest.MANIFEST_BYTES_MAX} bytes")
        found = manifest.parse(text)
        if (found.name, found.version, found.rank) != (name, version, rank):
            raise ValueError(
                f"it is that of version {found.version} of {found.name!r} by rank {found.rank}"
            )
    except ValueError as error:
        raise DamagedVersionError(path, str(error)) from error
    return found


class _FileSource:
    """A data file, opened for reading."""

    def __init__(self, path: Path, nbytes: int, o_direct: bool | None) -> None:
        self.path = str(path)
        size = files.check(self.path, writable=False).st_size
        if size != nbytes:
            raise DamagedVersionError(self.path, f"it has {size} bytes, and {nbytes} were written")
        direct = direct_works(path) if o_direct is None else o_direct
        self._file = File(path, o_direct=direct, lock=False)

    def read_into(self, offset: int, view: memoryview) -> None:
        self._file.read_into(offset, view)

    def close(self) -> None:
        self._file.close()


def _check_chunk(chunk_bytes: int | str) -> int:
    found = parse_bytes(chunk_bytes, "chunk_bytes")
    low, high = manifest.CHUNK_BYTES_MIN, manifest.CHUNK_BYTES_MAX
    if not low <= found <= high or found & (found - 1):
        raise ArgumentError(
            f"chunk_bytes={chunk_bytes!r} is no power of two between {low} and {high}"
        )
    return found


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise files.path_error(error, str(folder), writable=False) from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is left over and cannot be removed: %s", path, error)
