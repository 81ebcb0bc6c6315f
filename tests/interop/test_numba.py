"""Python kernels with arrays, compiled and linked for GPUs without one."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
pytest.importorskip("cuda.bindings.nvjitlink", reason="nvJitLink is not installed")

from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda
from numba.core.errors import NumbaError
from numba.cuda import types
from numba.cuda.core.errors import NumbaError as CudaNumbaError
from numba.cuda.datamodel import default_manager
from numba.cuda.models import cuda_data_manager
from numba.cuda.np import numpy_support
from numba.cuda.typing.typeof import typeof

import flashwarp as fw
from flashwarp.errors import ArgumentError, BoundsError, DtypeError
from flashwarp.interop import c_abi
from flashwarp.interop.numba import (
    Kernel,
    TokenType,
    array_type,
    atomic_add,
    extension,
    file_type,
    jit,
    pipeline_type,
    prefetch,
    read_async,
    write_async,
)
from support import host_numba
from support.samples import sample

DTYPES = [
    "bool",
    *(f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in ("int", "uint")),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
# Numba takes two seconds for one.
SAMPLED_DTYPES = sample(DTYPES, 7)
ADDED_DTYPES = sample(c_abi.ATOMIC_ADD_DTYPES, 6)


NEWEST = fw.policy.Policy(
    "newest",
    """
    struct newest {
      FW_DEVICE static void on_hit(const fw::cache::geometry&, uint64_t, uint64_t) {}
      FW_DEVICE static void on_fill(fw::cache::set_view& s, uint32_t way) { s.hand = way; }
      FW_DEVICE static uint32_t choose_victim(fw::cache::set_view& s) { return s.hand; }
    };
    """,
    keeps_words=False,
)


def link(function: Callable[..., Any], *kinds: Any, arch: str = "sm_90") -> str:
    """Return the PTX of a kernel after it was linked with the device headers."""
    cc = (int(arch[3:]) // 10, int(arch[3:]) % 10)
    codes, _ = cuda.compile_all(
        function, types.void(*kinds), device=False, abi="numba", output="ltoir", cc=cc
    )
    objects = [
        ObjectCode.from_ltoir(code if isinstance(code, bytes) else code.data) for code in codes
    ]
    options = LinkerOptions(arch=arch, link_time_optimization=True, ptx=True)
    return Linker(*objects, options=options).link("ptx").code.decode()


def entry_of(ptx: str) -> str:
    """The text of the kernel itself, without functions that it calls."""
    start = ptx.index(".entry")
    return ptx[start : ptx.index("\n}", start)]


def direct_calls(ptx: str) -> list[str]:
    """What the kernel calls by name; the slow path is called through pointers."""
    return re.findall(r"call(?:\.uni)?\s+(?:\([^)]*\),\s*)?([A-Za-z_]\w*)", entry_of(ptx))


def array(dtype: Any, ndim: int = 1) -> Any:
    return types.Array(numpy_support.from_dtype(np.dtype(dtype)), ndim, "C")


def gather(out: Any, data: Any, indices: Any) -> None:
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = data[indices[i]]


def scatter(data: Any, indices: Any, values: Any) -> None:
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        data[indices[i]] = values[i]


@pytest.mark.parametrize("arch", sample(["sm_80", "sm_90", "sm_100"], 3))
def test_loads_are_part_of_the_kernel(arch: str) -> None:
    ptx = link(gather, array("f4"), array_type("f4"), array("i8"), arch=arch)

    assert direct_calls(ptx) == []
    assert "fw_load_4" not in entry_of(ptx)
    # The look at the tags, the element itself, and the second look.
    assert re.search(r"ld\.acquire\.gpu\.global\.v2\.u64", entry_of(ptx))
    assert re.search(r"ld\.acquire\.gpu\.global\.u32", entry_of(ptx))
    assert re.search(r"ld\.relaxed\.gpu\.global\.u64", entry_of(ptx))
    # The array's struct stays in the parameters, and what the slow path loads comes in a register.
    assert "__local_depot" in ptx
    assert "__local_depot" not in entry_of(ptx)


def test_linked_code_keeps_no_call_of_the_functions_by_name() -> None:
    """The check above can fail: before the link there are calls."""
    ptx, _ = cuda.compile_ptx(
        gather, types.void(array("f4"), array_type("f4"), array("i8")), cc=(9, 0)
    )

    assert set(direct_calls(ptx)) == {"fw_load_4"}


@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
def test_every_number_is_loaded_and_stored(dtype: str) -> None:
    loaded = link(gather, array(dtype), array_type(dtype), array("i4"))
    stored = link(scatter, array_type(dtype), array("u4"), array(dtype))

    assert direct_calls(loaded) == direct_calls(stored) == []
    width = np.dtype(dtype).itemsize
    element = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: r"v4\.u32"}[width]
    assert re.search(rf"ld\.acquire\.gpu\.global\.{element}", entry_of(loaded))


def test_axes_lengths_and_sizes() -> None:
    def kernel(out: Any, data: Any) -> None:
        rows, columns = data.shape
        i = cuda.grid(1)
        if i < rows:
            total = 0.0
            for j in range(columns):
                total += data[i, -1 - j]
            data[i, 0] = total
            out[i] = total + len(data) + data.size + data.ndim

    ptx = link(kernel, array("f8"), array_type("f8", 2))

    assert direct_calls(ptx) == []


def test_transfers_of_ones_own_buffers() -> None:
    def kernel(out: Any, data: Any) -> None:
        buffer = cuda.local.array(64, types.float32)
        start = cuda.grid(1) * 64
        prefetch(data, start + 64)
        ahead = prefetch(data, start + 128, 64)
        token = read_async(data, start, 64, buffer)
        while not token.done():
            out[1] += 1
        if token.wait() == 0 and token.status() == 0 and ahead.wait() == 0:
            for i in range(64):
                buffer[i] *= 2
            write_async(data, start, 64, buffer).wait()

    assert direct_calls(link(kernel, array("f4"), array_type("f4"))) == []


@pytest.mark.parametrize("dtype", ADDED_DTYPES)
def test_numbers_are_added_to_in_one_step(dtype: str) -> None:
    def kernel(out: Any, data: Any) -> None:
        out[0] = atomic_add(data, 3, 2)

    assert direct_calls(link(kernel, array(dtype), array_type(dtype))) == []


def test_read_only_arrays_are_loaded() -> None:
    link(gather, array("f4"), array_type("f4", readonly=True), array("i8"))


@pytest.mark.parametrize("policy", ["lru", NEWEST], ids=str)
def test_policy_of_the_cache_is_part_of_the_kernel(policy: str | fw.policy.Policy) -> None:
    ptx = link(gather, array("f4"), array_type("f4", policy=policy), array("i8"))

    functions = re.findall(r"\.func\s+(?:\([^)]*\)\s*)?(\w+)", ptx)
    assert direct_calls(ptx) == []
    assert any(getattr(policy, "name", policy) in function for function in functions)
    assert not any("clock_policy" in function for function in functions)


# What kernels do, run by one thread of the host.


@pytest.fixture(scope="module")
def device() -> Iterator[fw.device.CpuDevice]:
    with fw.device.CpuDevice(1) as made:
        host_numba.link_headers(made)
        yield made


def opened(path: Path, values: np.ndarray[Any, Any], device: fw.device.CpuDevice) -> fw.Array:
    """A writable array with these values, larger than its cache."""
    np.save(path, values)
    # The host's thread is none of the device's, so it does not serve the controller itself.
    controller = fw.nvme.SoftwareController(threads=1)
    return fw.open(path, "r+", device=device, cache="16 KiB", line=512, controller=controller)


def values_of(dtype: str, count: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(3)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return random.integers(0, 2, count).astype(dtype)
    if kind in "iu":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, count, dtype, endpoint=True)
    real = random.random(count) * 100 - 50
    return (real + 1j * random.random(count) if kind == "c" else real).astype(dtype)


@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
def test_elements_arrive_as_they_are(
    dtype: str, tmp_path: Path, device: fw.device.CpuDevice
) -> None:
    values = values_of(dtype, 5000)
    order = np.random.default_rng(4).permutation(len(values))
    out = np.zeros_like(values)
    with (
        opened(tmp_path / "x.npy", values, device) as x,
        opened(tmp_path / "y.npy", np.zeros_like(values), device) as y,
    ):
        # From the end, as negative indices count.
        host_numba.run(gather, out, x, order - len(values))
        host_numba.run(scatter, y, order.astype(np.uint32), out)
        x.wait()
        y.wait()

        assert (out == values[order]).all()
        assert (y[:] == values).all()


def test_axes_are_those_of_numpy(tmp_path: Path, device: fw.device.CpuDevice) -> None:
    def kernel(out: Any, data: Any) -> None:
        rows, columns = data.shape
        for i in range(rows):
            total = 0
            for j in range(columns):
                total += data[i, -1 - j] * (j + 1)
            out[i] = total
            data[-1 - i, 0] = i
        out[rows] = len(data)
        out[rows + 1] = data.size
        out[rows + 2] = data.ndim

    values = np.random.default_rng(5).integers(0, 1000, (300, 70))
    out = np.zeros(303, np.int64)
    with opened(tmp_path / "x.npy", values, device) as x:
        host_numba.run(kernel, out, x)
        x.wait()
        stored = x[:, 0]

    # The second half is read after its first column was stored to.
    values[150:, 0] = np.arange(149, -1, -1)
    assert out[:300].tolist() == (values * np.arange(70, 0, -1)).sum(1).tolist()
    assert out[300:].tolist() == [300, 21_000, 2]
    assert stored.tolist() == list(range(299, -1, -1))


@pytest.mark.parametrize("place", [(3, 5), (3, 0), (-4, 0), (0, -6), (1 << 40, 0), (0, 1 << 62)])
def test_index_out_of_bounds_reads_zero_and_is_raised(
    place: tuple[int, int], tmp_path: Path, device: fw.device.CpuDevice
) -> None:
    def kernel(out: Any, data: Any, i: Any, j: Any) -> None:
        out[0] = data[i, j]
        data[i, j] = 7

    out = np.ones(1, np.float32)
    with opened(tmp_path / "x.npy", np.ones((3, 5), np.float32), device) as x:
        host_numba.run(kernel, out, x, *place)

        with pytest.raises(BoundsError):
            x.wait()
        assert out[0] == 0
        assert (x[:] == 1).all()


def test_transfers_and_tokens_that_are_asked_twice(
    tmp_path: Path, device: fw.device.CpuDevice
) -> None:
    def kernel(data: Any, buffer: Any, seen: Any) -> None:
        for start in range(0, data.size, 100):
            ahead = prefetch(data, start, 100)
            prefetch(data, start - data.size)
            token = read_async(data, start, 100, buffer)
            polls = 0
            while not token.done():
                polls += 1
            seen[0] += token.wait() + token.wait() + token.status() + ahead.wait()
            for i in range(100):
                buffer[i] *= 2
            token.wait()  # what was waited for is not read again
            write_async(data, start, 100, buffer).wait()
            seen[1] += 1

    values = np.random.default_rng(6).random(50_000)
    seen = np.zeros(2, np.int64)
    with opened(tmp_path / "x.npy", values, device) as x:
        host_numba.run(kernel, x, np.zeros(100), seen)
        x.wait()

        assert (x[:] == 2 * values).all()
    assert seen.tolist() == [0, 500]


def test_tokens_from_one_place_are_told_apart(tmp_path: Path, device: fw.device.CpuDevice) -> None:
    """More of them are outstanding than the place remembers."""

    def kernel(data: Any, out: Any, seen: Any) -> None:
        first = read_async(data, 0, 1, out[0:])
        previous = first
        for i in range(1, 20):
            token = read_async(data, 500 * i, 1, out[i:])
            seen[i] = previous.wait()
            previous = token
        oldest = prefetch(data, 0, 1)
        for i in range(20):
            latest = prefetch(data, 500 * i, 1)
        seen[0] = previous.wait() + oldest.wait() + latest.wait() + first.wait()
        if not (oldest.done() and latest.done()):
            seen[0] = 1

    out, seen = np.zeros(20), np.ones(20, np.int64)
    with opened(tmp_path / "x.npy", np.arange(10_000.0), device) as x:
        host_numba.run(kernel, x, out, seen)
        x.wait()

    assert out.tolist() == list(range(0, 10_000, 500))
    assert (seen == 0).all()


def test_transfer_that_does_not_fit_its_buffer_moves_nothing(
    tmp_path: Path, device: fw.device.CpuDevice
) -> None:
    def kernel(data: Any, buffer: Any, seen: Any) -> None:
        seen[0] = read_async(data, 0, buffer.size + 1, buffer).wait()

    buffer, seen = np.full(10, 7.0), np.zeros(1, np.int64)
    with opened(tmp_path / "x.npy", np.arange(100.0), device) as x:
        host_numba.run(kernel, x, buffer, seen)

        with pytest.raises(BoundsError):
            x.wait()
    assert (buffer == 7).all()
    assert seen[0] != 0


@pytest.mark.parametrize("dtype", ADDED_DTYPES)
def test_what_was_there_is_returned(
    dtype: str, tmp_path: Path, device: fw.device.CpuDevice
) -> None:
    def kernel(data: Any, before: Any) -> None:
        before[0] = atomic_add(data, 3, 5)
        before[1] = atomic_add(data, -7, 6)

    before = np.zeros(2, dtype)
    with opened(tmp_path / "x.npy", np.arange(10).astype(dtype), device) as x:
        host_numba.run(kernel, x, before)
        x.wait()

        assert x[3] == 14
    assert before.tolist() == [3, 8]


# What is refused when it is compiled.


def refused(function: Callable[..., Any], *kinds: Any) -> str:
    with pytest.raises((NumbaError, CudaNumbaError)) as caught:
        cuda.compile_ptx(function, types.void(*kinds), cc=(9, 0))
    return str(caught.value)


def test_store_to_a_read_only_array_is_refused() -> None:
    read_only = array_type("f4", readonly=True)

    assert 'mode="r+"' in refused(scatter, read_only, array("i8"), array("f4"))


def test_values_of_a_wrong_type_are_refused() -> None:
    assert "cannot be stored" in refused(scatter, array_type("f4"), array("i8"), array("c8"))


def test_index_that_is_no_integer_is_refused() -> None:
    assert "indexed by integers" in refused(gather, array("f4"), array_type("f4"), array("f4"))


def test_index_of_some_axes_is_refused() -> None:
    assert "data[i, j]" in refused(gather, array("f4"), array_type("f4", 2), array("i8"))

    def three(out: Any, data: Any) -> None:
        out[0] = data[1, 2, 3]

    assert "3 indices" in refused(three, array("f4"), array_type("f4", 2))


def test_buffer_of_another_dtype_or_with_gaps_is_refused() -> None:
    def kernel(buffer: Any, data: Any) -> None:
        read_async(data, 0, 10, buffer).wait()

    assert "contiguous" in refused(kernel, array("f8"), array_type("f4"))
    gaps = types.Array(types.float32, 1, "A")
    assert "contiguous" in refused(kernel, gaps, array_type("f4"))
    constant = types.Array(types.float32, 1, "C", readonly=True)
    assert "contiguous" in refused(kernel, constant, array_type("f4"))


def test_write_async_to_a_read_only_array_is_refused() -> None:
    def kernel(buffer: Any, data: Any) -> None:
        write_async(data, 0, 10, buffer).wait()

    assert 'mode="r+"' in refused(kernel, array("f4"), array_type("f4", readonly=True))


def test_atomic_add_of_small_numbers_is_refused() -> None:
    def kernel(out: Any, data: Any) -> None:
        out[0] = atomic_add(data, 0, 1)

    assert "atomic_add works on" in refused(kernel, array("i2"), array_type("i2"))


def test_token_is_not_returned_by_a_function() -> None:
    model = cuda_data_manager.chain(default_manager)[TokenType()]

    with pytest.raises(CudaNumbaError, match="cannot return a token"):
        model.as_return(None, None)


@pytest.mark.parametrize("dtype", [">f4", "U3", "f16", [("a", "i4")], "M8[s]"])
def test_dtypes_that_are_no_numbers_are_refused(dtype: Any) -> None:
    with pytest.raises(DtypeError, match=r"flashwarp\.compile"):
        array_type(dtype)


# Launches, as far as they go without a GPU.


def test_array_on_the_cpu_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with fw.create(tmp_path / "x.npy", "f4", (10,), device="cpu") as x:
        kind = typeof(x)

        assert kind == array_type("f4")
        with pytest.raises(ArgumentError, match=r"flashwarp\.compile, which runs on both"):
            extension.prepare_args(kind, x, 0, [])


def test_type_of_a_read_only_array_is_read_only(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 4), np.complex64))
    with fw.open(tmp_path / "x.npy", device="cpu") as x:
        assert typeof(x) == array_type("c8", 2, readonly=True)


def test_words_of_an_array_are_its_struct_and_its_shape(tmp_path: Path) -> None:
    with fw.create(tmp_path / "x.npy", "f4", (3, 5), device="cpu") as x:
        words = c_abi.array_words(x)

        assert len(words) == c_abi.word_count(2)
        assert words[-3:] == (15, 3, 5)


def test_functions_for_kernels_say_so_elsewhere() -> None:
    calls = (
        functools.partial(prefetch, None, 0),
        functools.partial(read_async, None, 0, 1, None),
        functools.partial(write_async, None, 0, 1, None),
        functools.partial(atomic_add, None, 0, 1),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match="works in kernels"):
            call()


def test_jit_takes_a_function_or_options() -> None:
    assert isinstance(jit(gather), Kernel)
    assert isinstance(jit(fastmath=True)(gather), Kernel)
    assert jit(gather).py_func is gather
    assert not isinstance(jit(device=True)(gather), Kernel)


def test_numba_that_cannot_be_imported_is_an_error_with_the_way_out() -> None:
    script = textwrap.dedent(
        """
        import sys
        sys.modules["numba"] = None
        import flashwarp.errors
        try:
            import flashwarp.interop.numba
        except flashwarp.errors.DeviceError as error:
            print(error)
        """
    )

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert "flashwarp[numba]" in result.stdout


def test_pipelines_are_linked_into_kernels() -> None:
    def kernel(p: Any, ids: Any, narrow: Any, rows: Any, statuses: Any, out: Any) -> None:
        ticket = p.prefetch(ids, ids.size, rows)
        out[0] = p.prefetch_wait(ticket, statuses)
        p.block_prefetch_seq(3, 4, rows)
        out[1] = p.block_prefetch_wait()
        p.write_back(narrow, 5, rows)
        p.block_write_back_seq(0, 1, rows)
        out[2] = p.write_back_wait()

    arrays = (types.int64, types.int32, types.float32, types.uint16, types.uint64)
    ptx = link(kernel, pipeline_type("float32"), *(each[::1] for each in arrays))

    assert ".extern .func" not in ptx
    assert "st.relaxed.sys" in ptx


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("p.prefetch(rows, 1, rows)", "takes ids as a contiguous array"),
        ("p.prefetch(ids, 1.5, rows)", "takes integers"),
        ("p.prefetch(ids, 1, ids)", "needs a contiguous array of float32"),
        ("p.prefetch(ids, 1)", r"prefetch\(ids, n, buffer\)"),
        ("p.write_back(ids, 1, rows)", "cannot be written to"),
        ("p.write_back_wait()", "cannot be written to"),
        ("p.prefetch_wait(1, rows)", "contiguous array of uint16"),
    ],
)
def test_calls_of_pipelines_that_cannot_work_do_not_compile(call: str, message: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def kernel(p, ids, rows):\n    {call}\n", names)
    kinds = (pipeline_type("float32", readonly=True), types.int64[::1], types.float32[::1])

    with pytest.raises((NumbaError, CudaNumbaError), match=message):
        link(names["kernel"], *kinds)


# Files.


def copy_records(source: Any, target: Any, buffer: Any, found: Any) -> None:
    for i in range(cuda.grid(1), source.size() // 100, cuda.gridsize(1)):
        if source.read(buffer, i * 100, 100) == 100 and buffer[0] == 7:
            found[i] = target.append(buffer, 100)


def call_all(file: Any, buffer: Any, found: Any) -> None:
    found[0] = file.size()
    found[1] = file.capacity()
    found[2] = file.warp_write(buffer, 50, 20)
    found[3] = file.block_write(buffer, 1000, 20)
    found[4] = file.warp_append(buffer, 8)
    found[5] = file.block_append(buffer, 8)
    found[6] = file.warp_read(buffer, 1000, 5000)
    found[7] = file.block_read(buffer, 5000, 1)
    found[8] = file.warp_flush(0, 100)
    found[9] = file.block_flush(0, 10_000)
    found[10] = file.write(buffer, 1990, 20)
    found[11] = file.read(buffer, 1 << 63, 1)
    found[12] = file.read_around(buffer, 0, 60)
    found[13] = file.warp_read_around(buffer, 1000, 5000)
    found[14] = file.block_read_around(buffer, 5000, 1)
    found[15] = file.write_around(buffer, 3, 20)
    found[16] = file.warp_write_around(buffer, 600, 20)
    found[17] = file.block_write_around(buffer, 1990, 20)


def file_of(path: Path, device: fw.device.CpuDevice, mode: Any = "r+", **options: Any) -> fw.File:
    # As for `opened`.
    controller = fw.nvme.SoftwareController(threads=1)
    return fw.File.open(
        path, mode, device=device, cache="16 KiB", line=512, controller=controller, **options
    )


def test_files_are_read_and_appended_to(tmp_path: Path, device: fw.device.CpuDevice) -> None:
    records = np.zeros((50, 100), np.uint8)
    records[[3, 40], 0] = 7
    records[:, 1] = np.arange(50)
    records.tofile(tmp_path / "in")
    (tmp_path / "out").touch()
    found = np.full(50, -1, np.int64)
    with (
        file_of(tmp_path / "in", device, "r") as source,
        file_of(tmp_path / "out", device, capacity="1 MiB") as target,
    ):
        host_numba.run(copy_records, source, target, np.zeros(100, np.uint8), found)
    assert (np.fromfile(tmp_path / "out", np.uint8).reshape(-1, 100) == records[[3, 40]]).all()
    assert [found[3], found[40]] == [0, 100]
    assert (np.delete(found, [3, 40]) == -1).all()


def test_every_call_of_files(tmp_path: Path, device: fw.device.CpuDevice) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    found = np.zeros(18, np.int64)
    buffer = np.arange(500, dtype=np.int32)
    with file_of(tmp_path / "f", device, capacity=2000) as file:
        host_numba.run(call_all, file, buffer, found)
        assert file.size == 1036
    einval, enospc = -22, -28
    assert found[:12].tolist() == [100, 2000, 20, 20, 1020, 1028, 36, 0, 100, 1036, enospc, einval]
    assert found[12:].tolist() == [60, 36, 0, 20, 20, enospc]


@pytest.mark.parametrize("arch", sample(["sm_90", "sm_100"], 2))
def test_calls_of_files_are_linked(arch: str) -> None:
    ptx = link(call_all, file_type(), array("i4"), array("i8"), arch=arch)

    assert not [name for name in direct_calls(ptx) if name.startswith("fw_")]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("f.read(0, 1, 2)", "needs a contiguous array"),
        ("f.read(rows, 1.5, 2)", "takes integers"),
        ("f.read(rows, 1)", r"read\(buffer, offset, nbytes\)"),
        ("f.write(rows, 0, 1)", "cannot be written to"),
        ("f.block_append(rows, 1)", "cannot be written to"),
        ("f.warp_flush(0, 1)", "cannot be written to"),
        ("f.size(1)", "takes no arguments"),
    ],
)
def test_calls_of_files_that_cannot_work_do_not_compile(call: str, message: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def kernel(f, rows):\n    {call}\n", names)

    with pytest.raises((NumbaError, CudaNumbaError), match=message):
        link(names["kernel"], file_type(readonly=True), types.float32[::1])


def test_files_on_the_cpu_are_no_arguments(tmp_path: Path, device: fw.device.CpuDevice) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    with (
        file_of(tmp_path / "f", device) as file,
        pytest.raises(ArgumentError, match="is on the CPU device"),
    ):
        extension.prepare_args(typeof(file), file, 0, [])
