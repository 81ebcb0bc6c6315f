"""Checkpoints on a remote store, through obstore: S3-compatible stores, other clouds, folders.

Objects have the names and the contents of a directory's files. The manifest is stored last, and a
store shows an object when it is complete: so a version is there as a whole, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from flashwarp import endings
from flashwarp.checkpoint.directory import manifest, names
from flashwarp.checkpoint.directory.buffers import page_aligned
from flashwarp.checkpoint.directory.catalog import Catalog, first_line
from flashwarp.checkpoint.directory.reader import VersionReader
from flashwarp.config import integer, number, time_limit_s
from flashwarp.errors import (
    ArgumentError,
    DamagedVersionError,
    FlashwarpError,
    MissingFileError,
    MissingVersionError,
    RemoteError,
)
from flashwarp.storage.progress import counting

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PART_BYTES = 8 << 20
_PARTS_IN_FLIGHT = 4
_THREADS = 8
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 10.0

# What another attempt would not change.
_FINAL = (
    "AlreadyExistsError",
    "InvalidPathError",
    "NotSupportedError",
    "PermissionDeniedError",
    "PreconditionError",
    "UnauthenticatedError",
    "UnknownConfigurationKeyError",
)


class RemoteDirectory(Catalog):
    """Versions of checkpoints on a remote store.

    Parameters
    ----------
    store : str or obstore store
        A URL, such as ``"s3://bucket/run-7"``, ``"file:///mnt/lustre/run-7"`` or ``"memory:///"``,
        or a store of the package obstore with time limits of its own.
    rank : int
        Whose versions are stored, and read by default. One process at a time may store a rank; the
        store has no lock.
    attempts : int
        How often a request is tried, with random waits that grow from 0.1 s to 10 s: by obstore if
        the URL is that of a server, otherwise here.
    timeout_s : float, optional
        Seconds after which no further attempt is made; if the URL is that of a server, also the
        limit of each attempt. Default: `Config.timeout_s`.
    **options
        For a URL: configuration of obstore, such as ``endpoint`` or ``skip_signature``.

    Raises
    ------
    ArgumentError
        If obstore is not installed, or does not accept the URL.

    Notes
    -----
    Thread-safe. All calls block. Requests that fail as often as they are tried raise `RemoteError`,
    and leave the store as it was, or with a data object without a manifest, which nobody reads.
    `remove_leftovers` removes such objects.

    Examples
    --------
    >>> from flashwarp.checkpoint.directory import RemoteDirectory
    >>> remote = RemoteDirectory("memory:///")
    >>> remote.versions("run")
    []
    """

    _poll_s = 1.0

    def __init__(
        self,
        store: Any,
        rank: int = 0,
        *,
        attempts: int = 5,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.rank = names.check_rank(rank)
        self._attempts = integer("attempts", attempts, 1, 100)
        self._timeout_s = number("timeout_s", time_limit_s(timeout_s), 1e-3, 1e6)
        self._obstore = _import_obstore()
        self._url = store if isinstance(store, str) else type(store).__name__
        if isinstance(store, str):
            store = self._connect(store, options)
        elif options:
            raise ArgumentError(f"options {sorted(options)} are for a URL, and a store was given")
        self._store = store
        self._pool = endings.Pool(_THREADS, "flashwarp-remote")

    def upload(self, reader: VersionReader, *, replace: bool = False) -> bool:
        """Store a version that is open elsewhere; see `Catalog.upload`."""
        self._check_usable()
        if reader.rank != self.rank:
            raise ArgumentError(f"a version by rank {reader.rank} is stored by rank {self.rank}")
        record = reader.manifest
        folder = "/".join(self._folders(record.name, None))
        target = f"{folder}/{names.manifest_name(record.version)}"
        if self._has(reader, replace):
            return False
        self._ask(
            f"put {record.data}",
            lambda: self._obstore.put(
                self._store,
                f"{folder}/{record.data}",
                _parts(reader),
                use_multipart=True,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_IN_FLIGHT,
            ),
        )
        text = manifest.encode(record)
        self._ask("put a manifest", lambda: self._obstore.put(self._store, target, text))
        if replace:
            self._delete_data(folder, self._listed(folder), {record.version}, record.data)
        return True

    def discard_all(self, name: str, versions: Iterable[int]) -> list[int]:
        """Remove several versions of this rank; return those that were there."""
        self._check_usable()
        folder = "/".join(self._folders(name, None))
        asked = {names.check_version(version) for version in versions}
        found = self._listed(folder)
        removed = [version for version in names.versions_among(found) if version in asked]
        # Manifests first: nobody sees a version without data.
        for version in removed:
            self._delete(f"{folder}/{names.manifest_name(version)}")
        self._delete_data(folder, found, removed)
        return removed

    def _delete_data(
        self, folder: str, found: list[str], versions: Collection[int | None], kept: str = ""
    ) -> None:
        for each in found:
            if names.data_version(each) in versions and each != kept:
                self._delete(f"{folder}/{each}")

    def remove_leftovers(self, name: str) -> int:
        """Remove data objects without a manifest, which uploads of this rank left that failed.

        Returns
        -------
        int
            How many. Nobody may upload this rank at the same time.
        """
        self._check_usable()
        folder = "/".join(self._folders(name, None))
        found = self._listed(folder)
        committed = set(names.versions_among(found))
        left = [
            each
            for each in found
            if (version := names.data_version(each)) is not None and version not in committed
        ]
        for each in left:
            self._delete(f"{folder}/{each}")
        return len(left)

    def close(self) -> None:
        """End its threads. May be called twice."""
        self._closed = True
        if not self._in_child:
            self._pool.close()

    # Inside.

    def _run(self, act: Callable[..., T], *arguments: Any) -> Future[T]:
        self._check_usable()
        return self._pool.submit(act, *arguments)

    def _listed(self, *folders: str) -> list[str]:
        prefix = "/".join(folders)
        found = self._ask(
            f"list {prefix}",
            lambda: self._obstore.list_with_delimiter(self._store, prefix or None),
        )
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def _read(self, *parts: str) -> tuple[str, bytes]:
        path = "/".join(parts)

        def get() -> bytes:
            result = self._obstore.get(self._store, path)
            if result.meta["size"] > manifest.MANIFEST_BYTES_MAX:
                raise DamagedVersionError(
                    self._path(path), f"it has more than {manifest.MANIFEST_BYTES_MAX} bytes"
                )
            return bytes(result.bytes())

        return self._path(path), self._ask(f"get {path}", get)

    def _source(self, nbytes: int, *parts: str) -> _Object:
        path = "/".join(parts)
        size = self._ask(f"head {path}", lambda: self._obstore.head(self._store, path))["size"]
        if size != nbytes:
            raise DamagedVersionError(
                self._path(path), f"it has {size} bytes, and {nbytes} were written"
            )
        return _Object(self, path)

    def _delete(self, path: str) -> None:
        with contextlib.suppress(MissingFileError):
            self._ask(f"delete {path}", lambda: self._obstore.delete(self._store, path))

    def _connect(self, url: str, options: dict[str, Any]) -> Any:
        store = importlib.import_module("obstore.store")
        limit = timedelta(seconds=self._timeout_s)
        if not url.startswith(("file:", "memory:")):
            # obstore tries each request again, and so each part of a large upload. Trying again
            # here would begin the upload anew.
            retries = {
                "max_retries": self._attempts - 1,
                "retry_timeout": limit,
                "backoff": {
                    "init_backoff": timedelta(seconds=_BACKOFF_S),
                    "max_backoff": timedelta(seconds=_BACKOFF_S_MAX),
                    "base": 2,
                },
            }
            self._attempts = 1
            options = {
                "client_options": {"timeout": limit, "connect_timeout": limit},
                "retry_config": retries,
                **options,
            }
        if url.startswith("file:"):
            options = {"mkdir": True, **options}
        try:
            return store.from_url(url, **options)
        except Exception as error:
            raise ArgumentError(f"obstore cannot use {url!r}: {error}") from error

    def _path(self, path: str) -> str:
        return f"{self._url.rstrip('/')}/{path}"

    def _ask(self, what: str, act: Callable[[], T]) -> T:
        """Make a request, again after errors that may pass."""
        begin = time.monotonic()
        for attempt in range(1, self._attempts + 1):
            try:
                return act()
            except FlashwarpError:
                raise
            except Exception as error:
                spent = time.monotonic() - begin
                kind = type(error).__name__
                if kind in ("FileNotFoundError", "NotFoundError"):
                    raise MissingFileError(
                        errno.ENOENT, f"{what}: no such object", self._url
                    ) from error
                if kind in _FINAL or attempt == self._attempts or spent >= self._timeout_s:
                    raise RemoteError(
                        f"{what} on {self._url} failed in {spent:.1f} s, attempt {attempt} of "
                        f"{self._attempts}: {first_line(error)}"
                    ) from error
                wait = min(_BACKOFF_S * 2 ** (attempt - 1), _BACKOFF_S_MAX)
                wait *= 0.5 + random.random() / 2
                _log.warning(
                    "%s on %s failed, and is tried again in %.1f s: %s",
                    what,
                    self._url,
                    wait,
                    first_line(error),
                )
                time.sleep(wait)
        raise AssertionError("unreachable")

    def __repr__(self) -> str:
        return f"RemoteDirectory({self._url!r}, rank={self.rank})"


class _Object:
    """A data file on the store."""

    def __init__(self, remote: RemoteDirectory, path: str) -> None:
        self._remote = remote
        self._object = path
        self.path = remote._path(path)

    def read_into(self, offset: int, view: memoryview) -> None:
        remote = self._remote
        try:
            found = remote._ask(
                f"get {self._object}",
                lambda: remote._obstore.get_range(
                    remote._store, self._object, start=offset, length=view.nbytes
                ),
            )
        except MissingFileError as error:
            raise MissingVersionError(f"{self.path} was discarded while it was read") from error
        data = memoryview(found)
        if data.nbytes != view.nbytes:
            raise DamagedVersionError(
                self.path, f"{view.nbytes} bytes at {offset} were asked for, {data.nbytes} came"
            )
        view[:] = data

    def close(self) -> None:
        """Nothing is open."""


def _parts(reader: VersionReader) -> Iterator[bytes]:
    """Yield the bytes of the data file, checked, with zeros between regions."""
    step = max(_PART_BYTES, reader.manifest.chunk_bytes)
    end, count = 0, counting(f"copying {reader.name} {reader.version}", reader.nbytes)
    for stored in reader.manifest.regions:
        if stored.offset > end:
            yield bytes(stored.offset - end)
        for offset in range(0, stored.region.nbytes, step):
            memory = page_aligned(min(step, stored.region.nbytes - offset))
            reader.read_into(stored.region.name, offset, memory)
            yield memory.tobytes()
            count(memory.nbytes)
        end = stored.offset + stored.region.nbytes
    yield bytes(reader.manifest.data_bytes - end)


def _import_obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError as error:
        raise ArgumentError(
            "remote stores need the package obstore: pip install 'flashwarp[remote]'"
        ) from error
