"""`ShardedArray`: an array whose rows are dealt over the ranks of a torch.distributed program.

This is what a user holds. Each call is one of all ranks: `ranks` lets them enter it together,
`moving` passes rows between them, and an ordinary `Array` serves the rows of each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.array.opening import CacheLike, Mode
from flashwarp.device import Device
from flashwarp.distributed import opening
from flashwarp.distributed.asking import Asked, Flags, Rows
from flashwarp.distributed.dealing import Deal
from flashwarp.distributed.moving import Call
from flashwarp.distributed.ranks import Ranks
from flashwarp.distributed.saves import Save
from flashwarp.errors import ArgumentError, ReadOnlyError
from flashwarp.storage.files import PathLike
from flashwarp.storage.source import Shape


class ShardedArray(endings.OfProcess):
    """An array whose rows are dealt over the ranks of a torch.distributed program.

    `open` and `create` make it. Each rank serves its rows, its *shard*, from a ``.npy`` file in a
    folder of its machine, or in one folder that all ranks share.

    Attributes
    ----------
    shape : tuple of int
        Of the whole array.
    dtype : numpy.dtype
    deal : {"range", "hash"}
        How rows are dealt: neighbours to one rank, or spread evenly by a fixed permutation.
    local : Array
        The shard of this rank; its rows are those of `local_ids`. Only `flush` and `close` of the
        sharded array close or flush it.
    rank, ranks : int
        This rank in the group, and the number of ranks.

    Notes
    -----
    *Collective* calls are made by all ranks of the group, in the same order; each passes what it
    wants itself, also nothing. They block until this rank's part is done on all ranks. If one rank
    cannot take part, as with a bad argument or a disk that fails, all ranks raise the same error,
    whose message names the rank; if they call different things, all raise ArgumentError. The array
    stays usable then.

    If a rank ends, leaves a call by an error of its own, as KeyboardInterrupt, or does not come
    within the time limit, all others raise RankLostError: at once if its connections were closed,
    else after `timeout_s`. Every later call raises it again. Close the array and open it again.
    What was flushed is in the files; rows that a broken `scatter` stored are old or new. Signals,
    as that of Ctrl-C, are handled when a wait for other ranks has ended.

    Messages go over gloo, between host memories, whatever backend the group has. If the array is on
    GPUs, each rank needs one of its own, rows and their numbers go between GPUs by NCCL, and the
    dtype is one that torch has. Several threads may use one array, and its calls take turns; but
    all ranks must make the calls in the same order.

    Examples
    --------
    >>> import tempfile, numpy as np, torch.distributed as dist
    >>> import flashwarp as fw, flashwarp.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with fw.distributed.ShardedArray.create(
    ...     tempfile.mkdtemp(), "float32", (1000, 64), device="cpu"
    ... ) as table:
    ...     table.scatter([10, 11], np.full((2, 64), 1.5))
    ...     table.gather(np.array([11, 3]))[:, 0].tolist()
    [1.5, 0.0]
    >>> dist.destroy_process_group()
    """

    _kind = "sharded array"
    _closed = True

    def __init__(self, ranks: Ranks, save: Save, local: Array) -> None:
        super().__init__()
        self._ranks, self._save = ranks, save
        self.shape, self.dtype, self.deal = save.shape, save.kind, save.deal
        self.local, self.rank, self.ranks = local, ranks.rank, ranks.count
        self._rows = Rows(local)
        self._flags = Flags(self._rows.place)
        self._save.dealing.starts_on(self._rows.place)
        self._closed = False

    # Opening.

    @classmethod
    def create(
        cls,
        folder: PathLike,
        dtype: npt.DTypeLike,
        shape: Shape,
        *,
        deal: Deal = "range",
        group: Any = None,
        timeout_s: float | None = None,
        device: Device | str | None = None,
        cache: CacheLike = "auto",
        line: int | str | None = None,
    ) -> Self:
        """Create an array of zeros, and open it for reading and writing. Collective.

        The array is there as a whole, after a crash too, or not at all.

        Parameters
        ----------
        folder : path-like
            Where this rank's shard lies: a folder of its machine, or one for all ranks. It is made
            if it is absent, and must hold no sharded array.
        dtype, shape
            As for `flashwarp.create`; at least one axis. The same on all ranks.
        deal : {"range", "hash"}
            Rows are dealt over ranks in ranges of neighbours, or by a fixed permutation of the rows
            (at most 2^48), which spreads neighbours and regular steps evenly.
        group : ProcessGroup, optional
            The ranks, of any backend. Default: all.
        timeout_s : float, optional
            How long a rank waits for the others in a call. Default: `Config.timeout_s`.
        device, cache, line
            As for `flashwarp.create`, for the shard of this rank. All ranks use the CPU device, or
            each a GPU of its own.

        Raises
        ------
        ArgumentError
            If torch.distributed is not initialised, or for dtype, shape or dealing that differ.
        ExistingFileError
            If a folder holds a sharded array.
        RankLostError
            If a rank has ended, or does not come.
        DtypeError, PathError, DeviceError, CacheError
        """
        act, options = opening.create_shards, {"device": device, "cache": cache, "line": line}
        return cls._open(act, group, timeout_s, folder, options, dtype, shape, deal)

    @classmethod
    def open(
        cls,
        folder: PathLike,
        mode: Mode = "r",
        *,
        group: Any = None,
        timeout_s: float | None = None,
        device: Device | str | None = None,
        cache: CacheLike = "auto",
        line: int | str | None = None,
    ) -> Self:
        """Open an array on as many ranks as it has shards. Collective.

        Parameters
        ----------
        folder : path-like
            Where this rank's shard lies.
        mode : {"r", "r+"}
            Read, or read and write; the same on all ranks.
        group, timeout_s, device, cache, line
            As for `create`.

        Raises
        ------
        MissingFileError
            If there is no array, or the file of a shard is gone.
        FileFormatError
            If a shard's file was replaced or is of another save, or if folders hold different
            saves.
        ArgumentError
            If the array has another number of shards than the group has ranks: call `reshard`.
        LockedError
            If another program has a shard open for writing, and `mode` is "r+".
        RankLostError, PathError, DeviceError, CacheError
        """
        options = {"device": device, "cache": cache, "line": line}
        return cls._open(opening.open_shards, group, timeout_s, folder, options, mode)

    @classmethod
    def _open(
        cls,
        act: Callable[..., tuple[Save, Array]],
        group: Any,
        timeout_s: float | None,
        folder: PathLike,
        options: opening.Options,
        *arguments: Any,
    ) -> Self:
        ranks = Ranks(group, timeout_s)
        with contextlib.ExitStack() as held:
            held.callback(ranks.close)
            with ranks.together():
                save, local = act(ranks, held, folder, options, *arguments)
                if local.device.kind == "cuda":
                    ranks.use(torch.device(local.device.name), local.device.identity)
                made = cls(ranks, save, local)
            held.pop_all()
        return made

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def broken(self) -> str:
        """Why all further calls raise RankLostError; empty while ranks meet."""
        return self._ranks.lost

    def local_ids(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows of `local`, in their order. Not collective."""
        first, last = self._save.dealing.starts[self.rank : self.rank + 2]
        return np.asarray(self._save.dealing.ids(first, last))

    # Rows.

    def gather(self, ids: Any, *, capacity: int | None = None) -> Any:
        """Copy rows ``self[ids]``, wherever they are, in the order of `ids`. Collective.

        Parameters
        ----------
        ids : array of int, any shape
            Rows that this rank wants, which may be none; negative ones count from the end. A tensor
            of torch (int64 or int32) on the device of `local`, or what numpy takes. On GPUs all
            ranks give tensors, or none does.
        capacity : int, optional
            How many rows of one rank fit: then each rank sends as many to each, the host waits for
            no GPU, and a CUDA graph can have the call. The same on all ranks.

        Returns
        -------
        array
            Of shape ``ids.shape + self.shape[1:]``: a tensor if `ids` is one, else of numpy.

        Raises
        ------
        BoundsError, IndexDtypeError, ArgumentError
            For ids that are out of bounds, no integers, or on another device. No rank gets rows
            then. With `capacity`, rows of tensor ids that are out of bounds, and rows for which it
            is too small, are zero; the next call on all ranks, or `check`, raises BoundsError.
        DtypeError
            For a tensor of ids, if torch lacks the array's dtype.
        StorageError
            If a rank cannot read rows. For ids on a GPU, the next call raises it on all ranks.
        CaptureError
            In the capture of a CUDA graph, without `capacity` or with ids on the host.
        RankLostError, ClosedError

        Notes
        -----
        With tensors on a GPU, the call runs in the order of torch's current stream. Without
        `capacity`, the host waits for the number of rows of each rank, not for the rows. If a rank
        is lost then, rows that the stream has not finished have any content, and the next call
        raises RankLostError. Make a call once before its capture. All ranks capture and replay it
        alike; if one does not come, the communicator is aborted after `timeout_s`.
        """
        return gather([(self, ids)], capacity=capacity)[0]

    def check(self) -> None:
        """Raise what this rank's calls on GPUs have noted so far. Not collective.

        Does not wait for streams. Use it after replays of a CUDA graph, once their stream is done.

        Raises
        ------
        BoundsError
            If gathers with a capacity had ids out of bounds, or too small a capacity.
        StorageError
            If this rank could not read or write rows, for whichever rank.
        RankLostError, ClosedError
        """
        self._check_usable()
        self._ranks.check()
        self.local.check()
        self._flags.check(self.shape[0])

    def scatter(self, ids: Any, rows: Any) -> None:
        """Store rows, ``self[ids] = rows``, wherever they are. Collective.

        Parameters
        ----------
        ids : array of int
            As for `gather`. If a row repeats, that of the highest rank is kept, and of one rank
            the last one.
        rows : array
            Of numpy, or a tensor on the device of `local`, which broadcasts to
            ``ids.shape + self.shape[1:]``, and is cast as numpy's assignment casts.

        Raises
        ------
        ReadOnlyError
            If the array was opened with ``mode="r"``.
        BoundsError, IndexDtypeError, ArgumentError
            As for `gather`, and for rows that do not fit. No rank stores a row then.
        StorageError
            If a rank cannot read lines that it stores to. Other rows are stored.
        RankLostError, ClosedError

        Notes
        -----
        All ranks see the rows when the call returns, on GPUs in later calls; `flush` makes them
        durable.
        """
        self._check_usable()

        def check() -> list[Asked]:
            if not self.local.writable:
                raise ReadOnlyError('the sharded array was opened for reading: give mode="r+"')
            self.check()
            return [Asked(self._rows, self._save.dealing, ids, rows)]

        with self._ranks.together():
            Call(self._ranks, f"scatter to {self._name}").scatter(check)

    def flush(self) -> None:
        """Write all ranks' rows back and make them durable. Collective.

        Blocks; after it, a crash of any rank loses nothing stored. If one rank cannot write, all
        raise its StorageError; a later flush tries again. Ranks wait for the slowest one for
        `timeout_s` at most.
        """
        self._check_usable()
        with self._ranks.together():
            self._ranks.step(f"flush {self._name}", self._flush)

    def _flush(self) -> None:
        self.local.flush()
        self.check()

    def save(self, folder: PathLike) -> None:
        """Copy the array, as it is now, to a new one. Collective.

        The copy is there as a whole, after a crash too, or not at all. `open` opens it on as many
        ranks, and ``reshard(folder, to=...)`` deals its rows over any number.

        Parameters
        ----------
        folder : path-like
            Where this rank's shard goes: a folder of its machine, or one for all ranks. It is made
            if it is absent, and must hold no sharded array.

        Raises
        ------
        CheckpointError
            If the array is a table, and an optimizer has made steps since its last `checkpoint`.
        ExistingFileError
            If a folder holds a sharded array.
        PathError, StorageError, RankLostError, ClosedError

        Notes
        -----
        Blocks until the copy is durable on all ranks. File systems with shared blocks (XFS, btrfs)
        copy in milliseconds; others copy every byte.
        """
        self._check_usable()
        with self._ranks.together():
            opening.save_shards(self._ranks, self._save, self.local, folder)

    def close(self) -> None:
        """Flush and close this rank's shard, and leave the group. May be called twice.

        Not collective: a rank that still makes calls gets RankLostError.
        """
        if self._closed or self._in_child:
            return
        self._ranks.close()
        self.local.close()
        self._closed = True

    @property
    def _name(self) -> str:
        return f"sharded array {self._ranks.number} {self.shape} {self.dtype}"

    def __repr__(self) -> str:
        state = "closed " if self._closed else "broken " if self.broken else ""
        return (
            f"<{state}flashwarp.distributed.ShardedArray shape={self.shape} dtype={self.dtype} "
            f"rank={self.rank} of {self.ranks}>"
        )


def gather(wanted: Sequence[tuple[ShardedArray, Any]], *, capacity: int | None = None) -> list[Any]:
    """Copy rows of several sharded arrays by the messages of one `ShardedArray.gather`. Collective.

    Parameters
    ----------
    wanted : sequence of (ShardedArray, ids)
        All ranks name the same arrays, in the same order, each with ids of its own. The arrays are
        those of one group, and all on GPUs or none.
    capacity : int, optional
        As for `ShardedArray.gather`: of each array.

    Returns
    -------
    list of array
        What `ShardedArray.gather` returns, for each.

    Raises
    ------
    ArgumentError
        If the arrays are none, of different groups, or not those of the other ranks.
    BoundsError, IndexDtypeError, DtypeError, StorageError, CaptureError, RankLostError, ClosedError
        As `ShardedArray.gather`.

    Examples
    --------
    >>> import tempfile, numpy as np, torch.distributed as dist
    >>> import flashwarp as fw, flashwarp.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> make = fw.distributed.ShardedArray.create
    >>> with (
    ...     make(tempfile.mkdtemp(), "f4", (100, 8), device="cpu") as users,
    ...     make(tempfile.mkdtemp(), "f4", (500, 16), device="cpu") as items,
    ... ):
    ...     found = fw.distributed.gather([(users, np.array([1, 2])), (items, np.array([7]))])
    ...     [rows.shape for rows in found]
    [(2, 8), (1, 16)]
    >>> dist.destroy_process_group()
    """
    pairs = list(wanted)
    arrays = [array for array, _ in pairs]
    if not arrays or not all(isinstance(array, ShardedArray) for array in arrays):
        raise ArgumentError("name at least one sharded array, as pairs of an array and ids")
    # The same for all ranks, even if they name the arrays in different orders.
    first = min(arrays, key=lambda array: array._ranks.number)
    first._check_usable()

    def check() -> list[Asked]:
        for array in arrays:
            array._check_usable()
            if array._ranks.members != first._ranks.members:
                raise ArgumentError(f"{array!r} and {first!r} are of different groups")
            if array._rows.place != first._rows.place:
                raise ArgumentError(f"{array!r} and {first!r} are on different devices")
            if not call.capturing:
                array.check()
        flags = [None if capacity is None else array._flags for array in arrays]
        return [
            Asked(array._rows, array._save.dealing, ids, flags=each)
            for (array, ids), each in zip(pairs, flags, strict=True)
        ]

    what = f"gather of {', '.join(array._name for array in arrays)}"
    call = Call(first._ranks, what, capacity)
    with first._ranks.together(alone=call.capturing):
        return call.gather(check)
