"""Clients of a shared cache, whose owner is in the same process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flashwarp as fw
from oracle.machine import ELEMENTS
from oracle.model import Rows
from oracle.steps import step
from oracle.world import KINDS, Hand, Held

_ELEMENTS_MAX = 2000
"""That a kernel of a client loads or stores."""


@dataclass
class Shared:
    """An owner, two clients, and the arrays of one file that they have open."""

    owner: Any
    clients: list[Any]
    held: Held
    arrays: list[Any]

    def close(self) -> None:
        """Close all, the owner last."""
        for each in (*self.arrays, *self.clients, self.owner):
            each.close()


def _of(hand: Hand) -> Shared | None:
    if hand.machine.on_gpu:
        return None
    shared = hand.world.extras.get("sharing")
    if shared is not None:
        return shared
    folder = hand.world.folders["memory"]
    os.environ["FLASHWARP_RUNTIME_DIR"] = str(folder / "run")
    device = hand.machine.devices[hand.world.device]
    line = hand.random.choice((512, 4096))
    hand.say(f"owner = fw.Cache({16 * line}, {line}, shared='rows'); two clients")
    owner = fw.Cache(16 * line, line, device=device, shared="rows")
    clients = [fw.Cache(shared="rows", device=device) for _ in range(2)]
    path: Path = folder / "shared.npy"
    dtype, row_shape = hand.random.choice(KINDS)
    model = Rows("shared", np.zeros((150, *row_shape), dtype))
    held = Held("shared", model, lambda: None, lambda: b"", path)
    model.now[...] = hand.values(held, 150)
    np.save(path, model.now)
    held.stored = lambda: np.load(path).tobytes()
    arrays = [fw.open(path, "r+", cache=cache) for cache in clients]
    shared = Shared(owner, clients, held, arrays)
    hand.world.extras["sharing"] = shared
    hand.world.closing.append(shared)
    return shared


@step(6, alone=True)
def read_shared(hand: Hand) -> None:
    """Read by one of the clients."""
    shared = _of(hand)
    if shared is None:
        return
    which = hand.random.randrange(2)
    rows = hand.ids(shared.held, repeats=True)
    hand.say(f"client{which}.gather({{}})", rows)
    hand.check(shared.held, shared.held.model.read(rows), shared.arrays[which].gather(rows))


@step(6, alone=True)
def store_shared(hand: Hand) -> None:
    """Store by one of the clients."""
    shared = _of(hand)
    if shared is None:
        return
    which = hand.random.randrange(2)
    rows = hand.ids(shared.held)
    values = hand.values(shared.held, len(rows))
    line = hand.say(f"client{which}.scatter({{}}, values)", rows)
    shared.arrays[which].scatter(rows, values)
    hand.stores(shared.held, line, rows, values)


@step(4, alone=True)
def read_and_store_shared_later(hand: Hand) -> None:
    """Store by a future of one of the clients, and read by one of either."""
    shared = _of(hand)
    if shared is None:
        return
    which, other = hand.random.randrange(2), hand.random.randrange(2)
    rows = hand.ids(shared.held)
    values = hand.values(shared.held, len(rows))
    line = hand.say(f"client{which}.scatter_async({{}}, values).result()", rows)
    shared.arrays[which].scatter_async(rows, values).result()
    hand.stores(shared.held, line, rows, values)
    rows = hand.ids(shared.held, repeats=True)
    hand.say(f"client{other}.gather_async({{}}).result()", rows)
    read = shared.arrays[other].gather_async(rows).result()
    hand.check(shared.held, shared.held.model.read(rows), read)


@step(4, alone=True)
def use_shared_by_kernel(hand: Hand) -> None:
    """Load or store the elements of some rows by a kernel on an array of one of the clients."""
    shared = _of(hand)
    if shared is None or shared.held.dtype.str[1:] not in ELEMENTS:
        return
    held, which = shared.held, hand.random.randrange(2)
    program = hand.machine.program(held.dtype.str[1:], hand.world.device)
    width = int(np.prod(held.row_shape))
    # Each element asks the owner, and waits for a thread of it.
    stores, rows = hand.odds(0.5), hand.ids(held, max(1, _ELEMENTS_MAX // width))
    at = (rows[:, np.newaxis] * width + np.arange(width)).reshape(-1).astype(np.uint64)
    values = np.zeros((len(rows), *held.row_shape), held.dtype)
    if stores:
        values = np.ascontiguousarray(hand.values(held, len(rows)))
    kernel = "store" if stores else "load"
    line = hand.say(f"program[{kernel!r}](client{which}, {{}}, values)", rows)
    array = shared.arrays[which]
    program[kernel](array, at, values, at.size)
    array.wait()
    if stores:
        hand.stores(held, line, rows, values)
    else:
        hand.check(held, held.model.read(rows), values)


@step(2, alone=True)
def maintain_shared(hand: Hand) -> None:
    """Flush, refresh or empty the cache by one of the clients."""
    shared = _of(hand)
    if shared is None:
        return
    which = hand.random.randrange(2)
    name = hand.random.choice(("flush", "refresh", "drop_cache", "explain"))
    hand.say(f"client{which}.{name}()")
    getattr(shared.arrays[which], name)()
    if name != "flush":
        return
    hand.world.checks += 1
    shared.held.check_storage()
