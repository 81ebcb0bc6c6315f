"""Which launches leave the wait for storage to their stream, and how; see `nvme/batch.cuh`.

A launch on rows then becomes rounds: submit the misses, let the stream wait, land the lines, move
the rows. A round is so small that its commands fit into the rings, and its lines into the cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from flashwarp.array.operands import Index
from flashwarp.nvme import Service

if TYPE_CHECKING:
    from flashwarp._jit.cuda_context import End
    from flashwarp.cache.cache import Volume
    from flashwarp.nvme.batches import Batch

__all__ = ["LAND_LINES_MIN", "LAND_WARPS", "ROUNDS_MAX", "SUBMIT_BATCH", "Splitting"]

# Rounds of one call, each of four things in the stream. Rows beyond them move in one launch, which
# waits.
ROUNDS_MAX = 64

# Rounds are of so many rows or a multiple, so that all of them have the alignment of the first.
_ROWS_MULTIPLE = 16

# Lines that a warp submits at a time: they are on one ring, so few of them let several threads of
# the controller begin at once.
SUBMIT_BATCH = 8

# Blocks of 8 warps that land lines: their loads saturate PCIe. Fewer lines are landed by the warps
# that move the rows, as fast as another kernel begins.
LAND_WARPS = 8 * 8
LAND_LINES_MIN = 1024

# The handle that stands for another stream in each thread.
_PER_THREAD = 2


class Splitting:
    """How the launches on one array are split around a wait of their stream.

    Parameters
    ----------
    volume : Volume
    service : Service
        What serves the array's queue pairs, and says whether it stores words.
    row_bytes, lines_per_row : int
        The bytes of one row, and the most lines that it touches.

    Attributes
    ----------
    rows : int
        The most rows of a round; 0: no launch is split.
    why_not : str
        Why no launch is split although the service stores words, for people; empty: they are.
    """

    def __init__(
        self, volume: Volume, service: Service, row_bytes: int, lines_per_row: int
    ) -> None:
        self._service = service
        self._volume = volume
        self._row_bytes = row_bytes
        self._lines_per_row = lines_per_row
        self._of_streams: dict[object, tuple[Batch, Batch]] = {}
        self.rows = 0
        self.why_not = ""
        if service.batches is None:
            return
        if not volume.cache.device.waits_for_words:
            self.why_not = "the driver has no cuStreamWaitValue32"
            return
        queues = service.queues
        # Two rounds are in flight at a time.
        lines = min(queues.count * (queues.depth - 1) // 2, volume.cache.lines // 4)
        rows = lines // lines_per_row
        self.rows = rows - rows % _ROWS_MULTIPLE
        if not self.rows:
            self.why_not = f"{lines} lines, which may be in flight, are less than 16 rows"

    def note(self) -> str:
        """Say for people what becomes of misses; empty if nobody asked to split them."""
        if self._service.batches is None:
            return ""
        if self.why_not:
            return f"warps wait for misses, because {self.why_not}"
        return "streams wait for misses"

    def on(self) -> bool:
        """Whether launches are split. A file may leave its in-place route at any time."""
        return self.rows != 0 and self._service.batches is not None

    def batches_for(self, stream: int | None) -> tuple[Batch, Batch] | None:
        """Return two batches for a launch on a stream; None if it is not split.

        A captured stream gets two of its own: two graphs that were captured on one stream may run
        at the same time.
        """
        batches = self._service.batches if self.rows else None
        if batches is None:
            return None
        if stream is not None and self._volume.cache.device.capture(stream) is not None:
            return batches.take_pair()
        handle: object = stream
        if stream == _PER_THREAD:
            handle = stream, threading.get_ident()
        found = self._of_streams.get(handle)
        if found is None:
            found = batches.take_pair()
            if found is not None:
                self._of_streams[handle] = found
        return found

    def start(
        self,
        batches: tuple[Batch, Batch],
        chosen: range | Index,
        buffer: int,
        stream: int | None,
        submit: Callable[[range | Index, int], None],
        land: Callable[[], None],
        move: Callable[..., None],
        end: End | None,
    ) -> None:
        """Queue a launch in rounds. `end` goes with the last thing that is queued.

        Parameters
        ----------
        batches : tuple of Batch
            Of the stream, from `batches_for`.
        chosen, buffer
            Rows, and where they go or come from.
        stream : int, optional
        submit, land, move : callable
            Launch the submission of the misses of rows to the batch at an address; the landing of
            lines; and the moving of rows to or from a buffer.
        """
        rounds, rest = self.rounds(chosen, buffer)
        submit(rounds[0][0], batches[0].address)
        for k, (part, rows) in enumerate(rounds):
            if k + 1 < len(rounds):
                submit(rounds[k + 1][0], batches[(k + 1) % 2].address)
            self._volume.cache.device.wait_for_word(batches[k % 2].word, stream)
            if len(part) * self._lines_per_row >= LAND_LINES_MIN:
                land()
            last = rest is None and k + 1 == len(rounds)
            move(part, rows, end=end if last else None)
        if rest is not None:
            move(*rest, end=end)

    def rounds(
        self, chosen: range | Index, buffer: int
    ) -> tuple[list[tuple[range | Index, int]], tuple[range | Index, int] | None]:
        """Divide chosen rows, and the buffer where they go or come from.

        Returns the rounds, and what is left of the rows if there are more than `ROUNDS_MAX`.
        """
        row_bytes = self._row_bytes
        count = -(-len(chosen) // self.rows)
        size = self.rows
        if count <= ROUNDS_MAX:
            even = -(-len(chosen) // count)
            size = min(self.rows, math.ceil(even / _ROWS_MULTIPLE) * _ROWS_MULTIPLE)
        parts = list(_parts(chosen, buffer, row_bytes, size, ROUNDS_MAX))
        done = size * ROUNDS_MAX
        rest = None
        if len(chosen) > done:
            rest = _part(chosen, done, len(chosen)), buffer + done * row_bytes
        return parts, rest


def _parts(
    chosen: range | Index, buffer: int, row_bytes: int, size: int, most: int
) -> Iterator[tuple[range | Index, int]]:
    for begin in range(0, min(len(chosen), size * most), size):
        end = min(begin + size, len(chosen))
        yield _part(chosen, begin, end), buffer + begin * row_bytes


def _part(chosen: range | Index, begin: int, end: int) -> range | Index:
    if isinstance(chosen, range):
        return chosen[begin:end]
    if begin == 0 and end == len(chosen):
        return chosen
    address = chosen.address + begin * chosen.itemsize
    return replace(chosen, address=address, shape=(end - begin,))
