"""The batches that kernels start themselves: an engine of their own, and its calls."""

from __future__ import annotations

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.pipeline.device_calls import DeviceCalls
from flashwarp.pipeline.engines import make_engine
from flashwarp.pipeline.ring import CHUNKS, ring_of

__all__ = ["KernelBatches"]


class KernelBatches(endings.Closing):
    """An engine that serves kernels alone, past the cache of the array.

    A writable array is handed over until `close`, unless the pipeline has it already.
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
        self._array = array
        self._hands_over = array.writable and not array._holder
        if self._hands_over:
            array._hand_over("kernels that start batches of it past its cache")
        try:
            self.engine = make_engine(
                array,
                batch_rows,
                depth,
                workers,
                timeout_s,
                ring_of(CHUNKS) if on_gpu else None,
                copies=on_gpu,
            )
            self.calls = DeviceCalls(self.engine, array.dtype, timeout_s)
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        if self._hands_over:
            self._array._take_back()

    def close(self) -> None:
        """Release everything, and raise as `DeviceCalls.close`. May be called twice."""
        try:
            self.calls.close()
        finally:
            self.engine.close()
            self._take_back()
