"""What programs do today, as fairly as we can: threads that read into pinned memory, and copies.

Native loops of `host.cpp` on threads of a pool; three buffers, so that threads fill one
while the copy engine moves another and the device uses the third. No part of flashwarp takes part.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwarp._jit.host_compiler import find_compiler

__all__ = ["PIECE_BYTES", "Ahead", "Behind", "Loops", "cut"]

PIECE_BYTES = 1 << 20
"""Of one call of the system where a tile is contiguous."""

_SOURCE = Path(__file__).with_name("host.cpp")
_SLOTS = 3  # one is filled, one is copied, one is used
_WAIT_S = 120.0
_NO_CALL = -1

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class Loops:
    """The native loops, each spread over some threads."""

    def __init__(self, folder: Path, threads: int) -> None:
        library = folder / "host.so"
        flags = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-o", str(library))
        subprocess.run([*find_compiler(), *flags, str(_SOURCE), "-ldl"], check=True)
        self._library = ctypes.CDLL(str(library))
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self.threads = threads

    def _spread(self, call: Callable[[slice], int], count: int, threads: int | None) -> None:
        """Cut `count` pieces into a part for each thread; raise what one of them returns."""
        threads = min(threads or self.threads, max(count, 1))
        if threads not in self._pools:
            self._pools[threads] = ThreadPoolExecutor(threads)
        bounds = np.linspace(0, count, threads + 1).astype(int).tolist()
        parts = [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]
        codes = list(self._pools[threads].map(call, parts))
        if bad := [code for code in codes if code != 0]:
            raise OSError(bad[0], f"a baseline failed: {os.strerror(bad[0])}")

    def _file(
        self, name: str, file: int, memory: Bytes, offsets: Numbers, nbytes: int,
        threads: int | None,
    ) -> None:  # fmt: skip
        loop = getattr(self._library, name)
        base, where = memory.ctypes.data, np.ascontiguousarray(offsets, np.int64)
        assert len(where) * nbytes <= memory.nbytes

        def part(which: slice) -> int:
            return int(
                loop(
                    file, ctypes.c_void_p(base + which.start * nbytes),
                    ctypes.c_void_p(where.ctypes.data + 8 * which.start),
                    ctypes.c_int64(which.stop - which.start), ctypes.c_int64(nbytes),
                )
            )  # fmt: skip

        self._spread(part, len(where), threads)

    def read(
        self, file: int, into: Bytes, offsets: Numbers, nbytes: int, threads: int | None = None
    ) -> None:
        """Read pieces of a file, each at its place in the list."""
        self._file("read_pieces", file, into, offsets, nbytes, threads)

    def write(
        self, file: int, data: Bytes, offsets: Numbers, nbytes: int, threads: int | None = None
    ) -> None:
        """Write pieces to a file."""
        self._file("write_pieces", file, data, offsets, nbytes, threads)

    def gather(
        self, source: Bytes, into: Bytes, offsets: Numbers, nbytes: int, threads: int | None = None
    ) -> None:
        """Copy pieces of memory."""
        where = np.ascontiguousarray(offsets, np.int64)
        assert len(where) * nbytes <= into.nbytes

        def part(which: slice) -> int:
            return int(
                self._library.copy_pieces(
                    ctypes.c_void_p(source.ctypes.data),
                    ctypes.c_void_p(into.ctypes.data + which.start * nbytes),
                    ctypes.c_void_p(where.ctypes.data + 8 * which.start),
                    ctypes.c_int64(which.stop - which.start), ctypes.c_int64(nbytes),
                )
            )  # fmt: skip

        self._spread(part, len(where), threads)

    def send(
        self, to: NDArray[np.uint64], source: NDArray[np.uint64], nbytes: int, stream: int,
        *, batched: bool,
    ) -> None:  # fmt: skip
        """Queue a copy for each piece, or one call for all; addresses are of the GPU and pinned."""
        call = self._library.send_batch if batched else self._library.send_each
        code = call(
            ctypes.c_void_p(to.ctypes.data), ctypes.c_void_p(source.ctypes.data),
            ctypes.c_int64(len(to)), ctypes.c_int64(nbytes), ctypes.c_void_p(stream),
        )  # fmt: skip
        if code == _NO_CALL:
            raise NotImplementedError("the driver has no such call")
        if code != 0:
            raise OSError(code, f"the driver refused a copy: {code}")

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools.values():
            pool.shutdown()


def cut(first: int, nbytes: int, piece: int = PIECE_BYTES) -> tuple[Numbers, int]:
    """Cut a contiguous range into equal pieces; return where they begin, and their size."""
    while nbytes % piece:
        piece //= 2
    return first + np.arange(0, nbytes, piece), piece


class _Slots:
    """Some pinned buffers, each with one on the device, and a stream for the copies."""

    def __init__(self, torch: Any, place: str, shape: tuple[int, ...], dtype: Any) -> None:
        self.torch, self.on_gpu = torch, place != "cpu"
        self.pinned = [self._page_aligned(shape, dtype) for _ in range(_SLOTS)]
        self.device = [torch.empty(shape, dtype=dtype, device=place) for _ in range(_SLOTS)]
        self.stream: Any = torch.cuda.Stream() if self.on_gpu else None
        self.free: queue.Queue[tuple[int, Any]] = queue.Queue()
        for slot in range(_SLOTS):
            self.free.put((slot, None))

    def _page_aligned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make memory that O_DIRECT takes, and copy engines on a GPU."""
        if self.on_gpu:
            return self.torch.empty(shape, dtype=dtype, pin_memory=True)
        pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        return self.torch.frombuffer(pages, dtype=dtype).view(shape)

    def copying(self) -> Any:
        """Make the copies' stream the current one."""
        return self.torch.cuda.stream(self.stream) if self.on_gpu else contextlib.nullcontext()

    def event(self) -> Any:
        """Record the present work of the current stream."""
        if not self.on_gpu:
            return None
        # A thread that waits for it sleeps, so that CPU time means work.
        event = self.torch.cuda.Event(blocking=True)
        event.record()
        return event

    def bytes_of(self, slot: int) -> Bytes:
        """Return the pinned memory of a slot."""
        return np.asarray(self.pinned[slot].view(self.torch.uint8).numpy()).reshape(-1)


class Ahead:
    """Batches that a thread has filled ahead: `fill` stores one into pinned memory."""

    def __init__(
        self, torch: Any, place: str, shape: tuple[int, ...], dtype: Any,
        fill: Callable[[Bytes, Any], int],
    ) -> None:  # fmt: skip
        self._slots, self.fill = _Slots(torch, place, shape, dtype), fill
        self.rows = shape[0]

    def iterate(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each batch on the device with what it was asked by; it is the body's alone."""
        slots = self._slots
        filled: queue.Queue[Any] = queue.Queue()

        def run() -> None:
            try:
                with slots.copying():
                    for batch in batches:
                        slot, consumed = slots.free.get(timeout=_WAIT_S)
                        # The copy out of this buffer came before its consumer, so it is over too.
                        if consumed is not None:
                            consumed.synchronize()
                        rows = self.fill(slots.bytes_of(slot), batch)
                        slots.device[slot][:rows].copy_(
                            slots.pinned[slot][:rows], non_blocking=True
                        )
                        filled.put((slot, rows, slots.event(), batch))
                filled.put(None)
            except BaseException as error:
                filled.put(error)

        thread = threading.Thread(target=run)
        thread.start()
        while (got := filled.get(timeout=_WAIT_S)) is not None:
            if isinstance(got, BaseException):
                thread.join()
                raise got
            slot, rows, copied, batch = got
            if copied is not None:
                slots.torch.cuda.current_stream().wait_event(copied)
            yield slots.device[slot][:rows], batch
            slots.free.put((slot, slots.event()))
        thread.join()


class Behind:
    """Batches that a thread writes behind their maker: `drain` stores one from pinned memory."""

    def __init__(
        self, torch: Any, place: str, shape: tuple[int, ...], dtype: Any,
        drain: Callable[[Bytes, Any], None],
    ) -> None:  # fmt: skip
        self._slots, self._drain = _Slots(torch, place, shape, dtype), drain
        self._jobs: queue.Queue[Any] = queue.Queue()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def write(self, rows: Any, where: Any) -> None:
        """Copy rows from the device and write them later; the rows may change after the stream."""
        slots = self._slots
        slot, _ = slots.free.get(timeout=_WAIT_S)
        if self._errors:
            raise self._errors[0]
        made = slots.event()
        with slots.copying():
            if made is not None:
                slots.stream.wait_event(made)
                rows.record_stream(slots.stream)
            slots.pinned[slot][: len(rows)].copy_(rows, non_blocking=True)
            self._jobs.put((slot, slots.event(), where))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            slot, copied, where = job
            try:
                if copied is not None:
                    copied.synchronize()
                if not self._errors:
                    self._drain(self._slots.bytes_of(slot), where)
            except BaseException as error:
                self._errors.append(error)
            self._slots.free.put((slot, None))

    def close(self) -> None:
        """Wait until all is written; raise the first error."""
        self._jobs.put(None)
        self._thread.join()
        if self._errors:
            raise self._errors[0]
