"""Kernels of one's own on the CPU device, and their compilation for GPUs without one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import flashwarp as fw
from flashwarp._jit import compiler, elf, host_compiler, spelling
from flashwarp._jit.artifact_cache import ArtifactCache
from flashwarp._jit.program import LoadedKernel
from flashwarp.arguments import _ArrayParam, parse_signature
from flashwarp.device import CpuDevice
from flashwarp.device import cuda as cuda_device
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    CompileError,
    DtypeError,
    FlashwarpError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.testing.faults import Faulty

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

SOURCE = """
#include "flashwarp/array.cuh"

struct pair {
  int32_t key;
  double value;
};
#if !defined(BIAS)
#define BIAS 0
#endif

FW_KERNEL gather(fw::array<float> x, const uint64_t* indices, float* out, uint64_t n) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) {
    out[i] = x[indices[i]] + BIAS;
  }
}

namespace mine {
FW_KERNEL scale(fw::array<float> x, float factor) {
  for (uint64_t i = fw::base::thread_index(); i < x.size(); i += fw::base::thread_count()) {
    x.store(i, x[i] * factor);
  }
}
}  // namespace mine

FW_KERNEL transpose(fw::array<const int32_t, 2> from, fw::array<int32_t, 2> to) {
  const uint64_t step = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i < from.extent(0); i += step) {
    for (uint64_t j = 0; j < from.extent(1); j++) to.store_at(from(i, j), j, i);
  }
}

FW_KERNEL keep(void* out, bool flag, int8_t small, uint16_t medium, int32_t i, uint64_t large,
               float single, double both, pair p) {
  if (fw::base::thread_index() != 0) return;
  double* to = static_cast<double*>(out);
  to[0] = flag;
  to[1] = small;
  to[2] = medium;
  to[3] = i;
  to[4] = double(large);
  to[5] = single;
  to[6] = both;
  to[7] = p.key;
  to[8] = p.value;
}

FW_KERNEL sum_values(const pair* pairs, uint64_t n, double* out) {
  if (fw::base::thread_index() != 0) return;
  for (uint64_t i = 0; i < n; i++) *out += pairs[i].value;
}

FW_KERNEL count_threads(uint32_t* seen) {
  seen[fw::base::thread_index()] = fw::base::thread_count();
}
"""
# Kernels whose types need code of their own, which takes NVRTC twice as long as all the above.
MORE = """
FW_KERNEL sum_pairs(fw::array<const pair> pairs, double* out) {
  if (fw::base::thread_index() != 0) return;
  for (uint64_t i = 0; i < pairs.size(); i++) *out += pairs[i].value;
}

FW_KERNEL add(fw::array<const double> a, fw::array<const double> b, fw::array<double> sum) {
  for (uint64_t i = fw::base::thread_index(); i < sum.size(); i += fw::base::thread_count()) {
    sum.store(i, a[i] + b[i]);
  }
}
"""

PAIR = np.dtype([("key", "i4"), ("value", "f8")], align=True)


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHWARP_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    with CpuDevice(3) as made:
        yield made


@pytest.fixture(scope="module")
def program(device: CpuDevice, cache_folder: Path) -> fw.Program:
    return fw.compile(SOURCE + MORE, device)


@pytest.fixture
def floats(tmp_path: Path, device: CpuDevice) -> Iterator[fw.Array]:
    """Sixteen times the size of its cache."""
    with fw.create(tmp_path / "x.npy", (1 << 18,), "f4", device=device, cache="64 KiB") as x:
        x[:] = np.arange(1 << 18)
        yield x


# Kernels run.


def test_gather_from_an_array_larger_than_its_cache(program: fw.Program, floats: fw.Array) -> None:
    indices = np.random.default_rng(1).integers(0, floats.size, 20_000).astype(np.uint64)
    out = np.empty(len(indices), np.float32)

    program["gather"](floats, indices, out, len(indices))
    floats.synchronize()

    assert (out == indices.astype(np.float32)).all()
    assert floats.stats.misses > 10_000


def test_stores_reach_the_file(program: fw.Program, tmp_path: Path, device: CpuDevice) -> None:
    path = tmp_path / "x.npy"
    with fw.create(path, (100_000,), "f4", device=device, cache="64 KiB") as x:
        x[:] = np.arange(100_000)
        program["mine::scale"](x, 2)
        x.synchronize()

    assert (np.load(path) == 2 * np.arange(100_000, dtype=np.float32)).all()


def test_arrays_on_caches_of_their_own_and_on_one(
    program: fw.Program, tmp_path: Path, device: CpuDevice
) -> None:
    rng = np.random.default_rng(2)
    values = [rng.random(50_000), rng.random(50_000)]
    with (
        fw.Cache("64 KiB", device=device) as shared,
        fw.create(tmp_path / "a.npy", (50_000,), "f8", cache=shared) as a,
        fw.create(tmp_path / "b.npy", (50_000,), "f8", device=device, cache="64 KiB") as b,
        fw.create(tmp_path / "c.npy", (50_000,), "f8", cache=shared) as total,
    ):
        a[:], b[:] = values
        program["add"](a, b, total)
        for array in (a, b, total):
            array.synchronize()

        assert (total[:] == values[0] + values[1]).all()


def test_axes_and_read_only_arrays(program: fw.Program, tmp_path: Path, device: CpuDevice) -> None:
    values = np.arange(300 * 70, dtype=np.int32).reshape(300, 70)
    np.save(tmp_path / "x.npy", values)
    with (
        fw.open(tmp_path / "x.npy", device=device) as x,
        fw.create(tmp_path / "y.npy", (70, 300), "i4", device=device, cache="64 KiB") as y,
    ):
        assert not x.writable
        program["transpose"](x, y)
        y.synchronize()

        assert (y[:] == values.T).all()


def test_number_of_axes_is_checked(program: fw.Program, tmp_path: Path, device: CpuDevice) -> None:
    with (
        fw.create(tmp_path / "x.npy", (30,), "i4", device=device) as x,
        pytest.raises(ArgumentError, match="wants 2 axes, the array has shape"),
    ):
        program["transpose"](x, x)


def test_arrays_of_records(program: fw.Program, tmp_path: Path, device: CpuDevice) -> None:
    records = np.zeros(5000, PAIR)
    records["value"] = 0.5
    np.save(tmp_path / "x.npy", records)
    out = np.zeros(1)

    with fw.open(tmp_path / "x.npy", device=device) as x:
        program["sum_pairs"](x, out)
        x.synchronize()

    assert out[0] == 2500


def test_numbers_and_structures_arrive_as_they_are(program: fw.Program) -> None:
    out = np.zeros(9)
    record = np.array((7, 0.25), PAIR)[()]

    program["keep"](out, True, -128, 65535, np.int32(-5), 1 << 53, 0.5, np.float64(1e300), record)

    assert out.tolist() == [1, -128, 65535, -5, 1 << 53, 0.5, 1e300, 7, 0.25]


def test_structure_may_be_bytes_or_ctypes(program: fw.Program) -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("key", ctypes.c_int32), ("value", ctypes.c_double))

    for given in (Pair(3, 1.5), bytes(Pair(3, 1.5))):
        out = np.zeros(9)
        program["keep"](out, False, 0, 0, 0, 0, 0, 0, given)
        assert out[7:].tolist() == [3, 1.5]


def test_array_of_structures_by_pointer(program: fw.Program) -> None:
    pairs = np.zeros(10, PAIR)
    pairs["value"] = 1.5
    out = np.zeros(1)

    program["sum_values"](pairs, 10, out)

    assert out[0] == 15


def test_device_memory_and_torch_tensors_are_pointers(
    program: fw.Program, device: CpuDevice
) -> None:
    torch = pytest.importorskip("torch")
    memory = device.allocate(64)
    tensor = torch.zeros(16, dtype=torch.uint32)

    program["count_threads"](memory)
    program["count_threads"](tensor)

    assert memory.as_numpy().view(np.uint32)[:4].tolist() == [3, 3, 3, 0]
    assert tensor[:4].tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize(("warps", "threads"), [(None, 3), (1, 1), (2, 2), (1000, 3), (0, 0)])
def test_no_more_threads_than_the_device_has(
    program: fw.Program, warps: int | None, threads: int
) -> None:
    seen = np.zeros(8, np.uint32)

    program["count_threads"](seen, warps=warps)

    assert seen.tolist() == [threads] * threads + [0] * (8 - threads)


def test_programs_do_not_share_symbols(device: CpuDevice) -> None:
    text = """
    #include "flashwarp/array.cuh"
    static int helper() { return VALUE; }
    int exported() { return VALUE; }
    FW_KERNEL answer(int* out) { out[0] = helper() + exported(); }
    """
    one = fw.compile(text, device, defines={"VALUE": 1})
    two = fw.compile(text, device, defines={"VALUE": 10})
    out = np.zeros(1, np.int32)

    answers = []
    for program in (one, two, one):
        program["answer"](out)
        answers.append(int(out[0]))

    assert answers == [2, 20, 2]


def test_two_programs_run_at_once_from_two_threads(
    program: fw.Program, floats: fw.Array, tmp_path: Path, device: CpuDevice
) -> None:
    other = fw.compile(SOURCE, device, defines={"BIAS": 1})
    failures: list[BaseException] = []

    def gather(program: fw.Program, bias: int) -> None:
        try:
            indices = np.arange(0, floats.size, 97, dtype=np.uint64)
            for _ in range(5):
                out = np.empty(len(indices), np.float32)
                program["gather"](floats, indices, out, len(indices))
                assert (out == indices.astype(np.float32) + bias).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=gather, args=each) for each in ((program, 0), (other, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []


def test_failed_transfers_are_raised_by_synchronize(
    program: fw.Program, tmp_path: Path, device: CpuDevice
) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(4096))
    storage = Faulty(fw.storage.File(tmp_path / "x.bin", writable=True), "read eio")
    with fw.from_storage(storage, "f4", (1000,), device=device) as x:
        out = np.empty(1, np.float32)
        program["gather"](x, np.zeros(1, np.uint64), out, 1)

        with pytest.raises(StorageError, match="a kernel"):
            x.synchronize()


# Sources.


def test_source_from_a_file_finds_headers_beside_it_and_in_folders(
    tmp_path: Path, device: CpuDevice
) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "far.cuh").write_text("#pragma once\nconstexpr int kFar = 30;\n")
    (tmp_path / "near.cuh").write_text("#pragma once\nconstexpr int kNear = 4;\n")
    path = tmp_path / "kernel.cu"
    path.write_text(
        '#include "near.cuh"\n#include <far.cuh>\n#include "flashwarp/array.cuh"\n'
        "FW_KERNEL answer(int* out) { out[0] = kFar + kNear; }\n"
    )
    out = np.zeros(1, np.int32)

    fw.compile(path, device, include_dirs=[tmp_path / "include"])["answer"](out)

    assert out[0] == 34


def test_defines_of_all_kinds(device: CpuDevice) -> None:
    text = """
    #include "flashwarp/array.cuh"
    #ifdef BARE
    FW_KERNEL answer(double* out) { out[0] = NUMBER; out[1] = YES; out[2] = FLOAT; out[3] = NAME; }
    #endif
    """
    program = fw.compile(
        text,
        device,
        defines={"BARE": None, "NUMBER": -3, "YES": True, "FLOAT": 0.5, "NAME": "(1 + 1)"},
        options=["-DUNUSED=1"],
    )
    out = np.zeros(4)

    program["answer"](out)

    assert out.tolist() == [-3, 1, 0.5, 2]


def test_kernels_with_bounded_registers_are_kernels(device: CpuDevice) -> None:
    program = fw.compile(
        '#include "flashwarp/array.cuh"\nFW_KERNEL_RESIDENT(4) one(int*) {}\n'
        "FW_KERNEL no_parameters() {}\n",
        device,
    )

    assert sorted(program.kernels) == ["no_parameters", "one"]
    program["no_parameters"]()


def test_assertions_are_checked_when_debugging(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import flashwarp as fw, sys
        program = fw.compile('''
        #include "flashwarp/array.cuh"
        FW_KERNEL check(int32_t n) { FW_ASSERT(n == 1); }
        ''', "cpu", debug=sys.argv[1] == "debug")
        program["check"](2)
        """
    )

    released, debugged = (
        subprocess.run(
            [sys.executable, "-c", script, mode], capture_output=True, text=True, check=False
        )
        for mode in ("release", "debug")
    )

    assert released.returncode == 0, released.stderr
    assert debugged.returncode != 0
    assert "n == 1" in debugged.stderr


# The cache of compiled code.


def test_second_compilation_is_found_on_disk_and_loaded_once(cache_folder: Path) -> None:
    text = '#include "flashwarp/array.cuh"\nFW_KERNEL found(int* out) { out[0]++; }\n'
    with CpuDevice(1) as device:
        first = fw.compile(text, device)
        second = fw.compile(text, device)
    with CpuDevice(1) as device:
        third = fw.compile(text, device)
        counter = np.zeros(1, np.int32)
        third["found"](counter)

    assert (first.from_cache, third.from_cache) == (False, True)
    assert second["found"]._loaded is first["found"]._loaded
    assert counter[0] == 1


@pytest.mark.parametrize("change", ["text", "define", "option", "debug", "header", "compiler"])
def test_what_goes_in_decides_what_is_found(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "include" / "mine.cuh"
    header.parent.mkdir()
    header.write_text("#pragma once\n")
    text = '#include "mine.cuh"\n#include "flashwarp/array.cuh"\nFW_KERNEL k(int*) {}\n'
    cache = ArtifactCache(tmp_path / "cache")
    dirs = [header.parent, compiler.INCLUDE_DIR]

    def build(text: str = text, **how: Any) -> host_compiler.HostArtifact:
        source = compiler.Source("k.cu", text.encode())
        return host_compiler.compile_host(source, include_dirs=dirs, cache=cache, **how)

    build()
    assert build().from_cache
    if change == "text":
        again = build(text + "// more\n")
    elif change == "define":
        again = build(options=["-DONE=1"])
    elif change == "option":
        again = build(options=["-O2"])
    elif change == "debug":
        again = build(debug=True)
    elif change == "header":
        header.write_text("#pragma once\n// changed\n")
        again = build()
    else:
        fake = tmp_path / "other-g++"
        real = host_compiler.find_compiler()[0]
        fake.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && {{ echo other 1.0; exit; }}\nexec {real} "$@"\n'
        )
        fake.chmod(0o755)
        monkeypatch.setenv("CXX", str(fake))
        again = build()

    assert not again.from_cache


def test_damaged_library_is_compiled_again(device: CpuDevice, tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    source = compiler.Source(
        "k.cu", b'#include "flashwarp/array.cuh"\nFW_KERNEL damaged(int*) {}\n'
    )
    host_compiler.compile_host(source, cache=cache)
    (path,) = tmp_path.glob("*.fwcubin")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    assert not host_compiler.compile_host(source, cache=cache).from_cache


def open_programs() -> int:
    """How many files in memory are open: others come and go with what is collected meanwhile."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:")
    return found


def test_programs_leave_no_file_open_when_the_device_closes() -> None:
    text = '#include "flashwarp/array.cuh"\nFW_KERNEL k(int*) {}\n'
    gc.collect()
    before = open_programs()

    for _ in range(2):
        with CpuDevice(1) as device:
            programs = [fw.compile(text, device, defines={"N": n}) for n in range(3)]
            during = open_programs()
        del programs

    assert during == before + 3
    assert open_programs() == before


def test_code_that_cannot_be_unloaded_is_never_taken_for_another(device: CpuDevice) -> None:
    """The loader knows libraries by path, here a descriptor's number, which is used again."""
    sticky = """
    #include "flashwarp/array.cuh"
    #include <string>
    struct noisy { ~noisy(); int value = 1; };
    __attribute__((noinline)) noisy::~noisy() { value = 0; }
    FW_KERNEL answer(int* out) { static thread_local noisy here; out[0] = here.value; }
    """
    plain = '#include "flashwarp/array.cuh"\nFW_KERNEL answer(int* out) { out[0] = 2; }\n'
    out = np.zeros(1, np.int32)

    answers = []
    for text in (sticky, plain):
        with CpuDevice(1) as device:
            fw.compile(text, device)["answer"](out)
            answers.append(int(out[0]))

    assert answers == [1, 2]


# What does not compile.


def test_compile_error_names_the_users_line(device: CpuDevice) -> None:
    with pytest.raises(CompileError, match=r"program\.cu:3:.*error") as caught:
        fw.compile(
            '#include "flashwarp/array.cuh"\n\nFW_KERNEL k(int* p) { p = mistake; }\n', device
        )

    assert "mistake" in caught.value.log


def test_compile_error_of_a_file_names_it(tmp_path: Path, device: CpuDevice) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text('#include "flashwarp/array.cuh"\n#include "absent.cuh"\n')

    with pytest.raises(CompileError, match=r"kernel\.cu:2:.*absent\.cuh"):
        fw.compile(path, device)


def test_missing_file_is_a_compile_error(tmp_path: Path, device: CpuDevice) -> None:
    with pytest.raises(CompileError, match=r"nothing\.cu cannot be read"):
        fw.compile(tmp_path / "nothing.cu", device)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int f() { return 1; }", "defines no kernel"),
        ("void k(int*) {}", "defines no kernel"),
        ("FW_KERNEL k(int*) {}\nFW_KERNEL k(float*) {}", "two kernels are named k"),
        ("FW_KERNEL k(int& i) { i = 1; }", "reference"),
        ('extern "C" FW_KERNEL k(int*) {}', "FW_KERNEL|extern"),
        ("struct s { s(const s&); int i; };\nFW_KERNEL k(s v) { (void)v; }", "byte by byte"),
        ("FW_KERNEL k(int*) { throw 1; }", "exception"),
    ],
)
def test_what_is_no_kernel_is_refused(device: CpuDevice, text: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        fw.compile('#include "flashwarp/array.cuh"\n' + text, device)


def test_missing_compiler_is_an_error_that_says_what_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: CpuDevice
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompileError, match=r"g\+\+, clang\+\+ and c\+\+.*apt-get install g\+\+"):
        fw.compile("", device)

    monkeypatch.setenv("CXX", "my-own-compiler -m64")
    with pytest.raises(CompileError, match=r"\$CXX is 'my-own-compiler -m64'"):
        fw.compile("", device)


def test_compiler_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = host_compiler.find_compiler()[0]
    monkeypatch.setenv("CXX", f"{real} -fno-math-errno")

    assert host_compiler.find_compiler() == (real, "-fno-math-errno")


def test_hanging_compiler_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: CpuDevice
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(host_compiler, "TIMEOUT_S", 0.2)

    with pytest.raises(CompileError, match="timed out"):
        fw.compile("", device)


@pytest.mark.parametrize(
    "how",
    [
        {"source": b"bytes"},
        {"options": "-O2"},
        {"options": [2]},
        {"defines": {"not a name": 1}},
        {"device": "tpu"},
    ],
)
def test_bad_arguments_of_compile_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        fw.compile(**{"source": "", "device": "cpu", **how})


def test_closed_device_compiles_and_launches_nothing() -> None:
    device = CpuDevice(1)
    program = fw.compile('#include "flashwarp/array.cuh"\nFW_KERNEL k(int*) {}\n', device)
    device.close()

    with pytest.raises(ClosedError):
        program["k"](None)
    with pytest.raises(ClosedError):
        fw.compile("", device)


# Arguments that do not fit.


def test_unknown_kernel_is_an_error_that_lists_the_known(program: fw.Program) -> None:
    with pytest.raises(ArgumentError, match="mine::scale"):
        program["scale"]


def test_number_of_arguments_is_checked(program: fw.Program, floats: fw.Array) -> None:
    with pytest.raises(ArgumentError, match="takes 2 arguments, not 1"):
        program["mine::scale"](floats)


def test_dtype_of_an_array_is_checked(
    program: fw.Program, tmp_path: Path, device: CpuDevice
) -> None:
    with (
        fw.create(tmp_path / "i.npy", (10,), "i4", device=device) as integers,
        pytest.raises(DtypeError, match=r"argument 0 .*float32.*int32"),
    ):
        program["mine::scale"](integers, 1)


def test_read_only_array_is_refused_where_it_could_be_stored_to(
    program: fw.Program, tmp_path: Path, device: CpuDevice
) -> None:
    np.save(tmp_path / "x.npy", np.ones(10, np.float32))
    with (
        fw.open(tmp_path / "x.npy", device=device) as x,
        pytest.raises(ReadOnlyError, match="array<const float>"),
    ):
        program["mine::scale"](x, 1)


def test_array_of_another_device_is_refused(program: fw.Program, tmp_path: Path) -> None:
    with (
        CpuDevice(1) as elsewhere,
        fw.create(tmp_path / "x.npy", (10,), "f4", device=elsewhere) as x,
        pytest.raises(ArgumentError, match="the array is on cpu, the kernel on cpu"),
    ):
        program["mine::scale"](x, 1)


def test_closed_array_is_refused(program: fw.Program, tmp_path: Path, device: CpuDevice) -> None:
    with fw.create(tmp_path / "x.npy", (10,), "f4", device=device) as x:
        pass
    with pytest.raises(ClosedError):
        program["mine::scale"](x, 1)


def test_array_where_a_pointer_is_wanted_and_the_other_way_round(
    program: fw.Program, floats: fw.Array
) -> None:
    with pytest.raises(ArgumentError, match="has no address"):
        program["count_threads"](floats)
    with pytest.raises(ArgumentError, match=r"wants a flashwarp\.Array, not ndarray"):
        program["mine::scale"](np.zeros(3, np.float32), 1)


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
    program: fw.Program, pointer: Any, error: type[FlashwarpError]
) -> None:
    with pytest.raises(error):
        program["count_threads"](pointer)


def test_read_only_array_is_a_pointer_to_const(program: fw.Program, floats: fw.Array) -> None:
    indices = read_only(np.array([5], np.uint64))
    out = np.zeros(1, np.float32)

    program["gather"](floats, indices, out, 1)

    assert out[0] == 5


def test_size_of_structures_is_checked(program: fw.Program) -> None:
    with pytest.raises(DtypeError, match=r"elements of 16 bytes.* 12"):
        program["sum_values"](np.zeros(3, [("key", "i4"), ("value", "f8")]), 3, np.zeros(1))


class FakeGpuArray:
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {
        "version": 3,
        "shape": (8,),
        "typestr": "<u4",
        "data": (4096, False),
        "strides": None,
    }


def test_array_on_a_gpu_is_refused_on_the_cpu(program: fw.Program) -> None:
    with pytest.raises(ArgumentError, match="the array is on cuda, the kernel on cpu"):
        program["count_threads"](FakeGpuArray())


def test_freed_memory_and_memory_of_another_device_are_refused(
    program: fw.Program, device: CpuDevice
) -> None:
    memory = device.allocate(64)
    memory.close()
    with pytest.raises(ArgumentError, match="freed"):
        program["count_threads"](memory)
    with CpuDevice(1) as elsewhere, pytest.raises(ArgumentError, match="the memory is of"):
        program["count_threads"](elsewhere.allocate(64))


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
    program: fw.Program, place: int, value: Any, error: type[FlashwarpError]
) -> None:
    arguments = [*GOOD[:place], value, *GOOD[place + 1 :]]

    with pytest.raises(error, match=f"argument {place} "):
        program["keep"](*arguments)


# Signatures.


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


# Compilation for GPUs, without one.


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_source_compiles_for_gpus(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    artifact = compiler.compile_source(
        arch,
        compiler.Source("program.cu", SOURCE.encode()),
        options=("-DFW_PROGRAM=1",),
        cache=ArtifactCache(tmp_path),
    )

    signatures = {spelling.demangle(symbol): found for symbol, found in artifact.kernels.items()}
    kernels = {text[: text.index("(")]: found for text, found in signatures.items()}
    assert set(kernels) == {
        "gather",
        "mine::scale",
        "transpose",
        "keep",
        "sum_values",
        "count_threads",
    }
    assert kernels["keep"].each_param_bytes == (8, 1, 1, 2, 4, 8, 4, 8, 16)
    assert all(found.registers for found in kernels.values())


def test_sizes_of_the_programs_own_types_are_known_for_gpus(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    text = """
    struct pair { int key; double value; };
    namespace mine { struct tiny {}; struct hidden; template <typename T> struct box { T a, b; }; }
    """

    sizes = compiler.type_sizes(
        "sm_90",
        compiler.Source("program.cu", text.encode()),
        ["pair", "mine::tiny", "mine::hidden", "mine::box<pair>", "float*"],
    )

    assert list(sizes.values()) == [16, 1, 0, 32, 8]


def test_own_types_of_elements_are_found() -> None:
    signature = "k(fw::array<pair const, 2u>, mine::box<int, 3u>*, float const*, void*, pair, int)"

    assert cuda_device._own_elements(signature) == ("pair", "mine::box<int, 3u>", "", "", "", "")


def test_nvrtc_error_names_the_users_line(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    source = compiler.Source(
        "program.cu", b'#include "flashwarp/array.cuh"\n\nFW_KERNEL k(int* p) { p = mistake; }\n'
    )

    with pytest.raises(CompileError, match=r"program\.cu\(3\): error"):
        compiler.compile_source("sm_90", source, cache=ArtifactCache(tmp_path))


def test_functions_of_a_section_are_read_off_an_object_file(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(
        '__attribute__((section("one"))) void f() {}\nvoid g() {}\n'
        '__attribute__((section("one"))) void h(int) {}\n'
    )
    command = [*host_compiler.find_compiler(), "-c", "-o", "a.o", "a.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    content = (tmp_path / "a.o").read_bytes()

    assert sorted(elf.functions(content, "one")) == ["_Z1fv", "_Z1hi"]
    assert elf.functions(content, "two") == []
    with pytest.raises(CompileError, match="ELF"):
        elf.functions(content[:100], "one")
