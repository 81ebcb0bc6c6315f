"""The batches that kernels start themselves: an engine of their own, and its calls."""

from __future__ import annotations

from functools import partial

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.pipeline.device_calls import DeviceCalls
from flashwarp.pipeline.engines import ArrayEngine, make_engine
from flashwarp.pipeline.ring import CHUNKS, ring_of

__all__ = ["KernelBatches"]


class KernelBatches(endings.Closing):
    """An engine that serves kernels alone, past the cache of the array.

    A writable array is theirs until `close`.
    """

    def __init__(
        self,
        array: Array,
        batch_rows: int,
        depth: int,
        workers: int | tuple[int, int] | None,
        timeout_s: float,
    ) -> None:
        on_gpu = array.device.kind == "cuda"
        ring = ring_of(CHUNKS) if on_gpu else None
        make = partial(
            make_engine, array, batch_rows, depth, workers, timeout_s, ring, copies=on_gpu
        )
        self._own = ArrayEngine(array, make)
        self.calls: DeviceCalls | None = None
        self._settings = array.dtype, timeout_s

    def begin(self, before: ArrayEngine | None) -> DeviceCalls:
        """Start the engine; if this raises, `close` gives back what was taken.

        If the pipeline has the array by an engine `before`, whose batches have ended, kernels have
        it from now on.
        """
        engine = self._own.begin("kernels that start batches of it past its cache", before)
        self.calls = DeviceCalls(engine, *self._settings)
        return self.calls

    def close(self) -> None:
        """Release everything, and raise as `DeviceCalls.close`. May be called twice."""
        try:
            if self.calls is not None:
                self.calls.close()
        finally:
            self._own.close()
