"""`Array`: an array larger than memory, gathered and scattered by device threads.

This is what a user holds. Its calls check their operands (`operands`) and launch the row kernels
(`launcher`). `attachment` owns the parts of an array, waits for them and ends them.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from flashwarp import endings
from flashwarp._names import renamed
from flashwarp.array import handles, keys, moving
from flashwarp.array.attachment import Attachment
from flashwarp.array.futures import Future
from flashwarp.array.protocols import Protocols
from flashwarp.array.reopening import Recipe, reopen
from flashwarp.array.selection import select
from flashwarp.array.stats import Stats
from flashwarp.array.turns import Turns, loads, stores
from flashwarp.cache.cache import Cache
from flashwarp.config import flag
from flashwarp.device import Device, stream_handle
from flashwarp.errors import ArgumentError, CopyError, DeviceError
from flashwarp.launch.operands import in_memory, is_foreign
from flashwarp.launch.rows import ArrayStruct, RowFormat
from flashwarp.nvme import Service
from flashwarp.observing.ranges import marked

if TYPE_CHECKING:
    from flashwarp.explanation import Explanation


@renamed
@marked
class Array(Protocols):
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
    that was opened from a path can be pickled and deep-copied: who gets it opens the path again,
    with the same settings, when the array is first used. Copying or pickling another array raises
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
        self,
        attachment: Attachment,
        *,
        why: str = "",
        recipe: Recipe | None = None,
        strict: str | None = None,
    ) -> None:
        if not isinstance(attachment, Attachment):
            raise ArgumentError("arrays are made by flashwarp.open and flashwarp.create")
        self.strict = strict
        self._attachment = attachment
        self._format = attachment.launcher.format
        self._why = why
        self._recipe = recipe
        self._turns = Turns(attachment, recipe, strict)
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
            rows = attachment.row_calls.gather(idx, out, stream, attachment.finish)
        except DeviceError as error:
            self._turns.raise_reason(error)
        return self._gather(in_memory(idx), out, stream) if rows is None else rows

    _gather = loads(moving.gather)

    def __getitem__(self, key: object) -> Any:
        """Read what numpy selects from an array in memory, and return it as numpy does.

        Blocks. Takes integers, slices, Ellipsis, None, and integer or boolean arrays on any axes.
        If the whole key is an array of another library, `gather` reads its rows. Reads whole rows
        of the first axis, but on the CPU device only the columns that integers and slices name, as
        ``x[i, j]`` and ``x[:, 2:5]``. If another key takes a part of rows, as ``x[:, [2, 5]]``
        does, they are read in blocks of `config.key_bytes`. The result is always a copy, never a
        view of the array.

        Raises
        ------
        BoundsError, IndexDtypeError, ArgumentError
            For what numpy refuses, single booleans and names of fields; nothing is read then.
        """
        attachment = self._attachment
        try:
            item = attachment.row_calls.item(key, attachment.finish)
        except DeviceError as error:
            self._turns.raise_reason(error)
        if item is not None:
            return item
        key = in_memory(key)
        if is_foreign(key):
            return self.gather(key)
        return self._select(select(key, self.shape))

    _select = loads(keys.read)

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
        self._turns.begin()
        self._format.need_axis()
        return self._attachment.calls.make("gather", idx, out, stream, flag("ordered", ordered))

    def prefetch(self, idx_or_slice: object, stream: object = None) -> None:
        """Start fetching rows into the cache; does not wait for their data.

        Takes the rows that `gather` takes, and a stream as `gather` does. Skips lines that find no
        free frame.
        """
        attachment = self._attachment
        try:
            if attachment.row_calls.prefetch(idx_or_slice, stream, attachment.finish):
                return
        except DeviceError as error:
            self._turns.raise_reason(error)
        self._prefetch(in_memory(idx_or_slice), stream)

    _prefetch = loads(moving.prefetch)

    # Writing.

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
        self._scatter(in_memory(idx), in_memory(values), stream)

    _scatter = stores(moving.scatter)

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
        self._attachment.need_writable()
        self._turns.begin()
        self._format.need_axis()
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
        key, value = in_memory(key), in_memory(value)
        if is_foreign(key):
            self.scatter(key, value)
            return
        self._store(select(key, self.shape), value)

    _store = stores(keys.store)

    def flush(self) -> None:
        """Write dirty lines back and make them durable: after it, a crash loses nothing stored.

        Blocks, and waits for asynchronous calls made before, whose failures stay with their
        futures. If a line cannot be written, raises StorageError; the line stays dirty in the
        cache, and a later flush tries again. If the storage itself cannot flush, all that was
        written since the last flush may be lost, and the storage does not say what. Then every
        later flush and `close` raise this error again: open the array anew and store again.
        """
        self._turns.act_after_calls(self._attachment.flush)

    # Introspection.

    @property
    def stats(self) -> Stats:
        """A snapshot of the counters; waits for the array's other calls.

        As `explain` it neither raises what earlier calls have failed with, nor refuses while a
        pipeline has the array.
        """
        return self._turns.fact(self._attachment.stats)

    def explain(self) -> Explanation:
        """Return which route is used and why, and what the counters advise.

        Blocks as `stats` does.
        """
        from flashwarp.array.explanation import explain

        return self._turns.fact(functools.partial(explain, self._attachment, self._why))

    @property
    def kernel_handle(self) -> ArrayStruct:
        """The struct `fw::array<T>` of this array, for the parameters of your own kernels.

        Valid until `close`. After launches that use it, call `wait`.
        """
        self._turns.check_usable()
        return self._attachment.launcher.hand_out()

    @property
    def in_place(self) -> int | None:
        """Device address at which kernels may read the elements past the cache, or None.

        An address is given if the array uses the in-place route, lies on one storage that is open
        for reading, and no drive is modelled; for a file, also only on a GPU, if its data begins at
        a multiple of 16 bytes, and while its lease holds or with ``immutable=True``. Valid until
        `close`. After a writer has opened the file, this is None, and memory at an earlier address
        may show the old file, in part or whole: ask again before each launch.
        """
        self._turns.check_usable()
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
        self._turns.begin()
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
        self._turns.check_usable()
        run = None if stream is None else stream_handle(stream)
        try:
            # First, and outside of the turn: what is raised then is all that the stream has done.
            self._attachment.idle(run)
        except DeviceError as error:
            self._turns.raise_reason(error)
        self._finish_kernels(run)

    @loads
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
        if (failure := self._attachment.close()) is not None:
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
        self._turns.act_after_calls(lambda: self._attachment.drop_lines(drop_dirty))

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
        self._turns.act_after_calls(self._attachment.refresh)

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
            raise self._no_member(name)
        endings.uninterrupted(functools.partial(reopen, self))
        return getattr(self, name)

    # For pipelines.

    _place_ids = loads(moving.place_ids)
    _queue = loads(moving.move)


def _unopened(recipe: Recipe, format: RowFormat) -> Array:  # noqa: A002
    """Make an array that is opened when it is first used."""
    array = Array.__new__(Array)
    array.__dict__.update(_recipe=recipe, _format=format)
    return array
