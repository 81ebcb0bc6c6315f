"""Calls on arrays: keys, gathers and scatters with and without streams, maintenance."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracle.steps import step
from oracle.world import Hand, Held, Pending

# Operands.


def choose(hand: Hand) -> Held | None:
    arrays = hand.arrays()
    return hand.random.choice(arrays) if arrays else None


def index_of(hand: Hand, held: Held, rows: Any) -> tuple[Any, str]:
    """Write rows as an index of some kind; return it, and how it reads."""
    draw = hand.random.random()
    libraries = hand.machine.libraries(held.dtype)  # rows are of the library of their ids
    if libraries and draw < 0.4:
        library = hand.random.choice(libraries)
        kept = hand.machine.place(rows.astype(hand.random.choice(("i8", "i4"))), library)
        hand.kept.append(kept)
        return kept, f"{library} "
    if draw < 0.6:
        return rows, ""
    if draw < 0.7:
        return rows.astype("i4"), "int32 "
    if draw < 0.8:
        return rows - held.count, "negative "
    if draw < 0.9:
        return np.repeat(rows, 2)[::2], "strided "
    return rows.tolist(), "list "


def values_of(hand: Hand, held: Held, count: int) -> tuple[Any, Any, str]:
    """Choose values to store: what is given, what it becomes, and how it reads."""
    values = hand.values(held, count)
    draw = hand.random.random()
    libraries = hand.machine.libraries(held.dtype)
    if libraries and draw < 0.4:
        library = hand.random.choice(libraries)
        kept = hand.machine.place(values, library)
        hand.kept.append(kept)
        return kept, values, f"{library} "
    if draw < 0.7 or held.dtype.kind not in "?biuf":
        return values, values, ""
    if draw < 0.8:
        return np.repeat(values, 2, axis=0)[::2], values, "strided "
    if draw < 0.9:
        one = values[:1]
        return one, np.broadcast_to(one, values.shape).copy(), "one "
    small = (values.astype("i8") % 100).astype("i2")
    return small, small.astype(held.dtype), "int16 "


def flat(held: Held, rows: Any) -> tuple[int, ...]:
    return (len(rows), *held.row_shape)


# Keys.


@step(8)
def read_key(hand: Hand) -> None:
    """Read x[key]."""
    held = choose(hand)
    if held is None:
        return
    n = held.count
    a = hand.random.randrange(n)
    b = min(n, a + hand.random.randint(0, min(hand.world.most, n)))
    kind = hand.random.choice(("slice", "slice", "row", "step", "rows", "mask", "all"))
    key: Any = slice(a, b)
    if kind == "row":
        key = a - n if hand.odds(0.3) else a
    elif kind == "step":
        key = slice(a, None, hand.random.choice((2, 3, -1)))
    elif kind == "rows":
        key = hand.ids(held, repeats=True)
    elif kind == "mask":
        key = np.arange(n) % hand.random.randint(2, 9) == 0
    elif kind == "all":
        key = slice(None)
    rows = np.atleast_1d(np.arange(n)[key])
    hand.say("{}[{}]", held, key)
    read = held.model.read(rows)
    hand.check(held, read, held.array[key])


@step(8)
def store_key(hand: Hand) -> None:
    """Store x[key] = values."""
    held = choose(hand)
    if held is None:
        return
    n = held.count
    a = hand.random.randrange(n)
    key: Any = slice(a, min(n, a + hand.random.randint(1, min(hand.world.most, n))))
    kind = hand.random.choice(("slice", "slice", "row", "step", "rows")) if hand.alone else "rows"
    if kind == "row":
        key = a
    elif kind == "step":
        key = slice(a, None, hand.random.choice((2, 3, -2)))
    elif kind == "rows":
        key = hand.ids(held)
    rows = np.atleast_1d(np.arange(n)[key])
    given, values, how = values_of(hand, held, len(rows))
    if not isinstance(given, np.ndarray):
        given, how = values, ""
    line = hand.say(f"{{}}[{{}}] = {how}values", held, key)
    held.array[key] = given[0] if kind == "row" else given
    hand.stores(held, line, rows, values)


@step(3)
def part_of_rows(hand: Hand) -> None:
    """Read or store a part of each of some rows."""
    held = choose(hand)
    if held is None or not held.row_shape or held.row_shape[0] < 2:
        return
    rows = hand.ids(held)
    low = hand.random.randrange(held.row_shape[0] - 1)
    inside = slice(low, hand.random.randint(low + 1, held.row_shape[0]))
    now = held.model.now[rows]
    if hand.odds(0.5):
        hand.say("{}[{}, {}]", held, rows, inside)
        whole = held.model.read(rows)
        got = now.copy()
        got[:, inside] = held.array[rows, inside]
        hand.check(held, whole, got)
        return
    part = hand.values(held, len(rows))[:, inside]
    line = hand.say("{}[{}, {}] = values", held, rows, inside)
    held.array[rows, inside] = part
    now[:, inside] = part
    hand.stores(held, line, rows, now)


@step(3)
def read_element(hand: Hand) -> None:
    """Read x[i, j, ...]: an element, or the neighbours that such a key leaves."""
    held = choose(hand)
    if held is None or not held.row_shape or 0 in held.row_shape:
        return
    axes = held.row_shape[: hand.random.randint(1, len(held.row_shape))]
    place = tuple(hand.random.randrange(-length, length) for length in axes)
    row = hand.random.randrange(held.count)
    hand.say("{}[{}]", held, (row, *place))
    read = held.model.read(np.array([row]))
    got = held.model.now[row].copy()
    got[place] = held.array[(row, *place)]
    hand.check(held, read, got[None])


def _part_of(hand: Hand, length: int) -> int | slice:
    """Draw an index or a slice of an axis, of which some go backwards or select nothing."""
    draw = hand.random.random()
    if draw < 0.5:
        return hand.random.randrange(-length, length)
    if draw < 0.6:
        return slice(None)
    ends = (hand.random.choice((None, hand.random.randint(-length - 1, length))) for _ in range(2))
    return slice(*ends, hand.random.choice((None, 1, 2, 3, -1, -2)))


@step(5)
def read_columns(hand: Hand) -> None:
    """Read x[a:b:s, j, c:d:t, ...]: columns, or parts of some."""
    held = choose(hand)
    if held is None or not held.row_shape or 0 in held.row_shape:
        return
    axes = held.row_shape[: hand.random.randint(1, len(held.row_shape))]
    place = tuple(_part_of(hand, length) for length in axes)
    rows = _part_of(hand, held.count)
    rows = slice(rows, rows + 1 or None) if isinstance(rows, int) else rows
    dots = (Ellipsis,) if hand.odds(0.2) else ()
    hand.say("{}[{}]", held, (rows, *place, *dots))
    numbers = np.arange(held.count)[rows]
    read = held.model.read(numbers)
    got = held.model.now[numbers]
    got[(slice(None), *place)] = held.array[(rows, *place, *dots)]
    hand.check(held, read, got)


# Rows by index.


def out_of(hand: Hand, held: Held, shape: tuple[int, ...]) -> tuple[Any, str]:
    draw = hand.random.random()
    libraries = hand.machine.libraries(held.dtype)
    if libraries and draw < 0.5:
        library = hand.random.choice(libraries)
        return hand.machine.place(np.zeros(shape, held.dtype), library), f", out={library}"
    if draw < 0.6:
        return np.zeros(shape, held.dtype), ", out=numpy"
    return None, ""


@step(10)
def gather(hand: Hand) -> None:
    """Read rows by index, a slice or a range; with a stream, or without."""
    held = choose(hand)
    if held is None:
        return
    if hand.odds(0.2):
        a = hand.random.randrange(held.count)
        b = min(held.count, a + hand.world.most)
        part = range(a, b, hand.random.choice((1, 1, 1, 3, 8)))
        part = hand.random.choice((part, part, part[::-1]))
        rows, how = np.array(part), ""
        backwards = slice(part.start, part.stop if part.stop >= 0 else None, part.step)
        index: Any = hand.random.choice((part, backwards))
    else:
        rows = hand.ids(held, repeats=True)
        index, how = index_of(hand, held, rows)
    out, where = out_of(hand, held, flat(held, rows))
    stream = hand.stream()
    line = hand.say(f"{{}}.gather({how}{{}}{where}, stream={{}})", held, rows, stream)
    read = held.model.read(rows)
    got = held.array.gather(index, out, stream)
    if stream is None or isinstance(got, np.ndarray):
        hand.check(held, read, hand.machine.fetch(got))
        return
    known = hand.known(held)
    among = None if known is None else known[rows]
    fetch = hand.machine.fetch
    hand.pending.append(
        Pending(held, lambda: fetch(got, stream), read, line, out=(index, got), among=among)
    )


@step(10)
def scatter(hand: Hand) -> None:
    """Store rows by index; with a stream, or without."""
    held = choose(hand)
    if held is None:
        return
    rows = hand.ids(held)
    index, how = index_of(hand, held, rows)
    given, values, what = values_of(hand, held, len(rows))
    stream = hand.stream()
    line = hand.say(f"{{}}.scatter({how}{{}}, {what}values, stream={{}})", held, rows, stream)
    held.array.scatter(index, given, stream)
    hand.stores(held, line, rows, values)


@step(2)
def prefetch(hand: Hand) -> None:
    """Bring rows to the cache."""
    held = choose(hand)
    if held is None:
        return
    rows = hand.ids(held)
    index, how = index_of(hand, held, rows)
    stream = hand.stream()
    hand.say(f"{{}}.prefetch({how}{{}}, stream={{}})", held, rows, stream)
    held.array.prefetch(index, stream)


# Maintenance.


@step(3)
def flush(hand: Hand) -> None:
    """Make what was stored durable, and look at the storage."""
    held = choose(hand)
    if held is None:
        return
    hand.say("{}.flush()", held)
    held.array.flush()
    hand.world.checks += 1
    held.check_storage(hand.known(held))


@step(3)
def maintain(hand: Hand) -> None:
    """Empty the cache, or ask for facts."""
    held = choose(hand)
    if held is None:
        return
    names = ("drop_cache", "refresh", "wait", "check", "stats", "explain", "__repr__")
    name = hand.random.choice(names)
    hand.say(f"{{}}.{name}()", held)
    found = getattr(held.array, name)
    if callable(found):
        found()


@step(1, alone=True)
def close_and_open(hand: Hand) -> None:
    """Close an array, look at its storage, and open it again."""
    held = choose(hand)
    if held is None or held.pipelines:
        return
    hand.say("{}.close(); {} = fw.open(...)", held, held)
    held.array.close()
    hand.world.checks += 1
    held.check_storage()
    held.array = held.open()
