"""`Loader`: batches of rows of arrays larger than memory, in any order, for training.

It is an iterable dataset of torch. Used directly, it reads the next batches in the background.
Inside a `DataLoader`, each worker opens the arrays itself, and batch n is made by worker n modulo
their number, so that the batches and their order are the same for any number of workers.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from flashwarp.array.array import Array
from flashwarp.array.futures import Future
from flashwarp.config import SIZE_MAX, flag, integer
from flashwarp.device.foreign import torch_dtype
from flashwarp.errors import ArgumentError, BoundsError, IndexDtypeError
from flashwarp.pipeline.pipeline import Pipeline

_DEPTH_MAX = 64

# Multiprocessors that read arrays which are open for writing.
_SMS = 8

Rows: TypeAlias = np.ndarray[Any, Any]


class Loader(IterableDataset):  # type: ignore[misc]
    """Batches of rows of one or several arrays, as tensors.

    Parameters
    ----------
    arrays : Array, or sequence or mapping of Array
        Of the same length, such as features and labels. Batches have the same form: a tensor, a
        tuple of tensors, or a dict of tensors.
    batch_size : int
        Rows of a batch.
    rows : array of int, optional
        Which rows an epoch has, in this order. Default: all.
    shuffle : bool
        Bring the rows into random order, another one in each epoch; see `set_epoch`.
    sampler : iterable of int, optional
        Instead of `rows` and `shuffle`: iterated once for each epoch, such as a sampler of torch.
        Torch's random numbers are seeded for it, so that every worker sees one order. A sampler
        that draws random numbers elsewhere must do so itself.
    drop_last : bool
        Leave a last batch out that is not full.
    seed : int
        Of the random orders. One seed and epoch give the same order in each process.
    device : torch.device or str, optional
        Where batches go. Default: the device of the arrays. If the arrays are on the CPU device and
        batches go to a GPU, rows are read into pinned memory and copied in the order of the current
        stream.
    depth : int
        How many batches are read ahead, from 1 to 64.

    Raises
    ------
    ArgumentError
        For arrays of different lengths or on different devices, and for numbers that make no sense.
    BoundsError, IndexDtypeError
        For `rows` that are out of bounds, or no integers; for those of a sampler when an epoch
        begins.

    Notes
    -----
    Inside a `DataLoader`, give it ``batch_size=None``, since batches are made here, and open the
    arrays with ``device="cpu"`` for reading: forked and spawned workers open their paths
    themselves, and read rows straight into the shared memory in which a `DataLoader` hands them
    over. On a GPU, use the loader directly: it has a `flashwarp.Pipeline` for each array, so that
    batches arrive while the GPU computes.

    Examples
    --------
    >>> import numpy as np, torch, flashwarp as fw, flashwarp.torch
    >>> np.save("x.npy", np.arange(20.0, dtype="f4").reshape(10, 2))
    >>> np.save("y.npy", np.arange(10))
    >>> with fw.open("x.npy", device="cpu") as x, fw.open("y.npy", device="cpu") as y:
    ...     for features, labels in fw.torch.Loader((x, y), 4):
    ...         print(tuple(features.shape), labels.tolist())
    (4, 2) [0, 1, 2, 3]
    (4, 2) [4, 5, 6, 7]
    (2, 2) [8, 9]
    """

    def __init__(
        self,
        arrays: Array | Sequence[Array] | Mapping[str, Array],
        batch_size: int,
        *,
        rows: Any = None,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        drop_last: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        depth: int = 2,
    ) -> None:
        self._names, self._arrays = _named(arrays)
        self._single = isinstance(arrays, Array)
        self._length = _length_of(self._arrays)
        self.batch_size = integer("batch_size", batch_size, 1, SIZE_MAX)
        self.shuffle = flag("shuffle", shuffle)
        self.drop_last = flag("drop_last", drop_last)
        self.seed = integer("seed", seed, 0, SIZE_MAX)
        self.depth = integer("depth", depth, 1, _DEPTH_MAX)
        if sampler is not None and (rows is not None or self.shuffle):
            raise ArgumentError("sampler= decides the order: leave rows= and shuffle= out")
        self.sampler = sampler
        self._rows = None if rows is None else self._checked(rows)
        self.device = None if device is None else torch.device(device)
        # The epoch, the batch at which iterations begin, and whether workers have begun one: in
        # memory that processes share, so that workers that persist see it.
        self._state = torch.zeros(3, dtype=torch.int64).share_memory_()
        # The iterations of this process that run; the one that handed out last is at the end. And
        # the last one, even if it was left.
        self._running: list[_Iteration] = []
        self._last: _Iteration | None = None

    def __repr__(self) -> str:
        arrays = ", ".join(f"{list(each.shape)} {each.dtype}" for each in self._arrays)
        return f"Loader({arrays}, batch_size={self.batch_size}, epoch={self.epoch})"

    # Epochs.

    @property
    def epoch(self) -> int:
        """Number of the epoch, which decides the order of `shuffle`."""
        return int(self._state[0])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration goes through, from its first batch on.

        Without it, every iteration has the same order. Workers see it too, persistent ones at
        their next iteration. A `sampler` that has `set_epoch` is told.
        """
        self._begin_at(integer("epoch", epoch, 0, SIZE_MAX), 0)

    def _begin_at(self, epoch: int, batch: int) -> None:
        self._state[0], self._state[1], self._state[2] = epoch, batch, 0
        self._running, self._last = [], None

    def state_dict(self) -> dict[str, int]:
        """Return where the iteration stands: its epoch, and the batches handed out.

        Of several iterations, the one that handed out a batch last and has not reached its end.

        Raises ArgumentError if workers of a `DataLoader` have begun an iteration since `set_epoch`:
        they are ahead of what the `DataLoader` has handed out. Count its batches yourself; a state
        is ``{"epoch": epoch, "batch": count}``.
        """
        if self._state[2]:
            raise ArgumentError(
                "workers of a DataLoader make the batches, ahead of those that it hands out: count "
                f"these, and use {{'epoch': {self.epoch}, 'batch': count}} as the state"
            )
        batch = int(self._state[1]) if self._last is None else self._last.handed_out
        return {"epoch": self.epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration begin behind the batches that a state has handed out.

        Later iterations begin there too until `set_epoch` is called, or an iteration that is not
        inside of a worker has reached its end.
        """
        if set(state) != {"epoch", "batch"}:
            raise ArgumentError(f"{sorted(state)} is no state of a loader: epoch and batch")
        epoch, batch = (integer(name, state[name], 0, SIZE_MAX) for name in ("epoch", "batch"))
        self._begin_at(epoch, batch)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        if self.sampler is not None:
            rows = len(self.sampler)  # type: ignore[arg-type]
        else:
            rows = self._length if self._rows is None else len(self._rows)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def _order(self) -> Rows | None:
        """Return the rows of the epoch in their order; None for all rows in the file's order."""
        if self.sampler is not None:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(self.epoch)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_mixed(self.seed, self.epoch))
                return self._checked(list(self.sampler))
        if not self.shuffle:
            return self._rows
        random = np.random.Generator(np.random.Philox(key=[self.seed, self.epoch]))
        if self._rows is None:
            return random.permutation(self._length)
        return random.permutation(self._rows)

    def _checked(self, rows: Any) -> Rows:
        """Return rows as int64; raises for what no array has."""
        if isinstance(rows, torch.Tensor):
            rows = rows.cpu()
        found = np.asarray(rows)
        if found.size == 0:
            found = found.astype(np.int64)
        if found.dtype.kind not in "iu":
            raise IndexDtypeError(f"rows of dtype {found.dtype}: give integers")
        if found.ndim != 1:
            raise ArgumentError(f"rows of shape {found.shape}: give one axis")
        wrong = np.flatnonzero((found < -self._length) | (found >= self._length))
        if len(wrong):
            raise BoundsError(
                f"row {found[wrong[0]]} is out of bounds: the arrays have {self._length}"
            )
        return found.astype(np.int64)

    # Batches.

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        kinds = {array.device.kind for array in self._arrays}
        if worker is not None and kinds != {"cpu"}:
            raise ArgumentError(
                "arrays on a GPU in a worker of a DataLoader: open them with device='cpu' for "
                "workers, or iterate over the loader in the main process"
            )
        self._check_devices()
        order, begin = self._order(), int(self._state[1])
        rows = self._length if order is None else len(order)
        count = rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)
        numbers = range(begin + number, count, stride)
        parts = (self._part(order, rows, each) for each in numbers)
        read = self._from_cpu(parts) if kinds == {"cpu"} else self._on_gpu(parts)
        self._state[2] = int(worker is not None)
        this, running = _Iteration(begin), self._running
        try:
            with contextlib.closing(read):
                running.append(this)
                for each, tensors in zip(numbers, read, strict=True):
                    this.handed_out = each + 1
                    # In one step, because a signal may end the loop between two.
                    running[:] = [*(other for other in running if other is not this), this]
                    if running is self._running:
                        self._last = this
                    yield self._formed(tensors)
        finally:
            running[:] = [other for other in running if other is not this]
        if running is self._running:
            self._last = running[-1] if running else None
            if worker is None:
                self._state[1] = 0

    def _part(self, order: Rows | None, rows: int, number: int) -> slice | Rows:
        first = number * self.batch_size
        end = min(first + self.batch_size, rows)
        return slice(first, end) if order is None else order[first:end]

    def _from_cpu(self, parts: Iterable[slice | Rows]) -> Generator[list[torch.Tensor], None, None]:
        """Read batches in the background, into memory that suits their way from here."""
        goes_to = self.device
        if get_worker_info() is not None:
            empty = _shared
        else:
            empty = _pinned if goes_to is not None and goes_to.type == "cuda" else torch.empty
        pending: collections.deque[list[tuple[Future[Any], torch.Tensor]]] = collections.deque()
        source = iter(parts)
        try:
            while True:
                for part in itertools.islice(source, self.depth + 1 - len(pending)):
                    pending.append([self._start(array, part, empty) for array in self._arrays])
                if not pending:
                    return
                for future, _ in pending[0]:
                    future.result()
                yield [
                    rows if goes_to is None else rows.to(goes_to, non_blocking=True)
                    for _, rows in pending.popleft()
                ]
        finally:
            # Nobody wants these batches, nor their failures.
            for future, _ in itertools.chain.from_iterable(pending):
                future.exception()

    def _start(
        self, array: Array, part: slice | Rows, empty: Callable[..., torch.Tensor]
    ) -> tuple[Future[Any], torch.Tensor]:
        count = part.stop - part.start if isinstance(part, slice) else len(part)
        rows = empty((count, *array.shape[1:]), dtype=torch_dtype(torch, array.dtype))
        return array.gather_async(part, out=rows), rows

    def _on_gpu(self, parts: Iterable[slice | Rows]) -> Generator[list[torch.Tensor], None, None]:
        """Read batches by pipelines, and copy them out of their buffers, in the caller's stream."""
        place = torch.device("cuda", self._arrays[0].device.ordinal)
        with contextlib.ExitStack() as opened:
            sources = itertools.tee((_uploaded(part, place) for part in parts), len(self._arrays))
            turns = []
            for array, source in zip(self._arrays, sources, strict=True):
                rows_max = max(1, min(self.batch_size, self._length))
                # Host threads would take a writable array for themselves.
                sms = _SMS if array.writable else None
                pipeline = Pipeline(array, rows_max, self.depth, sms=sms)
                turns.append(opened.enter_context(pipeline).iterate(source))
            for batch in zip(*turns, strict=True):
                # A copy takes a hundredth of the time in which the rows have arrived, and the
                # caller may keep it.
                yield [rows.clone() for rows, _ in batch]

    def _check_devices(self) -> None:
        devices = {id(array.device): array.device for array in self._arrays}
        if len(devices) > 1:
            names = ", ".join(device.name for device in devices.values())
            raise ArgumentError(f"arrays on several devices ({names}): open all on one")
        (own,) = devices.values()
        if self.device is None or own.kind == "cpu":
            return
        wanted = self.device.index
        if self.device.type != "cuda" or (wanted is not None and wanted != own.ordinal):
            raise ArgumentError(
                f"arrays on {own.name}, and batches for {self.device}: leave device= out, or open "
                "the arrays with device='cpu'"
            )

    def _formed(self, tensors: list[torch.Tensor]) -> Any:
        if self._single:
            return tensors[0]
        return (
            tuple(tensors) if self._names is None else dict(zip(self._names, tensors, strict=True))
        )


@dataclass(eq=False)
class _Iteration:
    """How far one iteration has come."""

    handed_out: int


# Memory.


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _shared(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate where `DataLoader` hands tensors over, so that it does not copy them there."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    storage = torch.UntypedStorage._new_shared(nbytes, device="cpu")
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)


def _uploaded(part: slice | Rows, place: torch.device) -> torch.Tensor:
    if isinstance(part, slice):
        return torch.arange(part.start, part.stop, device=place)
    return torch.from_numpy(part).pin_memory().to(place, non_blocking=True)


# Arguments.


def _named(arrays: Any) -> tuple[tuple[str, ...] | None, tuple[Array, ...]]:
    names = tuple(arrays) if isinstance(arrays, Mapping) else None
    if isinstance(arrays, Array):
        found: tuple[Any, ...] = (arrays,)
    elif isinstance(arrays, Mapping):
        found = tuple(arrays.values())
    elif isinstance(arrays, Sequence):
        found = tuple(arrays)
    else:
        raise ArgumentError(f"arrays={arrays!r}: give a flashwarp.Array, or several")
    if not found or not all(isinstance(array, Array) for array in found):
        raise ArgumentError(f"arrays={arrays!r}: give a flashwarp.Array, or several")
    return names, found


def _length_of(arrays: tuple[Array, ...]) -> int:
    if not all(array.shape for array in arrays):
        raise ArgumentError("an array without axes has no rows")
    lengths = {len(array) for array in arrays}
    if len(lengths) > 1:
        raise ArgumentError(f"arrays of lengths {sorted(lengths)}: all need the same")
    for array in arrays:
        torch_dtype(torch, array.dtype)  # raises for what torch does not have
    return lengths.pop()


def _mixed(seed: int, epoch: int) -> int:
    """Return a seed of torch's random numbers: 63 bits."""
    state = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    return int(state[0]) >> 1
