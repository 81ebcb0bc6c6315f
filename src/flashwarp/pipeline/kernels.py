"""The batches that kernels start themselves: an engine of their own, and its calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.pipeline.device_calls import DeviceCalls
from flashwarp.pipeline.engine import BatchEngine
from flashwarp.pipeline.engines import ArrayEngine
from flashwarp.pipeline.staged import RING


class KernelBatches(endings.Closing):
    """An engine that serves kernels alone, past the cache of the array.

    A writable array is theirs until `close`.
    """

    def __init__(self, array: Array, make: Callable[..., BatchEngine]) -> None:
        on_gpu = array.device.kind == "cuda"
        self._own = ArrayEngine(array, partial(make, RING if on_gpu else None, copies=on_gpu))
        self.calls: DeviceCalls | None = None

    def begin(self, before: ArrayEngine | None) -> DeviceCalls:
        """Start the engine; if this raises, `close` gives back what was taken.

        If the pipeline has the array by an engine `before`, whose batches have ended, kernels have
        it from now on.
        """
        engine = self._own.begin("kernels that start batches of it past its cache", before)
        self.calls = DeviceCalls(engine, self._own.array.dtype)
        return self.calls

    def close(self) -> None:
        """Release everything, and raise as `DeviceCalls.close`. May be called twice."""
        try:
            if self.calls is not None:
                self.calls.close()
        finally:
            self._own.close()
