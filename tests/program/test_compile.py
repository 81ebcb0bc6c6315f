"""`fw.compile`: where a program's text comes from, what is defined in it, and what is no program.

What programs do is in `test_programs.py`, on the CPU device and on GPUs; what their kernels take is
in `test_arguments.py`.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import CpuDevice
from flashwarp.errors import ArgumentError, ClosedError, CompileError
from flashwarp.program import compiling


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    with CpuDevice(3) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "given", "taken"),
    [
        ("cuda", (), ("--maxrregcount=64",)),
        ("cuda", ("-lineinfo",), ("--maxrregcount=64", "-lineinfo")),
        ("cuda", ("--maxrregcount=128",), ("--maxrregcount=128",)),
        ("cpu", (), ()),
    ],
)
def test_registers_are_limited_on_a_gpu_unless_the_caller_does(
    monkeypatch: pytest.MonkeyPatch, kind: str, given: tuple[str, ...], taken: tuple[str, ...]
) -> None:
    loaded: list[tuple[str, ...]] = []

    def load_program(*_: object, options: tuple[str, ...], **__: object) -> None:
        loaded.append(options)
        raise CompileError("enough")

    stub = types.SimpleNamespace(kind=kind, load_program=load_program)
    monkeypatch.setattr(compiling.devices, "resolve", lambda _: stub)
    with pytest.raises(CompileError, match="enough"):
        fw.compile("FW_KERNEL f() {}", options=given)
    assert [loaded[0][len(loaded[0]) - len(taken) :]] == [taken]
    assert sum("maxrregcount" in each for each in loaded[0]) == (kind == "cuda")


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


# What does not compile.


def test_compile_error_names_the_users_line(device: CpuDevice) -> None:
    with pytest.raises(CompileError, match=r"program\.cu:3:.*error") as caught:
        fw.compile(
            '#include "flashwarp/array.cuh"\n\nFW_KERNEL k(int* p) { p = mistake; }\n', device
        )

    assert "mistake" in caught.value.log


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ("FW_KERNEL k(fw::array<float> x) { x[0] = 1; }", r"store with x\.store\(i, value\)"),
        ("__global__ void k(fw::array<float> x) { }", r"begins with FW_KERNEL name\(\.\.\.\)"),
        ("FW_KERNEL k(fw::array<float> x) { int i = threadIdx.x; }", r"fw::base::thread_index\(\)"),
        ("FW_KERNEL k(fw::file x) { }", 'needs #include "flashwarp/file.cuh"'),
    ],
)
def test_mistake_of_those_who_know_cuda_has_a_hint(body: str, hint: str) -> None:
    with pytest.raises(CompileError, match=f"hint: .*{hint}"):
        fw.compile(f'#include "flashwarp/array.cuh"\n{body}', device="cpu")


def test_forgotten_include_is_named() -> None:
    with pytest.raises(CompileError, match=r'hint: the source needs #include "flashwarp/array'):
        fw.compile("FW_KERNEL k(fw::array<float> x) { }", device="cpu")


def test_message_has_no_lines_of_our_headers() -> None:
    source = """#include "flashwarp/array.cuh"
    struct record { ~record() {} };
    FW_KERNEL k(fw::array<record> x) { x[0]; }"""
    with pytest.raises(CompileError, match="elements are moved as bytes") as caught:
        fw.compile(source, device="cpu")
    assert fw.get_include() not in str(caught.value)
    assert fw.get_include() in caught.value.log


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


def test_name_of_a_file_is_no_code() -> None:
    with pytest.raises(ArgumentError, match=r"give pathlib\.Path\('kernel\.cu'\)"):
        fw.compile("kernel.cu", "cpu")


def test_closed_device_compiles_and_launches_nothing() -> None:
    device = CpuDevice(1)
    program = fw.compile('#include "flashwarp/array.cuh"\nFW_KERNEL k(int*) {}\n', device)
    device.close()

    with pytest.raises(ClosedError):
        program["k"](None)
    with pytest.raises(ClosedError):
        fw.compile("", device)
