"""`Array`: an array larger than memory, gathered and scattered by device threads.

What a user holds. Its calls become launches of the row kernels (`launcher`) on what the caller
brings (`operands`), and what went wrong below becomes typed errors (`failures`). What it is made
of, and how that comes to rest and to its end, is in `attachment`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from flashwarp import rows
from flashwarp.attachment import Attachment
from flashwarp.cache import Cache
from flashwarp.device import Device
from flashwarp.errors import (
    BoundsError,
    ClosedError,
    DataPathError,
    DeviceError,
    ForkError,
    ReadOnlyError,
)
from flashwarp.futures import Future
from flashwarp.launcher import Watcher
from flashwarp.operands import Index, Operands, is_foreign
from flashwarp.rows import ArrayStruct
from flashwarp.spread import AnyController
from flashwarp.stats import Stats
from flashwarp.storage import Storage

__all__ = ["Array", "Explanation"]

P = ParamSpec("P")
R = TypeVar("R")

# What open arrays need to close. An array that is lost as a part of a cycle is closed by the
# garbage collector, which would otherwise have freed their memory first: it runs the callbacks of
# weak references before `__del__`.
_kept: dict[int, Attachment] = {}


@dataclass(frozen=True)
class Explanation:
    """Which way an array's data goes, and why; `str` gives a text for people."""

    path: str
    """"mapped", "bounce" or "direct"."""
    reason: str
    storage: dict[str, Any]
    controller: dict[str, Any]
    cache: str
    device: str

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
            )
        )


def _locked(
    method: Callable[Concatenate[Array, P], R],
) -> Callable[Concatenate[Array, P], R]:
    """One operation of an array at a time: errors are then of the call that raises them."""

    @functools.wraps(method)
    def call(self: Array, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            self._begin()
            try:
                return method(self, *args, **kwargs)
            except DeviceError as error:
                reason = self._attachment.reason_of(error)
                if reason is error:
                    raise
                raise reason from error

    return call


class Array:
    """An array in a storage, read and written through a cache in device memory.

    Made by `flashwarp.open`, `create` and `from_storage`. Indices and results are numpy arrays on
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

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> with fw.create("rows.npy", (1000, 64), "float32", device="cpu") as x:
    ...     x[10:12] = 1.5
    ...     x.gather(np.array([11, 3]))[:, 0].tolist()
    [1.5, 0.0]
    """

    def __init__(
        self,
        storage: Storage,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        cache: Cache,
        owns_cache: bool,
        controller: AnyController,
        release: Callable[[], None] = lambda: None,
        why: str = "",
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.cache = cache
        self._storage = storage
        self._controller = controller
        self._why = why
        self._lock = cache.turn
        self._pid = os.getpid()
        self._closed = False
        self._changes = 0
        self.strict: str | None = None
        self._operands = Operands(self.device, dtype, self._row_shape, self._row_count, self.device)
        self._attachment = Attachment(
            storage,
            cache=cache,
            owns_cache=owns_cache,
            controller=controller,
            operands=self._operands,
            shape=shape,
            row_bytes=self._row_bytes,
            row_count=self._row_count,
            release_storage=release,
        )
        self._volume = self._attachment.volume
        self._launcher = self._attachment.launcher
        self._calls = self._attachment.calls
        _kept[id(self)] = self._attachment

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
        """Whether `close` was called."""
        return self._closed

    @property
    def writable(self) -> bool:
        """Whether rows can be stored."""
        return self._storage.writable

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        state = "closed " if self._closed else ""
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
            Contiguous array of shape ``idx.shape + self.shape[1:]`` and this dtype.
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
        target = self._operands.target(out, index.shape, index.library)
        if index.size and self._row_bytes:
            self._move_rows("gather", index, target.address, stream)
        return target.finish(stream)

    @_locked
    def __getitem__(self, key: Any) -> Any:
        if is_foreign(key):
            return self.gather(key)
        chosen = rows.select(key, self.shape)
        result = self._read_selection(chosen)
        if chosen.scalar:
            result = result.reshape(self._row_shape)
        if chosen.rest:
            lead = () if chosen.scalar else (slice(None),) * (result.ndim - len(self._row_shape))
            result = result[lead + chosen.rest]
        return result[()] if result.ndim == 0 else result

    def _read_selection(self, chosen: rows.RowSelection) -> npt.NDArray[Any]:
        if isinstance(chosen.rows, range) and (chosen.rows.step == 1 or len(chosen.rows) < 2):
            result = np.empty((len(chosen.rows), *self._row_shape), self.dtype)
            if result.nbytes:
                self._move_range("gather", chosen.rows, result)
            return result
        index = np.asarray(chosen.rows, np.int64)
        return np.asarray(self.gather(index))

    def read_async(self, idx: Any, out: Any = None, stream: Any = None) -> Future[Any]:
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
        >>> with fw.create("rows.npy", (1000, 64), "float32", device="cpu") as x:
        ...     written = x.write_async(slice(10, 12), 1.5)
        ...     written.result()  # and meanwhile, something else
        ...     x.read_async(np.array([11, 3])).result()[:, 0].tolist()
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
            chosen = rows.select(idx_or_slice, self.shape).rows
            if isinstance(chosen, range):
                chosen = np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64)
            idx_or_slice = chosen
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
            Broadcastable to ``idx.shape + self.shape[1:]``; on a GPU an array there, of this shape
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

    def write_async(self, idx: Any, values: Any, stream: Any = None) -> Future[None]:
        """Start storing rows, ``self[idx] = values``, and return a future.

        Parameters
        ----------
        idx : slice, or array of int
            As for `read_async`. Where an index repeats, one of its rows wins.
        values : array
            As for `scatter`. Leave it unchanged until the future is done.
        stream : optional
            As for `read_async`.

        Returns
        -------
        Future
            Of None. When it is done the rows are in the cache; `flush` makes them durable.

        Raises
        ------
        ReadOnlyError
            When the array was opened with ``mode="r"``.
        BoundsError, IndexDtypeError, ArgumentError, DtypeError, DeviceTimeout
            As for `read_async`.
        """
        self._need_writable()
        self._begin()
        self._need_axis()
        return self._calls.write(idx, values, stream)

    @_locked
    def __setitem__(self, key: Any, value: Any) -> None:
        self._need_writable()
        if is_foreign(key):
            self.scatter(key, value)
            return
        chosen = rows.select(key, self.shape)
        lead = () if chosen.scalar else _row_lead(chosen)
        shape = lead + self._row_shape
        if chosen.rest:
            held = self._read_selection(chosen).reshape(shape)
            held[(slice(None),) * len(lead) + chosen.rest] = np.asarray(value)
            value = held
        block = self._operands.host_values(value, shape)
        if isinstance(chosen.rows, range) and (chosen.rows.step == 1 or len(chosen.rows) < 2):
            if block.nbytes:
                self._move_range("scatter", chosen.rows, block)
            return
        index = np.asarray(chosen.rows, np.int64).reshape(-1)
        block = block.reshape(-1, *self._row_shape)
        last = _last_of_each(index)
        if last is not None:
            index, block = index[last], np.ascontiguousarray(block[last])
        self.scatter(index, block)

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
        with self._lock:
            self._check_usable()
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
        with self._lock:
            self._check_usable()
            self._launcher.watchers.append(watcher)
        try:
            yield
        finally:
            with self._lock:
                self._launcher.watchers.remove(watcher)

    @_locked
    def explain(self) -> Explanation:
        """Tell which data path is used, and why."""
        left = self._controller.changes != 0
        why = f"when it was opened, {self._why}" if left and self._why else self._why
        reason = "; ".join(filter(None, (self._controller.reason, why)))
        return Explanation(
            path=self._controller.path,
            reason=reason,
            storage=self._storage.describe(),
            controller=self._controller.describe(),
            cache=f"{self.cache!r}{self._volume.tier_note()}",
            device=self.device.describe(),
        )

    @property
    def kernel_handle(self) -> ArrayStruct:
        """The struct `fw::array<T>` of this array, for the parameters of kernels of one's own.

        Valid until `close`. After launches that use it, call `synchronize`.
        """
        self._check_usable()
        volume = self._volume
        return ArrayStruct(
            shape=self.cache.geometry,
            cache=self.cache.address,
            volume=volume.address,
            line_begin=volume.line_begin,
            length=self.size,
        )

    @property
    def in_place(self) -> int | None:
        """Address of the elements where kernels may read them past the cache, or None.

        Device-readable memory that nobody writes: the mapped path, one storage opened for reading,
        no modelled drive; of a file, on a GPU. Valid until `close`. A file's address is given for
        as long as its lease holds, or with ``immutable=True``. After a writer has opened the file
        this is None, and what an address taken before shows is the file as it was, in part or
        whole: ask again before each launch.
        """
        self._check_usable()
        return self._controller.in_place or None

    @_locked
    def synchronize(self, stream: Any = None) -> None:
        """Wait for kernels of one's own that use this array, and raise what they met.

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
    def controller(self) -> AnyController:
        """The controller that serves it; CPU launches name it so that their waits serve it too."""
        return self._controller

    # The end.

    def close(self) -> None:
        """Flush, wait for what is in flight, and release everything. May be called twice.

        Blocks. When the flush fails, everything is released all the same and the error raised:
        what could not be written is lost then, and the error says what. So is the failure of an
        asynchronous call that nobody has looked at.
        """
        if os.getpid() != self._pid:
            self._closed = True
            _kept.pop(id(self), None)
            return
        # Not under the lock: callbacks of the calls may need it.
        unseen = self._calls.close()
        with self._lock:
            failure = None if self._closed else self._tear_down()
        if failure is not None and unseen is not None:
            failure.add_note(f"and before, {type(unseen).__name__}: {unseen}")
        if failure is not None or unseen is not None:
            raise failure or unseen  # type: ignore[misc]

    def _tear_down(self) -> Exception | None:
        """Release everything, and return what could not be done."""
        failure = self._attachment.settle()
        self._closed = True
        failure = self._attachment.release(failure)
        _kept.pop(id(self), None)
        return failure

    def drop_cache(self, drop_dirty: bool = False) -> None:
        """Empty the cache of this array's lines, as a cold start has it. Dirty lines are flushed.

        Parameters
        ----------
        drop_dirty : bool
            Give up lines that cannot be written, instead of raising.
        """
        self._begin()
        self._calls.wait()
        self._drop_cache_in_turn(drop_dirty)

    @_locked
    def _drop_cache_in_turn(self, drop_dirty: bool) -> None:
        self._attachment.drop_lines(drop_dirty)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not hasattr(self, "_calls") or self._closed or os.getpid() != self._pid:
            return
        try:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)
        finally:  # where warnings are errors, too
            self.close()

    # Checks.

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"the array {self._storage.path or 'in memory'} is closed")
        if os.getpid() != self._pid:
            raise ForkError(
                f"the array was opened by process {self._pid}; its threads do not exist in a "
                "forked child: open it again there, or start children with 'spawn'"
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
            When only the mapped path was allowed.
        """
        with self._lock:
            changes = self._controller.changes
            if changes == self._changes:
                return
            if self.strict == "mapped" and self._controller.path != self.strict:
                raise DataPathError(
                    f"strict='mapped', but {self._storage.path} was opened for writing by "
                    "somebody, so it cannot be read in place any more: close the array, and open "
                    "it again when the writer has closed the file"
                )
            self._attachment.drop_lines(drop_dirty=False)
            self._changes = changes
            stale = self._controller.take_stale()
        if stale is not None:
            raise stale

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

    def _join_launch(self, stream: Any) -> tuple[int, ...]:
        """Take part in a launch of somebody's own kernel, in the cache's turn; whom it serves."""
        self._check_usable()
        if self._controller.changes != self._changes:
            self._drop_old_lines()
        if stream is not None:
            self._attachment.note_stream(stream)
        return self._launcher.wake()


def _row_lead(chosen: rows.RowSelection) -> tuple[int, ...]:
    return (len(chosen.rows),) if isinstance(chosen.rows, range) else chosen.rows.shape


def _last_of_each(index: npt.NDArray[np.int64]) -> npt.NDArray[np.intp] | None:
    """Positions of the last occurrence of each index, or None when none repeats."""
    values, first = np.unique(index[::-1], return_index=True)
    if len(values) == len(index):
        return None
    return index.size - 1 - first
