"""`DeviceQueue`: what is queued on a GPU in order, on a stream of its own, and signals of its ends.

Copies, stores of words and kernels begin after what was queued before them. Nothing here waits but
`wait`. The copies of a `CopyEngine` and the batches of pipelines are queued so.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashwarp._jit.cuda_context import End
from flashwarp.device import CudaDevice, Event


class DeviceQueue:
    """A stream of a GPU, which is not being captured. Any thread may call."""

    def __init__(self, device: CudaDevice) -> None:
        self.stream = device.create_stream()
        self._device, self._context = device, device.context
        # Used inside of one call of the driver only.
        self._mark = self._context.take_event()

    @property
    def handle(self) -> int:
        """The stream's."""
        return self.stream.handle

    def after(self, *streams: int | None) -> None:
        """Make later work wait for the present work of other streams; None: the library's own."""
        for each in streams:
            self._device.order(each, self.handle)

    def copy(
        self,
        pieces: Sequence[tuple[int, int, int]],
        after: tuple[int, ...] = (),
        begin: int = 0,
        end: End | None = None,
    ) -> None:
        """Copy pieces (target, source, bytes) after the present work of other streams.

        The events and the entry are those of `ContextOfStreams.copy_and_append`.
        """
        self._context.copy_and_append(after, self._mark, pieces, begin, end, self.handle)

    def wait_word(self, address: int, value: int) -> None:
        """Make later work wait until a word in pinned memory is at least `value`."""
        self._context.wait_word(address, value, self.handle)

    def write_word(self, address: int, value: int) -> None:
        """Store a word in pinned memory after the present work."""
        self._context.write_word(address, value, self.handle)

    def signal(self) -> Event:
        """Return an event at the present end; closing it lets others use it again."""
        return self._device.mark(self.stream)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until everything has ended; raises what failed, or DeviceTimeout."""
        self._device.wait(self.stream, timeout_s)

    def close(self) -> None:
        """Release the stream, whose work has ended."""
        self._context.give_event(self._mark)
        self.stream.close()
