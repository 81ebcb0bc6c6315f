"""`Array`: an array larger than memory, gathered and scattered by device threads.

What a user holds. Its calls become launches of the row kernels (`launcher`) on what the caller
brings (`operands`), and what went wrong below becomes typed errors (`failures`). What it is made
of, and how that comes to rest and to its end, is in `attachment`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from flashwarp import config, endings
from flashwarp.array.attachment import Attachment
from flashwarp.array.futures import Future
from flashwarp.array.launcher import Watcher
from flashwarp.array.operands import Index, Operands, host_empty, host_index, is_foreign
from flashwarp.array.rows import ArrayStruct
from flashwarp.array.selection import Selection, rows_of_slice, select
from flashwarp.cache.cache import Cache
from flashwarp.config import flag
from flashwarp.device import Device, host_memory
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    CopyError,
    DataPathError,
    DeviceError,
    ForkError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.nvme import Controller, Service
from flashwarp.stats import Stats
from flashwarp.storage import File, Namespace
from flashwarp.storage.composite import members_of
from flashwarp.storage.file_access import room_for_pages

if TYPE_CHECKING:
    from flashwarp.array.advice import Usage

__all__ = ["Array", "Explanation"]

P = ParamSpec("P")
R = TypeVar("R")

_opening = threading.RLock()
"""One pickled array opens at a time."""


@dataclass(frozen=True)
class Explanation:
    """Which way an array's data goes, and why; `str` gives a text for people."""

    path: str
    """"in_place", "bounce" or "direct"."""
    reason: str
    storage: dict[str, Any]
    controller: dict[str, Any]
    cache: str
    device: str
    advice: tuple[str, ...] = ()
    """What the counters say could be done better; empty if nothing, or too little was read yet."""

    def __str__(self) -> str:
        facts = ", ".join(f"{k}: {v}" for k, v in self.storage.items())
        engine = self.controller.get("engine", "stopped")
        return "\n".join(
            (
                f"data path   {self.path}: {self.reason}",
                f"storage     {facts}",
                f"engine      {engine}",
                f"cache       {self.cache}",
                f"device      {self.device}",
                *(f"advice      {sentence}" for sentence in self.advice),
            )
        )


# What a call reads, and which may be an array itself.
_OPERANDS = {"idx", "idx_or_slice", "values", "value"}


def _locked(
    method: Callable[Concatenate[Array, P], R],
) -> Callable[Concatenate[Array, P], R]:
    """One operation of an array at a time: errors are then of the call that raises them."""
    names = tuple(inspect.signature(method).parameters)[1:]
    places = [place for place, name in enumerate(names) if name in _OPERANDS]

    @functools.wraps(method)
    def call(self: Array, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # Before the lock, which a thread of the parent may have held when a child was forked.
        self._check_usable()
        given = list(args)
        for place in places:
            # Before the turn: two threads that each read the other's array in the turn of their own
            # would wait for ever.
            if place < len(given):
                if isinstance(given[place], Array):
                    given[place] = np.asarray(given[place])
            elif isinstance(kwargs.get(names[place]), Array):
                kwargs[names[place]] = np.asarray(kwargs[names[place]])
        return endings.holding(
            (self._lock,), functools.partial(_in_turn, self, method, given, kwargs)
        )

    return call


def _in_turn(array: Array, method: Callable[..., R], args: list[Any], kwargs: dict[str, Any]) -> R:
    array._begin()
    try:
        return method(array, *args, **kwargs)
    except DeviceError as error:
        reason = array._attachment.reason_of(error)
        if reason is error:
            raise
        raise reason from error


class Recipe(Protocol):
    """How to open an array again: what is pickled of one."""

    def open(self) -> Array:
        """Open it."""

    def of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Recipe:
        """Return the recipe of what was opened; raises CopyError where that cannot be sent."""


class Array(endings.Closing):
    """An array in a storage, read and written through a cache in device memory.

    Made by `flashwarp.open` and `create`. Indices and results are numpy arrays on
    the CPU device; on a GPU they are arrays of the caller's library (torch in, torch out).

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    device : Device
    cache : Cache
    strict : str or None
        The only data path that is allowed; see `flashwarp.open`.

    Notes
    -----
    Calls block until done unless a `stream` is given; then they return before their data has moved,
    ordered on it, and their errors are raised by the next call or by `close`. Indices on a GPU are
    checked first, which waits for them. Several Python threads may use one
    array; their calls take turns. Repeated indices in a store: one of the values wins in
    `scatter`, the last in ``x[...] = v``. A forked child must open its own.

    An array that is open when the interpreter ends is closed then, which flushes it. A read-only
    array that was opened from a path can be pickled: the other process opens the path again, with
    the same settings, when it first uses the array. Others, and copies, raise CopyError.

    ``x[key]`` and ``x[key] = value`` do what numpy does with an array in memory, or raise. Arrays
    are compared by identity: ``x == y`` is ``x is y``, as for a file; compare ``x[...]``. Functions
    and arrays of numpy that are given an array read all of it, up to `config.asarray_bytes`.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> with fw.create("rows.npy", "float32", (1000, 64), device="cpu") as x:
    ...     x[10:12] = 1.5
    ...     x.gather(np.array([11, 3]))[:, 0].tolist()
    [1.5, 0.0]
    """

    def __init__(
        self,
        storage: Namespace,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        writable: bool,
        cache: Cache,
        owns_cache: bool,
        controller: Controller,
        release: Callable[[], None] = lambda: None,
        why: str = "",
        recipe: Recipe | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.cache = cache
        self._storage = storage
        self._why = why
        self._lock = cache.turn
        self._recipe = recipe
        self._changes = 0
        self.strict: str | None = None
        self._operands = Operands(self.device, dtype, self._row_shape, self._row_count, self.device)
        self._attachment = Attachment(
            storage,
            writable=writable,
            cache=cache,
            owns_cache=owns_cache,
            controller=controller,
            operands=self._operands,
            shape=shape,
            row_bytes=self._row_bytes,
            row_count=self._row_count,
            release_storage=release,
        )
        self._controller = self._attachment.controller
        self._volume = self._attachment.volume
        self._launcher = self._attachment.launcher
        self._calls = self._attachment.calls

    # What it is.

    @property
    def device(self) -> Device:
        """Where its kernels run and its cache lies."""
        return self.cache.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the interpreter or its device has closed it."""
        if "_attachment" not in self.__dict__:
            return self._recipe is None
        return self._attachment.closed

    @property
    def writable(self) -> bool:
        """Whether rows can be stored."""
        return self._attachment.writable

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        if "_attachment" not in self.__dict__:
            return f"<unopened flashwarp.Array shape={self.shape} dtype={self.dtype}>"
        state = "closed " if self.closed else ""
        return (
            f"<{state}flashwarp.Array {self._storage.path or 'in memory'} shape={self.shape} "
            f"dtype={self.dtype} device={self.device.name!r}>"
        )

    @property
    def _row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def _row_bytes(self) -> int:
        return math.prod(self._row_shape) * self.dtype.itemsize

    @property
    def _row_count(self) -> int:
        return self.shape[0] if self.shape else 1

    # Reading.

    @_locked
    def gather(self, idx: Any, out: Any = None, stream: Any = None) -> Any:
        """Copy rows ``self[idx]``, in the order of `idx`.

        Parameters
        ----------
        idx : array of int, any shape
            Rows of the first axis; negative ones count from the end. On a GPU: anything with
            `__cuda_array_interface__` or DLPack, int32 or int64; or a numpy array.
        out : array, optional
            Contiguous array of shape ``idx.shape + self.shape[1:]`` and this dtype, apart from the
            memory of `idx`.
        stream : optional
            GPU only: queue the work there and return at once. Keep `idx` and `out` until done.

        Returns
        -------
        array
            `out`, or a new array of the library that `idx` belongs to.

        Raises
        ------
        BoundsError, IndexDtypeError
            For an index out of bounds or not integer; nothing is read then.
        StorageError
            When a transfer failed; rows of lines that could be read are in `out`.
        """
        self._need_axis()
        index = self._index(idx, stream)
        target = self._operands.target(out, index, index.shape, index.library)
        if index.size and self._row_bytes:
            self._move_rows("gather", index, target.address, stream)
        return target.finish(stream)

    def __getitem__(self, key: Any) -> Any:
        """Read what numpy selects from an array in memory, and return it as numpy does.

        Blocks. Takes integers, slices, Ellipsis, None, and integer or boolean arrays on any axes;
        an array of another library as the whole key is given to `gather`. Reads whole rows of the
        first axis. If a key takes only a part of them, as ``x[:, 0]`` does, they are read in blocks
        of `config.key_bytes`. The result has memory of its own: it is never a view of the array.

        Raises
        ------
        BoundsError, IndexDtypeError, ArgumentError
            For what numpy refuses, single booleans and names of fields; nothing is read then.
        """
        if isinstance(key, Array):
            key = np.asarray(key)  # in its own turn: two turns at a time could wait for ever
        if is_foreign(key):
            return self.gather(key)
        return self._select(select(key, self.shape))

    @_locked
    def _select(self, chosen: Selection) -> Any:
        if chosen.whole:
            return self._read_rows(chosen.rows)[chosen.whole_key]
        result = host_empty(chosen.shape, self.dtype)
        if result.size:
            for block in chosen.blocks(self._rows_of(config.current().key_bytes)):
                result[block.place] = self._read_rows(block.rows)[block.key]
        return result[()] if chosen.scalar else result

    def _read_rows(self, chosen: range | npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        if isinstance(chosen, range) and (chosen.step == 1 or len(chosen) < 2):
            result = host_empty(self._shape_of(chosen), self.dtype)
            if result.nbytes:
                self._move_range("gather", chosen, result)
            return result
        index = host_index(chosen) if isinstance(chosen, range) else chosen
        return np.asarray(self.gather(index))

    def _rows_of(self, nbytes: int) -> int:
        """Count the rows that so many bytes hold: at least one."""
        return max(1, nbytes // max(1, self._row_bytes))

    def _shape_of(self, chosen: range | npt.NDArray[np.int64]) -> tuple[int, ...]:
        if not self.shape:
            return ()
        lead = (len(chosen),) if isinstance(chosen, range) else chosen.shape
        return lead + self._row_shape

    # As numpy and Python see it.

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Copy the whole array to memory, by one read; `numpy.asarray` and its kin call this.

        Blocks. Raises ArgumentError if the array has more bytes than `config.asarray_bytes`: what
        takes an array in memory is rarely meant for one that does not fit there. Also for
        ``copy=False``, as the data is not in memory.
        """
        if copy is False:
            raise ArgumentError("the array is not in memory: numpy can have it only by a copy")
        limit = config.current().asarray_bytes
        if self.nbytes > limit:
            raise ArgumentError(
                f"an array of {self.nbytes} bytes is not copied to memory unasked: at most {limit} "
                "(FLASHWARP_ASARRAY_BYTES); x[...] reads all of it, x[10:20] or gather() some rows"
            )
        held: npt.NDArray[Any] = self[...]
        return held if dtype is None else held.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Export a copy in host memory, with the limit of `__array__`: for `torch.as_tensor`."""
        copy = options.pop("copy", None)
        return self.__array__(copy=copy).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return host memory, where `__dlpack__` puts the copy."""
        return 1, 0  # kDLCPU

    def __iter__(self) -> Iterator[Any]:
        """Iterate over copies of the rows, which are read in blocks of `config.key_bytes`."""
        return self._each_row(range(len(self)))

    def __reversed__(self) -> Iterator[Any]:
        """Iterate from the last row to the first."""
        return self._each_row(range(len(self) - 1, -1, -1))

    def _each_row(self, numbers: range) -> Iterator[Any]:
        step = self._rows_of(config.current().key_bytes)
        for start in range(0, len(numbers), step):
            part = numbers[start : start + step]
            low, high = sorted((part[0], part[-1]))
            for row in self[low : high + 1][:: numbers.step]:
                # A view would keep its whole block.
                yield row.copy() if isinstance(row, np.ndarray | np.void) else row

    def __contains__(self, item: object) -> bool:
        """Tell whether an element or row equals `item`, as numpy does: one pass over the data."""
        axes = np.ndim(item)  # type: ignore[arg-type]
        if axes >= max(1, self.ndim):
            raise ArgumentError(
                f"an item with {axes} axes in an array with {self.ndim}: (x[...] == item).any() "
                "compares all"
            )
        step = self._rows_of(config.current().key_bytes)
        keys = [slice(i, i + step) for i in range(0, len(self), step)] if self.shape else [...]
        return any(bool(np.any(self[key] == item)) for key in keys)

    def __bool__(self) -> bool:
        """Refuse: numpy's truth value would need all elements."""
        raise ArgumentError(
            "an array has no truth value: compare with None, ask for len(x), or for x[...].any()"
        )

    def gather_async(self, idx: Any, out: Any = None, stream: Any = None) -> Future[Any]:
        """Start copying rows ``self[idx]``, and return a future of them.

        Parameters
        ----------
        idx : slice, or array of int
            Rows of the first axis; arrays as for `gather`. Checked before this returns, which
            waits for indices that are on a GPU.
        out : array, optional
            As for `gather`. Leave it and `idx` unchanged until the future is done.
        stream : optional
            GPU only: the read comes after what this stream has queued. Default: after what the
            caller's library has queued on its current stream. Either way it runs on a stream of
            its own, and nothing waits for it but what `Future.wait_on` is told of.

        Returns
        -------
        Future
            Of `out`, or of a new array as `gather` returns it.

        Raises
        ------
        BoundsError, IndexDtypeError, ArgumentError, DtypeError
            As `gather` raises them, here and not in the future.
        DeviceTimeout
            When `config.async_calls` are in flight and none of them ends.

        Notes
        -----
        Calls in flight run in any order, and so do calls of `gather` and `scatter` beside them: a
        read that needs a write waits for it, by `result` or `wait_on`. `flush`, `drop_cache` and
        `close` wait for all calls made before. On the CPU device they run one after the other in
        the background, and the lines of the next ones are fetched meanwhile.

        Examples
        --------
        >>> import flashwarp as fw, numpy as np
        >>> with fw.create("rows.npy", "float32", (1000, 64), device="cpu") as x:
        ...     written = x.scatter_async(slice(10, 12), 1.5)
        ...     written.result()  # and meanwhile, something else
        ...     x.gather_async(np.array([11, 3])).result()[:, 0].tolist()
        [1.5, 0.0]
        """
        self._begin()
        self._need_axis()
        return self._calls.read(idx, out, stream)

    @_locked
    def prefetch(self, idx_or_slice: Any, stream: Any = None) -> None:
        """Start bringing rows into the cache; does not wait for their data.

        Takes what `gather` takes, or a slice. Lines that find no free frame are skipped.
        """
        self._need_axis()
        if isinstance(idx_or_slice, slice):
            idx_or_slice = host_index(rows_of_slice(idx_or_slice, self.shape[0]))
        index = self._index(idx_or_slice, stream)
        if not index.size or not self._row_bytes:
            return
        self._launcher.prefetch_rows(index, stream)
        self._attachment.finish("prefetch", stream)

    # Writing.

    @_locked
    def scatter(self, idx: Any, values: Any, stream: Any = None) -> None:
        """Store rows: ``self[idx] = values``.

        Parameters
        ----------
        idx : array of int
            As for `gather`. Where an index repeats, one of its rows wins.
        values : array
            Broadcastable to ``idx.shape + self.shape[1:]``, and cast as numpy's assignment casts:
            floats stored as integers lose their fraction. On a GPU an array there, of this shape
            and dtype, or a host array.
        stream : optional
            As for `gather`.

        Notes
        -----
        The rows are in the cache when the call returns; `flush` makes them durable. Rows that cover
        whole lines are stored without reading the lines first.

        Raises
        ------
        ReadOnlyError
            When the array was opened with ``mode="r"``.
        """
        self._need_writable()
        self._need_axis()
        index = self._index(idx, stream)
        source = self._operands.source(values, index.shape)
        if source.library != "numpy":
            # What was computing the values comes before what is queued from now on.
            self.device.order(self.device.current_stream(source.library), None)
        if index.size and self._row_bytes:
            self._move_rows("scatter", index, source.address, stream)
        source.release()

    def scatter_async(self, idx: Any, values: Any, stream: Any = None) -> Future[None]:
        """Start storing rows, ``self[idx] = values``, and return a future.

        Parameters
        ----------
        idx : slice, or array of int
            As for `gather_async`. Where an index repeats, one of its rows wins.
        values : array
            As for `scatter`. Leave it unchanged until the future is done.
        stream : optional
            As for `gather_async`.

        Returns
        -------
        Future
            Of None. When it is done the rows are in the cache; `flush` makes them durable.

        Raises
        ------
        ReadOnlyError
            When the array was opened with ``mode="r"``.
        BoundsError, IndexDtypeError, ArgumentError, DtypeError, DeviceTimeout
            As for `gather_async`.
        """
        self._need_writable()
        self._begin()
        self._need_axis()
        return self._calls.write(idx, values, stream)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Store as numpy does in an array in memory: its broadcasting, casts and last value.

        Takes the keys of `__getitem__`. Blocks; the rows are in the cache then, and `flush` makes
        them durable. Casts are those of numpy's assignment, which drops fractions without a word.

        A key that takes only a part of its rows reads them, changes the part and stores them whole,
        a block of `config.key_bytes` after another. Calls of other threads to arrays on this cache
        wait meanwhile. What `scatter_async` or a kernel stores to other parts of the same rows
        meanwhile may be lost. After a StorageError some of the rows are stored.

        Raises
        ------
        BoundsError, IndexDtypeError, ArgumentError, ReadOnlyError
            For what numpy refuses, and as for `__getitem__`; nothing is stored then.
        """
        if isinstance(key, Array):
            key = np.asarray(key)  # in its own turn, as above
        if isinstance(value, Array):
            value = np.asarray(value)
        if is_foreign(key):
            self.scatter(key, value)
            return
        chosen = select(key, self.shape)
        self._store(chosen, value)

    @_locked
    def _store(self, chosen: Selection, value: Any) -> None:
        self._need_writable()
        values = self._operands
        if chosen.is_mask and (ndim := values.as_array(value).ndim) > 1:
            raise ArgumentError(
                f"values with {ndim} axes for a mask of the whole array: it takes one value, or "
                "one axis of them"
            )
        if 0 in chosen.shape:
            values.assign(np.empty(chosen.shape, self.dtype), ..., value)
            return
        blocks = list(chosen.blocks(self._rows_of(config.current().key_bytes)))
        given = value if len(blocks) == 1 else values.broadcast(value, chosen.shape)
        for block in blocks:
            part = value if len(blocks) == 1 else given[block.place]
            shape = self._shape_of(block.rows)
            if chosen.in_order and values.as_stored(part, shape):
                self._store_rows(block.rows, part)
                continue
            held = host_empty(shape, self.dtype) if chosen.whole else self._read_rows(block.rows)
            values.assign(held, block.key, part)
            self._store_rows(block.rows, held)

    def _store_rows(self, chosen: range | npt.NDArray[np.int64], block: npt.NDArray[Any]) -> None:
        """Store a dense block to rows none of which is named twice."""
        if isinstance(chosen, range) and (chosen.step == 1 or len(chosen) < 2):
            self._move_range("scatter", chosen, block)
        else:
            self.scatter(host_index(chosen) if isinstance(chosen, range) else chosen, block)

    def flush(self) -> None:
        """Write dirty lines back and make them durable: after it, a crash loses nothing stored.

        Blocks, and waits for asynchronous calls made before; what they met stays with their
        futures. Raises StorageError when a line could not be written; the line stays dirty in the
        cache, so a later flush tries again. When the storage itself could not flush, what was
        written since the flush before may be lost, and nobody can tell what: every later flush and
        `close` raise this error again. Open the array anew and store again.
        """
        self._begin()
        self._calls.wait()
        self._flush_in_turn()

    @_locked
    def _flush_in_turn(self) -> None:
        self._attachment.flush()

    # What can be told about it.

    @property
    def stats(self) -> Stats:
        """A snapshot of the counters; waits for the array's other calls."""
        return self._read_counters()

    @_locked
    def _read_counters(self) -> Stats:
        events = self._volume.counters()
        queues = self._controller.queues.counters()
        return Stats(
            **events,
            commands=queues.commands,
            doorbells=queues.doorbells,
            helps=queues.helps,
        )

    @contextlib.contextmanager
    def _watched(self, watcher: Watcher) -> Iterator[None]:
        """Show a watcher what calls are about to move: byte offsets in the array, and bytes."""
        self._check_usable()
        self._launcher.watchers.append(watcher)
        try:
            yield
        finally:
            self._launcher.watchers.remove(watcher)

    @_locked
    def explain(self) -> Explanation:
        """Tell which data path is used and why, and what the counters advise.

        Blocks as `stats` does.
        """
        from flashwarp.array.advice import advise

        left = self._controller.changes != 0
        why = f"when it was opened, {self._why}" if left and self._why else self._why
        reason = "; ".join(filter(None, (self._controller.reason, why)))
        return Explanation(
            path=self._controller.path,
            reason=reason,
            # Who opened the storage may have closed it: the controller keeps serving it.
            storage={"closed": True} if self._storage.closed else self._storage.describe(),
            controller=self._controller.describe(),
            cache=f"{self.cache!r}{self._volume.tier_note()}",
            device=self.device.describe(),
            advice=advise(self._usage()),
        )

    def _usage(self) -> Usage:
        from flashwarp.array.advice import Usage

        parts = members_of(self._storage)
        files = [each for each in parts if isinstance(each, File) and not each.closed]
        told = [(file.describe(), file.review is not None) for file in files]
        available = host_memory.available_bytes()
        tier = self.cache.host_capacity if self._volume.in_host_tier else 0
        return Usage(
            nbytes=self.nbytes,
            row_bytes=self._row_bytes,
            line_bytes=self.cache.line_bytes,
            capacity=self.cache.capacity,
            host_capacity=tier,
            on_cpu=self.device.kind == "cpu",
            in_place=self._controller.path == "in_place",
            o_direct=any(facts["o_direct"] and not may_change for facts, may_change in told),
            alignment=max((int(facts.get("alignment", 1)) for facts, _ in told), default=1),
            device_free_bytes=self.device.memory_info().free_bytes,
            host_free_bytes=available,
            page_room=room_for_pages(available, 0, config.current()),
            calls=self._launcher.moved.calls,
            rows=self._launcher.moved.rows,
            stats=self.stats,
        )

    @property
    def kernel_handle(self) -> ArrayStruct:
        """The struct `fw::array<T>` of this array, for the parameters of your own kernels.

        Valid until `close`. After launches that use it, call `synchronize`.
        """
        self._check_usable()
        volume = self._volume
        return ArrayStruct(
            geometry=self.cache.geometry,
            cache=self.cache.address,
            volume=volume.address,
            line_begin=volume.line_begin,
            length=self.size,
        )

    @property
    def in_place(self) -> int | None:
        """Address of the elements where kernels may read them past the cache, or None.

        Device-readable memory that nobody writes: the in-place path, one storage opened for
        reading, no modelled drive; of a file, on a GPU. Valid until `close`. A file's address is
        given for as long as its lease holds, or with ``immutable=True``. After a
        writer has opened the file this is None, and what an address taken before shows is the file
        as it was, in part or whole: ask again before each launch.
        """
        self._check_usable()
        return self._controller.in_place or None

    @_locked
    def synchronize(self, stream: Any = None) -> None:
        """Wait for your own kernels that use this array, and raise the failures of their transfers.

        Parameters
        ----------
        stream : optional
            The stream of the launches. Default: the library's own, and each that was given to a
            launch or call since the last wait.

        Notes
        -----
        Blocks until the stream is idle, for no longer than the time limit of the device.

        Raises
        ------
        StorageError
            When a transfer failed: what the kernels computed from this array is void then.
        BoundsError
            When they used an index out of bounds. Such a load gives zero and such a store does
            nothing. Kernels compiled with ``debug=True`` are stopped by it, and the process cannot
            use the GPU any more.
        DeviceTimeout
            When the stream did not become idle in time.
        """
        if stream is None:
            self._attachment.idle_streams()
        self._attachment.finish("a kernel", stream)

    @property
    def controller(self) -> Service:
        """What serves the array: its `stats`, `describe`, data path and queue pairs."""
        return self._controller

    # The end.

    def close(self) -> None:
        """Flush, wait for what is in flight, and release everything. May be called twice.

        Blocks. When the flush fails, everything is released all the same and the error raised:
        what could not be written is lost then, and the error says what. So is the failure of an
        asynchronous call that nobody has looked at. When a signal handler raises meanwhile, as that
        of Ctrl-C does, the array is open and usable afterwards, or closed.
        """
        if "_attachment" not in self.__dict__:  # pickled, and not used since
            self._recipe = None
            return
        failure = self._attachment.close()
        if failure is not None:
            raise failure

    def drop_cache(self, drop_dirty: bool = False) -> None:
        """Empty the cache of this array's lines, as a cold start has it. Dirty lines are flushed.

        Waits for asynchronous calls made before. Lines that calls and kernels beside this one store
        to stay in the cache, dirty: nothing is lost, and the next flush writes them back.

        Parameters
        ----------
        drop_dirty : bool
            Give up lines that cannot be written, instead of raising. What was stored in them since
            the last flush is lost.
        """
        drop_dirty = flag("drop_dirty", drop_dirty)
        self._begin()
        self._calls.wait()
        self._drop_cache_in_turn(drop_dirty)

    @_locked
    def _drop_cache_in_turn(self, drop_dirty: bool) -> None:
        self._attachment.drop_lines(drop_dirty)

    def refresh(self) -> None:
        """Forget what was read before, so that it is read again as the file has it now.

        For a reader beside a writer in another process, after the writer's `flush`. Blocks, and
        waits for asynchronous calls made before. Dirty lines of a writable array are flushed.

        Raises
        ------
        StorageError
            When the file was cut short (ENODATA), or replaced or removed (ESTALE): the array then
            goes on with the file that it has open. Open the path again to see the new one.
        """
        self._begin()
        self._calls.wait()
        self._refresh_in_turn()

    @_locked
    def _refresh_in_turn(self) -> None:
        self._attachment.drop_lines(drop_dirty=False)
        self._storage.check_unchanged()

    def __del__(self) -> None:
        attachment: Attachment | None = self.__dict__.get("_attachment")
        if attachment is None or attachment.closed or attachment.in_child:
            return
        try:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)
        finally:  # where warnings are errors, too
            attachment.close_lost()

    # Pickling.

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._recipe is None:
            raise CopyError(
                f"{self!r} cannot be pickled, only an array that was opened from a path: open it "
                "in the other process"
            )
        return _unopened, (self._recipe.of(self.shape, self.dtype), self.shape, self.dtype)

    def __getattr__(self, name: str) -> Any:
        # Of a pickled array, all but what `_unopened` gives it is missing until it is opened.
        if name.startswith("__") or "_attachment" in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        endings.uninterrupted(self._open)
        return getattr(self, name)

    def _open(self) -> None:
        with _opening:
            if "_attachment" in self.__dict__:
                return
            recipe: Recipe | None = self.__dict__.get("_recipe")
            if recipe is None:
                raise ClosedError("the array is closed")
            opened = recipe.open()
            self.__dict__.update(opened.__dict__)
            opened.__dict__.clear()

    # Checks.

    def _check_usable(self) -> None:
        if self._attachment.closed:
            raise ClosedError(f"the array {self._storage.path or 'in memory'} is closed")
        if self._attachment.in_child:
            raise ForkError(
                f"the array was opened by process {self._attachment.opened_by}; its threads do not "
                "exist in a forked child: open it again there, or start children with 'spawn'"
            )

    def _begin(self) -> None:
        """Check that a call can be made, and raise what an earlier one has left to be raised."""
        self._check_usable()
        self._calls.raise_lost()
        if self._controller.changes != self._changes:
            self._drop_old_lines()

    def _drop_old_lines(self) -> None:
        """Forget what was read before a writer opened the file, or before it closed it.

        Raises
        ------
        StorageError
            When rows may have been read in place while they were written.
        DataPathError
            When only the in-place path was allowed.
        """
        stale = endings.holding([self._lock], self._leave_old_lines)
        if stale is not None:
            raise stale

    def _leave_old_lines(self) -> StorageError | None:
        changes = self._controller.changes
        if changes == self._changes:
            return None
        if self.strict == "in_place" and self._controller.path != self.strict:
            raise DataPathError(
                f"strict='in_place', but {self._storage.path} was opened for writing by "
                "somebody, so it cannot be read in place any more: close the array, and open "
                "it again when the writer has closed the file"
            )
        self._attachment.drop_lines(drop_dirty=False)
        self._changes = changes
        return self._controller.take_stale()

    def _need_writable(self) -> None:
        if not self.writable:
            raise ReadOnlyError('the array is read-only: open it with mode="r+"')

    def _need_axis(self) -> None:
        if not self.shape:
            raise BoundsError("an array without axes has no rows: use x[...]")

    # Launches.

    def _index(self, idx: Any, stream: Any) -> Index:
        index = self._operands.index(idx)
        if not index.checked and index.size:
            here = self.device.current_stream(index.library) if stream is None else stream
            self._calls.check(index, here)
        return index

    def _move_rows(self, verb: str, index: Index, buffer: int, stream: Any) -> None:
        run = stream if stream is not None else self._default_stream(index.library)
        if run is not None:
            # What uploads and other calls queued on the library's own stream comes first.
            self.device.order(None, run)
        self._launcher.move_rows(verb, index, buffer, run)
        if stream is None:
            self._attachment.finish(verb, run)
        else:
            self._attachment.note_stream(stream)

    def _default_stream(self, library: str) -> Any:
        if self.device.kind == "cpu" or library == "numpy":
            return None
        return self.device.current_stream(library)

    def _move_range(self, verb: str, chosen: range, block: npt.NDArray[Any]) -> None:
        """Copy rows that lie back to back between the array and a host block."""
        held = None
        address = block.ctypes.data
        if self.device.kind == "cuda":
            held = self.device.empty_array(block.shape, self.dtype)
            address = held.address
            if verb == "scatter":
                self.device.upload(address, block)
        self._launcher.move_range(verb, chosen.start, address, block.nbytes)
        self._attachment.finish(verb, None)
        if held is not None:
            if verb == "gather":
                self.device.download_into(address, block)
            held.close()

    def _join_launch(self, stream: Any) -> tuple[object, ...]:
        """Take part in a launch of a caller's kernel, in the cache's turn; return what it uses."""
        self._check_usable()
        if self._controller.changes != self._changes:
            self._drop_old_lines()
        if stream is not None:
            self._attachment.note_stream(stream)
        return self._launcher.wake()


def _unopened(recipe: Recipe, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Make an array that is opened when it is first used."""
    array = Array.__new__(Array)
    array.__dict__.update(_recipe=recipe, shape=shape, dtype=dtype)
    return array
