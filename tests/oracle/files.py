"""What else reads the file of an array: a second array, and loads of the whole file."""

from __future__ import annotations

import json

import numpy as np

import flashwarp as fw
from flashwarp.errors import FlashwarpError
from oracle.arrays import choose
from oracle.model import Wrong
from oracle.steps import step
from oracle.world import Hand, Held


def _flushed(hand: Hand) -> Held | None:
    held = choose(hand)
    if held is None or held.path is None:
        return None
    if held.dirty or hand.odds(0.3):
        hand.say("{}.flush()", held)
        held.array.flush()
        held.dirty = False
    return held


@step(2, alone=True)
def read_beside_the_writer(hand: Hand) -> None:
    """Open the file of an array for reading once it is flushed, or look at it again."""
    held = _flushed(hand)
    if held is None:
        return
    device = hand.machine.devices[hand.world.device]
    if held.reader is None:
        hand.say("r = fw.open({}, 'r', cache='64 KiB', lock=False)", held)
        options = {"device": device, "cache": "64 KiB", "line": 512, "lock": False}
        held.reader = fw.open(held.path, "r", **options)
    elif held.reader_is_old or hand.odds(0.3):
        hand.say("r.refresh()  # of {}", held)
        held.reader.refresh()
    held.reader_is_old = False
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
    target: object = np.zeros(held.model.now.shape, held.dtype)
    if "torch" in hand.machine.libraries(held.dtype) and hand.odds(0.7):
        target = hand.machine.place(target, "torch")
    hand.say("fw.load({}.npy, into=array)", held)
    fw.load(held.path, into={held.path.stem: target}, host_memory="8 MiB")
    hand.check(held, held.model.read(np.arange(held.count)), hand.machine.fetch(target))


@step(1, alone=True)
def load_two_into_one(hand: Hand) -> None:
    """Load two entries into arrays that share memory: refused, unless they are equal."""
    path = hand.world.folders["memory"] / "two.safetensors"
    first = np.arange(64, dtype="f4")
    second = first if hand.odds(0.3) else first + 1
    header = {
        name: {"dtype": "F32", "shape": [64], "data_offsets": [256 * k, 256 * (k + 1)]}
        for k, name in enumerate(("a", "b"))
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + first.tobytes() + second.tobytes())
    memory = np.zeros(96, "f4")
    apart = hand.odds(0.3)
    into = {"a": memory[:64], "b": np.zeros(64, "f4") if apart else memory[32:]}
    if not apart and second is first:
        into["b"] = memory[:64]
    hand.say("fw.load(two, into=arrays)  # apart: {}, equal: {}", apart, second is first)
    hand.world.checks += 1
    try:
        fw.load(path, into=into)
    except FlashwarpError:
        if apart:
            raise
        return
    if not np.array_equal(into["a"], first) or not np.array_equal(into["b"], second):
        raise Wrong("two entries were loaded into one memory, and one has lost")
