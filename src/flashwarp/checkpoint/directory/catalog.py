"""What checkpoints there are and how they are read, on disks and on remote stores alike."""

from __future__ import annotations

import contextlib
import errno
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from flashwarp.checkpoint.directory import manifest, names
from flashwarp.checkpoint.directory.follow import follow
from flashwarp.checkpoint.directory.prune import Finding, superfluous
from flashwarp.checkpoint.directory.reader import Source, VersionReader
from flashwarp.endings import OfProcess
from flashwarp.errors import (
    ArgumentError,
    DamagedVersionError,
    ExistingVersionError,
    MissingFileError,
    MissingVersionError,
    StorageError,
)

_log = logging.getLogger(__name__)

_OPEN_ATTEMPTS = 3


class Catalog(OfProcess):
    """Base of `Directory` and `RemoteDirectory`: the half that reads.

    Attributes
    ----------
    rank : int
        Whose versions calls are about, unless they name a rank.
    """

    _when_closed = "{0!r} is closed"
    _when_forked = "{0!r} was opened before fork(): open it again here"

    rank: int
    _poll_s: float
    """Seconds between two looks of `follow`, by default."""

    # What a place must do.

    @abstractmethod
    def _listed(self, *folders: str) -> list[str]:
        """Return the names in a folder; none if it does not exist."""

    def _stamp(self, *folders: str) -> object:  # noqa: ARG002 (for those that have one)
        """Return something that changes if a folder changes; None if only a listing shows it."""
        return None

    @abstractmethod
    def _read(self, *parts: str) -> tuple[str, bytes]:
        """Return where a manifest is, for people, and its text; raises MissingFileError."""

    @abstractmethod
    def _source(self, nbytes: int, *parts: str) -> Source:
        """Open a data file; raises MissingFileError, or DamagedVersionError for another size."""

    @abstractmethod
    def upload(self, reader: VersionReader, *, replace: bool = False) -> bool:
        """Store a version that is open elsewhere; every byte of it is checked on the way.

        Returns False if this very version, by its identity, is here already: an earlier attempt may
        have stored it, and its answer was lost.

        Parameters
        ----------
        reader : VersionReader
            The version.
        replace : bool
            Replace another version of this number. If False, it is refused.

        Raises
        ------
        ExistingVersionError
            If there is another version of this number.
        DamagedVersionError
            If the version is damaged. What is here stays as it was then.
        RemoteError, PathError, StorageError
            If it could not be stored.
        """

    def _has(self, reader: VersionReader, replace: bool) -> bool:
        """Return whether a version is here; raises ExistingVersionError if another one is."""
        try:
            found = self.identity(reader.name, reader.version)
        except DamagedVersionError:
            found = ""
        if found not in (None, reader.identity) and not replace:
            raise exists(reader.name, reader.version, repr(self))
        return found == reader.identity

    def discard(self, name: str, version: int) -> None:
        """Remove a version of this rank; raises MissingVersionError if there is none."""
        if not self.discard_all(name, [version]):
            raise MissingVersionError(f"{self!r} has no version {version} of {name!r}")

    @abstractmethod
    def discard_all(self, name: str, versions: Iterable[int]) -> list[int]:
        """Remove several versions of this rank; return those that were there."""

    @abstractmethod
    def _run(self, act: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in another thread."""

    # What there is.

    def names(self) -> list[str]:
        """Return the names of the checkpoints that there are, sorted."""
        self._check_usable()
        found = []
        for each in self._listed():
            with contextlib.suppress(ArgumentError):
                if any(names.rank_of(rank) is not None for rank in self._listed(each)):
                    found.append(names.check_name(each))
        return sorted(found)

    def ranks(self, name: str) -> list[int]:
        """Return the ranks that have versions of a checkpoint, or had, sorted."""
        self._check_usable()
        found = map(names.rank_of, self._listed(names.check_name(name)))
        return sorted(rank for rank in found if rank is not None)

    def versions(self, name: str, rank: int | None = None) -> list[int]:
        """Return the committed versions of a checkpoint, ascending; reads none of them."""
        self._check_usable()
        return names.versions_among(self._listed(*self._folders(name, rank)))

    def identity(self, name: str, version: int, *, rank: int | None = None) -> str | None:
        """Return the identity of a version, if it is here; see `VersionReader.identity`.

        Raises as `open` for a version that is damaged or cannot be reached.
        """
        try:
            with self.open(name, version, rank=rank) as found:
                return found.identity
        except MissingVersionError:
            return None

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

        Raises
        ------
        PathError, RemoteError
            If a version cannot be reached, which does not mean that it is damaged.
        """
        for version in reversed(self.versions(name, rank)):
            found = self._look_at(name, version, verify, rank)
            if found is not None:
                yield found

    def _look_at(self, name: str, version: int, verify: bool, rank: int | None) -> Finding | None:
        """Look at one version; None if it is not there."""
        nbytes = 0
        try:
            with self.open(name, version, rank=rank) as reader:
                nbytes = reader.nbytes
                if verify:
                    reader.verify()
        except MissingVersionError:
            return None
        # No other errors: a version that cannot be reached now is not damaged.
        except (DamagedVersionError, StorageError) as error:
            return Finding(version, nbytes, str(error))
        return Finding(version, nbytes, "")

    def latest(self, name: str, *, verify: bool = False, rank: int | None = None) -> int | None:
        """Return the newest version that can be used, or None.

        A damaged version is skipped, and a warning logs the reason. Arguments as for `examine`.
        """
        for found in self.examine(name, verify=verify, rank=rank):
            if not found.problem:
                return found.version
            _log.warning("skipped version %d of %r: %s", found.version, name, found.problem)
        return None

    # Removing.

    def prune(
        self, name: str, keep_last: int, keep_every: int | None = None, *, dry_run: bool = False
    ) -> list[int]:
        """Remove old versions of this rank; return their numbers, ascending.

        Parameters
        ----------
        name : str
            The checkpoint.
        keep_last : int
            Keep so many of the newest versions, at least one. A version whose manifest is damaged,
            or whose data file is missing or of another size, does not count.
        keep_every : int, optional
            Also keep every version whose number is a multiple of it.
        dry_run : bool
            Remove nothing.
        """

        def is_usable(version: int) -> bool:
            found = self._look_at(name, version, False, None)
            return found is not None and not found.problem

        gone = superfluous(self.versions(name), is_usable, keep_last, keep_every)
        return gone if dry_run else self.discard_all(name, gone)

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
        self._check_usable()
        version = names.check_version(version)
        folders = self._folders(name, rank)
        # A version that is replaced between two steps has another data file: look again.
        for _ in range(_OPEN_ATTEMPTS):
            path, record = self._manifest(name, version, rank)
            try:
                source = self._source(record.data_bytes, *folders, record.data)
            except MissingFileError:
                continue
            return VersionReader(record, source, self._run)
        raise DamagedVersionError(path, f"its data file {record.data} is missing")

    def _manifest(self, name: str, version: int, rank: int | None) -> tuple[str, manifest.Manifest]:
        """Return where a manifest is, for people, and what it says."""
        folders = self._folders(name, rank)
        try:
            path, text = self._read(*folders, names.manifest_name(version))
        except MissingFileError as error:
            raise MissingVersionError(
                f"{self!r} has no version {version} of {name!r} by rank "
                f"{names.rank_of(folders[1])}: it was never committed, or it was discarded"
            ) from error
        try:
            if len(text) > manifest.MANIFEST_BYTES_MAX:
                raise ValueError(f"it has more than {manifest.MANIFEST_BYTES_MAX} bytes")
            found = manifest.parse(text)
            if (found.name, found.version, found.rank) != (
                name,
                version,
                names.rank_of(folders[1]),
            ):
                raise ValueError(
                    f"it is that of version {found.version} of {found.name!r} by rank {found.rank}"
                )
        except ValueError as error:
            raise DamagedVersionError(path, str(error)) from error
        return path, found

    def _folders(self, name: str, rank: int | None) -> tuple[str, str]:
        rank = self.rank if rank is None else names.check_rank(rank)
        return names.check_name(name), names.rank_folder(rank)

    def follow(
        self,
        name: str,
        *,
        timeout_s: float,
        rank: int | None = None,
        until: int | None = None,
        poll_s: float | None = None,
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
        poll_s : float, optional
            Seconds between two looks, at least 1 ms; default 0.05 in a folder and 1 on a remote
            store. In a folder a look is one call of stat(2), and the folder is listed only if it
            changed. (inotify would miss the changes of other nodes.)

        Yields
        ------
        int
            Each version once, also if it is replaced; of those found together, the lowest first. A
            version that was discarded before the next look is left out, and `open` of one that was
            discarded since raises `MissingVersionError`.
        """
        folders = self._folders(name, rank)
        last = None if until is None else names.check_version(until)
        return follow(
            check=self._check_usable,
            stamp=lambda: self._stamp(*folders),
            listed=lambda: names.versions_among(self._listed(*folders)),
            what=f"a version of {name!r} in {self!r}",
            timeout_s=timeout_s,
            poll_s=self._poll_s if poll_s is None else poll_s,
            until=last,
        )


def first_line(error: BaseException) -> str:
    """Return what an error of others says, short enough for one of ours."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def exists(name: str, version: int, path: str) -> ExistingVersionError:
    """Make the error of a version that is there."""
    return ExistingVersionError(
        errno.EEXIST,
        f"version {version} of {name!r} exists: choose another number, discard it first, or give "
        "replace=True",
        path,
    )
