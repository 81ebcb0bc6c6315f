"""Batches that kernels start themselves: the device's memory of `batch/direction.cuh`, and errors.

Kernels get a `DeviceCalls` as an argument of type `fw::pipeline<T>`.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import numpy.typing as npt

from flashwarp import endings
from flashwarp.cache.failures import FailureSequence
from flashwarp.cache.structs import FAILURES_KEPT, FailureStruct
from flashwarp.config import number
from flashwarp.device import CudaDevice, Device, DeviceMemory
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    ControllerTimeout,
    DeviceTimeout,
    FlashwarpError,
)
from flashwarp.pipeline.engine import BatchEngine, BatchPort
from flashwarp.pipeline.structs import (
    DirectionStruct,
    PipelineStruct,
    RegionsStruct,
    SlotStateStruct,
)

# `fault` of batch/direction.cuh.
_NO_FREE_SLOT, _NOT_DONE, _NOT_ALL, _TOO_LONG = 1, 2, 3, 4

_SLOTS_MAX = 1 << 14  # `kSlotsMax`


class DeviceCalls(endings.Closing):
    """The batches of kernels over one engine, of which kernels are the only submitter.

    The engine stays open while kernels run, and looks for their requests until `close`, at
    intervals of 100 us at most. `dtype` is that of the elements of rows, and `timeout_s` limits
    each wait of a kernel; default: as the engine's. What kernels could not do, `check` raises.

    While a kernel waits for a batch on a GPU, the engine calls the driver for it. So no thread of
    the program may then make a call that waits for the device while it holds the driver, such as
    cudaFree: the kernel's wait would run out of time. The library's own calls of this kind wait
    first for kernels that it has launched, but not for those of replayed CUDA graphs.
    """

    def __init__(
        self, engine: BatchEngine, dtype: npt.DTypeLike, timeout_s: float | None = None
    ) -> None:
        self.engine = engine
        self.device: Device = engine.device
        self.dtype = np.dtype(dtype)
        limit_s = engine.timeout_s if timeout_s is None else timeout_s
        self.timeout_s = number("timeout_s", limit_s, 1e-3, 1e6)
        self._closed = False
        self._memory: list[DeviceMemory] = []
        self._failures: dict[str, FailureSequence] = {}
        self._slots: dict[str, BatchPort] = {}
        handle = PipelineStruct()
        try:
            for name, member in (("prefetch", "reads"), ("write_back", "writes")):
                if name in engine.ports:
                    setattr(handle, member, self._lay_out(name, engine.ports[name]))
            for one, other in ((handle.reads, handle.writes), (handle.writes, handle.reads)):
                if one and other:
                    word = other.to_bytes(8, sys.byteorder)
                    self.device.upload(one + DirectionStruct.other.offset, word)
        except BaseException:
            self._free()
            raise
        self._handle = handle
        engine.kernels_begin()

    def _lay_out(self, name: str, port: BatchPort) -> int:
        """Make the device's memory of one direction, and return its address."""
        assert port.slots <= _SLOTS_MAX
        entry_bytes = ctypes.sizeof(FailureStruct) * FAILURES_KEPT
        entries = self.device.allocate_host(entry_bytes)
        self._memory.append(entries)
        place = ctypes.sizeof(DirectionStruct)
        memory = self.device.allocate(place + port.slots * ctypes.sizeof(SlotStateStruct))
        self._memory.append(memory)
        direction = DirectionStruct(
            shared=RegionsStruct(
                requests=port.requests,
                results=port.results,
                lists=port.lists,
                all_statuses=port.statuses,
                count=port.slots,
                rows_max=port.rows_max,
            ),
            states=memory.address + place,
            failures=entries.address,
            row_bytes=self.engine.row_bytes,
        )
        direction.limit.timeout_ns = int(self.timeout_s * 1e9)
        self.device.upload(memory.address, bytes(direction).ljust(memory.nbytes, b"\0"))
        kept = (FailureStruct * FAILURES_KEPT).from_address(entries.address)
        log = memory.address + DirectionStruct.log.offset
        self._failures[name] = FailureSequence(kept, log, self.device, None)
        self._slots[name] = port
        return memory.address

    @property
    def writable(self) -> bool:
        """Whether kernels may write rows."""
        return "write_back" in self._slots

    @property
    def handle(self) -> bytes:
        """The struct that a parameter of type ``fw::pipeline<T>`` takes by value."""
        self.check_usable()
        return bytes(self._handle)

    @property
    def owners(self) -> tuple[object, ...]:
        """What holds the memory; see `DeviceMemory.owners`."""
        return tuple(owner for memory in self._memory for owner in memory.owners)

    def check(self) -> None:
        """Raise what a call of a kernel could not do since the last check. Waits for no kernel.

        ArgumentError: a batch that all slots together cannot hold, or no batch to wait for.
        ControllerTimeout: the engine has not ended a batch in time. DeviceTimeout: the batches in
        all slots were not waited for, or some blocks of the launch did not make the call that
        others made.
        """
        self.check_usable()
        for name, sequence in self._failures.items():
            noted = sequence.read()
            if not noted:
                continue
            if not noted.kept:
                raise DeviceTimeout(f"{noted.count} calls of {name} in kernels have failed")
            raise self._error(name, noted.kept[0], noted.count)

    def _error(self, name: str, first: FailureStruct, count: int) -> FlashwarpError:
        more = f" (the first of {count} such failures)" if count > 1 else ""
        limit = f"within {self.timeout_s:g} s{more}"
        port = self._slots[name]
        if first.status == _NO_FREE_SLOT:
            return DeviceTimeout(
                f"{name} in a kernel waited for a free slot for ticket {first.where}, and none of "
                f"the {port.slots} batches in flight was waited for {limit}: call "
                f"{name}_wait for each batch, or ask for more slots"
            )
        if first.status == _NOT_DONE:
            return ControllerTimeout(
                f"{name}_wait in a kernel waited for ticket {first.where}, which the engine "
                f"has not ended {limit}: the storage does not answer, or the program holds the "
                "driver"
            )
        if first.status == _NOT_ALL:
            return DeviceTimeout(
                f"{name} in a kernel waited for all {first.limit} blocks of the launch, and only "
                f"{first.where} made the call {limit}: all blocks must call, and run at a time; "
                "fw::block has calls of one block"
            )
        if first.status == _TOO_LONG:
            return ArgumentError(
                f"{name} in a kernel of {first.where} rows: {port.slots} slots of {port.rows_max} "
                f"rows hold {first.limit}{more}: ask for more slots or larger batches"
            )
        which = f"ticket {first.where}" if first.where else "any batch"
        return ArgumentError(
            f"{name}_wait in a kernel, but {which} is not in flight{more}: it was not "
            f"started, or was waited for before; call {name} first"
        )

    def check_usable(self) -> None:
        """Raise ClosedError if it was closed."""
        if self._closed:
            raise ClosedError("the batches of kernels were closed")

    def close(self) -> None:
        """Wait for kernels that run, and free the memory. May be called twice.

        Raises what a call of a kernel could not do and nobody has seen, as `check` does.
        """
        if self._closed:
            return
        failures: list[FlashwarpError] = []
        try:
            if isinstance(self.device, CudaDevice):
                self.device.context.outlast_served()
            self.check()
        except FlashwarpError as error:
            failures.append(error)
        self._closed = True
        self._free()
        self.engine.kernels_end()
        if failures:
            raise failures[0]

    def _free(self) -> None:
        for memory in self._memory:
            memory.close()
