"""Checkpoints: copies of tables at one step, which appear together or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashwarp.config import flag
from flashwarp.errors import CheckpointError, ExistingFileError, FlashwarpError
from flashwarp.storage import files
from flashwarp.table.record import Record, record_path

# linux/fs.h: shares the blocks of a file with another one, until one of them is written.
_FICLONE = 0x40049409
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)
_PIECE_BYTES = 1 << 30


@dataclass(frozen=True)
class Table:
    """A table of a checkpoint: the path of its file, and what its record says then."""

    path: str
    record: Record


def save(
    folder: str | os.PathLike[str],
    step: int,
    tables: Sequence[Table],
    write_extra: Callable[[Path], None] | None = None,
) -> Path:
    """Copy tables to a new folder in `folder`; see `flashwarp.torch.SGD.checkpoint`.

    The new folder has its name, ``step-`` and the number, only when it is complete and durable.
    """
    target = Path(folder) / f"step-{step:012d}"
    draft = Path(folder) / f".flashwarp-{os.urandom(8).hex()}"
    if target.exists():
        raise ExistingFileError(errno.EEXIST, "the checkpoint exists already", str(target))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as unless_done:
            unless_done.callback(shutil.rmtree, draft, ignore_errors=True)
            draft.mkdir()
            names = []
            for number, table in enumerate(tables):
                name = f"{number}-{Path(table.path).name}"
                copy_file(table.path, draft / name)
                table.record.write(draft / name)
                names.append({"file": name, "table": table.path})
            if write_extra is not None:
                write_extra(draft / "extra.pt")
                _sync(draft / "extra.pt")
            (draft / "checkpoint.json").write_text(json.dumps({"step": step, "tables": names}))
            _sync(draft / "checkpoint.json")
            files.sync_folder(draft)
            _take_name(draft, target)
            unless_done.pop_all()
        files.sync_folder(folder)
    except OSError as error:
        if isinstance(error, FlashwarpError):
            raise
        raise files.write_error(error, str(target)) from error
    return target


def _take_name(draft: Path, target: Path) -> None:
    try:
        os.rename(draft, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise ExistingFileError(
            errno.EEXIST, "another process has made this checkpoint", str(target)
        ) from error


def copy_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
    """Copy a file durably. Returns whether the copy shares the blocks of the original.

    File systems with shared blocks (XFS, btrfs) take milliseconds for a file of any size, and space
    only for what changes later. Others copy all bytes.
    """
    with open(source, "rb") as old, open(target, "wb") as new:
        shared = copy_bytes(old.fileno(), new.fileno())
        os.fsync(new.fileno())
    return shared


def copy_bytes(source: int, target: int) -> bool:
    """Copy from one open file to another; returns whether they share the blocks."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _send_bytes(source, target)
        return False
    return True


def _send_bytes(source: int, target: int) -> None:
    """Copy in the kernel; what is a hole in the file stays one."""
    end = os.fstat(source).st_size
    os.ftruncate(target, end)
    place = 0
    while place < end:
        try:
            begin = os.lseek(source, place, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        place = min(end, os.lseek(source, begin, os.SEEK_HOLE))
        os.lseek(source, begin, os.SEEK_SET)
        os.lseek(target, begin, os.SEEK_SET)
        while begin < place:
            sent = os.sendfile(target, source, None, min(place - begin, _PIECE_BYTES))
            if sent == 0:
                raise OSError(errno.ENODATA, "the table was cut short while it was copied")
            begin += sent


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def restore_table(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, overwrite: bool = False
) -> int:
    """Copy a table of a checkpoint to where it is trained.

    Parameters
    ----------
    source : path-like
        The table's file in the folder of a checkpoint.
    path : path-like
        Where the table goes. Its record comes with it.
    overwrite : bool
        Replace a table that is there and not open for writing.

    Returns
    -------
    int
        Steps of the optimizer that the table has behind it.

    Raises
    ------
    CheckpointError
        If `source` has no record, or is a table in training.
    ExistingFileError, MissingFileError, LockedError, PathError
        As `flashwarp.create`.

    Notes
    -----
    Blocks until the copy is durable. After a crash, `path` has the old table without its record,
    the new table without one, or both; call it again.
    """
    source = files.check_name(source)
    overwrite = flag("overwrite", overwrite)
    record = Record.read(source)
    if record is None or record.changing:
        raise CheckpointError(
            f"{source} is no table of a checkpoint: it "
            + ("has no record" if record is None else "is or was being trained")
        )
    target = files.check_new(files.check_name(path), overwrite)
    with files.Draft(target, overwrite, lock=True) as draft:
        try:
            copy_file(source, draft.path)
        except OSError as error:
            raise files.write_error(error, target) from error
        with contextlib.suppress(FileNotFoundError):
            Path(record_path(target)).unlink()
        draft.publish()
    replace(record, changing=False).write(target)
    return record.step
