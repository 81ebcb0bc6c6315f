"""Pipelines of every way: batches that are read and written, loops, tiles, and their ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import flashwarp as fw
from flashwarp.errors import ArgumentError, RouteError
from oracle.arrays import choose
from oracle.model import Read, Wrong
from oracle.steps import step
from oracle.world import Hand, Held, Ids, Values


@dataclass
class Piped:
    """A pipeline of one thread, and the batches that it has in flight."""

    held: Held
    pipeline: Any
    hand: Hand
    options: dict[str, Any]
    alone: bool  # whether it has the array for itself
    reads: deque[tuple[Read, Any]] = field(default_factory=deque)
    kept: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """End it; batches in flight are dropped."""
        self.pipeline.close()
        self.leave()

    def leave(self) -> None:
        """Note that its array has it no more."""
        self.reads.clear()
        if self.held.holder is self:
            self.held.holder = None
        self.held.pipelines.remove(self)


def _ways(hand: Hand) -> list[dict[str, Any]]:
    if hand.machine.on_gpu:
        return [{}, {"sms": 2}, {"sms": 0}, {"sms": 0}, {"workers": 1}]
    return [{}, {"workers": 1}, {"workers": 2}, {"workers": (1, 2)}]


@step(4, alone=True)
def open_pipeline(hand: Hand) -> None:
    """Make a pipeline, by one of its ways."""
    held = choose(hand)
    if held is None or held.pipelines:
        return
    options = dict(hand.random.choice(_ways(hand)))
    options["depth"] = hand.random.randint(1, 3)
    if hand.machine.on_gpu:
        options["stream"] = hand.random.choice(hand.machine.streams[1:])
    hand.say("p = fw.Pipeline({}, {}, {})", held, hand.world.most, options)
    try:
        pipeline = fw.Pipeline(held.array, hand.world.most, **options)
    except RouteError:
        return
    alone = pipeline.explain().route in ("ring", "workers")
    piped = Piped(held, pipeline, hand, options, alone)
    held.pipelines.append(piped)
    if alone:
        held.holder = piped


def _choose(hand: Hand) -> Piped | None:
    mine = [each for held in hand.world.arrays for each in held.pipelines if each.hand is hand]
    return hand.random.choice(mine) if mine else None


def _ids(hand: Hand, piped: Piped, rows: Ids) -> tuple[Any, str]:
    library = hand.random.choice(
        [*hand.machine.libraries(piped.held.dtype), "", "negative", "list"]
    )
    if library == "list":
        return rows.tolist(), "list "
    if library == "negative":
        return rows - piped.held.count, "negative "
    if not library:
        return rows, ""
    placed = hand.machine.place(rows, library)
    piped.kept.append(placed)
    return placed, f"{library} "


def _sequence(hand: Hand, held: Held) -> tuple[Ids, Any]:
    """Choose rows that a slice or a range names."""
    begin = hand.random.randrange(held.count)
    count = hand.random.randint(0, min(hand.world.most, held.count - begin))
    numbers = range(begin, begin + count)[:: hand.random.choice((1, 1, 3, -1))]
    as_slice = slice(begin, begin + count)
    return np.array(numbers, np.int64), as_slice if numbers.step == 1 else numbers


@step(12)
def prefetch_batch(hand: Hand) -> None:
    """Start to read a batch."""
    piped = _choose(hand)
    if piped is None or len(piped.reads) >= piped.options["depth"]:
        return
    if hand.odds(0.2):
        (rows, ids), how = _sequence(hand, piped.held), "sequence "
    else:
        rows = hand.ids(piped.held, repeats=True)
        ids, how = _ids(hand, piped, rows)
    hand.say(f"p.prefetch({how}{{}})  # {piped.held.name}", rows)
    read = piped.held.model.read(rows)
    known = hand.known(piped.held)
    piped.reads.append((read, None if known is None else known[rows]))
    piped.pipeline.prefetch(ids)


@step(12)
def synchronize_batch(hand: Hand) -> None:
    """Take the oldest batch."""
    piped = _choose(hand)
    if piped is None or not piped.reads:
        return
    hand.say(f"p.take()  # {piped.held.name}")
    read, among = piped.reads.popleft()
    rows = piped.pipeline.take()
    got = hand.machine.fetch(rows, piped.options.get("stream"))
    hand.world.checks += 1
    read.check(np.array(got), among)
    held, own = piped.held, hand.own(piped.held)
    if among is None and len(read.rows) <= len(own) and hand.odds(0.3):
        ids = own[(hand.random.randrange(len(own)) + np.arange(len(read.rows))) % len(own)]
        line = hand.say(f"p.write_back({{}}, the rows of the batch)  # {held.name}", ids)
        piped.pipeline.write_back(ids, rows)
        hand.stores(held, line, ids, read.right)


def _rows(hand: Hand, piped: Piped, values: Values) -> tuple[Any, str]:
    libraries = hand.machine.libraries(piped.held.dtype)
    if libraries and hand.odds(0.5):
        library = hand.random.choice(libraries)
        placed = hand.machine.place(values, library)
        piped.kept.append(placed)
        return placed, f"{library} "
    piped.kept.append(values)
    return values, ""


@step(16)
def write_back(hand: Hand) -> None:
    """Start to store a batch."""
    piped = _choose(hand)
    if piped is None:
        return
    held = piped.held
    if hand.alone and hand.odds(0.2):
        (rows, ids), how = _sequence(hand, held), "sequence "
    else:
        rows = hand.ids(held)
        ids, how = _ids(hand, piped, rows)
    values = hand.values(held, len(rows))
    given, what = _rows(hand, piped, values)
    line = hand.say(f"p.write_back({how}{{}}, {what}rows)  # {held.name}", rows)
    piped.pipeline.write_back(ids, given)
    hand.stores(held, line, rows, values)


@step(4)
def synchronize_writes(hand: Hand) -> None:
    """Wait for the batches that are being stored."""
    piped = _choose(hand)
    if piped is not None:
        hand.say(f"p.reclaim()  # {piped.held.name}")
        piped.pipeline.reclaim()


@step(3)
def flush_pipeline(hand: Hand) -> None:
    """Make batches durable, and look at the storage."""
    piped = _choose(hand)
    if piped is None:
        return
    hand.say(f"p.flush()  # {piped.held.name}")
    piped.pipeline.flush()
    if piped.alone:
        hand.world.checks += 1
        piped.held.check_storage(hand.known(piped.held))


@step(2)
def iterate(hand: Hand) -> None:
    """Loop over batches, some of which the loop stores to."""
    piped = _choose(hand)
    if piped is None or piped.reads:
        return
    held, reads = piped.held, deque[tuple[Read, Any]]()
    known = hand.known(held)
    line = hand.say(f"for rows, ids in p.iterate(batches): ...  # {held.name}")

    def batches() -> Iterator[Ids]:
        for _ in range(hand.random.randint(1, 5)):
            rows = hand.ids(held, repeats=True)
            reads.append((held.model.read(rows), None if known is None else known[rows]))
            yield rows

    for got, _ in piped.pipeline.iterate(batches()):
        read, among = reads.popleft()
        hand.world.checks += 1
        hand.world.calls += 1
        read.check(np.array(hand.machine.fetch(got, piped.options.get("stream"))), among)
        if hand.odds(0.4):
            rows = hand.ids(held)
            values = hand.values(held, len(rows))
            piped.kept.append(values)
            piped.pipeline.write_back(rows, values)
            hand.stores(held, line, rows, values)


@step(2)
def ask_for_facts(hand: Hand) -> None:
    """Ask a pipeline and its array for facts, which they never refuse."""
    piped = _choose(hand)
    if piped is None:
        return
    hand.say(f"p.explain(), p.stats, p.check(), {piped.held.name}.explain(), .stats, repr")
    piped.pipeline.explain()
    repr(piped.pipeline)
    _ = piped.pipeline.stats
    piped.pipeline.check()
    piped.held.array.explain()
    _ = piped.held.array.stats
    repr(piped.held.array)


@step(1)
def refused(hand: Hand) -> None:
    """Call an array that belongs to a pipeline."""
    piped = _choose(hand)
    if piped is None or not piped.alone:
        return
    hand.say("{}[0]  # belongs to the pipeline", piped.held)
    try:
        piped.held.array[0]
    except ArgumentError:
        return
    raise Wrong("an array that belongs to a pipeline was read beside it")


@step(3, alone=True)
def close_pipeline(hand: Hand) -> None:
    """End a pipeline."""
    piped = _choose(hand)
    if piped is not None:
        hand.say(f"p.close()  # {piped.held.name}")
        piped.close()


@step(1, alone=True)
def lose_pipeline(hand: Hand) -> None:
    """Drop a pipeline without closing it: a thread closes it, and gives its array back."""
    piped = _choose(hand)
    if piped is None:
        return
    held = piped.held
    hand.say("p = None  # {}", held)
    piped.leave()
    piped.pipeline = None
    end = time.monotonic() + 60
    while piped.alone:
        try:
            held.array[0]
            return
        except ArgumentError as error:
            if time.monotonic() > end:
                raise Wrong(f"a lost pipeline keeps {held.name}") from error
            time.sleep(1e-3)


@step(1, alone=True)
def tiles(hand: Hand) -> None:
    """Stream an array from front to back, and perhaps store to it."""
    held = choose(hand)
    if held is None or held.pipelines:
        return
    options = dict(hand.random.choice(_ways(hand)))
    stream = hand.random.choice(hand.machine.streams[1:] or [None])
    if hand.machine.on_gpu:
        options["stream"] = stream
    height = hand.random.randint(max(1, held.count // 8), held.count)
    writable, read = hand.odds(0.6), hand.odds(0.8)
    options |= {"writable": writable, "read": read or not writable}
    line = hand.say("for tile in fw.Pipeline.tiles({}, {}, {}): ...", held, height, options)
    begin = 0
    for tile in fw.Pipeline.tiles(held.array, height, **options):
        rows = np.arange(begin, min(begin + height, held.count))
        begin += height
        hand.world.calls += 1
        if options["read"]:
            got = hand.machine.fetch(tile, stream)
            hand.check(held, held.model.read(rows), np.array(got))
        if not writable:
            continue
        values = hand.values(held, len(rows))
        if isinstance(tile, np.ndarray):
            tile[...] = values
        else:
            address = tile.data_ptr() if hasattr(tile, "data_ptr") else tile.address
            hand.machine.devices[0].upload(address, np.ascontiguousarray(values), stream)
        hand.stores(held, line, rows, values)
