"""Compiled kernels of the caller's, which load and store elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracle.arrays import choose
from oracle.machine import ELEMENTS
from oracle.steps import step
from oracle.world import Hand, Held, Ids, Pending


def _program(hand: Hand, held: Held) -> Any:
    return hand.machine.program(held.dtype.str[1:], hand.world.device)


def _elements(held: Held, rows: Ids) -> Any:
    width = int(np.prod(held.row_shape))
    return (rows[:, np.newaxis] * width + np.arange(width)).reshape(-1).astype(np.uint64)


def _placed(hand: Hand, host: Any) -> Any:
    if not hand.machine.on_gpu:
        return host
    placed = hand.machine.place(host, "flashwarp")
    hand.kept.append(placed)
    return placed


def _choose(hand: Hand) -> tuple[Held, Ids] | None:
    held = choose(hand)
    if held is None or held.dtype.str[1:] not in ELEMENTS or hand.world.policy != "clock":
        return None
    return held, hand.ids(held)


@step(4)
def load_by_kernel(hand: Hand) -> None:
    """Launch a kernel that loads the elements of some rows."""
    chosen = _choose(hand)
    if chosen is None:
        return
    held, rows = chosen
    at = _placed(hand, _elements(held, rows))
    out = _placed(hand, np.zeros((len(rows), *held.row_shape), held.dtype))
    stream = hand.stream()
    line = hand.say("program['load']({}, {}, out, stream={})", held, rows, stream)
    read = held.model.read(rows)
    _program(hand, held)["load"](held.array, at, out, at.size, stream=stream)
    known = hand.known(held)
    among = None if known is None else known[rows]
    fetch = hand.machine.fetch
    hand.pending.append(
        Pending(held, lambda: fetch(out, stream), read, line, out=(at, out), among=among)
    )
    if hand.odds(0.5):
        hand.settle(hand.pending[-1])


@step(4)
def store_by_kernel(hand: Hand) -> None:
    """Launch a kernel that stores the elements of some rows."""
    chosen = _choose(hand)
    if chosen is None:
        return
    held, rows = chosen
    values = hand.values(held, len(rows))
    at, given = _placed(hand, _elements(held, rows)), _placed(hand, np.ascontiguousarray(values))
    stream = hand.stream()
    line = hand.say("program['store']({}, {}, values, stream={})", held, rows, stream)
    _program(hand, held)["store"](held.array, at, given, at.size, stream=stream)
    hand.stores(held, line, rows, values)
