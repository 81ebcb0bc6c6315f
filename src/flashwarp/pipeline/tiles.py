"""`Pipeline.tiles`: an array from front to back, tile by tile, and stores back to its storage."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from flashwarp.config import flag
from flashwarp.errors import ArgumentError


def tiles(make: Callable[[], Any], writable: bool, read: bool) -> Iterator[Any]:
    """Yield the tiles of an array; `Pipeline.tiles` describes them."""
    flag("writable", writable)
    if not flag("read", read) and not writable:
        raise ArgumentError("tiles that are neither read nor written: say writable=True")
    own: list[Callable[[], Any]] = []
    found = _tiles(make, writable, read, own)
    # Weakly: a loop that ends early ends the generator, too.
    own.append(weakref.ref(found))
    return found


def _tiles(
    make: Callable[[], Any], writable: bool, read: bool, own: list[Callable[[], Any]]
) -> Iterator[Any]:
    with make() as pipeline:
        # If the array is closed first, it stores the tile that the loop has.
        pipeline._entry.generator = own[0]
        rows, length = pipeline.batch_rows, len(pipeline.array)
        parts = (range(at, min(at + rows, length)) for at in range(0, length, rows))
        ahead: deque[range] = deque()
        for part in parts:
            ahead.append(part)
            if read:
                pipeline.prefetch(part)
            if len(ahead) == pipeline.depth:
                yield from _tile(pipeline, ahead.popleft(), writable, read)
        while ahead:
            yield from _tile(pipeline, ahead.popleft(), writable, read)
        if writable:
            pipeline._settle_writes()


def _tile(pipeline: Any, part: range, writable: bool, read: bool) -> Iterator[Any]:
    tile = pipeline.take() if read else pipeline._lend(len(part))
    try:
        yield tile
    except GeneratorExit:
        # The loop has ended early, or a shorter one beside it in `zip` has: the tile was used.
        if writable:
            pipeline.write_back(part, tile)
            pipeline._settle_writes()
        raise
    if writable:
        pipeline.write_back(part, tile)
