"""What else reads the file of an array: a second array, and loads of the whole file."""

from __future__ import annotations

import numpy as np

import flashwarp as fw
from oracle.arrays import choose
from oracle.steps import step
from oracle.world import Hand, Held


def _flushed(hand: Hand) -> Held | None:
    held = choose(hand)
    if held is None or held.path is None:
        return None
    if held.stale or hand.odds(0.3):
        hand.say("{}.flush()", held)
        held.array.flush()
        held.stale = False
    return held


@step(2, alone=True)
def read_beside_the_writer(hand: Hand) -> None:
    """Open the file of an array for reading once it is flushed, or look at it again."""
    was_stale = {each.name: each.stale for each in hand.arrays()}
    held = _flushed(hand)
    if held is None:
        return
    device = hand.machine.devices[hand.world.device]
    if held.reader is None:
        hand.say("r = fw.open({}, 'r', cache='64 KiB', lock=False)", held)
        options = {"device": device, "cache": "64 KiB", "line": 512, "lock": False}
        held.reader = fw.open(held.path, "r", **options)
    elif was_stale[held.name] or hand.odds(0.3):
        hand.say("r.refresh()  # of {}", held)
        held.reader.refresh()
    rows = hand.ids(held, repeats=True)
    hand.say("r.gather({})  # of {}", rows, held)
    hand.check(held, held.model.read(rows), np.asarray(held.reader.gather(rows)))
    if hand.odds(0.3):
        hand.say("r.close()  # of {}", held)
        held.reader.close()
        held.reader = None


@step(2, alone=True)
def load(hand: Hand) -> None:
    """Load the file of an array once it is flushed."""
    held = _flushed(hand)
    if held is None:
        return
    device = hand.machine.devices[hand.world.device]
    empty = np.zeros(held.model.now.shape, held.dtype)
    target = hand.machine.place(empty, "flashwarp") if hand.machine.on_gpu else empty
    hand.say("fw.load({}.npy, into=array)", held)
    fw.load(held.path, device, into={held.path.stem: target}, staging="8 MiB")
    hand.check(held, held.model.read(np.arange(held.count)), hand.machine.fetch(target))
