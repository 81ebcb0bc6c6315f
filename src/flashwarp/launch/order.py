"""The order of stores and loads of one array on a GPU: see docs/kernels.md.

Every access of a writable array leaves a mark in its stream, and comes behind the marks of the
accesses before that it conflicts with. `native/cuda/order.h` has the marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

from flashwarp import _native
from flashwarp._jit.cuda_context import CAPTURED, wait_until
from flashwarp.device import CudaDevice
from flashwarp.errors import CaptureError

ALL_LINES = (0, (1 << 64) - 1)

T = TypeVar("T")


class Ordered(Protocol):
    """What has an order of accesses, as the launches of an array."""

    order: Order | None


def in_order(
    accesses: Iterable[tuple[Ordered, bool]], stream: int | None, queue: Callable[[], T]
) -> T:
    """Queue one access to several arrays by calling `queue`, in the order of each.

    Each access says whether it stores. None is the library's own stream.

    Raises
    ------
    CaptureError
        If the stream is in a capture, and an access outside of it that comes before is not over;
        nothing was queued then.
    ArgumentError
        If the stream does not exist, or its context does not any more.
    """
    for array, stores in accesses:
        if array.order is not None:
            queue = partial(array.order.queue, stream, stores, ALL_LINES, queue)
    return queue()


class Order:
    """The order of the accesses of one array. Any thread may use it.

    Attributes
    ----------
    native : _native.Order
        For the extension's own launches.
    queue : callable
        Queues an access by calling a function, in its order: of a stream, or the library's own
        (None), a load or a store, of lines from the first up to the second one; see `in_order`.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._context = device.context
        self.native = _native.Order(device.context.calls)
        queue = partial(self.native.call, self._refuse, device.own_stream())
        self.queue: Callable[..., Any] = queue

    def _refuse(self, result: int, stream: int) -> None:
        if result == CAPTURED:
            raise CaptureError(
                "the array is loaded from or stored to on another stream, outside of the capture, "
                "and no graph can wait for that: synchronize that stream before the capture"
            )
        self._context.refuse_stream(result, stream)
        self._context.require(result, "ordering the accesses of an array")

    def wait(self, timeout_s: float) -> None:
        """Block until all accesses so far are over; raises DeviceTimeout, or what one failed."""
        wait_until(self._done, timeout_s, "loads and stores of an array on streams")

    def _done(self) -> bool:
        return self._context.accesses_done(self.native)

    def close(self) -> None:
        """Release the marks. Nothing may access the array any more."""
        if self._context.usable:
            self.native.close()
