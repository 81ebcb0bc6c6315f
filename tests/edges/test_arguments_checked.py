"""Arguments are what they must be, or a typed error names them, their value and their limits.

None is bent: no float is cut to an integer, no True is a 1, no text is taken letter by letter.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import graphs, trace
from flashwarp.array.share_table import ENTRIES_MAX
from flashwarp.config import Config, flag, integer, number, parse_bytes
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    DtypeError,
    FileFormatError,
    FlashwarpError,
)
from flashwarp.storage import BlockDevice, File, Memory, Replicated, Striped

NOT_INTEGERS = [2.5, 4096.0, np.float64(2), math.nan, True, np.True_, "2", b"2", 1j, [2], {}]
NOT_SIZES = [
    0.5,
    4096.0,
    np.float64(4096),
    math.nan,
    math.inf,
    True,
    np.True_,
    b"4",
    1j,
    [4096],
    {},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 100 rows of four int64."""
    name = tmp_path_factory.mktemp("checked") / "rows.npy"
    np.save(name, np.arange(400).reshape(100, 4))
    return name


# The helpers.


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_an_integer_is_an_integer(value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        integer("depth", value, 1, 9)

    assert str(caught.value) == f"depth={value!r} is not an integer between 1 and 9"


def test_an_integer_of_any_library_will_do() -> None:
    assert type(integer("depth", np.uint8(7), 1, 9)) is int
    assert integer("depth", np.array(7), 1, 9) == 7
    for value in (0, 10, 2**70):
        with pytest.raises(ArgumentError, match="between 1 and 9"):
            integer("depth", value, 1, 9)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, True, "1", 1j, None, [1], np.nan, 11], ids=repr
)
def test_a_number_is_a_number_within_its_limits(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^x=.* is not a number between 0 and 10$"):
        number("x", value, 0, 10)
    assert number("x", np.float32(2.5), 0, 10) == 2.5
    assert number("x", 3, 0, 10) == 3.0


@pytest.mark.parametrize("value", ["no", 0, 1, None, np.array([True, False])], ids=repr)
def test_a_flag_is_true_or_false(value: Any) -> None:
    with pytest.raises(ArgumentError, match="is neither True nor False"):
        flag("o_direct", value)
    assert flag("o_direct", np.True_) is True


@pytest.mark.parametrize("size", NOT_SIZES, ids=repr)
def test_a_size_is_an_integer_or_a_text(size: Any) -> None:
    with pytest.raises(ArgumentError, match=r"cache=.* is not a size"):
        parse_bytes(size, "cache")
    assert parse_bytes(np.int32(4096)) == 4096


# Who uses them: each keyword of each constructor, with what is no integer or size.


def opened(path: Path, **options: Any) -> fw.Array:
    return fw.open(path, device="cpu", **options)


LOOP = trace.make("loop", 100)

INTEGERS: dict[str, Callable[[Any], Any]] = {
    "ways": lambda value: fw.Cache("1 MiB", ways=value, device="cpu"),
    "queue_pairs": lambda value: fw.nvme.SoftwareController(queue_pairs=value),
    "depth": lambda value: fw.nvme.SoftwareController(depth=value),
    "threads": lambda value: fw.nvme.SoftwareController(threads=value),
    "threads of a device": lambda value: fw.device.CpuDevice(threads=value),
    "seed": lambda value: fw.nvme.SSDModel.named("P5800X", seed=value),
    "units": lambda value: model(units=value),
    "size": lambda value: model(read_iops=[(value, 1e6)]),
    "depth of a drive": lambda value: model().saturation(value, 4096),
    "commands": lambda value: model().saturation(8, 4096, commands=value),
    "block_bytes": lambda value: model().saturation(8, value),
    "block_bytes of times": lambda value: model().completion_times([0], value),
    "block_bytes of iops": lambda value: model().iops(value),
    "arrival_ns": lambda value: model().completion_times([value], 4096),
    "offset": lambda value: Memory(8192).read(value, 1),
    "nbytes": lambda value: Memory(8192).read(0, value),
    "offset of a write": lambda value: Memory(8192).write(value, b"a"),
    "offset of a discard": lambda value: Memory(8192).discard(value, 512),
    "nbytes of zeros": lambda value: Memory(8192).write_zeroes(0, value),
    "nbytes of an allocation": lambda value: fw.device.CpuDevice(1).allocate(value),
    "alignment": lambda value: fw.device.CpuDevice(1).allocate_host(4096, value),
    "shape of an allocation": lambda value: fw.device.CpuDevice(1).empty_array(value, "f4"),
    "length of an allocation": lambda value: fw.device.CpuDevice(1).empty_array((3, value), "f4"),
    "scale": lambda value: graphs.kronecker(value),
    "edge_factor": lambda value: graphs.uniform(4, value),
    "seed of a graph": lambda value: graphs.uniform(4, seed=value),
    "accesses": lambda value: trace.make("loop", value),
    "capacity_lines": lambda value: trace.replay(LOOP, capacity_lines=value),
    "ways of a replay": lambda value: trace.replay(LOOP, capacity_lines=64, ways=value),
    "capacity": lambda value: trace.min_misses(LOOP.lines, value),
    "row_bytes": lambda value: trace.trace_of_indices([1], value),
    "line_bytes": lambda value: trace.trace_of_indices([1], 8, line_bytes=value),
    "Config.look_ahead": lambda value: Config(look_ahead=value),
    "Config.async_calls": lambda value: Config(async_calls=value),
    "Config.copy_cached": lambda value: Config(copy_cached=value),
}


def model(**changes: Any) -> fw.nvme.SSDModel:
    settings: dict[str, Any] = {
        "name": "drive",
        "read_iops": ((4096, 1e6),),
        "write_iops": ((4096, 1e6),),
        "read_bytes_per_s": 1e9,
        "write_bytes_per_s": 1e9,
        "read_latency_us": (1, 2, 3),
        "write_latency_us": (1, 2, 3),
        "units": 8,
    }
    return fw.nvme.SSDModel(**{**settings, **changes})


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize("name", INTEGERS)
def test_what_takes_an_integer_refuses_all_else(name: str, value: Any) -> None:
    if name == "shape of an allocation" and value == [2]:
        return
    with pytest.raises(ArgumentError):
        INTEGERS[name](value)


SIZES: dict[str, Callable[[Path, Any], Any]] = {
    "capacity": lambda _, value: fw.Cache(value, device="cpu"),
    "line": lambda _, value: fw.Cache("1 MiB", value, device="cpu"),
    "host_memory": lambda _, value: fw.Cache("1 MiB", host_memory=value, device="cpu"),
    "cache": lambda path, value: opened(path, cache=value),
    "line of open": lambda path, value: opened(path, line=value),
    "stripe of paths": lambda path, value: Striped([path], value),
    "stripe": lambda _, value: Striped([Memory("1 MiB")], value),
}


@pytest.mark.parametrize("value", NOT_SIZES, ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_what_takes_a_size_refuses_all_else(name: str, value: Any, path: Path) -> None:
    keyword = name.partition(" ")[0]
    with pytest.raises(ArgumentError, match=rf"^{keyword}=.* is not a size"):
        SIZES[name](path, value)


@pytest.mark.parametrize("value", [0.5, True, "4", -1, 10**9], ids=repr)
def test_a_range_of_a_file_is_of_bytes(path: Path, value: Any) -> None:
    for make in (
        lambda: File(path, offset=value),
        lambda: File(path, 0, value),
        lambda: Striped([Memory("1 MiB")], nbytes=value),
    ):
        with pytest.raises(ArgumentError):
            make()


def test_a_range_of_no_bytes_is_not_the_whole_file(path: Path) -> None:
    assert File(path, 0, 16).nbytes == 16
    with pytest.raises(ArgumentError, match="nbytes=0"):
        File(path, 0, 0)


@pytest.mark.parametrize("entries", [0, -1, 2.0, True, "8", ENTRIES_MAX + 1], ids=repr)
def test_entries_of_a_share_table(entries: Any) -> None:
    with fw.Cache("1 MiB", device="cpu") as cache, pytest.raises(ArgumentError, match="entries="):
        fw.array.ShareTable(cache, entries=entries)


@pytest.mark.parametrize("value", [0, -1, 1 << 20], ids=repr)
def test_threads_of_a_device_are_bounded(value: int) -> None:
    with pytest.raises(ArgumentError, match=f"threads={value} is not an integer between 1 and"):
        fw.device.CpuDevice(value)


@pytest.mark.parametrize("field", ["o_direct"])
def test_a_flag_of_open(path: Path, field: str) -> None:
    with pytest.raises(ArgumentError, match="o_direct='no' is neither True nor False"):
        opened(path, **{field: "no"})


@pytest.mark.parametrize(
    "make",
    [
        lambda path: File(path, writable="no"),
        lambda path: File(path, o_direct="no"),
        lambda _: Memory(512, writable="no"),
        lambda _: Memory(np.array([{}], object)),
        lambda _: Memory(1.5),
        lambda _: Memory([1, 2]),
        lambda _: Memory(None),
        lambda _: Striped([1]),
        lambda _: Replicated([None]),
        lambda _: Memory(512).write(0, "text"),
        lambda _: Memory(512).write(0, [1]),
        lambda _: fw.nvme.SoftwareController("file.npy"),
        lambda _: fw.nvme.SoftwareController(model=5),
        lambda _: fw.nvme.SoftwareController(route=["direct"]),
        lambda _: fw.Cache("1 MiB", policy=["clock"], device="cpu"),
        lambda _: model(read_latency_us="123"),
        lambda _: model(read_latency_us=(1, 2, True)),
        lambda _: model(read_iops=[(4096.7, 1e6)]),
        lambda _: model(read_iops=[(4096, "1e6")]),
        lambda _: model(read_bytes_per_s=math.nan),
        lambda _: Config(async_calls=0),
        lambda _: Config(timeout_s=True),
        lambda _: Config(in_place_budget=math.nan),
        lambda _: Config(review_bytes="much"),
    ],
)
def test_other_arguments(path: Path, make: Callable[[Path], Any]) -> None:
    with pytest.raises(FlashwarpError):
        make(path)


ODD = [5, None, 2.5, [], {}, object(), b"x", True, np.zeros(2), (1, 2), "no", "a\0b", io.BytesIO()]


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:20])
def test_what_is_no_path_no_storage_and_no_choice(path: Path, tmp_path: Path, value: Any) -> None:
    here: dict[str, Any] = {"device": "cpu"}
    given = 0 if value is None else value  # where None is the default
    tries: list[Callable[[], Any]] = [
        lambda: fw.open(path, value, **here),
        lambda: fw.open(value, "r+", "i8", **here),
        lambda: fw.open(Memory(4096), "r+", "i8", controller=given, **here),
        lambda: fw.nvme.SoftwareController(model=given),
        lambda: fw.array.ShareTable(value),
        lambda: fw.nvme.SSDModel.named(value),
        lambda: Striped(value),
        lambda: Replicated(value),
        lambda: fw.compile("", "cpu", options=given),
        lambda: fw.compile("", "cpu", defines=given),
        lambda: fw.compile("", "cpu", include_dirs=given),
        lambda: fw.compile("", "cpu", policy=value),
        lambda: fw.Cache("1 MiB", policy=given, **here),
        lambda: fw.Cache("1 MiB", host_memory=given, **here),
    ]
    for name in ("strict", "line", "cache"):
        tries.append(lambda name=name: opened(path, **{name: given}))
    if not isinstance(value, str | bytes) or value == "a\0b":  # others are names
        tries += [
            lambda: fw.open(value, **here),
            lambda: fw.create(value, "i8", 3, **here),
            lambda: File(value),
            lambda: BlockDevice(value),
        ]
    for place, attempt in enumerate(tries):
        with pytest.raises(FlashwarpError):
            print(f"attempt {place} made {attempt()!r}")
    with fw.create(tmp_path / "x.npy", "i8", 3, **here) as x:
        if value is not True:
            with pytest.raises(ArgumentError, match="drop_dirty"):
                x.drop_cache(value)


@pytest.mark.parametrize("contents", [b"\x93NUMPY\0" * 9, b"x" * 40_000_000])
def test_contents_are_no_path(contents: bytes) -> None:
    for attempt in (fw.open, fw.load, File):
        with pytest.raises(FlashwarpError, match="for memory give a storage") as caught:
            attempt(contents)
        assert len(str(caught.value)) < 1000


def test_no_device_is_a_block_device(path: Path) -> None:
    with pytest.raises(FlashwarpError):
        BlockDevice(path)


# Shapes.


@pytest.mark.parametrize(
    "shape",
    [
        2.5,
        4.0,
        np.float64(3),
        (3, 2.0),
        [3.7],
        math.nan,
        True,
        (True, 3),
        np.True_,
        "12",
        b"12",
        ("3", 4),
        -1,
        (3, -2),
        {3, 4},
        {3: 4},
        ((3, 4),),
        np.array([1.5]),
        np.zeros((2, 2), int),
        (2**40, 2**40),
        2**63,
        2**70,
        (0, 2**62, 2**62),
        (1,) * 65,
        (0,) * 65,
    ],
    ids=lambda shape: repr(shape)[:40],
)
def test_shapes_that_cannot_be(tmp_path: Path, path: Path, shape: Any) -> None:
    for make in (
        lambda: fw.create(tmp_path / "x.npy", "f4", shape, device="cpu"),
        lambda: fw.open(Memory(4096), "r+", "f4", shape, device="cpu"),
        lambda: fw.open(path, dtype="i8", shape=shape, device="cpu"),
    ):
        with pytest.raises(ArgumentError, match="shape"):
            make()
    assert list(tmp_path.iterdir()) == [], "nothing is created then"


def test_a_shape_of_no_axes_or_none_given(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="shape=None"):
        fw.create(tmp_path / "x.npy", "f4", None, device="cpu")  # type: ignore[arg-type]
    with fw.create(tmp_path / "x.npy", "f4", (), device="cpu") as x:
        assert x.shape == ()


@pytest.mark.parametrize(
    "shape", [3, np.int64(3), (3,), [3], np.array([3]), range(3, 4), np.array(3)], ids=repr
)
def test_shapes_of_any_integers(tmp_path: Path, shape: Any) -> None:
    with fw.create(tmp_path / "x.npy", "f4", shape, device="cpu") as x:
        assert x.shape == (3,)
        assert all(type(n) is int for n in x.shape)


def test_64_axes_work(tmp_path: Path) -> None:
    most = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
    shape = (2, *(1,) * (most - 1))
    with fw.create(tmp_path / "x.npy", "f4", shape, device="cpu") as x:
        x[...] = 3
        assert x[...].shape == x[[1, 0]].shape == shape
        assert x[1].sum() == 3


def test_a_file_of_65_axes_is_refused(tmp_path: Path) -> None:
    text = repr({"descr": "<f4", "fortran_order": False, "shape": (1,) * 65}).encode() + b"\n"
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    (tmp_path / "x.npy").write_bytes(header + bytes(4))

    with pytest.raises(FileFormatError, match="65 axes"):
        fw.open(tmp_path / "x.npy", device="cpu")


def test_rows_of_a_trace_beyond_all_files() -> None:
    with pytest.raises(ArgumentError, match="beyond byte"):
        trace.trace_of_indices(np.array([2**63], np.uint64), 4096)


# Dtypes.


@pytest.mark.parametrize(
    "dtype",
    [
        object,
        "O",
        [("a", "O")],
        "V0",
        "S0",
        "U",
        [],
        "(2,3)f4",
        ("i4", (2,)),
        "nonsense",
        [("a", "i4"), ("a", "i4")],
        [("a",)],
        "(2,3",
        "f4,,f4,",
        5,
        None,
        {"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]},
    ],
    ids=repr,
)
def test_dtypes_that_cannot_be(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(DtypeError):
        fw.create(tmp_path / "x.npy", dtype, 3, device="cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "dtype",
    [
        "datetime64[ns]",
        "timedelta64[D]",
        "M8",
        ">f4",
        ">i8",
        "S7",
        "U3",
        "V5",
        "f2",
        "c16",
        "g",
        "?",
        [("a", ">i4"), ("b", "(2,3)f4")],
        np.dtype([("a", "u1"), ("b", "f8")], align=True),
    ],
    ids=repr,
)
def test_dtypes_that_work(tmp_path: Path, dtype: Any) -> None:
    kind = np.dtype(dtype)
    values = np.frombuffer(bytes(range(1, 1 + 3 * kind.itemsize)), kind)
    if kind.kind in "Uf?g" or kind.fields:
        values = np.zeros(3, kind)
    with fw.create(tmp_path / "x.npy", dtype, 3, device="cpu") as x:
        x[...] = values
        assert x[...].dtype == kind
    with fw.open(tmp_path / "x.npy", device="cpu") as x:
        assert x.dtype == kind
        assert x[...].tobytes() == np.ascontiguousarray(values).tobytes() or kind.fields
    assert np.load(tmp_path / "x.npy").dtype == kind


# Launches.


def test_a_launch_is_of_whole_warps() -> None:
    source = '#include "flashwarp/array.cuh"\nFW_KERNEL nothing(int n) { (void)n; }'
    program = fw.compile(source, device="cpu")
    program["nothing"](1, warps=np.int64(1), block_threads=64)
    for value in (*NOT_INTEGERS, -1, 1 << 31):
        with pytest.raises(ArgumentError, match="warps="):
            program["nothing"](1, warps=value)
        with pytest.raises(ArgumentError, match="block_threads="):
            program["nothing"](1, block_threads=value)
    for odd in (0, 33, 288, 1024):
        with pytest.raises(ArgumentError, match=f"block_threads={odd}"):
            program["nothing"](1, block_threads=odd)


# Bytes of a storage.


def test_bytes_outside_of_a_storage() -> None:
    with Memory(512) as storage:
        for offset, nbytes in ((-1, 1), (0, -1), (512, 1), (0, 513), (2**70, 1), (1, 2**70)):
            with pytest.raises(BoundsError):
                storage.read(offset, nbytes)
