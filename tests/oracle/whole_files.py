"""`fw.File`: bytes that are read, written, appended and cut, in ordinary files and images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import flashwarp as fw
from flashwarp.errors import BoundsError
from oracle.model import Wrong
from oracle.steps import step
from oracle.world import Hand

_CAPACITY = 40_000


@dataclass
class Whole:
    """An open file, and the bytes that it must have."""

    path: Path
    kind: str
    options: dict[str, Any]
    file: Any
    content: bytearray
    started: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Close it, look at what is there, and remove it."""
        self.started.clear()
        self.file.close()
        self.check()
        self.path.unlink()

    def check(self) -> None:
        """Raise Wrong unless the path holds the bytes."""
        if self.kind == "plain":
            got = self.path.read_bytes()[: len(self.content)]
            if got != bytes(self.content):
                raise Wrong(f"the file differs: {_difference(got, self.content)}")


def _difference(got: bytes, right: bytes | bytearray) -> str:
    if len(got) != len(right):
        return f"{len(got)} bytes, not {len(right)}"
    places = np.flatnonzero(np.frombuffer(got, "u1") != np.frombuffer(right, "u1"))
    return f"{len(places)} of {len(right)} bytes, from {places[0]} to {places[-1]}"


def _of(hand: Hand) -> Whole:
    whole = hand.world.extras.get("file")
    if whole is None:
        path = hand.world.folders["memory"] / "whole"
        path.unlink(missing_ok=True)
        device = hand.machine.devices[hand.world.device]
        options = {"device": device, "cache": "16 KiB", "line": hand.random.choice((512, 4096))}
        kind = hand.random.choice(("plain", "plain", "gvdk", "sparse"))
        how: dict[str, Any] = {"format": "plain" if kind == "plain" else "gvdk"}
        if kind == "sparse":
            how["preallocate"] = False
        size = hand.random.randrange(_CAPACITY)
        hand.say(f"f = fw.File.create(path, {size}, capacity={_CAPACITY}, {how})")
        file = fw.File.create(path, size, capacity=_CAPACITY, **how, **options)
        whole = Whole(path, kind, options, file, bytearray(size))
        hand.world.extras["file"] = whole
        hand.world.closing.append(whole)
    return whole


def _bytes(hand: Hand, count: int) -> np.ndarray:
    return np.random.default_rng(hand.random.getrandbits(32)).integers(1, 256, count, "u1")


def _given(hand: Hand, host: np.ndarray) -> Any:
    return hand.machine.place(host, "torch") if hand.machine.torch and hand.odds(0.7) else host


def _same(hand: Hand, got: bytes, right: bytes | bytearray) -> None:
    hand.world.checks += 1
    if got != bytes(right):
        raise Wrong(_difference(got, right))


@step(6, alone=True)
def read_bytes(hand: Hand) -> None:
    """Read bytes, to the host or into an array."""
    whole = _of(hand)
    offset, count = hand.random.randrange(_CAPACITY), hand.random.choice((1, 17, 512, 5000))
    right = whole.content[offset : offset + count]
    if hand.odds(0.5):
        hand.say(f"f.read({offset}, {count})")
        _same(hand, whole.file.read(offset, count), right)
        return
    room = np.zeros(count, "u1")
    target = _given(hand, room)
    hand.say(f"f.read_into(array[{count}], {offset})")
    got = whole.file.read_into(target, offset)
    _same(hand, hand.machine.fetch(target)[:got].tobytes(), right)


@step(6, alone=True)
def write_bytes(hand: Hand) -> None:
    """Write bytes, at once or in the background."""
    whole = _of(hand)
    count = hand.random.choice((1, 17, 512, 5000))
    appends = hand.odds(0.3)
    offset = len(whole.content) if appends else hand.random.randrange(_CAPACITY)
    data = _bytes(hand, count)
    given = _given(hand, data)
    name = "append" if appends else hand.random.choice(("write_from", "write_from_async"))
    hand.say(f"f.{name}(array[{count}], {offset})")
    call = getattr(whole.file, name)
    try:
        done = call(given) if appends else call(given, offset)
    except BoundsError:
        if offset + count <= _CAPACITY:
            raise
        return
    if name == "write_from_async":
        whole.started.append((done, given))
    whole.content.extend(bytes(max(0, offset + count - len(whole.content))))
    whole.content[offset : offset + count] = data.tobytes()


@step(1, alone=True)
def cut(hand: Hand) -> None:
    """Cut the file, or let it grow."""
    whole = _of(hand)
    size = hand.random.randrange(_CAPACITY)
    hand.say(f"f.truncate({size})")
    whole.file.truncate(size)
    del whole.content[size:]
    whole.content.extend(bytes(size - len(whole.content)))


@step(1, alone=True)
def sync(hand: Hand) -> None:
    """Make the file durable, and look at it."""
    whole = _of(hand)
    hand.say("f.flush()")
    whole.file.flush()
    hand.world.checks += 1
    whole.check()


@step(1, alone=True)
def open_again(hand: Hand) -> None:
    """Close the file and open it again."""
    whole = _of(hand)
    hand.say("f.close(); f = fw.File.open(path, 'r+')")
    whole.file.close()
    whole.started.clear()
    whole.check()
    capacity = {"capacity": _CAPACITY} if whole.kind == "plain" else {}
    whole.file = fw.File.open(whole.path, "r+", **capacity, **whole.options)
    if whole.file.size != len(whole.content):
        raise Wrong(f"a file of {whole.file.size} bytes, not {len(whole.content)}")
