"""Your own programs on a GPU: pointers and streams of other libraries, resources, refusals.

What programs do on every device is in `tests/program/test_programs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import CudaDevice
from flashwarp.errors import ArgumentError, ClosedError, CompileError, DtypeError

pytestmark = pytest.mark.gpu

KERNELS = Path(__file__).parents[1] / "support" / "program_kernels.cu"


@pytest.fixture(scope="module")
def program(device: CudaDevice) -> fw.program.Program:
    return fw.compile(KERNELS, device)


@pytest.fixture
def floats(tmp_path: Path, device: CudaDevice) -> Iterator[fw.Array]:
    with fw.create(tmp_path / "x.npy", "f4", (1000,), device=device) as x:
        yield x


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_arrays_of_other_libraries_are_used_in_the_order_of_their_stream(
    library: str, program: fw.program.Program
) -> None:
    module = pytest.importorskip(library)
    size = 1 << 24
    x = (
        module.zeros(size, dtype=module.float32, device="cuda:0")
        if library == "torch"
        else module.zeros(size, module.float32)
    )

    for _ in range(20):
        x *= 2
        program["increment"](x, size)
    x -= 1

    # After n rounds of doubling and adding one: 2^n - 1; float32 is exact up to 2^24.
    assert float(x[0]) == float(x[-1]) == (1 << 20) - 2


def test_launch_on_a_stream_of_ones_own_is_waited_for_by_close(
    program: fw.program.Program, tmp_path: Path, device: CudaDevice
) -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    path = tmp_path / "x.npy"
    with fw.create(path, "f4", (1_000_000,), device=device, cache="1 MiB") as x:
        x[:] = 1
        program["mine::scale"](x, 3, stream=stream)

    assert (np.load(path) == 3).all()


def test_repeated_launches_take_new_arguments(
    program: fw.program.Program, tmp_path: Path, device: CudaDevice
) -> None:
    torch = pytest.importorskip("torch")
    scale, gather = program["mine::scale"], program["gather"]
    with (
        fw.create(tmp_path / "x.npy", "f4", (1000,), device=device) as x,
        fw.create(tmp_path / "y.npy", "f4", (1000,), device=device) as y,
    ):
        x[:] = y[:] = 1
        for factor in (2.0, 3.0, 0.5):
            scale(x, factor)
            scale(y, 2 * factor, stream=torch.cuda.current_stream())
        x.wait()
        y.wait()
        assert set(x[:].tolist()) == {3.0}
        assert set(y[:].tolist()) == {24.0}

        x[:] = np.arange(1000)
        for first in range(5):
            indices = torch.tensor([first, 999 - first], device="cuda").view(torch.uint64)
            out = torch.zeros(2, device="cuda")
            gather(x, indices, out, 2)
            assert out.tolist() == [first, 999 - first]


def test_resources_are_told(program: fw.program.Program) -> None:
    resources = program["gather"].resources

    assert resources is not None
    assert 0 < (resources.registers or 0) <= 255
    assert resources.each_param_bytes[1:] == (8, 8, 8)


UNBOUND = """
#include "flashwarp/array.cuh"
__global__ void unbound(const __grid_constant__ fw::array<const float> x, float* out) {
  float sum = 0;
  const uint64_t step = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i < x.size(); i += step) sum += x[i];
  out[fw::base::thread_index()] = sum;
}
"""


@pytest.mark.parametrize(("options", "most"), [((), 64), (("--maxrregcount=32",), 32)])
def test_a_kernel_without_bounds_has_64_registers(
    device: CudaDevice, options: tuple[str, ...], most: int
) -> None:
    resources = fw.compile(UNBOUND, device, options=options)["unbound"].resources

    assert resources is not None
    assert resources.registers == most
    if most == 64:
        assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0)


def test_what_does_not_fit_is_refused(
    program: fw.program.Program, floats: fw.Array, tmp_path: Path, device: CudaDevice
) -> None:
    with pytest.raises(ArgumentError, match="the array is on cpu"):
        program["increment"](np.zeros(3, np.float32), 3)
    with pytest.raises(DtypeError):
        program["increment"](device.empty_array((3,), np.float64), 3)
    with pytest.raises(ArgumentError, match="multiple of 32"):
        program["mine::scale"](floats, 1, block_threads=100)
    with (
        fw.create(tmp_path / "y.npy", "f4", (10,), device="cpu") as elsewhere,
        pytest.raises(ArgumentError, match="the array is on cpu"),
    ):
        program["mine::scale"](elsewhere, 1)
    floats.close()
    with pytest.raises(ClosedError):
        program["mine::scale"](floats, 1)


def test_extern_c_kernel_is_refused(device: CudaDevice) -> None:
    with pytest.raises(CompileError, match="write FW_KERNEL"):
        fw.compile('extern "C" __global__ void plain(int* p) { *p = 1; }', device)
