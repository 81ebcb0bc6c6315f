"""`Array`: an array larger than memory, gathered and scattered by device threads.

This is what a user holds. Its calls check their operands (`operands`) and launch the row kernels
(`launcher`). `attachment` owns the parts of an array, waits for them and ends them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NoReturn,
    ParamSpec,
    Protocol,
    SupportsIndex,
    TypeVar,
)

import numpy as np
import numpy.typing as npt

from flashwarp import config, endings
from flashwarp._names import renamed
from flashwarp.array import handles
from flashwarp.array.attachment import Attachment
from flashwarp.array.futures import Future
from flashwarp.array.selection import Selection, select
from flashwarp.array.stats import Stats
from flashwarp.cache.cache import Cache
from flashwarp.config import flag
from flashwarp.device import Device, stream_handle
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CaptureError,
    ClosedError,
    CopyError,
    DeviceError,
    FlashwarpError,
    ForkError,
    ReadOnlyError,
    RouteError,
    StorageError,
)
from flashwarp.launch.launcher import Verb, Watcher
from flashwarp.launch.operands import Index, Operands, Rows, host_empty, host_index, is_foreign
from flashwarp.launch.rows import ArrayStruct, RowFormat
from flashwarp.nvme import Service

if TYPE_CHECKING:
    from flashwarp.explanation import Explanation

__all__ = ["Array"]

P = ParamSpec("P")
R = TypeVar("R")

_opening = endings.Lock()
"""One pickled or inherited array opens at a time."""

_of_parent: list[Attachment] = []
"""What arrays of a forked child were attached to: it stays, because its end is the parent's."""


# Parameters that a call reads, and for which a caller may give another `Array`.
_OPERANDS = {"idx", "idx_or_slice", "values", "value"}


def _locked(
    method: Callable[Concatenate[Array, P], R], *, stores: bool = False
) -> Callable[Concatenate[Array, P], R]:
    """Serialise operations on the array, so that an error belongs to the call that raises it."""
    names = tuple(inspect.signature(method).parameters)[1:]
    places = [place for place, name in enumerate(names) if name in _OPERANDS]

    @functools.wraps(method)
    def call(self: Array, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._come_behind(stores)
        given = list(args)
        for place in places:
            # Before the turn: if two threads each read the other's array in their own turn, both
            # would wait for ever.
            if place < len(given):
                if isinstance(given[place], Array):
                    given[place] = np.asarray(given[place])
            elif isinstance(kwargs.get(names[place]), Array):
                kwargs[names[place]] = np.asarray(kwargs[names[place]])
        return endings.holding(
            (self.cache.turn,), functools.partial(_in_turn, self, method, given, kwargs)
        )

    return call


_storing = functools.partial(_locked, stores=True)


def _in_turn(
    array: Array, method: Callable[..., R], args: Sequence[Any], kwargs: dict[str, Any]
) -> R:
    try:
        array._begin()
        return method(array, *args, **kwargs)
    except DeviceError as error:
        array._raise_reason(error)


class Recipe(Protocol):
    """How to open an array again. Pickling an array pickles its recipe."""

    def open(self) -> Array:
        """Open the array."""

    def of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Recipe:
        """Return the recipe for exactly this array; raises CopyError if it cannot be pickled."""


@renamed
class Array(endings.Closing):
    """An array in a storage, read and written through a cache in device memory.

    `flashwarp.open` and `create` make it. On the CPU device, indices and results are numpy arrays.
    On a GPU they are arrays of the caller's library (torch in, torch out).

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    device : Device
    cache : Cache
    strict : str or None
        The only route that is allowed; see `flashwarp.open`.

    Notes
    -----
    Calls block until they are done. If you give a `stream`, a call returns before its data has
    moved: it runs in the order of the stream, and the next call or `close` raises its errors.
    Kernels check indices that are on a GPU. Several Python threads may use one
    array; their calls take turns. If an index repeats in a store, `scatter` keeps one of the values
    and ``x[...] = v`` the last one.

    If an array is open when the interpreter ends, it is flushed and closed then. A read-only array
    that was opened from a path can be pickled: the other process opens the path again, with the
    same settings, when it first uses the array. Copying any array, or pickling another one, raises
    CopyError. A forked child opens such an array again, too, if it is on the CPU device; there,
    calls of any other inherited array raise ForkError.

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
        self, attachment: Attachment, *, why: str = "", recipe: Recipe | None = None
    ) -> None:
        if not isinstance(attachment, Attachment):
            raise ArgumentError("arrays are made by flashwarp.open and flashwarp.create")
        self.strict: str | None = None
        self._attachment = attachment
        self._format = attachment.launcher.format
        self._why = why
        self._recipe = recipe
        # Who has the storage, in words and as an object: see `_hand_over`.
        self._holder = ""
        self._owner: object = None
        self._handle = handles.new(self)

    # Properties.

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self._format.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._format.dtype

    @property
    def cache(self) -> Cache:
        """The cache that its lines enter."""
        return self._attachment.cache

    @property
    def device(self) -> Device:
        """Where its kernels run and its cache lies."""
        return self._attachment.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._format.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._format.size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._format.nbytes

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
        facts = f"shape={self.shape} dtype={self.dtype}"
        if "_attachment" not in self.__dict__:
            return f"<{'closed' if self.closed else 'unopened'} flashwarp.Array {facts}>"
        state = "closed " if self.closed else ""
        return f"<{state}flashwarp.Array {self._place} {facts} device={self.device.name!r}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: what the array is, its route, and its counters.

        Opens no array, and raises no failure of an earlier call. Reading the counters of an array
        on a GPU waits for what the library's own stream has queued.
        """
        from flashwarp.array.explanation import html_table, live_facts

        facts: dict[str, object] = {
            "shape": self.shape,
            "dtype": self.dtype,
            "bytes": self.nbytes,
        }
        if "_attachment" not in self.__dict__:
            state = "closed" if self.closed else "unopened"
            return html_table(f"flashwarp.Array, {state}", facts)
        facts["path"] = self._place
        if self.closed or self._attachment.in_child:
            state = "closed" if self.closed else "of another process"
            return html_table(f"flashwarp.Array, {state}", facts)
        try:
            facts |= live_facts(self._attachment)
        except FlashwarpError as error:  # a notebook shows the table all the same
            facts["error"] = error
        return html_table("flashwarp.Array", facts)

    @property
    def _place(self) -> str:
        path = self._attachment.storage.path or "in memory"
        return path if path.isprintable() else repr(path)

    # Reading.

    def gather(self, idx: object, out: object = None, stream: object = None) -> Any:
        """Copy rows ``self[idx]``, in the order of `idx`.

        Parameters
        ----------
        idx : array of int, any shape; slice; or range
            Rows of the first axis; negative ones count from the end. On a GPU: anything with
            `__cuda_array_interface__` or DLPack, int32 or int64; or a numpy array.
        out : array, optional
            Contiguous array of shape ``idx.shape + self.shape[1:]`` and this dtype, which must not
            overlap the memory of `idx`.
        stream : optional
            GPU only: queue the work there and return at once. Keep `idx` and `out` until it is
            done. The stream may be in the capture of a CUDA graph, see docs/kernels.md. Operands
            on the host are copied, and the call waits for that.

        Returns
        -------
        array
            `out`, or a new array of the library that `idx` belongs to; of a slice or range, numpy.

        Raises
        ------
        BoundsError
            If an index is out of bounds. If the indices are on the host, nothing is read then. If
            they are on a GPU, the rows of such indices are zero in `out`, and the others are
            there; with `stream`, the next call, `check` or `wait` raises the error.
        IndexDtypeError
            If the indices are no integers.
        ArgumentError, DtypeError
            If `out` does not fit; if it is a tensor that requires a gradient while gradients are
            recorded, which do not flow through an array; or if `stream` is of another device.
        CaptureError
            If the call cannot become part of the CUDA graph that is being captured.
        StorageError
            If a transfer failed; rows of lines that could be read are in `out`.

        Notes
        -----
        If a GPU reads the storage in place, copy engines read slices and ranges that are at least
        twice as long as the cache. They pass the cache: lines that were stored to are written back
        first, in the order of the stream, and no line enters. `explain` says whether they do.
        """
        attachment = self._attachment
        try:
            rows = attachment.row_calls.gather(idx, out, stream, attachment.finish_launch)
        except DeviceError as error:
            self._raise_reason(error)
        return self._gather(idx, out, stream) if rows is None else rows

    def _raise_reason(self, error: DeviceError) -> NoReturn:
        """Raise why a kernel was stopped, if `error` came from that; else `error`."""
        reason = self._attachment.reason_of(error)
        if reason is error:
            raise error
        raise reason from error

    @_locked
    def _gather(self, idx: object, out: object, stream: object) -> Any:
        self._need_axis()
        chosen = self._choose(idx, stream)
        target = self._operands_of(stream).target(out, chosen, stream)
        self._move("gather", chosen, target, stream)
        return target.finish(stream)

    def __getitem__(self, key: object) -> Any:
        """Read what numpy selects from an array in memory, and return it as numpy does.

        Blocks. Takes integers, slices, Ellipsis, None, and integer or boolean arrays on any axes.
        If the whole key is an array of another library, `gather` reads its rows. Reads whole rows
        of the first axis. If a key takes only a part of them, as ``x[:, 0]`` does, they are read in
        blocks of `config.key_bytes`. The result is always a copy, never a view of the array.

        Raises
        ------
        BoundsError, IndexDtypeError, ArgumentError
            For what numpy refuses, single booleans and names of fields; nothing is read then.
        """
        if isinstance(key, Array):
            key = np.asarray(key)  # in its own turn, see `_locked`
        if is_foreign(key):
            return self.gather(key)
        return self._select(select(key, self.shape))

    @_locked
    def _select(self, chosen: Selection) -> Any:
        if chosen.whole:
            return self._read_rows(chosen.rows)[chosen.whole_key]
        result = host_empty(chosen.shape, self.dtype)
        if result.size:
            for block in chosen.blocks(self._rows_of_a_block()):
                result[block.place] = self._read_rows(block.rows)[block.key]
        return result[()] if chosen.scalar else result

    def _read_rows(self, chosen: range | npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        if isinstance(chosen, range) and (chosen.step == 1 or len(chosen) < 2):
            target = self._attachment.operands.target(None, chosen)
            self._move("gather", chosen, target)
            rows: npt.NDArray[Any] = target.finish(None)
            return rows
        index = host_index(chosen) if isinstance(chosen, range) else chosen
        return np.asarray(self.gather(index))

    def _rows_of_a_block(self) -> int:
        return self._format.rows_in(config.current("key_bytes").key_bytes)

    # Protocols of numpy and Python.

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Copy the whole array to memory, by one read; `numpy.asarray` and the like call this.

        Blocks. Raises ArgumentError if the array has more bytes than `config.asarray_bytes`: code
        for arrays in memory is rarely meant for one that does not fit there. Also raises it for
        ``copy=False``, because the data is not in memory.
        """
        if copy is False:
            raise ArgumentError("the array is not in memory: numpy can have it only by a copy")
        limit = config.current("asarray_bytes").asarray_bytes
        if self.nbytes > limit:
            raise ArgumentError(
                f"an array of {self.nbytes} bytes is not copied to memory unasked: at most {limit} "
                "(FLASHWARP_ASARRAY_BYTES); x[...] reads all of it, x[10:20] or gather() some rows"
            )
        held: npt.NDArray[Any] = self[...]
        return held if dtype is None else held.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Export a copy in host memory, for `torch.as_tensor`; raises as `__array__` does."""
        copy = options.pop("copy", None)
        return self.__array__(copy=copy).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of memory of the copy that `__dlpack__` exports: host memory."""
        return 1, 0  # kDLCPU

    def __iter__(self) -> Iterator[Any]:
        """Iterate over copies of the rows, which are read in blocks of `config.key_bytes`."""
        return self._each_row(range(len(self)))

    def __reversed__(self) -> Iterator[Any]:
        """Iterate from the last row to the first."""
        return self._each_row(range(len(self) - 1, -1, -1))

    def _each_row(self, numbers: range) -> Iterator[Any]:
        step = self._rows_of_a_block()
        for start in range(0, len(numbers), step):
            part = numbers[start : start + step]
            low, high = sorted((part[0], part[-1]))
            for row in self[low : high + 1][:: numbers.step]:
                # A view would keep its whole block.
                yield row.copy() if isinstance(row, np.ndarray | np.void) else row

    def __contains__(self, item: object) -> bool:
        """Return whether an element or row equals `item`, as numpy does: one pass over the data."""
        axes = np.ndim(item)  # type: ignore[arg-type]
        if axes >= max(1, self.ndim):
            raise ArgumentError(
                f"an item with {axes} axes in an array with {self.ndim}: (x[...] == item).any() "
                "compares all"
            )
        step = self._rows_of_a_block()
        keys = [slice(i, i + step) for i in range(0, len(self), step)] if self.shape else [...]
        return any(bool(np.any(self[key] == item)) for key in keys)

    def __bool__(self) -> bool:
        """Raise ArgumentError: numpy's truth value would need all elements."""
        raise ArgumentError(
            "an array has no truth value: compare with None, ask for len(x), or for x[...].any()"
        )

    def gather_async(
        self,
        idx: object,
        out: object = None,
        stream: object = None,
        *,
        ordered: bool = True,
    ) -> Future[Any]:
        """Start copying rows ``self[idx]``, and return a future of them.

        Parameters
        ----------
        idx : array of int, slice, or range
            As for `gather`.
        out : array, optional
            As for `gather`. Leave it and `idx` unchanged until the future is done.
        stream : optional
            GPU only: the read runs after the work that this stream has queued. Default: after the
            work on the current stream of the caller's library. In both cases it runs on a stream of
            the library's own, and only the streams given to `Future.before` wait for it.
        ordered : bool
            False: the read may run before stores that were called before it, and after stores that
            are called later.

        Returns
        -------
        Future
            Of `out`, or of a new array as `gather` returns it.

        Raises
        ------
        IndexDtypeError, ArgumentError, DtypeError, CaptureError
            As `gather` raises them; this method raises them, not the future.
        BoundsError
            If an index on the host is out of bounds. If one on a GPU is, the future raises it.
        DeviceTimeout
            If `config.async_calls` calls are in flight and none of them ends.

        Notes
        -----
        A read sees the stores of all calls before it, asynchronous or not, and none of later ones;
        reads overlap (docs/kernels.md). `flush`, `drop_cache` and `close` wait for all calls made
        before. On the CPU device, calls run one after the other in the background, and the lines of
        the next calls are fetched meanwhile.

        Examples
        --------
        >>> import flashwarp as fw, numpy as np
        >>> with fw.create("rows.npy", "float32", (1000, 64), device="cpu") as x:
        ...     written = x.scatter_async(slice(10, 12), 1.5)
        ...     x.gather_async(np.array([11, 3])).result()[:, 0].tolist()
        [1.5, 0.0]
        """
        self._begin()
        self._need_axis()
        return self._attachment.calls.make("gather", idx, out, stream, flag("ordered", ordered))

    def prefetch(self, idx_or_slice: object, stream: object = None) -> None:
        """Start fetching rows into the cache; does not wait for their data.

        Takes the rows that `gather` takes, and a stream as `gather` does. Skips lines that find no
        free frame.
        """
        attachment = self._attachment
        try:
            if attachment.row_calls.prefetch(idx_or_slice, stream, attachment.finish_launch):
                return
        except DeviceError as error:
            self._raise_reason(error)
        self._prefetch(idx_or_slice, stream)

    @_locked
    def _prefetch(self, idx_or_slice: object, stream: object) -> None:
        self._need_axis()
        chosen = self._choose(idx_or_slice, stream)
        if not len(chosen) or not self._format.row_bytes:
            return
        run = self._join("prefetch", chosen, None, stream)
        self._attachment.launcher.prefetch(chosen, run)
        self._lend(chosen, None, run, stream)
        self._finish("prefetch", run, stream)

    # Writing.

    @_storing
    def scatter(self, idx: object, values: object, stream: object = None) -> None:
        """Store rows: ``self[idx] = values``.

        Parameters
        ----------
        idx : array of int
            As for `gather`. If an index repeats, one of its rows is kept.
        values : array
            Broadcastable to ``idx.shape + self.shape[1:]``, and cast as numpy's assignment casts:
            floats stored as integers lose their fraction. On a GPU: an array on it, of this shape
            and dtype, or a host array.
        stream : optional
            As for `gather`.

        Notes
        -----
        The rows are in the cache when the call returns; `flush` makes them durable. Rows that cover
        whole lines are stored without reading the lines first. If any index is out of bounds,
        nothing is stored; `gather` describes who raises the error.

        Raises
        ------
        ReadOnlyError
            If the array was opened with ``mode="r"``.
        BoundsError, IndexDtypeError, CaptureError
            As for `gather`.
        """
        self._need_writable()
        self._need_axis()
        operands = self._operands_of(stream)
        index = operands.index(idx)
        source = operands.source(values, index)
        self._move("scatter", index, source, stream)
        if stream is None:  # else it is lent to the stream
            source.release()

    def scatter_async(
        self,
        idx: object,
        values: object,
        stream: object = None,
        *,
        ordered: bool = True,
    ) -> Future[None]:
        """Start storing rows, ``self[idx] = values``, and return a future.

        Parameters
        ----------
        idx : array of int, slice, or range
            As for `gather_async`. If an index repeats, one of its rows is kept.
        values : array
            As for `scatter`. Leave it unchanged until the future is done.
        stream : optional
            As for `gather_async`.
        ordered : bool
            Whether of two stores to a row the one that was called later wins, and reads see those
            called before them. False: calls beside this one may run in any order with it.

        Returns
        -------
        Future
            Of None. When it is done, the rows are in the cache; `flush` makes them durable.

        Raises
        ------
        ReadOnlyError
            If the array was opened with ``mode="r"``.
        BoundsError, IndexDtypeError, ArgumentError, DtypeError, DeviceTimeout
            As for `gather_async`.
        """
        self._need_writable()
        self._begin()
        self._need_axis()
        return self._attachment.calls.make("scatter", idx, values, stream, flag("ordered", ordered))

    def __setitem__(self, key: object, value: object) -> None:
        """Store as numpy does in an array in memory: with its broadcasting, casts and last value.

        Takes the keys of `__getitem__`. Blocks; afterwards the rows are in the cache, and `flush`
        makes them durable. Casts are those of numpy's assignment, which drops fractions in silence.

        If a key takes only a part of its rows, the rows are read, changed and stored whole, in
        blocks of `config.key_bytes`. Calls of other threads to arrays on this cache wait meanwhile.
        Values that `scatter_async` or a kernel stores to other parts of these rows meanwhile may be
        lost. After a StorageError some of the rows are stored.

        Raises
        ------
        BoundsError, IndexDtypeError, ArgumentError, ReadOnlyError
            For what numpy refuses, and as for `__getitem__`; nothing is stored then.
        """
        if isinstance(key, Array):
            key = np.asarray(key)  # in its own turn, see `_locked`
        if isinstance(value, Array):
            value = np.asarray(value)
        if is_foreign(key):
            self.scatter(key, value)
            return
        self._store(select(key, self.shape), value)

    @_storing
    def _store(self, chosen: Selection, value: object) -> None:
        self._need_writable()
        values = self._attachment.operands
        if chosen.is_mask and (ndim := values.as_array(value).ndim) > 1:
            raise ArgumentError(
                f"values with {ndim} axes for a mask of the whole array: give one value, or one "
                "axis of values"
            )
        if 0 in chosen.shape:
            values.assign(np.empty(chosen.shape, self.dtype), ..., value)
            return
        blocks = list(chosen.blocks(self._rows_of_a_block()))
        given = None if len(blocks) == 1 else values.broadcast(value, chosen.shape)
        for block in blocks:
            part = value if given is None else given[block.place]
            shape = self._format.shape_of(block.rows)
            if chosen.in_order and isinstance(part, np.ndarray) and values.as_stored(part, shape):
                self._store_rows(block.rows, part)
                continue
            held = host_empty(shape, self.dtype) if chosen.whole else self._read_rows(block.rows)
            values.assign(held, block.key, part)
            self._store_rows(block.rows, held)

    def _store_rows(self, chosen: range | npt.NDArray[np.int64], block: npt.NDArray[Any]) -> None:
        """Store a dense block to rows, none of which repeats."""
        if isinstance(chosen, range) and (chosen.step == 1 or len(chosen) < 2):
            source = self._attachment.operands.placed(block)
            self._move("scatter", chosen, source)
            source.release()
        else:
            self.scatter(host_index(chosen) if isinstance(chosen, range) else chosen, block)

    def flush(self) -> None:
        """Write dirty lines back and make them durable: after it, a crash loses nothing stored.

        Blocks, and waits for asynchronous calls made before, whose failures stay with their
        futures. If a line cannot be written, raises StorageError; the line stays dirty in the
        cache, and a later flush tries again. If the storage itself cannot flush, all that was
        written since the last flush may be lost, and the storage does not say what. Then every
        later flush and `close` raise this error again: open the array anew and store again.
        """
        self._after_calls(self._attachment.flush)

    # Introspection.

    @property
    def stats(self) -> Stats:
        """A snapshot of the counters; waits for the array's other calls.

        As `explain` it neither raises what earlier calls have failed with, nor refuses while a
        pipeline has the array.
        """
        return self._fact(self._attachment.stats)

    @contextlib.contextmanager
    def _watched(self, watcher: Watcher) -> Iterator[None]:
        """Show a watcher what calls are about to move: byte offsets in the array, and bytes."""
        self._check_usable()
        watchers = self._attachment.launcher.watchers
        watchers.append(watcher)
        try:
            yield
        finally:
            watchers.remove(watcher)

    def explain(self) -> Explanation:
        """Return which route is used and why, and what the counters advise.

        Blocks as `stats` does.
        """
        from flashwarp.array.explanation import explain

        return self._fact(functools.partial(explain, self._attachment, self._why))

    @property
    def kernel_handle(self) -> ArrayStruct:
        """The struct `fw::array<T>` of this array, for the parameters of your own kernels.

        Valid until `close`. After launches that use it, call `wait`.
        """
        self._check_usable()
        return ArrayStruct.from_buffer_copy(self._attachment.launcher.handle)

    @property
    def in_place(self) -> int | None:
        """Device address at which kernels may read the elements past the cache, or None.

        An address is given if the array uses the in-place route, lies on one storage that is open
        for reading, and no drive is modelled; for a file, also only on a GPU, if its data begins at
        a multiple of 16 bytes, and while its lease holds or with ``immutable=True``. Valid until
        `close`. After a writer has opened the file, this is None, and memory at an earlier address
        may show the old file, in part or whole: ask again before each launch.
        """
        self._check_usable()
        return self.service.in_place or None

    def check(self) -> None:
        """Raise what kernels have noted so far: failed transfers and indices out of bounds.

        Does not wait for streams: what is queued on one may note more. If something was noted, it
        waits for calls of other threads, which raise their failures themselves. Use it after
        replays of CUDA graphs that use the array, once their stream is done. Every other call does
        the same first. Takes a microsecond if there is nothing.

        Raises
        ------
        StorageError, BoundsError
            As `wait`.
        """
        self._begin()
        self._attachment.check()

    def wait(self, stream: object = None) -> None:
        """Wait for your own kernels that use this array, and raise the failures of their transfers.

        Parameters
        ----------
        stream : optional
            The stream of the launches. Default: the library's own stream, and each stream that you
            gave to a launch or call since the last wait.

        Notes
        -----
        Blocks until the stream is idle, for no longer than the time limit of the device.

        Raises
        ------
        StorageError
            If a transfer failed. Then results that kernels computed from this array are invalid.
        BoundsError
            If kernels used an index out of bounds. Such a load gives zero, and such a store does
            nothing. It stops kernels that were compiled with ``debug=True``, and the process cannot
            use the GPU any more.
        DeviceTimeout
            If the stream did not become idle in time.
        """
        self._check_usable()
        run = None if stream is None else stream_handle(stream)
        try:
            # First, and outside of the turn: what is raised then is all that the stream has done.
            self._attachment.idle(run)
        except DeviceError as error:
            self._raise_reason(error)
        self._finish_kernels(run)

    @_locked
    def _finish_kernels(self, run: int | None) -> None:
        if run is None:
            self._attachment.idle_streams()
        self._attachment.finish("a kernel", run)

    @property
    def service(self) -> Service:
        """The service of the array: its `stats`, `describe`, route and queue pairs."""
        return self._attachment.launcher.service

    # The end.

    def close(self) -> None:
        """Flush, wait for what is in flight, and release everything. May be called twice.

        Blocks. What stands on the array, such as pipelines, is closed first. Refuses while a CUDA
        graph with calls of the array exists, or a stream that had calls of it is being captured. If
        the flush fails, everything is released all the same, and the error is raised: it says what
        could not be written and is lost. Unobserved failures of asynchronous calls are raised too.
        If a signal handler raises meanwhile, as that of Ctrl-C does, the array is open and usable
        afterwards, or closed.

        Stream 2, the per-thread default stream, stands for another stream in each thread. `close`
        waits for the calling thread's alone: first call ``wait(2)`` in the other threads
        that gave it to calls.
        """
        if "_attachment" not in self.__dict__:  # pickled, and not used since
            self._recipe = None
            return
        failure = self._attachment.close()
        if failure is not None:
            raise failure

    def drop_cache(self, drop_dirty: bool = False) -> None:
        """Remove this array's lines from the cache, as before a cold start. Flushes dirty lines.

        Waits for asynchronous calls made before. Lines to which other calls and kernels store
        meanwhile stay in the cache, dirty: nothing is lost, and the next flush writes them back.

        Parameters
        ----------
        drop_dirty : bool
            Give up lines that cannot be written, instead of raising. What was stored in them since
            the last flush is lost.
        """
        drop_dirty = flag("drop_dirty", drop_dirty)
        self._after_calls(lambda: self._attachment.drop_lines(drop_dirty))

    def refresh(self) -> None:
        """Remove what was read before from the cache, so that later reads see the present file.

        Use it in a reader beside a writer in another process, after the writer's `flush`. Blocks,
        and waits for asynchronous calls made before. Flushes dirty lines of a writable array.

        Raises
        ------
        StorageError
            If the file was cut short (ENODATA), or replaced or removed (ESTALE). The array goes on
            with the file that it has open. Open the path again to see the new one.
        """
        self._after_calls(self._attachment.refresh)

    def __del__(self) -> None:
        attachment: Attachment | None = self.__dict__.get("_attachment")
        if attachment is None or attachment.closed or attachment.in_child:
            return
        try:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)
        finally:  # a warning may be raised as an error
            attachment.close_lost()

    # Pickling.

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self._recipe is None:
            raise CopyError(
                f"{self!r} cannot be pickled, only an array that was opened from a path: open it "
                "in the other process"
            )
        return _unopened, (self._recipe.of(self.shape, self.dtype), self._format)

    def __getattr__(self, name: str) -> Any:
        # Until an unpickled array is opened, it has only what `_unopened` gives it.
        if name.startswith("__") or "_attachment" in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        endings.uninterrupted(self._open)
        return getattr(self, name)

    def _leave_to_parent(self) -> None:
        """Open anew on first use, in a forked child."""
        attachment: Attachment | None = self.__dict__.get("_attachment")
        if attachment is None or attachment.closed or self._not_in_child(attachment):
            return
        assert self._recipe is not None
        _of_parent.append(attachment)
        del self._attachment
        self._recipe = _Inherited(self._recipe.of(self.shape, self.dtype))

    def _not_in_child(self, attachment: Attachment) -> str:
        """Return why a forked child cannot open the array by itself, and what to do; or nothing."""
        if attachment.writable:
            return (
                "for storing, and two processes must not store to one file: flush it, and open it "
                "there with mode='r'"
            )
        if attachment.device.kind != "cpu":
            return (
                "on a GPU, which a forked child cannot use: start children with 'spawn', or open "
                "it with device='cpu' for them"
            )
        if self._recipe is None:
            return "from a storage, which belongs to that process: open it there from a path"
        return ""

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
            handles.point_to(self._handle, self)

    # Turns and checks.

    @_locked
    def _act(self, act: Callable[[], R]) -> R:
        self.device.refuse_capture("this call", "make it before or after the capture")
        return act()

    def _fact(self, read: Callable[[], R]) -> R:
        """Read a fact in the array's turn, whoever has the array and whatever has failed."""
        self._check_usable()
        try:
            return endings.holding((self.cache.turn,), read)
        except DeviceError as error:
            self._raise_reason(error)

    def _after_calls(self, act: Callable[[], None]) -> None:
        """Wait for asynchronous calls made before, then act in the array's turn."""
        self._begin()
        self.device.refuse_capture("this call", "make it before or after the capture")
        self._attachment.calls.wait()
        self._act(act)

    def _come_behind(self, stores: bool) -> None:
        """Let a load or store come behind the asynchronous calls before it; see `Calls`.

        Checks first that the array can be used: before its turn, which another thread may have held
        when this process was forked. Who is in the turn already has come behind them.
        """
        self._check_usable()
        if not self.cache.turn._is_owned():
            self._attachment.calls.come_behind(stores)

    def _check_usable(self) -> None:
        if self._attachment.closed:
            raise ClosedError(f"the array {self._place} is closed")
        if self._attachment.in_child:
            raise ForkError(
                f"the array was opened by process {self._attachment.opened_by} "
                f"{self._not_in_child(self._attachment)}"
            )

    def _begin(self) -> None:
        """Check that a call can be made, and raise the failures of earlier calls."""
        attachment = self._attachment
        if attachment.closed or attachment.in_child:
            self._check_usable()
        attachment.calls.raise_lost()
        attachment.raise_noted()
        if attachment.launcher.service.changes != attachment.row_calls.changes:
            self._drop_old_lines()

    def _drop_old_lines(self) -> None:
        """Remove lines that were read before a writer opened the file, or before it closed it.

        Raises
        ------
        StorageError
            If rows may have been read in place while they were written.
        RouteError
            If only the in-place route is allowed.
        ArgumentError
            If the array was handed over.
        """
        self._refuse_others(None)
        stale = endings.holding([self.cache.turn], self._leave_old_lines)
        if stale is not None:
            raise stale

    def _hand_over(self, owner: object, holder: str, before: object = None) -> None:
        """Give the storage to one who moves rows past the cache; other calls are refused.

        If the owner `before` has it, it leaves it to this one. All calls compare the changes with
        the service's, so they cost nothing more.
        """
        if before is None or self._owner is not before:
            self._after_calls(lambda: self._attachment.drop_lines(drop_dirty=False))
        self._owner, self._holder = owner, holder
        self._attachment.row_calls.changes = -1

    def _refuse_others(self, owner: object) -> None:
        """Raise ArgumentError if the array was handed over to another owner."""
        if self._owner is not owner and self._holder:
            raise ArgumentError(
                f"the array {self._place} belongs to {self._holder} now: use that, or close it "
                "first"
            )

    def _take_back(self, owner: object) -> None:
        """End the `_hand_over` to an owner, and begin the next call without old lines."""
        if self._owner is owner:
            self._owner, self._holder = None, ""

    def _leave_old_lines(self) -> StorageError | None:
        service = self.service
        changes = service.changes
        if changes == self._attachment.row_calls.changes:
            return None
        if self.strict == "in_place" and service.route != self.strict:
            raise RouteError(
                f"strict='in_place', but a writer has opened {self._place}, so it cannot be read "
                "in place any more: close the array, and open it again when the writer has closed "
                "the file"
            )
        self._attachment.drop_lines(drop_dirty=False)
        self._attachment.row_calls.changes = changes
        return service.take_stale()

    def _need_writable(self) -> None:
        if not self.writable:
            raise ReadOnlyError('the array is read-only: open it with mode="r+"')

    def _need_axis(self) -> None:
        if not self.shape:
            raise BoundsError("an array without axes has no rows: use x[...]")

    # Launches.

    def _move(
        self,
        verb: Verb,
        chosen: range | Index,
        rows: Rows,
        stream: object = None,
        sms: int | None = None,
    ) -> None:
        """Copy chosen rows; those of a range lie back to back."""
        if not len(chosen) or not self._format.row_bytes:
            return
        run = self._join(verb, chosen, rows, stream)
        launcher = self._attachment.launcher
        launcher.move(verb, chosen, rows.address, run, sms=sms)
        self._lend(chosen, rows, run, stream)
        self._finish(verb, run, stream)
        if stream is None and launcher.copies is not None and launcher.copies.spoilt():
            # Warps, which read it now, know what a writer may change.
            launcher.move(verb, chosen, rows.address, run)
            self._finish(verb, run, stream)

    def _choose(self, idx_or_slice: object, stream: object) -> range | Index:
        """Check which rows a call is about, and place their numbers where kernels read them."""
        return self._operands_of(stream).choose(idx_or_slice)

    _place_ids = _locked(_choose)

    @_locked
    def _queue(
        self, verb: Verb, chosen: range | Index, rows: Rows, stream: object, sms: int
    ) -> None:
        """Queue the copying of chosen rows on a stream, by at most so many multiprocessors."""
        self._move(verb, chosen, rows, stream, sms)

    def _operands_of(self, stream: object) -> Operands:
        """Return what copies the host operands of a call, perhaps on a stream of the caller's."""
        attachment = self._attachment
        own = stream is None or self.device.kind == "cpu"
        return attachment.operands if own else attachment.calls.operands

    def _lend(
        self, chosen: range | Index, rows: Rows | None, run: int | None, stream: object
    ) -> None:
        """Keep the copies of host operands until a stream of the caller's has passed the call."""
        index = chosen.held if isinstance(chosen, Index) else None
        copies = [each for each in (index, None if rows is None else rows.held) if each is not None]
        if copies and stream is not None and run is not None:
            self._attachment.calls.lend(copies, run)

    def _join(
        self, what: str, chosen: range | Index, rows: Rows | None, stream: object
    ) -> int | None:
        """Return the stream that a launch runs on; what its operands need comes before it there."""
        device = self.device
        if device.kind == "cpu":
            return None
        if stream is not None:
            handle = stream_handle(stream)
            held = (isinstance(chosen, Index) and chosen.held) or (rows and rows.held)
            if held and device.capture(handle) is not None:
                raise CaptureError(
                    f"{what} with operands on the host cannot become part of a CUDA graph, because "
                    "it copies them now: put them on the GPU"
                )
            self._attachment.join(handle)
            # Uploads, and calls that are queued on the library's own stream, come first.
            device.order(None, handle)
            return handle
        instead = "give it stream=, and operands on the GPU"
        if isinstance(chosen, Index) and chosen.library != "numpy":
            handle = device.current_stream(chosen.library).handle
            if device.capture(handle) is not None:
                raise CaptureError(
                    f"{what} waits for its end, which a stream in a capture cannot: {instead}"
                )
            if rows is not None and rows.library not in ("numpy", chosen.library):
                device.refuse_capture(what, instead)
                device.order(device.current_stream(rows.library).handle, handle)
            device.order(None, handle)
            self._attachment.note_blocking(handle)
            return handle
        device.refuse_capture(what, instead)
        if rows is not None and rows.library != "numpy":
            # The work that computes the values comes first.
            device.order(device.current_stream(rows.library).handle, None)
        return None

    def _finish(self, what: str, run: int | None, stream: object) -> None:
        """Wait for a launch on `run`, unless the caller has chosen the stream."""
        if stream is None:
            self._attachment.finish(what, run)

    def _join_launch(self, stream: object) -> tuple[object, ...]:
        """Prepare for a launch of a caller's kernel, in the cache's turn; return what it uses."""
        attachment = self._attachment
        if attachment.closed or attachment.in_child:
            self._check_usable()
        launcher = attachment.launcher
        if launcher.service.changes != attachment.row_calls.changes:
            self._drop_old_lines()
        if stream is None:
            attachment.note_launch()
        else:
            attachment.join(stream_handle(stream), refreshes=True)
        return launcher.wake()


def _unopened(recipe: Recipe, format: RowFormat) -> Array:  # noqa: A002
    """Make an array that is opened when it is first used."""
    array = Array.__new__(Array)
    array.__dict__.update(_recipe=recipe, _format=format)
    return array


@dataclass(frozen=True)
class _Inherited:
    """How a forked child opens an array of its parent: as if it had come by a pickle."""

    recipe: Recipe

    def open(self) -> Array:
        try:
            own: Recipe = pickle.loads(pickle.dumps(self.recipe))
        except Exception as error:
            raise ForkError(
                f"this forked child cannot open the array by itself: {error}; open it there"
            ) from error
        return own.open()

    def of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Recipe:
        return self.recipe.of(shape, dtype)


def _after_fork() -> None:
    global _opening
    _opening = endings.Lock()  # another thread of the parent may have held it
    for array in handles.arrays():
        array._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
