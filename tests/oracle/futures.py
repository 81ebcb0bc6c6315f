"""Asynchronous calls: their futures, and the ways to wait for them."""

from __future__ import annotations

from typing import Any

from oracle.arrays import choose, flat, index_of, out_of, values_of
from oracle.steps import step
from oracle.world import Hand, Pending


@step(6)
def gather_async(hand: Hand) -> None:
    """Start a read."""
    held = choose(hand)
    if held is None:
        return
    rows = hand.ids(held, repeats=True)
    index, how = index_of(hand, held, rows)
    out, where = out_of(hand, held, flat(held, rows))
    stream = hand.stream()
    line = hand.say(f"f = {{}}.gather_async({how}{{}}{where}, stream={{}})", held, rows, stream)
    read = held.model.read(rows)
    future = held.array.gather_async(index, out, stream)
    known = hand.known(held)
    among = None if known is None else known[rows]
    hand.pending.append(Pending(held, future.result, read, line, future, (index, out), among))


@step(6)
def scatter_async(hand: Hand) -> None:
    """Start a store."""
    held = choose(hand)
    if held is None:
        return
    rows = hand.ids(held)
    index, how = index_of(hand, held, rows)
    given, values, what = values_of(hand, held, len(rows))
    stream = hand.stream()
    text = f"f = {{}}.scatter_async({how}{{}}, {what}values, stream={{}})"
    line = hand.say(text, held, rows, stream)
    future = held.array.scatter_async(index, given, stream)
    hand.stores(held, line, rows, values)
    if hand.odds(0.7):
        out = (index, given)
        hand.pending.append(Pending(held, future.result, None, line, future, out))
    else:
        hand.kept += [index, given]


@step(8)
def settle(hand: Hand) -> None:
    """Wait for something in flight, in one of the ways to do that."""
    if not hand.pending:
        return
    pending = hand.random.choice(hand.pending)
    future = pending.future
    kind = hand.random.choice(("result", "result", "done", "before", "callback"))
    if future is None or kind == "result":
        hand.say(f"# what line {pending.line} has read" if future is None else
                 f"f.result()  # of line {pending.line}")  # fmt: skip
        hand.settle(pending)
        return
    hand.say(f"f.{kind}  # of line {pending.line}")
    if kind == "done":
        future.done()
    elif kind == "before":
        stream = hand.random.choice(hand.machine.streams[1:] or [None])
        on_host = pending.read is not None and not hasattr(future.out, "address")
        if (hand.machine.on_gpu and on_host) or stream is None:
            return
        out = future.before(stream)
        if pending.read is not None:
            pending.get = lambda: hand.machine.fetch(out, stream)
    else:
        results: list[Any] = []
        future.add_done_callback(lambda each: results.append(each.exception()))


@step(1)
def rude(hand: Hand) -> None:
    """Let other code wait for the GPU where nothing of Python's can run beside it."""
    if not hand.machine.on_gpu:
        return
    if hand.odds(0.5):
        hand.say("cuCtxSynchronize()  # by a library that keeps the interpreter's lock")
        hand.machine.wait_with_the_interpreter()
    else:
        hand.say("# memory of the GPU for the collector to free")
        hand.machine.leave_memory_in_a_cycle()


@step(2)
def unordered(hand: Hand) -> None:
    """Start a call that need not keep the order, when those before it are over."""
    held = choose(hand)
    if held is None:
        return
    hand.say("{}.flush()", held)
    held.array.flush()
    stream = hand.stream()
    if hand.odds(0.5):
        rows = hand.ids(held)
        values = hand.values(held, len(rows))
        line = hand.say("{}.scatter_async({}, values, ordered=False).result()", held, rows)
        held.array.scatter_async(rows, values, stream, ordered=False).result()
        hand.stores(held, line, rows, values)
        return
    for pending in [each for each in hand.pending if each.read in held.model.loose]:
        hand.settle(pending)
    rows = hand.ids(held, repeats=True)
    line = hand.say("f = {}.gather_async({}, ordered=False)", held, rows)
    read = held.model.read_loosely(rows)
    future = held.array.gather_async(rows, None, stream, ordered=False)
    known = hand.known(held)
    among = None if known is None else known[rows]
    hand.pending.append(Pending(held, future.result, read, line, future, (rows,), among))
