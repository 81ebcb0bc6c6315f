"""`Pipeline`: batches of rows arrive in device memory while the device computes.

Batches pass in the order of their calls. On a GPU nothing here waits: each call queues work on a
stream of the pipeline's own and orders it with the caller's stream by events.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from flashwarp import endings
from flashwarp._names import renamed
from flashwarp.array.array import Array
from flashwarp.config import integer, time_limit_s
from flashwarp.device import CudaDevice, stream_handle
from flashwarp.errors import ArgumentError, DeviceTimeout, FlashwarpError, ReadOnlyError
from flashwarp.explanation import Explanation
from flashwarp.launch.operands import Index
from flashwarp.observing import counting
from flashwarp.observing.ranges import marked
from flashwarp.pipeline.buffers import Buffers, imported, library_of
from flashwarp.pipeline.choice import choose_route
from flashwarp.pipeline.device_calls import DeviceCalls
from flashwarp.pipeline.engines import make_engine
from flashwarp.pipeline.explanation import PipelineStats
from flashwarp.pipeline.ids import check_rows, refuse_repeats
from flashwarp.pipeline.kernels import KernelBatches
from flashwarp.pipeline.route import GpuRoute
from flashwarp.pipeline.ticket import Ticket
from flashwarp.pipeline.tiles import tiles

_DEPTH_MAX = 1024
_ROWS_MAX = 1 << 40


@renamed
@marked
class Pipeline(endings.OfProcess):
    """Batches of rows that arrive in device memory while the device computes.

    `prefetch` starts a batch and returns at once; `take` gives the oldest one to the
    caller's stream. Between the two the device computes. Row i of a batch is the one that its i-th
    id names.

    Parameters
    ----------
    array : Array
        Whose rows are read, and written by `write_back`. It stays open while the pipeline is.
    batch_rows : int
        The most rows of a batch.
    depth : int
        Batches that may be in flight: prefetched and not yet taken. The pipeline allocates
        ``depth + 1`` buffers of `batch_rows` rows in device memory, at the first `prefetch`.
    stream : optional
        The caller's stream on a GPU, in any form. Default: the current stream of the library of the
        ids, at each call.
    sms : int, optional
        The most multiprocessors that move rows beside the caller's kernels. 0: host threads and
        copy engines move them, which costs cores instead. Default: 4, which fill the link, if the
        GPU reads the rows in place, and else 0.
    workers : int or (int, int), optional
        Host threads, or their limits, between which they follow the load. Default: a quarter to a
        half of the storage's controllers, or of the cores if there is one. On the CPU device they
        read past the cache, and only if this is given.
    library : {"torch", "cupy", "numpy"}, optional
        What the buffers are arrays of. Default: of the library of the ids of each batch.
    timeout_s : float, optional
        The time limit of a batch and of what waits: `take` on the CPU device, and `close`. Default:
        `Config.timeout_s`.

    Raises
    ------
    ArgumentError
        For an array without axes, and numbers out of their limits.
    RouteError
        If `sms` is 0 or `workers` is given, and host threads cannot move the rows.

    Notes
    -----
    The buffer that `take` returns belongs to the caller until the next `take`. Then
    the pipeline fills it again, after all work that the caller's stream had at that moment. If
    another stream uses a buffer, let the caller's stream wait for that one first.

    On a GPU a batch reads what the array holds when its turn comes: stores that the caller's stream
    has queued before `prefetch` are seen. Ids on a GPU are not copied to the host, and the call can
    be captured into a CUDA graph if multiprocessors move the rows.

    Host threads read and write rows past the array's cache. If the array is writable and host
    threads move its rows, it is the pipeline's until the pipeline is closed: other calls on the
    array are refused.

    Batches that share rows act in the order of their calls, in flight or not.

    Serialise the calls of a pipeline: one thread at a time.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> with fw.create("rows.npy", "float32", (1000, 64), device="cpu") as x:
    ...     x[:] = np.arange(1000, dtype="float32")[:, None]
    ...     batches = [np.array([7, 3]), np.array([999])]
    ...     with fw.Pipeline(x, batch_rows=2) as pipeline:
    ...         for rows, ids in pipeline.iterate(batches):
    ...             print(ids.tolist(), rows[:, 0].tolist())
    [7, 3] [7.0, 3.0]
    [999] [999.0]
    """

    _kind = "pipeline"
    _needs: Mapping[str, Any] = {}
    """What an engine may leave out."""

    def __init__(
        self,
        array: Array,
        batch_rows: int,
        depth: int = 2,
        stream: object = None,
        *,
        sms: int | None = None,
        workers: int | tuple[int, int] | None = None,
        library: str = "",
        timeout_s: float | None = None,
    ) -> None:
        if not isinstance(array, Array):
            raise ArgumentError(f"a pipeline reads a flashwarp.Array, not {type(array).__name__}")
        if not array.shape:
            raise ArgumentError("a pipeline moves rows, and an array without axes has none")
        array._turns.check_usable()
        super().__init__()
        self.array = array
        self.batch_rows = integer("batch_rows", batch_rows, 1, _ROWS_MAX)
        self.depth = integer("depth", depth, 1, _DEPTH_MAX)
        self._stream = stream
        self._library = imported(library)
        self._buffers = Buffers(array, self.batch_rows, self.depth + 1)
        self._reads: deque[Ticket] = deque()
        self._writes: deque[Ticket] = deque()
        self._stats = PipelineStats()
        self._kernels: KernelBatches | None = None
        limit_s = time_limit_s(timeout_s)
        self._make_engine = partial(
            make_engine, array, self.batch_rows, self.depth, workers, limit_s
        )
        make = partial(self._make_engine, **self._needs)
        self._route = choose_route(array, make, sms, workers, limit_s)
        self._explanation: Explanation | None = None
        self._entry = _Entry(self)
        try:
            self._entry.enter()
            self._route.begin()
        except BaseException:
            self._closed = True
            self._entry.leave()
            self._route.close()
            raise

    # Reads.

    def prefetch(self, ids: object) -> Ticket:
        """Start a batch: the rows that `ids` name. Never waits.

        Parameters
        ----------
        ids : array of int64 or int32, range, or slice
            At most `batch_rows` rows of the first axis, on one axis; negative ones count from the
            end, and a row may occur more than once. On a GPU they may be an array of torch, cupy or
            numba in its memory, which the caller's stream computes: leave it unchanged until
            `take`.

        Returns
        -------
        Ticket
            Of the batch.

        Raises
        ------
        ArgumentError
            If there are more than `batch_rows` ids, they have several axes, or `depth` batches wait
            to be taken. Nothing was started.
        BoundsError
            If an id on the host is out of bounds. If one on a GPU is, its row is zeros, and a later
            call, `Array.check` or `Array.wait` raises.
        IndexDtypeError
            For ids of another dtype.
        """
        self._check_usable()
        if len(self._reads) >= self.depth:
            raise ArgumentError(
                f"{len(self._reads)} batches are prefetched and not taken, as many as "
                f"depth={self.depth} allows: take one first, or make the pipeline deeper"
            )
        self.array._turns.check_usable()
        self._route.check()
        chosen, library = self._route.place(ids)
        count = self._count(chosen)
        stream = self._stream_of(library)
        buffer = self._buffers.take(self._library or library, count, stream)
        ticket = Ticket(self._route, "prefetch", count, buffer, ids)
        self._route.read(chosen, buffer, stream, ticket)
        self._reads.append(ticket)
        self._buffers.keep()
        self._stats.note(ticket.route, "prefetch", count, count * self._row_bytes)
        return ticket

    def take(self) -> Any:
        """Give the oldest batch to the caller's stream, and return its rows.

        On a GPU this never waits: work that the stream gets from now on runs after the batch has
        arrived. On the CPU device it waits for the batch.

        Returns
        -------
        array
            Of shape ``(len(ids), *array.shape[1:])``: a tensor of torch or an array of cupy if the
            ids were one, else a `DeviceArray` on a GPU and a numpy array on the CPU device.

        Raises
        ------
        ArgumentError
            If no batch was prefetched.
        StorageError, BoundsError
            What the batch failed with on the CPU device. The next batches are not affected. On a
            GPU, failures that are known by now, of any batch.
        DeviceTimeout
            If the batch does not arrive in time on the CPU device.
        """
        self._check_usable()
        if not self._reads:
            raise ArgumentError("there is no batch to take: call prefetch(ids) first")
        stream = self._stream_of(self._reads[0].buffer.library)
        self._route.check_capture(self._reads[0], stream)
        ticket = self._reads.popleft()
        self._route.finish(ticket, stream)
        return ticket.buffer.on(stream)

    def iterate(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Prefetch `depth` batches ahead, and yield each one's rows and ids.

        The rows are the loop body's until the next turn. While the body has them, `depth` more
        batches are in flight: what it stores by `write_back` is seen by batches behind these. If
        the loop ends early, the batches that it has not seen are dropped.
        """
        self._check_usable()
        waiting: deque[Any] = deque()
        source = iter(batches)
        begun = len(self._reads)

        def start() -> None:
            for ids in itertools.islice(source, self.depth - len(self._reads)):
                self.prefetch(ids)
                waiting.append(ids)

        try:
            start()
            while waiting:
                rows, ids = self.take(), waiting.popleft()
                failures: list[BaseException] = []
                try:
                    start()  # ahead of the body's work, so that they need not wait for it
                except Exception as error:  # of the caller's iterator, too
                    failures.append(error)
                yield rows, ids
                _raise_first(failures)
        finally:
            while waiting and len(self._reads) > begun and not self._closed:
                waiting.pop()
                self._route.drop(self._reads.pop())

    @staticmethod
    def tiles(
        array: Array,
        rows: int,
        *,
        writable: bool = False,
        read: bool = True,
        depth: int = 2,
        stream: object = None,
        library: str = "",
        sms: int | None = None,
        workers: int | tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Any]:
        """Yield an array from front to back, `rows` rows at a time, in buffers of a pipeline.

        A tile is the loop body's until the next turn, and so are the rules of `take`.
        Meanwhile the next tiles arrive. On a GPU, read and change a tile in the caller's stream:
        that stream alone waits until the buffer's earlier tile has been taken from it.

        Parameters
        ----------
        array : Array
        rows : int
            Of each tile; the last one has what is left.
        writable : bool
            Store each tile after its turn, in the order of the caller's stream. The end of the loop
            waits until all are stored; `Array.flush` makes them durable.
        read : bool
            If False, tiles come with any content, for loops that only store.
        depth, stream, library, sms, workers, timeout_s
            As for `Pipeline`.

        Raises
        ------
        ReadOnlyError
            At the first store to an array that was opened for reading.
        ArgumentError, StorageError, DeviceTimeout
            As for `prefetch`, `take` and `write_back`.

        Notes
        -----
        A loop over several arrays takes ``zip(..., strict=True)``, which ends all of them; the
        tile that a loop has when it ends early is stored, too.

        Examples
        --------
        >>> import flashwarp as fw
        >>> with fw.create("tiles.npy", "float32", (1000, 64), device="cpu") as x:
        ...     for tile in fw.Pipeline.tiles(x, 300, writable=True):
        ...         tile += 1
        ...     float(x[999, 63])
        1.0
        """
        options: dict[str, Any] = {"sms": sms, "workers": workers, "timeout_s": timeout_s}
        only = "write_back" if not read else None if writable else "prefetch"
        make = partial(_OfTiles, only, array, rows, depth, stream, library=library, **options)
        return tiles(make, writable, read)

    # Writes.

    def write_back(self, ids: object, rows: object) -> Ticket:
        """Store rows, in the order of the caller's stream. Never waits on a GPU.

        Parameters
        ----------
        ids : as for `prefetch`
            On the host, no row may occur twice. If one does on a GPU, it gets one of its values, or
            parts of several.
        rows : array
            Of shape ``(len(ids), *array.shape[1:])`` and the array's dtype, contiguous. It may be a
            buffer of this pipeline. Leave it unchanged until `write_back_wait`.

        Returns
        -------
        Ticket
            Batches that are prefetched later see the rows. They are durable after `flush`.

        Raises
        ------
        ReadOnlyError
            If the array was opened for reading.
        ArgumentError, BoundsError, DtypeError, IndexDtypeError
            For ids and rows that do not fit, and for ids on the host that name a row twice.
        """
        self._check_usable()
        if not self.array.writable:
            raise ReadOnlyError(
                'the array of this pipeline was opened for reading: open it with mode="r+"'
            )
        self.array._turns.check_usable()
        self._route.check()
        refuse_repeats(self.array, ids)
        chosen, library = self._route.place(ids)
        count = self._count(chosen)
        check_rows(self.array, count, rows)
        ticket = Ticket(self._route, "write_back", count, None, (ids, rows))
        # Rows in memory of torch come from torch's stream, wherever their ids come from.
        ticket.library = library_of(rows) or library
        self._route.write(chosen, rows, self._stream_of(ticket.library), ticket)
        self._forget_done_writes()
        self._writes.append(ticket)
        self._stats.note(ticket.route, "write_back", count, count * self._row_bytes)
        return ticket

    def _forget_done_writes(self) -> None:
        while isinstance(self._route, GpuRoute) and self._writes and self._writes[0].done():
            self._route.drop(self._writes.popleft())

    def reclaim(self) -> None:
        """Let the caller's stream wait until the rows of all writes have been taken.

        Their buffers may be changed then. On the CPU device this waits, and raises what the writes
        failed with.
        """
        self._check_usable()
        _raise_first(self._finish_writes())

    def _finish_writes(self) -> list[BaseException]:
        """Put the ends of writes before later work of the caller's stream; return what failed."""
        failures: list[BaseException] = []
        while self._writes:
            stream = self._stream_of(self._writes[0].library)
            self._route.check_capture(self._writes[0], stream)
            try:
                self._route.finish(self._writes.popleft(), stream)
            except FlashwarpError as error:
                failures.append(error)
        return failures

    def _settle_writes(self) -> None:
        """Wait until all writes have ended, and raise what they have failed with."""
        failures: list[BaseException] = []
        while self._writes:
            ticket = self._writes.popleft()
            try:
                ticket.wait()
            except FlashwarpError as error:
                failures.append(error)
            self._route.drop(ticket)
        _raise_first(failures)

    def _lend(self, rows: int) -> Any:
        """Lend a buffer with any content, after the writes from it that came before."""
        while len(self._writes) > self.depth:
            self._route.finish(self._writes.popleft(), self._stream_of(""))
        stream = self._stream_of("")
        buffer = self._buffers.take(self._library, rows, stream)
        self._buffers.keep()
        return buffer.on(stream)

    def flush(self) -> None:
        """Make all rows that were written durable. Waits."""
        self.reclaim()
        self._route.flush()

    # Kernels.

    @property
    def device_calls(self) -> DeviceCalls:
        """What kernels take as ``fw::pipeline<T>``: batches that they start themselves.

        Give the pipeline itself to a launch. The first use starts an engine for kernels alone. Its
        threads look for requests until the pipeline is closed; close it after such kernels. A
        writable array is theirs until then, and other calls on it are refused, those of the
        pipeline too. What a kernel could not do, `check` raises.

        Raises
        ------
        RouteError
            If the host's threads do not reach the storage.
        """
        self._check_usable()
        if self._kernels is None:
            self._route.settle()
            self._kernels = KernelBatches(self.array, self._make_engine)
        if self._kernels.calls is not None:
            return self._kernels.calls
        return self._kernels.begin(self._route.own)

    def check(self) -> None:
        """Raise what batches are known to have failed with, those of kernels too. Never waits."""
        self._check_usable()
        if self._route.own is not None or not self.array._turns.holder:
            self._route.check()
        if self._kernels is not None and self._kernels.calls is not None:
            self._kernels.calls.check()

    # What users ask.

    def explain(self) -> Explanation:
        """Explain by which route batches move, what it uses, and why. Never refuses."""
        if not self._closed:
            self._explanation = self._route.explain()
        return self._explanation or self._route.explain()

    @property
    def stats(self) -> PipelineStats:
        """What has been moved by which route, and the counters of host threads."""
        if not self._closed:
            self._stats.engine = self._route.engine_stats
        return self._stats

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def in_flight(self) -> int:
        """Batches that were prefetched and not taken."""
        return len(self._reads)

    # The end.

    def close(self) -> None:
        """Wait for what is in flight, and free the buffers. May be called twice.

        Raises what writes have failed with that nobody has seen. The rows of buffers that the
        caller still holds stay valid for libraries that count references.
        """
        if self._closed or self._in_child:
            return
        failures: list[BaseException] = []
        with contextlib.suppress(FlashwarpError):
            self._explanation = self._route.explain()
        try:
            while self._reads:
                self._route.drop(self._reads.popleft())
            if not isinstance(self._route, GpuRoute) and not self.array.closed:
                failures += self._finish_writes()
            if self._kernels is not None:
                try:
                    self._kernels.close()
                except FlashwarpError as error:
                    failures.append(error)
            self._route.close()
        except DeviceTimeout:
            raise  # what is in flight may still write the buffers: close it again
        except FlashwarpError as error:
            failures.append(error)
        while self._writes:
            self._route.drop(self._writes.popleft())
        self._closed = True
        self._entry.leave()
        self._buffers.close()
        _raise_first(failures)

    def __del__(self) -> None:
        if "_entry" in self.__dict__:
            self._entry.lost(self)

    # Checks.

    @property
    def _row_bytes(self) -> int:
        return self.array._format.row_bytes

    def _stream_of(self, library: str) -> int:
        """Return the caller's stream."""
        device = self.array.device
        if not isinstance(device, CudaDevice):
            return 0
        if self._stream is not None:
            return stream_handle(self._stream)
        if library in ("", "numpy"):
            library = self._library or library or self._buffers.library
        return device.current_stream(library).handle

    def _count(self, chosen: range | Index) -> int:
        if isinstance(chosen, Index) and len(chosen.shape) != 1:
            raise ArgumentError(
                f"the ids have {len(chosen.shape)} axes: a batch is a list of rows, on one axis"
            )
        if len(chosen) > self.batch_rows:
            raise ArgumentError(
                f"a batch of {len(chosen)} rows exceeds batch_rows={self.batch_rows}: make the "
                "pipeline with larger batches, or divide this one"
            )
        return len(chosen)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._reads)} of {self.depth} in flight"
        return f"<Pipeline of {self.batch_rows} rows, {state}, over {self.array!r}>"


class _OfTiles(Pipeline):
    """A pipeline of ranges, perhaps in one direction only."""

    def __init__(self, only: str | None, *arguments: Any, **options: Any) -> None:
        self._needs = {"only": only, "lists": False}
        super().__init__(*arguments, **options)


def _raise_first(failures: list[BaseException]) -> None:
    if (first := endings.first_of(failures)) is not None:
        raise first


class _Entry(endings.Holder):
    """The pipeline in the registry of what is open, and among what stands on its array."""

    _counted: counting.Entry | None = None

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline.array)
        self._thing = weakref.ref(pipeline)
        self._stats = pipeline._stats
        self.generator: Callable[[], Any] = lambda: None
        self._dependents = pipeline.array._attachment.dependents

    def enter(self) -> None:
        self._counted = self._stats.counted(self.device)
        endings.remember(self)
        self._dependents.append(self)

    def leave(self) -> None:
        endings.forget(self)
        if self._counted is not None:
            self._counted.leave()
        self._dependents[:] = [each for each in self._dependents if each is not self]

    def close(self) -> BaseException | None:
        try:
            if (generator := self.generator()) is not None:
                generator.close()
        except FlashwarpError as error:
            return error
        return super().close()
