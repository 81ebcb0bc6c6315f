"""Arguments of your own kernels: what fits, and what is refused before anything runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import flashwarp as fw
from flashwarp._jit import spelling
from flashwarp._jit.program import LoadedKernel
from flashwarp.device import CpuDevice
from flashwarp.device import cuda as cuda_device
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DtypeError,
    FlashwarpError,
    ReadOnlyError,
)
from flashwarp.program.arguments import _ArrayParam, parse_signature

KERNELS = Path(__file__).parents[1] / "support" / "program_kernels.cu"
PAIR = np.dtype([("key", "i4"), ("value", "f8")], align=True)


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    with CpuDevice(3) as made:
        yield made


@pytest.fixture(scope="module")
def program(device: CpuDevice) -> fw.program.Program:
    return fw.compile(KERNELS, device)


@pytest.fixture
def floats(tmp_path: Path, device: CpuDevice) -> Iterator[fw.Array]:
    with fw.create(tmp_path / "x.npy", "f4", (1000,), device=device) as x:
        x[:] = np.arange(1000)
        yield x


# Pointers.


def test_device_memory_and_torch_tensors_are_pointers(
    program: fw.program.Program, device: CpuDevice
) -> None:
    torch = pytest.importorskip("torch")
    memory = device.allocate(64)
    tensor = torch.zeros(16, dtype=torch.uint32)

    program["count_threads"](memory)
    program["count_threads"](tensor)

    assert memory.as_numpy().view(np.uint32)[:4].tolist() == [3, 3, 3, 0]
    assert tensor[:4].tolist() == [3, 3, 3, 0]


def test_read_only_array_is_a_pointer_to_const(
    program: fw.program.Program, floats: fw.Array
) -> None:
    indices = read_only(np.array([5], np.uint64))
    out = np.zeros(1, np.float32)

    program["gather"](floats, indices, out, 1)

    assert out[0] == 5


def test_array_of_structures_by_pointer(program: fw.program.Program) -> None:
    pairs = np.zeros(10, PAIR)
    pairs["value"] = 1.5
    out = np.zeros(1)

    program["sum_values"](pairs, 10, out)

    assert out[0] == 15


def test_size_of_structures_is_checked(program: fw.program.Program) -> None:
    with pytest.raises(DtypeError, match=r"elements of 16 bytes.* 12"):
        program["sum_values"](np.zeros(3, [("key", "i4"), ("value", "f8")]), 3, np.zeros(1))


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("pointer", "error"),
    [
        (np.zeros(8, np.int64), DtypeError),
        (np.zeros(8, np.float32), DtypeError),
        (np.zeros(8, ">u4"), DtypeError),
        (np.zeros(16, np.uint32)[::2], ArgumentError),
        (read_only(np.zeros(8, np.uint32)), ReadOnlyError),
        ([0] * 8, ArgumentError),
        (1234, ArgumentError),
        ("text", ArgumentError),
    ],
)
def test_bad_pointers_are_refused(
    program: fw.program.Program, pointer: Any, error: type[FlashwarpError]
) -> None:
    with pytest.raises(error):
        program["count_threads"](pointer)


class FakeGpuArray:
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {
        "version": 3,
        "shape": (8,),
        "typestr": "<u4",
        "data": (4096, False),
        "strides": None,
    }


def test_array_on_a_gpu_is_refused_on_the_cpu(program: fw.program.Program) -> None:
    with pytest.raises(ArgumentError, match="the array is on cuda, the kernel on cpu"):
        program["count_threads"](FakeGpuArray())


def test_freed_memory_and_memory_of_another_device_are_refused(
    program: fw.program.Program, device: CpuDevice
) -> None:
    memory = device.allocate(64)
    memory.close()
    with pytest.raises(ArgumentError, match="freed"):
        program["count_threads"](memory)
    with CpuDevice(1) as elsewhere, pytest.raises(ArgumentError, match="the memory is of"):
        program["count_threads"](elsewhere.allocate(64))


def test_array_where_a_pointer_is_wanted_and_the_other_way_round(
    program: fw.program.Program, floats: fw.Array
) -> None:
    with pytest.raises(ArgumentError, match="has no address"):
        program["count_threads"](floats)
    with pytest.raises(ArgumentError, match=r"takes a flashwarp\.Array, not ndarray"):
        program["mine::scale"](np.zeros(3, np.float32), 1)


# Arrays.


def test_number_of_axes_is_checked(
    program: fw.program.Program, tmp_path: Path, device: CpuDevice
) -> None:
    with (
        fw.create(tmp_path / "x.npy", "i4", (30,), device=device) as x,
        pytest.raises(ArgumentError, match="takes 2 axes, the array has shape"),
    ):
        program["transpose"](x, x)


def test_dtype_of_an_array_is_checked(
    program: fw.program.Program, tmp_path: Path, device: CpuDevice
) -> None:
    with (
        fw.create(tmp_path / "i.npy", "i4", (10,), device=device) as integers,
        pytest.raises(DtypeError, match=r"argument 0 .*float32.*int32"),
    ):
        program["mine::scale"](integers, 1)


def test_read_only_array_is_refused_where_it_could_be_stored_to(
    program: fw.program.Program, tmp_path: Path, device: CpuDevice
) -> None:
    np.save(tmp_path / "x.npy", np.ones(10, np.float32))
    with (
        fw.open(tmp_path / "x.npy", device=device) as x,
        pytest.raises(ReadOnlyError, match="array<const float>"),
    ):
        program["mine::scale"](x, 1)


def test_array_of_another_device_is_refused(program: fw.program.Program, tmp_path: Path) -> None:
    with (
        CpuDevice(1) as elsewhere,
        fw.create(tmp_path / "x.npy", "f4", (10,), device=elsewhere) as x,
        pytest.raises(ArgumentError, match="the array is on cpu, the kernel on cpu"),
    ):
        program["mine::scale"](x, 1)


def test_closed_array_is_refused(
    program: fw.program.Program, tmp_path: Path, device: CpuDevice
) -> None:
    with fw.create(tmp_path / "x.npy", "f4", (10,), device=device) as x:
        pass
    with pytest.raises(ClosedError):
        program["mine::scale"](x, 1)


# Numbers and structures.


def test_structure_may_be_bytes_or_ctypes(program: fw.program.Program) -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("key", ctypes.c_int32), ("value", ctypes.c_double))

    for given in (Pair(3, 1.5), bytes(Pair(3, 1.5))):
        out = np.zeros(9)
        program["keep"](out, False, 0, 0, 0, 0, 0, 0, given)
        assert out[7:].tolist() == [3, 1.5]


GOOD = (None, True, 1, 1, 1, 1, 1.0, 1.0, bytes(16))


@pytest.mark.parametrize(
    ("place", "value", "error"),
    [
        (1, 1, DtypeError),
        (1, None, DtypeError),
        (2, 128, ArgumentError),
        (2, -129, ArgumentError),
        (3, -1, ArgumentError),
        (3, 1 << 16, ArgumentError),
        (4, 1 << 31, ArgumentError),
        (4, 1.0, DtypeError),
        (4, True, DtypeError),
        (4, "1", DtypeError),
        (5, -1, ArgumentError),
        (5, 1 << 64, ArgumentError),
        (6, 1e39, ArgumentError),
        (6, "1", DtypeError),
        (6, 1j, DtypeError),
        (6, False, DtypeError),
        (7, None, DtypeError),
        (8, bytes(15), DtypeError),
        (8, 1, DtypeError),
        (8, np.zeros(2, PAIR), DtypeError),
    ],
)
def test_bad_numbers_are_refused(
    program: fw.program.Program, place: int, value: Any, error: type[FlashwarpError]
) -> None:
    arguments = [*GOOD[:place], value, *GOOD[place + 1 :]]

    with pytest.raises(error, match=f"argument {place} "):
        program["keep"](*arguments)


# Signatures.


def test_unknown_kernel_is_an_error_that_lists_the_known(program: fw.program.Program) -> None:
    with pytest.raises(ArgumentError, match="mine::scale"):
        program["scale"]


def test_number_of_arguments_is_checked(program: fw.program.Program, floats: fw.Array) -> None:
    with pytest.raises(ArgumentError, match="takes 2 arguments, not 1"):
        program["mine::scale"](floats)


@pytest.mark.parametrize(
    ("symbol", "name", "kinds"),
    [
        ("_Z1kv", "k", []),
        ("_ZN4mine5scaleEN2fw5arrayIfEEf", "mine::scale", ["_ArrayParam", "_NumberParam"]),
        ("_Z1kN2fw5arrayIKfLj2EEEPKyPv", "k", ["_ArrayParam", "_PointerParam", "_PointerParam"]),
        ("_Z1kSt4pairIifEPS0_", "k", ["_BytesParam", "_PointerParam"]),
    ],
)
def test_signatures_are_read(symbol: str, name: str, kinds: list[str]) -> None:
    sizes = {"_ArrayParam": 72, "_NumberParam": 4, "_PointerParam": 8, "_BytesParam": 8}
    each = tuple(sizes[kind] for kind in kinds)
    loaded = LoadedKernel(symbol, each, (0,) * len(each), None, None)

    found, params = parse_signature(spelling.demangle(symbol), loaded)

    assert found == name
    assert [type(param).__name__ for param in params] == kinds


def test_rank_and_constness_are_read() -> None:
    loaded = LoadedKernel("", (88,), (0,), None, None)

    _, (param,) = parse_signature("k(fw::array<double const, 3u>)", loaded)

    assert isinstance(param, _ArrayParam)
    assert (param.element, param.constant, param.rank) == ("double", True, 3)


def test_own_types_of_elements_are_found() -> None:
    signature = "k(fw::array<pair const, 2u>, mine::box<int, 3u>*, float const*, void*, pair, int)"

    assert cuda_device._own_elements(signature) == ("pair", "mine::box<int, 3u>", "", "", "", "")
