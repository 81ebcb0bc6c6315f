"""Your own kernels on the CPU device: the host's compiler, what is kept and loaded, threads."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp._jit import compiler, elf, host_compiler
from flashwarp._jit.artifact_cache import ArtifactCache
from flashwarp.device import CpuDevice
from flashwarp.errors import CompileError

KERNELS = Path(__file__).parents[1] / "support" / "program_kernels.cu"


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    with CpuDevice(3) as made:
        yield made


@pytest.fixture(scope="module")
def program(device: CpuDevice) -> fw.program.Program:
    return fw.compile(KERNELS, device)


@pytest.fixture
def floats(tmp_path: Path, device: CpuDevice) -> Iterator[fw.Array]:
    """Sixteen times the size of its cache."""
    with fw.create(tmp_path / "x.npy", "f4", (1 << 18,), device=device, cache="64 KiB") as x:
        x[:] = np.arange(1 << 18)
        yield x


# The compiler.


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


# What is kept on disk.


def test_second_compilation_is_found_on_disk_and_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_CACHE_DIR", str(tmp_path))
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
    header.write_text("#pragma once\n#ifndef ONE\n#define ONE()\n#endif\n")
    text = '#include "mine.cuh"\n#include "flashwarp/array.cuh"\nFW_KERNEL k(int*) { ONE(); }\n'
    cache = ArtifactCache(tmp_path / "cache")
    dirs = [header.parent, compiler.INCLUDE_DIR]

    def build(text: str = text, **how: Any) -> host_compiler.HostArtifact:
        source = compiler.Source("k.cu", text.encode())
        return host_compiler.compile_host(source, include_dirs=dirs, cache=cache, **how)

    build()
    assert build().from_cache
    if change == "text":
        again = build(text + "FW_KERNEL more(int*) {}\n")
    elif change == "define":
        again = build(options=["-DONE()=int()"])
    elif change == "option":
        again = build(options=["-O2"])
    elif change == "debug":
        again = build(debug=True)
    elif change == "header":
        header.write_text("#pragma once\n#define ONE() short()\n")
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


# What is loaded.


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


def open_programs() -> int:
    """How many files in memory are open: others come and go with what is collected meanwhile."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:")
    return found


def test_programs_leave_no_file_open_when_the_device_closes() -> None:
    text = '#include "flashwarp/array.cuh"\nFW_KERNEL k(int* p) { *p = N; }\n'
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


# Threads.


@pytest.mark.parametrize(("warps", "threads"), [(None, 3), (1, 1), (2, 2), (1000, 3), (0, 0)])
def test_no_more_threads_than_the_device_has(
    program: fw.program.Program, warps: int | None, threads: int
) -> None:
    seen = np.zeros(8, np.uint32)

    program["count_threads"](seen, warps=warps)

    assert seen.tolist() == [threads] * threads + [0] * (8 - threads)


def test_two_programs_run_at_once_from_two_threads(
    program: fw.program.Program, floats: fw.Array, device: CpuDevice
) -> None:
    other = fw.compile(KERNELS, device, defines={"BIAS": 1})
    failures: list[BaseException] = []

    def gather(program: fw.program.Program, bias: int) -> None:
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
