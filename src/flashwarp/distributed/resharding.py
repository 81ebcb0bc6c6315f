"""Dealing the rows of a sharded array over another number of ranks."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import torch

from flashwarp.config import integer
from flashwarp.distributed import records
from flashwarp.distributed.opening import commit
from flashwarp.distributed.ranks import Ranks
from flashwarp.distributed.saves import Folder, Save, chosen, read
from flashwarp.errors import ExistingFileError, FileFormatError, MissingFileError, StorageError
from flashwarp.storage import files, npy
from flashwarp.storage.file import File
from flashwarp.storage.files import PathLike

_PIECE_BYTES = 8 << 20
_SYNC_BYTES = 1 << 30


def reshard(
    folder: PathLike,
    ranks: int | None = None,
    *,
    to: PathLike | None = None,
    group: Any = None,
    timeout_s: float | None = None,
) -> None:
    """Deal the rows of a sharded array over another number of ranks. Collective.

    Records of trained tables go along.

    Parameters
    ----------
    folder : path-like
        Where this rank's shard lies, or is to lie: a folder of its machine, or one for all ranks.
    ranks : int, optional
        How many shards the array gets, at most as many as the group has ranks. Default: as many.
    to : path-like, optional
        Where this rank's new shard goes: then `folder` stays as it is, and this is a new array.
        Default: the new shards replace the old ones.
    group : ProcessGroup, optional
        The ranks, of any backend. Between them they must see all shards of the array. So to deal
        rows in separate folders over fewer ranks, all ranks that have shards call this, with
        `ranks`. Default: all.
    timeout_s : float, optional
        How long a rank waits for the others. Default: `Config.timeout_s`.

    Raises
    ------
    ArgumentError
        If `ranks` is more than the group has, or differs between ranks.
    MissingFileError, FileFormatError
        As `ShardedArray.open`.
    ExistingFileError
        If `to`, or the folder of a rank that had no shard, holds another array.
    CheckpointError
        If the array is a table whose shards were trained for different numbers of steps.
    LockedError
        If a program has a shard open for writing.
    PathError, StorageError, RankLostError

    Notes
    -----
    Blocks until the new shards are durable. Each rank reads, from the shards that it sees, only
    what its new shard needs; other ranks send the rest. The new shards lie beside the old ones
    until they take their place at one instant: a rank that is killed leaves the old array, or the
    new one. Programs that read the old array may go on.
    """
    group_ranks = Ranks(group, timeout_s)
    with contextlib.ExitStack() as held:
        held.callback(group_ranks.close)
        held.enter_context(group_ranks.together())
        _reshard(group_ranks, folder, ranks, to, held)


def _reshard(
    ranks: Ranks,
    path: PathLike,
    wanted: int | None,
    to: PathLike | None,
    held: contextlib.ExitStack,
) -> None:
    def look() -> tuple[str, Any, tuple[int, Folder, Folder]]:
        count = ranks.count if wanted is None else integer("ranks", wanted, 1, ranks.count)
        home, target = Folder(path), Folder(path if to is None else to)
        if to is not None:
            target.check_new()
        where = "" if to is None else ", elsewhere"
        return f"reshard to {count} ranks{where}", home.look(), (count, home, target)

    (count, home, target), told = ranks.agree("reshard", look)

    def find() -> tuple[str, Any, tuple[Save, dict[int, npy.Layout]]]:
        old = chosen(told, str(home.path))
        there = told[ranks.rank]["present"]
        if there is not None and read(there, str(home.path)).array != old.array:
            raise ExistingFileError(
                errno.EEXIST, "holds another sharded array: name another folder", str(home.path)
            )
        every = range(old.ranks)
        seen = [rank for rank in every if os.path.lexists(old.path(home.path, rank))]
        found = {rank: old.check_shard(home.path, rank) for rank in seen}
        return "find the shards", [os.urandom(16).hex(), seen], (old, found)

    (old, seen), found = ranks.agree("find the shards", find)
    shown = [set(there) for _, there in found]

    def lock() -> tuple[str, dict[int, Any], None]:
        found: dict[int, Any] = {}
        for shard in range(old.ranks):
            seers = [rank for rank, there in enumerate(shown) if shard in there]
            if not seers:
                path = old.path(home.path, shard)
                raise MissingFileError(errno.ENOENT, f"no rank sees shard {shard}", path)
            if seers[0] == ranks.rank:
                path = old.path(home.path, shard)
                held.callback(File(path, writable=to is None).close)
                found[shard] = records.told(path)
        if told[ranks.rank] != home.look():
            raise FileFormatError(f"{home.path}: was changed by another program: try again")

        return "lock the shards", found, None

    told_of = {}
    for each in ranks.agree("lock the shards", lock)[1]:
        told_of.update(each)
    of_shards = [told_of[str(shard)] for shard in range(old.ranks)]
    record = ranks.step("compare the records", lambda: records.agreed(of_shards))
    array = old.array if to is None else found[0][0]
    new = replace(old, id=found[0][0], array=array, ranks=count)
    _make_shards(ranks, home, target, _Plan(old, new, shown), seen)

    def keep_record() -> None:
        if record is not None and ranks.rank < count:
            own = replace(record, rows=new.shard_shape(ranks.rank)[0])
            own.write(new.path(target.path, ranks.rank))

    ranks.step("keep the records", keep_record)
    commit(ranks, target, new)


@dataclass(frozen=True)
class _Piece:
    """Bytes of an old shard that a rank reads for a new one."""

    shard: int
    offset: int  # of the old shard's rows
    place: int  # of the new shard's rows
    nbytes: int


@dataclass(frozen=True)
class _Plan:
    """What goes where, the same on all ranks; `shown` has the old shards that each rank sees."""

    old: Save
    new: Save
    shown: list[set[int]]

    def flow(self, source: int, target: int) -> Iterator[_Piece]:
        """Yield the pieces that one rank reads for another one, or for itself."""
        olds, news = self.old.dealing.starts, self.new.dealing.starts
        row_bytes = self.old.row_bytes
        for shard in range(self.old.ranks):
            seers = [rank for rank, those in enumerate(self.shown) if shard in those]
            if source != (target if target in seers else seers[0]):
                continue
            first = max(olds[shard], news[target]) * row_bytes
            last = min(olds[shard + 1], news[target + 1]) * row_bytes
            for at in range(first, last, _PIECE_BYTES):
                nbytes = min(_PIECE_BYTES, last - at)
                offset, place = at - olds[shard] * row_bytes, at - news[target] * row_bytes
                yield _Piece(shard, offset, place, nbytes)


def _make_shards(
    ranks: Ranks, home: Folder, target: Folder, plan: _Plan, seen: dict[int, npy.Layout]
) -> None:
    """Write the new shards in rounds, in which each rank reads one piece for each rank.

    So no rank is ahead of another one by more than a round, however long all of it takes.
    """
    every = range(ranks.count)
    with contextlib.ExitStack() as made:

        def begin() -> _Copier:
            files.make_folder(target.path)
            copier = _Copier(home, target, plan.old, seen, made)
            if ranks.rank < plan.new.ranks:
                copier.new = made.enter_context(plan.new.new_shard(target.path, ranks.rank))
            return copier

        copier = ranks.step("make the shards", begin)
        flows = {
            (source, target): plan.flow(source, target)
            for source, target in itertools.product(every, range(plan.new.ranks))
        }
        got: list[tuple[_Piece, torch.Tensor]] = []
        while True:
            now = {pair: piece for pair, flow in flows.items() if (piece := next(flow, None))}
            to = [now.get((ranks.rank, rank)) for rank in every]
            of = [now.get((rank, ranks.rank)) for rank in every]
            sent = ranks.step("move rows", functools.partial(copier.turn, got, to))
            if not now:
                break
            sizes = [[piece.nbytes if piece else 0 for piece in those] for those in (to, of)]
            parts = ranks.swap(sent, *sizes).split(sizes[1])
            got = [(piece, part) for piece, part in zip(of, parts, strict=True) if piece]
        # Only now it gets its name.
        ranks.step("keep the shards", made.close)


@dataclass
class _Copier:
    """Reads from the old shards that this rank sees, and writes its new one."""

    home: Folder
    target: Folder
    old: Save
    seen: dict[int, npy.Layout]
    closing: contextlib.ExitStack
    new: tuple[int, int] = (-1, 0)  # descriptor, and offset of the rows
    _unsynced: int = 0
    _files: dict[int, BinaryIO] = field(default_factory=dict)

    def turn(
        self, got: Sequence[tuple[_Piece, torch.Tensor]], sent: Sequence[_Piece | None]
    ) -> torch.Tensor:
        """Write the pieces of the last round, and return those that the next one sends."""
        for piece, part in got:
            self.write(piece, part.numpy())
        content = b"".join(self.read(piece) for piece in sent if piece)
        return torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)[: len(content)]

    def read(self, piece: _Piece) -> bytes:
        """Return the bytes of a piece."""
        path = self.old.path(self.home.path, piece.shard)
        if piece.shard not in self._files:
            file = self.closing.enter_context(files.open_for_reading(path))
            self._files[piece.shard] = file
        offset = self.seen[piece.shard].offset + piece.offset
        try:
            self._files[piece.shard].seek(offset)
            found = self._files[piece.shard].read(piece.nbytes)
        except OSError as error:
            number = error.errno or errno.EIO
            raise StorageError(number, "cannot be read", path, offset=offset) from error
        if len(found) != piece.nbytes:
            raise StorageError(errno.EIO, "was cut short", path, offset=offset)
        return found

    def write(self, piece: _Piece, content: Any) -> None:
        """Store the bytes of a piece in the new shard."""
        descriptor, rows = self.new
        view = memoryview(content)
        with files.writing(str(self.target.path)):
            while view:
                done = os.pwrite(descriptor, view, rows + piece.place + piece.nbytes - len(view))
                view = view[done:]
            self._unsynced += piece.nbytes
            if self._unsynced >= _SYNC_BYTES:  # else the last fsync keeps the other ranks waiting
                os.fdatasync(descriptor)
                self._unsynced = 0
