"""`Writer`: files that torch.distributed.checkpoint loads; a crash loses nothing committed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pickle
import re
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from flashwarp import _native, endings
from flashwarp.config import integer
from flashwarp.errors import (
    CheckpointError,
    DamagedVersionError,
    ExistingFileError,
    StorageError,
)
from flashwarp.interop.torch.dcp.checksums import (
    Checksums,
    Item,
    checksum_files,
    checksums_name,
    encode,
    is_data_name,
    metadata_name,
)
from flashwarp.interop.torch.dcp.records import Record, Records
from flashwarp.interop.torch.dcp.relied import check_torch
from flashwarp.storage import files

_log = logging.getLogger(__name__)

_SEGMENT_BYTES = 8 << 20
_THREADS_MAX = 64
# The file in the shared folder by which a failed rank stops the others.
_FAILED = ".failed"
_FAILED_BYTES_MAX = 4096
# What a commit writes before it renames it.
_DRAFT = re.compile(r"(?:(?:__[0-9]+)?\.metadata|\.checksums-[0-9a-f-]+)\.[0-9a-f]{8}\.tmp")
_LOOK_S = 0.2


class Writer(StorageWriter):  # type: ignore[misc]
    """Writes a checkpoint of torch.distributed.checkpoint in the files that torch itself writes.

    ``dcp.load`` reads them without flashwarp, with any number of ranks. Each rank writes one file
    under a new name, and the coordinator renames the metadata file last. So what was committed in
    the folder before stays as it is until the new checkpoint is complete and durable, whenever the
    process or the machine ends. A file of checksums lies beside it, for `Reader` and `verify`.

    Parameters
    ----------
    path : path-like
        The folder of one checkpoint, on a file system that all ranks see; it is made. The
        ``checkpoint_id`` of a save takes its place.
    threads : int
        How many threads compute checksums and write, for each rank.
    overwrite : bool
        Whether a checkpoint that is there may be replaced. Its files are removed when the new one
        is durable.

    Raises
    ------
    ArgumentError
        torch lacks what this relies on; the error says what.

    Notes
    -----
    If a rank cannot write, the others stop within a second, and the save raises on all of them. The
    files of a save that was killed have names of their own; nothing reads them, and the next save
    that succeeds in the folder removes them.

    Examples
    --------
    >>> import tempfile, torch, torch.distributed.checkpoint as dcp
    >>> import flashwarp.dcp
    >>> folder = tempfile.mkdtemp()
    >>> state = {"weight": torch.arange(4.0)}
    >>> _ = dcp.save(state, storage_writer=flashwarp.dcp.Writer(folder), no_dist=True)
    >>> again = {"weight": torch.zeros(4)}
    >>> dcp.load(again, checkpoint_id=folder, no_dist=True)
    >>> again["weight"]
    tensor([0., 1., 2., 3.])
    """

    def __init__(
        self, path: str | os.PathLike[str], *, threads: int = 2, overwrite: bool = True
    ) -> None:
        check_torch()
        super().__init__()
        self.path = Path(files.check_name(path))
        self.threads = integer("threads", threads, 1, _THREADS_MAX)
        self.overwrite = overwrite
        self._save = ""
        self._rank = 0
        self._use_collectives = True
        # This rank's file, locked from its beginning until the save has ended: no other save takes
        # it for a leftover.
        self._held: weakref.finalize[..., Writer] | None = None
        self.reset()

    # What torch calls, in this order.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it can be a folder."""
        return "://" not in os.fspath(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, of another folder if one is named."""
        if checkpoint_id:
            self.path = Path(files.check_name(checkpoint_id))
        self._save = uuid.uuid4().hex[:16]
        self._let_go()

    def storage_meta(self) -> StorageMeta:
        """Return what names this save."""
        return StorageMeta(checkpoint_id=os.fspath(self.path), save_id=self._save)

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Note which rank this is."""
        self._rank = kwargs.get("rank") or 0
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder, and refuse one that must not be overwritten."""
        with _storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        there = self.path / metadata_name(self._metadata_rank)
        if not self.overwrite and there.exists():
            raise ExistingFileError(
                errno.EEXIST,
                "the folder has a checkpoint: choose another one, or give overwrite=True",
                str(there),
            )
        if not self._use_collectives:
            return replace(plan, storage_data=_StoragePrefix(f"__{self._rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Forget that an earlier save into this folder has failed."""
        with suppress(FileNotFoundError):
            (self.path / _FAILED).unlink()
        return [
            replace(plan, storage_data=plan.storage_data or _StoragePrefix(f"__{rank}_"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; returns when it is durable under its name."""
        try:
            results = self._write(plan, planner)
        except BaseException as error:
            self._let_go()
            self._tell_others(error)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: write the checksums and the metadata, and remove what they replace."""
        try:
            self._commit(metadata, results)
        finally:
            self._let_go()

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        entries = [each for of_rank in results for each in of_rank]
        data_files = _items_by_file(entries)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {each.index: each.storage_data for each in entries}
        metadata.storage_meta = self.storage_meta()
        content = pickle.dumps(metadata)
        checksums = Checksums(Item(0, len(content), _native.crc32c(content)), data_files)
        self._check_sizes(data_files)
        rank = self._metadata_rank
        with _storage_errors(self.path), _locked(self.path):
            _replace(self.path / checksums_name(self._save, rank), encode(checksums))
            files.sync_folder(self.path)
            _replace(self.path / metadata_name(rank), content)
            files.sync_folder(self.path)
            self._remove_replaced(set(data_files))

    @property
    def _metadata_rank(self) -> int | None:
        return None if self._use_collectives else self._rank

    # The file of a rank.

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = f"__{self._rank}_{self._save}_0.distcp"
        records = Records()
        places: list[tuple[int, Record]] = []
        end = 0
        for item in plan.items:
            record = records.of(planner.resolve_data(item))
            places.append((end, record))
            end += record.nbytes
        if not places:
            return []
        path, draft = self.path / name, self.path / f"{name}.tmp"
        with _storage_errors(draft):
            try:
                values = self._write_draft(draft, places, end)
                draft.rename(path)
                files.sync_folder(self.path)
            except BaseException:
                with suppress(OSError):
                    draft.unlink()
                raise
        return [
            _result(item.index, name, offset, record.nbytes, value)
            for item, (offset, record), value in zip(plan.items, places, values, strict=True)
        ]

    def _write_draft(self, draft: Path, places: list[tuple[int, Record]], nbytes: int) -> list[int]:
        """Write all records; return their checksums."""
        self._let_go()
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._held = weakref.finalize(self, os.close, descriptor)
        with _unless_unsupported():
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # A disk that is too full says so now.
        with _unless_unsupported():
            os.posix_fallocate(descriptor, 0, nbytes)
        watch = _Watch(self.path / _FAILED)
        with endings.Pool(self.threads, "flashwarp-dcp") as pool:
            writes = [
                pool.submit(_write_record, descriptor, offset, record, watch)
                for offset, record in places
            ]
            try:
                values = [each.result() for each in writes]
            except BaseException:
                watch.stop()
                raise
        os.fsync(descriptor)
        return values

    def _let_go(self) -> None:
        if self._held is not None:
            self._held()
            self._held = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file: a save in another process makes its own."""
        return {**self.__dict__, "_held": None}

    def _tell_others(self, error: BaseException) -> None:
        """Leave a note for the other ranks, so that they need not write to their end."""
        _log.error("rank %d could not write its part of %s: %s", self._rank, self.path, error)
        if isinstance(error, _OtherRankError):
            return
        text = f"rank {self._rank}: {type(error).__name__}: {error}"[:_FAILED_BYTES_MAX]
        # If the folder cannot be written either, they learn of it when they have written.
        with suppress(OSError):
            _replace(self.path / _FAILED, text.encode())

    # The commit.

    def _check_sizes(self, data_files: dict[str, list[Item]]) -> None:
        for name, items in data_files.items():
            path, wanted = self.path / name, sum(item.nbytes for item in items)
            with _storage_errors(path):
                size = path.stat().st_size
            if size != wanted:
                raise CheckpointError(
                    f"{path} has {size} bytes here and {wanted} on the rank that wrote it: all "
                    "ranks must write to one file system that they share"
                )

    def _remove_replaced(self, kept: set[str]) -> None:
        """Remove the files of committed checkpoints that are no more, and what killed saves left.

        A failure to remove loses space only, so it is logged.
        """
        rank = self._metadata_rank
        try:
            for path in checksum_files(self.path, rank):
                if path.name != checksums_name(self._save, rank):
                    path.unlink(missing_ok=True)
            for path in self.path.iterdir():
                mine = rank is None or path.name.startswith(f"__{rank}_")
                if mine and path.name not in kept and is_data_name(path.name):
                    _remove_unheld(path)
                elif _DRAFT.fullmatch(path.name):
                    path.unlink(missing_ok=True)  # commits hold the lock while they have one
        except (OSError, DamagedVersionError) as error:
            _log.warning("files that %s replaces remain: %s", self.path, error)


class _OtherRankError(CheckpointError):
    """Another rank has failed, and has said so."""


class _Watch:
    """Looks now and then whether another rank has failed. Any thread may ask."""

    def __init__(self, note: Path) -> None:
        self._note = note
        self._lock = endings.Lock()
        self._next = 0.0
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def check(self) -> None:
        """Raise if this save is to end."""
        if self._stopped:
            raise CheckpointError("another part of this rank's file could not be written")
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                return
            self._next = now + _LOOK_S
        with suppress(OSError), self._note.open("rb") as file:
            text = file.read(_FAILED_BYTES_MAX).decode(errors="replace")
            raise _OtherRankError(f"the save was given up, because another rank failed: {text}")


def _write_record(descriptor: int, offset: int, record: Record, watch: _Watch) -> int:
    """Write one record in segments; return its checksum."""
    value = 0
    for part in (memoryview(record.head), record.data(), memoryview(record.tail)):
        for begin in range(0, part.nbytes, _SEGMENT_BYTES):
            watch.check()
            segment = part[begin : begin + _SEGMENT_BYTES]
            value = _native.crc32c(segment, value)
            _native.write_file(descriptor, offset, segment)
            offset += segment.nbytes
    return value


def _result(index: Any, name: str, offset: int, nbytes: int, crc32c: int) -> WriteResult:
    info = _StorageInfo(name, offset, nbytes)
    # Travels to the coordinator with the rest, and is not stored.
    info.crc32c = crc32c
    return WriteResult(index=index, size_in_bytes=nbytes, storage_data=info)


def _items_by_file(results: list[WriteResult]) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = {}
    for each in results:
        info = each.storage_data
        item = Item(info.offset, info.length, info.__dict__.pop("crc32c"))
        found.setdefault(info.relative_path, []).append(item)
    return {name: sorted(items, key=lambda item: item.offset) for name, items in found.items()}


def _remove_unheld(path: Path) -> None:
    """Remove a data file, unless a save that has not ended holds it."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        path.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Write a small file durably, and give it its name in one step."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other commits out of a folder: one must not remove what another one commits."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Give errors of the system their type and the path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if type(error).__module__.startswith("flashwarp"):
            raise
        text = f"{error.strerror or error}"
        if error.errno == errno.ENOSPC:
            text += "; the checkpoint that was there before is untouched: free space, or save "
            text += "elsewhere"
        offset = getattr(error, "offset", None)
        raise StorageError(
            error.errno or errno.EIO, text, error.filename or str(path), offset=offset
        ) from error


@contextmanager
def _unless_unsupported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
