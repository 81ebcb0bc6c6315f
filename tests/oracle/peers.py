"""GPUs that share a cache: arrays of one file, one on each GPU, which only read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import flashwarp as fw
from oracle.machine import ELEMENTS
from oracle.model import Rows
from oracle.steps import step
from oracle.world import KINDS, Hand, Held


@dataclass
class Peers:
    """The caches, and for each GPU its array and the version of the file that this has open."""

    caches: list[Any]
    devices: list[Any]
    path: Path
    options: dict[str, Any]
    helds: list[Held] = field(default_factory=list)
    now: Any = None

    def open(self, which: int, held: Held) -> None:
        """Open the file on one of the GPUs."""
        cache = self.caches[which % len(self.caches)]
        options = {key: value() for key, value in self.options.items()}
        array = fw.open(self.path, device=self.devices[which], cache=cache, **options)
        self.helds[which] = replace(held, array=array)

    def store(self, values: Any, *, in_place: bool) -> Held:
        """Give the file other rows, as another program does."""
        if in_place:
            np.load(self.path, mmap_mode="r+")[...] = values
        else:
            np.save(self.path.with_suffix(".next.npy"), values)
            os.replace(self.path.with_suffix(".next.npy"), self.path)
        self.now = Held("peers", Rows("peers", values), lambda: None, lambda: b"", self.path)
        return self.now

    def close(self) -> None:
        """Close all."""
        for each in (*(held.array for held in self.helds), *reversed(self.caches)):
            each.close()


@step(2, alone=True)
def begin_peers(hand: Hand) -> None:
    """Make a cache of two GPUs, or two with a name that are one, and open a file on each."""
    devices = hand.machine.peers
    if len(devices) < 2 or "peers" in hand.world.extras:
        return
    line = hand.random.choice((512, 4096))
    capacity = hand.random.choice((4, 8, 40)) * 4 * line
    policy = hand.random.choice(("clock", "lru", "s3_fifo"))
    named = hand.odds(0.4)
    names = [each.name for each in devices]
    hand.say(f"peers = fw.Cache({capacity}, {line}, policy={policy!r}, peers={names}) {named=}")
    make = partial(fw.Cache, capacity, line, policy=policy, peers=devices)
    if named:
        folder = hand.world.folders["memory"]
        os.environ["FLASHWARP_RUNTIME_DIR"] = str(folder / "run")
        caches = [make(shared="peers", device=each) for each in devices]
    else:
        caches = [make()]
    dtype, row_shape = hand.random.choice(KINDS)
    path: Path = hand.world.folders["memory"] / "peers.npy"
    options: dict[str, Any] = {}
    if hand.odds(0.5):
        options["controller"] = partial(fw.nvme.SoftwareController, route="bounce")
    peers = Peers(caches, devices, path, options)
    hand.world.closing.append(peers)
    empty = Rows("peers", np.zeros((150, *row_shape), dtype))
    blank = Held("peers", empty, lambda: None, lambda: b"", path)
    held = peers.store(np.array(hand.values(blank, 150)), in_place=False)
    peers.helds += [held] * len(devices)
    for which in range(len(devices)):
        peers.open(which, held)
    hand.world.extras["peers"] = peers


@step(6)
def read_among_peers(hand: Hand) -> None:
    """Read by one of the GPUs: rows, a range, a future's rows, or rows that were prefetched."""
    peers = hand.world.extras.get("peers")
    if peers is None:
        return
    which = hand.random.randrange(len(peers.helds))
    held, x = peers.helds[which], peers.helds[which].array
    rows = hand.ids(held, repeats=True)
    how = hand.random.choice(("gather", "gather", "range", "future", "prefetch"))
    if how == "range":
        begin = hand.random.randrange(held.count)
        rows = np.arange(begin, min(held.count, begin + hand.world.most))
    hand.say(f"gpu{which}.{how}({{}})", rows)
    if how == "future":
        got = x.gather_async(rows).result()
    elif how == "range":
        got = x[rows[0] : rows[-1] + 1]
    else:
        if how == "prefetch":
            x.prefetch(rows)
        got = x.gather(rows)
    hand.check(held, held.model.read(rows), got)


@step(3)
def load_among_peers(hand: Hand) -> None:
    """Load the elements of some rows by a kernel on one of the GPUs."""
    peers = hand.world.extras.get("peers")
    if peers is None or peers.helds[0].dtype.str[1:] not in ELEMENTS:
        return
    which = hand.random.randrange(len(peers.helds))
    held, x = peers.helds[which], peers.helds[which].array
    program = hand.machine.program_for(held.dtype.str[1:], x.device, x.cache.policy)
    rows = hand.ids(held)
    width = int(np.prod(held.row_shape))
    at = (rows[:, np.newaxis] * width + np.arange(width)).reshape(-1).astype(np.uint64)
    with (
        x.device.empty_array(at.shape, at.dtype) as places,
        x.device.empty_array((len(rows), *held.row_shape), held.dtype) as out,
    ):
        x.device.upload(places.address, at)
        hand.say(f"program['load'](gpu{which}, {{}}, out)", rows)
        program["load"](x, places, out, at.size)
        x.wait()
        hand.check(held, held.model.read(rows), out.copy_to_host())


@step(2, alone=True)
def rewrite_among_peers(hand: Hand) -> None:
    """Close some arrays, perhaps write the file anew or in place, and open them again.

    An array that stays open beside a new file has the old one.
    """
    peers = hand.world.extras.get("peers")
    if peers is None:
        return
    count = len(peers.helds)
    how = hand.random.choice(("not", "anew", "anew", "in place", "under"))
    if how == "under":
        _write_under(hand, peers)
        return
    many = count if how == "in place" else hand.random.randint(1, count)
    closed = hand.random.sample(range(count), many)
    hand.say(f"close gpu{closed}, write the file {how}, open them again")
    for which in closed:
        peers.helds[which].array.close()
    if how == "not":
        held = peers.now
    else:
        values = np.array(hand.values(peers.now, peers.now.count))
        held = peers.store(values, in_place=how == "in place")
    for which in closed:
        peers.open(which, held)


def _write_under(hand: Hand, peers: Peers) -> None:
    """Write the file while arrays have it open; then they are told."""
    before = peers.now.model
    told = [which for which, held in enumerate(peers.helds) if held.model is before]
    hand.random.shuffle(told)
    hand.say(f"write the file in place, and gpu{told}.refresh()")
    held = peers.store(np.array(hand.values(peers.now, peers.now.count)), in_place=True)
    for which in told:
        array = peers.helds[which].array
        array.refresh()
        peers.helds[which] = replace(held, array=array)
