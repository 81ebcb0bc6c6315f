"""``x[key]`` and ``x[key] = value`` against numpy: the same result, or a typed error for both.

FLASHWARP_INDEXING_KEYS is the number of random keys (default 6,000), FLASHWARP_INDEXING_SEED their
seed (default: the day's). A failure prints the seed of its array and the number of its key.
"""

from __future__ import annotations

import os
import resource
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    FlashwarpError,
    IndexDtypeError,
)
from flashwarp.launch.operands import rows_of
from flashwarp.storage import Memory

KEYS = int(os.environ.get("FLASHWARP_INDEXING_KEYS", "6000"))
SEED = int(os.environ.get("FLASHWARP_INDEXING_SEED", "1"))
KEYS_EACH = 250

RECORD = np.dtype([("key", "<i8"), ("weight", "<f4"), ("name", "S5")])  # 17 bytes
DTYPES = ["<i8", "u1", "<f4", ">i2", "<f8", "?", "<c8", "S3", "<M8[s]", "<f2", RECORD]

Reference = npt.NDArray[Any]


def random_array(random: np.random.Generator, kind: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Values without pattern, none of which is NaN."""
    made = np.zeros(shape, kind)
    if kind.names is not None:
        for name in kind.names:
            made[name] = random_array(random, kind[name], shape)
        return made
    if kind.kind == "S":
        return random.integers(97, 123, (*shape, kind.itemsize), np.uint8).view(kind)[..., 0]
    return random.integers(0, 2 if kind.kind == "b" else 100, shape).astype(kind)


# Random keys.


class Keys:
    """Draws keys for arrays of one shape: most fit, some do not."""

    def __init__(self, random: np.random.Generator, shape: tuple[int, ...]) -> None:
        self.random = random
        self.shape = shape

    def draw(self) -> Any:
        count = int(self.random.integers(0, len(self.shape) + 1)) + self.chance(0.08)
        count += self.chance(0.2) + 5 * self.chance(0.01)
        shapes = [(2,), (3,), (1,), (0,), (2, 1), (2, 3), (1, 2, 2), (1, 1), (5,), ()]
        self.index_shape = shapes[int(self.random.choice(len(shapes)))]
        parts: list[Any] = []
        axis = 0
        ellipsis_at = self.random.integers(0, 8)
        for number in range(count):
            if number == ellipsis_at or self.chance(0.02):
                parts.append(...)
                axis = max(axis, len(self.shape) - (count - number - 1))
            elif self.chance(0.08):
                parts.append(None)
            elif self.chance(0.06) and axis < len(self.shape):
                taken = int(self.random.integers(1, len(self.shape) - axis + 1))
                parts.append(self.mask(self.shape[axis : axis + taken]))
                axis += taken
            else:
                parts.append(self.part(self.shape[axis] if axis < len(self.shape) else 3))
                axis += 1
        return tuple(parts) if len(parts) != 1 or self.chance(0.3) else parts[0]

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def integer(self, length: int) -> int:
        far = 1 if self.chance(0.02) else 0
        low, high = -length - far, length + far
        return int(self.random.integers(low, max(high, low + 1)))

    def mask(self, shape: tuple[int, ...]) -> Any:
        if self.chance(0.02):
            shape = (*shape[:-1], shape[-1] + 1)
        mask = self.random.random(shape) < self.random.choice([0, 0.3, 0.6, 1])
        return mask.tolist() if self.chance(0.2) else mask

    def part(self, length: int) -> Any:
        kind = self.random.choice(9, p=[0.2, 0.26, 0.18, 0.1, 0.1, 0.05, 0.04, 0.04, 0.03])
        if kind == 0:
            return self.integer(length)
        if kind == 1:
            return self.slice(length)
        if kind == 2:
            return self.integers(length, self.shape_of_index())
        if kind == 3:
            return self.integers(length, self.shape_of_index()).tolist()
        if kind == 4:
            return self.mask((length,))
        if kind == 5:
            return np.int64(self.integer(length))
        if kind == 6:
            return np.array(self.integer(length))
        if kind == 7:
            return self.slice(length, np.int16)
        return self.odd()

    def slice(self, length: int, type_: Any = int) -> slice:
        bounds = [None, *range(-length - 2, length + 3)]
        start, stop = self.random.choice(len(bounds), 2)
        step = [None, 1, 2, 3, -1, -2, 7, 100, -100, 0][self.random.choice(10)]
        if step == 0 and self.chance(0.9):
            step = None
        return slice(
            *(None if n is None else type_(n) for n in (bounds[start], bounds[stop], step))
        )

    def shape_of_index(self) -> tuple[int, ...]:
        """Mostly one that broadcasts with the other index arrays of the key."""
        if self.chance(0.1):
            return (4,)
        shape = self.index_shape[int(self.random.integers(0, 2)) :]
        return tuple(1 if self.chance(0.2) else n for n in shape)

    def integers(self, length: int, shape: tuple[int, ...]) -> Any:
        kinds = ["<i8", "<i4", ">i8", "i1", "u1", "<u8"]
        kind = kinds[int(self.random.choice(len(kinds)))]
        low = 0 if kind[-2] == "u" else -length
        made = self.random.integers(low, max(length, low + 1), shape).astype(kind)
        if made.size and self.chance(0.02):
            made.reshape(-1)[-1] = length
        return made[..., ::-1] if made.ndim and self.chance(0.2) else made

    def odd(self) -> Any:
        """What is hardly an index."""
        odd = [True, False, np.True_, 1.0, "a", "key", ["key", "name"], [[0], [0, 1]], 2**70, 1j]
        odd += [
            {},
            object(),
            Named(0),
            Named("no"),
            np.array(True),
            [],
            [[]],
            np.empty(0),
            (),
            b"a",
        ]
        odd += [
            [1.0],
            np.array([0], object),
            [None],
            np.array("a"),
            [0, True],
            np.datetime64(1, "s"),
        ]
        return odd[int(self.random.choice(len(odd)))]


class Named:
    """Has `__index__`, which may fail."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> int:
        if self.value == "no":
            raise ZeroDivisionError("no index")
        return int(self.value)

    def __repr__(self) -> str:
        return f"Named({self.value!r})"


def refused_here(key: Any) -> bool:
    """Whether the key has a part that numpy takes and flashwarp refuses, as documented."""
    if isinstance(key, list) and key and all(isinstance(name, str) for name in key):
        return True  # names of fields
    parts = key if isinstance(key, tuple) else (key,)
    return any(
        isinstance(part, bool | np.bool_ | str)
        or (isinstance(part, np.ndarray) and part.ndim == 0 and part.dtype == np.bool_)
        for part in parts
    )


# Random values.


def values_for(random: np.random.Generator, kind: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Values for a selection of this shape: most fit."""
    choice = int(random.choice(10, p=[0.3, 0.15, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.05]))
    whole = random_array(random, kind, shape)
    if choice == 0:
        return whole
    if choice == 1:
        return random_array(random, kind, ())[()]
    if choice == 2:
        return random_array(random, kind, tuple(n if random.random() < 0.5 else 1 for n in shape))
    if choice == 3:
        return random_array(random, kind, (1, 1, *shape))
    if choice == 4:
        return random_array(random, kind, shape[1:])
    if choice == 5:
        return random_array(random, kind, (*shape, 2))
    if choice == 6:
        return whole.tolist()
    if choice == 7:
        return random.random(shape) * 300 - 100
    if choice == 8:
        return np.asfortranarray(whole)
    odd = [np.nan, "abc", None, -1, 300, 2**70, [1, [2, 3]], 1j, b"xy", (1, 2.5, b"z"), [], {}]
    return odd[int(random.choice(len(odd)))]


# The comparison.


def outcome(act: Any) -> tuple[Any, Exception | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return act(), None
        except Exception as error:  # judged by the caller
            return None, error


def same(got: Any, expected: Any) -> bool:
    """Whether both are the same: type, dtype, shape and bytes."""
    if isinstance(expected, np.ndarray) != isinstance(got, np.ndarray):
        return False
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    return bool(np.asarray(got).tobytes() == np.asarray(expected).tobytes())


class Comparison:
    """One array, its model, and how its keys came out."""

    def __init__(self, seed: int, cache: fw.Cache) -> None:
        self.random = random = np.random.default_rng(seed)
        self.seed = seed
        kind = np.dtype(DTYPES[int(random.choice(len(DTYPES)))])
        axes = int(random.choice([0, 1, 1, 2, 2, 3, 3, 4, 5]))
        lengths = [0, 1, 2, 3, 4, 5, 7, 30]
        chances = [0.04, 0.1, 0.2, 0.2, 0.2, 0.1, 0.1, 0.06]
        shape = tuple(int(n) for n in random.choice(lengths, axes, p=chances))
        self.model = random_array(random, kind, shape)
        self.array = fw.open(
            Memory(bytearray(self.model.tobytes() or bytes(512))), "r+", kind, shape, cache=cache
        )
        self.keys = Keys(random, shape)
        self.counts: Counter[str] = Counter()

    def run(self, count: int) -> None:
        with self.array:
            for number in range(count):
                key = self.keys.draw()
                what = f"seed {self.seed}, key {number}: {self.model.dtype} {self.model.shape}, "
                if number % 2:
                    self.store(key, what)
                else:
                    self.load(key, f"{what}x[{key!r}]")

    def load(self, key: Any, what: str) -> None:
        expected, refusal = outcome(lambda: self.model[key])
        got, error = outcome(lambda: self.array[key])
        if self.judge(key, refusal, error, what):
            assert same(got, expected), f"{what} is {got!r}, not {expected!r}"
            assert not np.may_share_memory(got, self.model)

    def store(self, key: Any, what: str) -> None:
        selected, refusal = outcome(lambda: self.model[key])
        shape = () if refusal is not None else selected.shape
        value = values_for(self.random, self.model.dtype, shape)
        what += f"x[{key!r}] = {value!r}"
        expected = self.model.copy()
        _, refusal = outcome(lambda: expected.__setitem__(key, value))
        _, error = outcome(lambda: self.array.__setitem__(key, value))
        if self.judge(key, refusal, error, what):
            self.model = expected
        got = self.array[...]
        assert same(got, self.model), f"{what}: the array is {got!r}, not {self.model!r}"

    def judge(
        self, key: Any, refusal: Exception | None, error: Exception | None, what: str
    ) -> bool:
        """Whether both did it; one alone must not, but for what is documented."""
        assert error is None or isinstance(error, FlashwarpError), f"{what} raised {error!r}"
        if refusal is not None:
            assert error is not None, f"{what} was done; numpy: {refusal!r}"
        elif error is not None:
            assert refused_here(key), f"{what} raised {error!r}"
        self.counts["refused by numpy" if refusal else "refused here" if error else "same"] += 1
        return error is None


@pytest.mark.parametrize("key_bytes", ["1", "100", "67108864"])
def test_random_keys_select_and_store_what_numpy_does(
    key_bytes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_KEY_BYTES", key_bytes)
    counts: Counter[str] = Counter()
    print(f"FLASHWARP_INDEXING_SEED={SEED}")
    with fw.device.CpuDevice(1) as device, fw.Cache(8 << 10, 512, 4, device=device) as cache:
        for number in range(max(1, KEYS // 3 // KEYS_EACH)):
            compared = Comparison(SEED * 10**6 + int(key_bytes) % 997 * 10**4 + number, cache)
            compared.run(KEYS_EACH)
            counts += compared.counts
    print(dict(counts))
    assert counts["same"] > 0.5 * counts.total()
    assert counts["refused here"] < 0.1 * counts.total()


# Samples.


@pytest.fixture
def cube() -> Iterator[tuple[fw.Array, Reference]]:
    """An array of 7 x 5 x 6 with a model of it."""
    model = np.arange(7 * 5 * 6).reshape(7, 5, 6)
    with fw.open(Memory(model.copy()), "r+", "i8", model.shape, device="cpu") as x:
        yield x, model


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        ("key", IndexDtypeError, r"x\[rows\]\['field'\]"),
        (["key", "name"], IndexDtypeError, "fields"),
        (True, IndexDtypeError, r"x\[None\]"),
        (np.False_, IndexDtypeError, "mask"),
        ((0, np.array(True)), IndexDtypeError, "mask"),
        (1.0, IndexDtypeError, "float"),
        (Named("no"), IndexDtypeError, "Named"),
        ([[0], [0, 1]], IndexDtypeError, "inhomogeneous"),
        (slice(None, None, 0), ArgumentError, "step"),
        (slice(0.0, 1), IndexDtypeError, "slice"),
        (slice(Named("no"), 1), IndexDtypeError, "no index"),
        (np.uint64(2**64 - 1), BoundsError, str(2**64 - 1)),
        (np.array([2**64 - 1], np.uint64), BoundsError, str(2**64 - 1)),
        (2**70, BoundsError, str(2**70)),
        ((0, 5), BoundsError, "5 is out of bounds for axis 1 with size 5"),
        ((0, [0, -6]), BoundsError, "-6 is out of bounds for axis 1 with size 5"),
        (([0, 1], [0, 1, 2]), BoundsError, r"shapes \(2,\) \(3,\)"),
        (np.ones((7, 6), bool), BoundsError, "axis 1"),
        ((0, 0, 0, 0), BoundsError, "4 indices for an array of 3 axes"),
        ((..., 0, ...), IndexDtypeError, "one Ellipsis"),
        ((None,) * 62, BoundsError, "dimension"),
    ],
    ids=lambda each: repr(each)[:50],
)
def test_refusals_name_the_problem(
    cube: tuple[fw.Array, Reference], key: Any, error: type[Exception], words: str
) -> None:
    x, model = cube

    with pytest.raises(error, match=words):
        x[key]
    with pytest.raises(error, match=words):
        x[key] = 1

    assert same(x[...], model)


def test_an_index_is_asked_for_its_value_once(cube: tuple[fw.Array, Reference]) -> None:
    class Counting:
        asked = 0

        def __index__(self) -> int:
            self.asked += 1
            return self.asked

    x, model = cube
    index = Counting()

    assert same(x[index, 0], model[1, 0])
    assert index.asked == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [("abc", "int64"), (2**70, "int64"), ([1, [2, 3]], "int64"), (np.ones(4), "broadcast")],
    ids=repr,
)
def test_values_that_do_not_fit_are_refused(
    cube: tuple[fw.Array, Reference], value: Any, words: str
) -> None:
    x, model = cube

    for store in (
        lambda: x.__setitem__(2, value),
        lambda: x.__setitem__((slice(None), 0), value),
        lambda: x.scatter([2], value),
    ):
        with pytest.raises(ArgumentError, match=words):
            store()

    assert same(x[...], model)


def test_values_that_cannot_be_cast_store_nothing_in_any_block(
    cube: tuple[fw.Array, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_KEY_BYTES", "1")
    x, model = cube

    for values in (["1"] * 6 + ["x"], [1] * 6 + [None]):
        with pytest.raises(ArgumentError):
            x[:, 0, 0] = np.array(values)

    assert same(x[...], model)


@pytest.mark.parametrize("kind", ["u1", "<f8", "S3"])
@pytest.mark.parametrize("shape", [(9000, 129), (3, 400_000), (700, 11, 90), (1, 300_000)])
def test_steps_over_columns_are_read_in_several_blocks(kind: str, shape: tuple[int, ...]) -> None:
    reference = random_array(np.random.default_rng(3), np.dtype(kind), shape)
    rows = [np.s_[:], np.s_[::-1], np.s_[1:-1], np.s_[-2::-2], np.s_[::700], np.s_[0], np.s_[-1:]]
    columns = [np.s_[::2], np.s_[::-1], np.s_[5:1:-2], np.s_[3:400:3], np.s_[-1:0:-7]]
    rest = [np.s_[:], np.s_[4], np.s_[::-3]] if len(shape) > 2 else [np.s_[...]]

    with fw.open(Memory(reference), "r+", kind, shape, device="cpu", cache="1 MiB") as x:
        for key in ((a, b, c) for a in rows for b in columns for c in rest):
            expected = reference[key]
            read = x[key]
            assert (read.shape, read.dtype) == (expected.shape, expected.dtype), key
            assert np.array_equal(read, expected), key
            assert read.base is None or not np.shares_memory(read, reference)


def test_a_column_is_read_and_stored_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = np.zeros((4096, 1024), np.int64)
    monkeypatch.setenv("FLASHWARP_KEY_BYTES", str(1 << 20))
    with fw.open(Memory(model), "r+", "i8", model.shape, device="cpu", cache="1 MiB") as x:
        moved: list[int] = []
        with x._turns.watched(lambda starts, nbytes: moved.append(len(starts) * nbytes)):
            x[:, 5] = np.arange(4096)
            x[np.arange(4096)[::-1], 6] = np.arange(4096)
            column = x[:, 5]

        assert column.tolist() == list(range(4096))
        assert x[:, 6].tolist() == list(range(4095, -1, -1))
        assert max(moved) == 1 << 20
        assert sum(moved) == 5 * model.nbytes, "each row once, for reading and for storing"


def test_stores_to_parts_of_one_row_from_two_threads_keep_both() -> None:
    with fw.open(Memory(bytearray(8192)), "r+", "i8", (4, 256), device="cpu") as x:

        def count(column: int) -> None:
            for turn in range(300):
                x[1, column] = turn + 1

        threads = [threading.Thread(target=count, args=(column,)) for column in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

        assert x[1, :3].tolist() == [300, 300, 0]


def test_an_array_indexes_another() -> None:
    with (
        fw.open(Memory(np.arange(10) * 2), "r+", "i8", device="cpu") as x,
        fw.open(Memory(np.array([3, -1])), "r+", "i8", device="cpu") as index,
    ):
        assert x[index].tolist() == x.gather(index).tolist() == [6, 18]
        x[index] = index
        assert x[[3, 9]].tolist() == [3, -1]


def test_arrays_store_each_other_from_two_threads() -> None:
    with (
        fw.open(Memory(bytearray(8192)), "r+", "i8", (1024,), device="cpu") as x,
        fw.open(Memory(bytearray(8192)), "r+", "i8", (1024,), device="cpu") as y,
    ):

        def copy(to: fw.Array, source: fw.Array) -> None:
            for _ in range(200):
                to[...] = source

        threads = [threading.Thread(target=copy, args=pair) for pair in ((x, y), (y, x))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.filterwarnings("ignore:.*the file is sparse")
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[...],
        lambda x: x[::2],
        lambda x: x[:, 0],
        lambda x: x.gather(np.zeros(1 << 17, int)),
    ],
)
def test_more_than_fits_into_memory_is_a_typed_error(tmp_path: Path, read: Any) -> None:
    with fw.create(tmp_path / "x.npy", "u1", (1 << 28, 4096), device="cpu", cache="1 MiB") as x:
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20), limits[1]))
        try:
            with pytest.raises(MemoryError, match="bytes of host memory") as caught:
                read(x)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert isinstance(caught.value, FlashwarpError)
        assert x[5, :3].tolist() == [0, 0, 0]


# As numpy and Python see an array.


class Reads:
    """Counts the launches that read."""

    def __init__(self, x: fw.Array) -> None:
        self.x = x
        self.count = 0

    def __enter__(self) -> Reads:
        self.watch = self.x._turns.watched(self.saw)
        self.watch.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.watch.__exit__(None, None, None)

    def saw(self, _starts: object, _nbytes: int) -> None:
        self.count += 1


def test_numpy_reads_an_array_at_once(cube: tuple[fw.Array, Reference]) -> None:
    x, model = cube

    with Reads(x) as reads:
        made = np.asarray(x)
    assert same(made, model)
    assert reads.count == 1
    made[0] = 0
    assert same(x[...], model), "it is a copy"

    with Reads(x) as reads:
        assert np.asarray(x, np.float32).dtype == np.float32
        assert np.sum(x) == model.sum()
        assert same(np.from_dlpack(x), model)
        assert same(np.ones(6) + x, np.ones(6) + model)
        assert np.array_equal(x, model)
    assert reads.count == 5
    for refused in (lambda: np.asarray(x, copy=False), lambda: np.from_dlpack(x, copy=False)):
        with pytest.raises(ValueError, match="only by a copy"):
            refused()


def test_numpy_is_not_given_what_is_too_large(
    cube: tuple[fw.Array, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, model = cube
    monkeypatch.setenv("FLASHWARP_ASARRAY_BYTES", str(model.nbytes - 1))

    words = rf"{model.nbytes} bytes.*{model.nbytes - 1} \(FLASHWARP_ASARRAY_BYTES\); x\[...\]"
    for use in (np.asarray, np.sum, np.from_dlpack, lambda x: x + np.ones(6), lambda x: [x] + x[0]):
        with pytest.raises(ArgumentError, match=words), Reads(x) as reads:
            use(x)
        assert reads.count <= 1
    monkeypatch.setenv("FLASHWARP_ASARRAY_BYTES", str(model.nbytes))
    assert same(np.asarray(x), model)


def test_rows_are_iterated_in_blocks(
    cube: tuple[fw.Array, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, model = cube
    monkeypatch.setenv("FLASHWARP_KEY_BYTES", str(3 * model[0].nbytes))

    with Reads(x) as reads:
        rows = list(x)
    assert reads.count == 3
    assert same(np.stack(rows), model)
    assert all(row.base is None for row in rows), "a kept row does not keep its block"
    with Reads(x) as reads:
        assert same(np.stack(list(reversed(x))), model[::-1])
    assert reads.count == 3
    a, *_, g = x
    assert same(a, model[0])
    assert same(g, model[6])
    with fw.open(Memory(model.copy()), "r+", "i8", 4, device="cpu") as y:
        assert [type(n) for n in y] == [np.int64] * 4
        assert sum(y) == 6


def test_an_element_is_looked_for_in_blocks(
    cube: tuple[fw.Array, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, model = cube
    monkeypatch.setenv("FLASHWARP_KEY_BYTES", str(3 * model[0].nbytes))

    with Reads(x) as reads:
        assert 209 in x
        assert 210 not in x
        assert model[3, 2] in x
        assert "a" not in x
    assert reads.count == 3 + 3 + 2 + 3
    with pytest.raises(ArgumentError, match=r"== item\).any"):
        assert model in x


def test_an_array_has_no_truth_value_and_is_equal_to_itself_only(
    cube: tuple[fw.Array, Reference],
) -> None:
    x, _ = cube

    with pytest.raises(ArgumentError, match="truth value"):
        bool(x)
    with fw.open(Memory(512), "r+", "i8", device="cpu") as y:
        assert x != y
        assert {x: 1, y: 2}[x] == 1
        assert len({x, y}) == 2


def test_an_array_without_axes() -> None:
    with fw.open(Memory(np.array(2.5)), "r+", "f8", (), device="cpu") as x:
        assert same(x[()], np.float64(2.5))
        assert same(x[...], np.array(2.5))
        assert same(x[None], np.array([2.5]))
        assert 2.5 in x
        assert float(np.asarray(x)) == 2.5
        for use in (len, iter, reversed):
            with pytest.raises(TypeError, match="without axes"):
                use(x)


# Operands of gather and scatter.


@pytest.mark.parametrize(
    "idx",
    [[1.0], 1.5, [[0], [1, 2]], "1", None, {}, [None], np.ones((7, 5), bool), np.array([0], "O")],
    ids=repr,
)
def test_what_is_no_index(cube: tuple[fw.Array, Reference], idx: Any) -> None:
    x, model = cube

    for use in (x.gather, x.prefetch, x.gather_async):
        with pytest.raises(IndexError) as caught:
            use(idx)
        assert isinstance(caught.value, FlashwarpError)
    for store in (x.scatter, x.scatter_async):
        with pytest.raises(IndexError):
            store(idx, 1)
    assert same(x[...], model)


def test_an_out_that_cannot_take_the_rows(cube: tuple[fw.Array, Reference]) -> None:
    x, _ = cube
    for read in (x.gather, x.gather_async):
        # Rows went to a copy, which was lost.
        for out in ([[[0] * 6] * 5], x, 5, memoryview(bytes(240))):
            with pytest.raises(ArgumentError, match="out is a"):
                read([1], out=out)


@pytest.mark.parametrize("shift", [0, 8])
def test_an_out_over_the_indices(shift: int) -> None:
    with fw.open(Memory(np.arange(100)), "r+", "i8", device="cpu") as x:
        memory = np.zeros(11, np.int64)
        idx, out = memory[:10], memory.view(np.uint8)[shift : shift + 80].view(np.int64)
        for read in (x.gather, x.gather_async):
            with pytest.raises(ArgumentError, match="overlaps the indices"):
                read(idx, out=out)


@pytest.mark.parametrize(
    "none", [range(0)[::-1], range(3, 3), range(8, 8), slice(0, 0), slice(8, 3)]
)
def test_no_rows(none: Any) -> None:
    """A reversed range of none begins at -1."""
    content = np.arange(32, dtype=np.int32).reshape(8, 4)
    with fw.open(Memory(content.copy()), "r+", "int32", (8, 4), device="cpu") as x:
        if isinstance(none, range):
            assert x.gather(none).shape == (0, 4)
            x.scatter(none, np.zeros((0, 4), np.int32))
            x.prefetch(none)
        with fw.Pipeline(x, 2, depth=1) as batches:
            batches.prefetch(none)
            assert len(batches.take()) == 0
            batches.write_back(none, np.zeros((0, 4), np.int32))
            batches.flush()
        assert (x[:] == content).all()
    assert rows_of(none, 8) == range(0)
    assert isinstance(none, slice) or rows_of(none, 8).start >= 0
