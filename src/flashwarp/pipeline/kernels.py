"""The batches that kernels start themselves: an engine of their own, and its calls."""

from __future__ import annotations

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.errors import DataPathError
from flashwarp.nvme.software import SoftwareController
from flashwarp.pipeline.device_calls import DeviceCalls
from flashwarp.pipeline.engine import BatchEngine, Direction
from flashwarp.pipeline.ring import CHUNKS, ring_of, slots_of, why_no_ring
from flashwarp.storage import Storage

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
        storage, controller = array._attachment.storage, array._attachment.controller
        on_gpu = array.device.kind == "cuda"
        refused = why_no_ring(array) if on_gpu else ""
        if refused or not isinstance(storage, Storage):
            raise DataPathError(
                f"kernels cannot have batches of this array: {refused or 'it has no storage here'}"
            )
        directions: list[Direction] = ["prefetch"]
        self._array = array
        self._hands_over = array.writable and not array._holder
        if array.writable:
            directions.append("write_back")
        if self._hands_over:
            array._hand_over("kernels that start batches of it past its cache")
        try:
            self.engine = BatchEngine(
                array.device,
                storage,
                rows=len(array),
                row_bytes=max(1, array._format.row_bytes),
                batch_rows=batch_rows,
                slots=slots_of(depth, batch_rows),
                directions=directions,
                ring=ring_of(CHUNKS) if on_gpu else None,
                copies=on_gpu,
                workers=workers,
                timeout_s=timeout_s,
                controller=controller if isinstance(controller, SoftwareController) else None,
            )
            self.calls = DeviceCalls(self.engine, array.dtype, timeout_s)
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        if self._hands_over:
            self._array._take_back()

    def close(self) -> None:
        """Release everything. No kernel may use it any more. May be called twice."""
        self.calls.close()
        self.engine.close()
        self._take_back()
