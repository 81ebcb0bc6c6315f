"""Which kernels a program for the CPU device defines, and how often it is compiled to know them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flashwarp._jit import elf, spelling
from flashwarp._jit.artifact_cache import ArtifactCache
from flashwarp._jit.compiler import Source
from flashwarp._jit.host_compiler import compile_host
from flashwarp.device import CpuDevice
from flashwarp.errors import CompileError

BEGIN = '#include "flashwarp/array.cuh"\n'


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The compiler's runs that translate C++."""
    seen: list[Sequence[str]] = []
    run = subprocess.run

    def noted(command: Sequence[str], **more: Any) -> Any:
        if "program.ii" in command and "-###" not in command:
            seen.append(command)
        return run(command, **more)

    monkeypatch.setattr(subprocess, "run", noted)
    return seen


def kernels_of(text: str, folder: Path) -> set[str]:
    """Compile a text, let the CPU device load it, and return its kernels."""
    source = Source("program.cu", (BEGIN + text).encode())
    built = compile_host(source, cache=ArtifactCache(folder))
    symbols = elf.functions(built.library, "fw_kernels")
    with CpuDevice() as device:
        loaded = device.load_program(source).by_name()
    assert {spelling.kernel_name(symbol) for symbol in symbols} == set(loaded)
    return set(loaded)


@pytest.mark.parametrize(
    ("text", "kernels"),
    [
        ("FW_KERNEL one(float*) {} FW_KERNEL_RESIDENT(2)\ntwo(uint64_t n) {}", {"one", "two"}),
        ("namespace a::b { struct s {}; FW_KERNEL k(s) {} } FW_KERNEL k() {}", {"a::b::k", "k"}),
        ("namespace { FW_DEVICE int f() { return '{'; } } FW_KERNEL k(int*) {}", {"k"}),
        ('const char* text = "namespace x { FW_KERNEL no() {} \\" {"; FW_KERNEL k() {}', {"k"}),
        ("#define MAKE(name) FW_KERNEL name##_4(float*) {}\nMAKE(load)", {"load_4"}),
        ("int nothing;", set()),
    ],
)  # fmt: skip
def test_program_is_compiled_once(
    text: str, kernels: set[str], tmp_path: Path, compilations: list[Sequence[str]]
) -> None:
    source = Source("program.cu", (BEGIN + text).encode())

    compile_host(source, cache=ArtifactCache(tmp_path))

    assert len(compilations) == 1
    assert kernels_of(text, tmp_path) == kernels


@pytest.mark.parametrize(
    ("text", "kernels"),
    [
        ("FW_KERNEL only_declared(float*); FW_KERNEL k(int) {}", {"k"}),
        ("namespace a { inline namespace v1 { FW_KERNEL k() {} } }", {"a::v1::k"}),
        ("namespace a __attribute__((visibility(\"hidden\"))) { FW_KERNEL k() {} }", {"a::k"}),
    ],
)  # fmt: skip
def test_kernels_that_the_text_does_not_show_are_found(
    text: str, kernels: set[str], tmp_path: Path
) -> None:
    assert kernels_of(text, tmp_path) == kernels


def test_error_of_the_text_is_compiled_once(
    tmp_path: Path, compilations: list[Sequence[str]]
) -> None:
    source = Source("program.cu", (BEGIN + "FW_KERNEL k() { wrong; }").encode())

    with pytest.raises(CompileError, match=r"program\.cu:2:.*wrong"):
        compile_host(source, cache=ArtifactCache(tmp_path))

    assert len(compilations) == 1


def test_two_kernels_of_one_name_are_refused(tmp_path: Path) -> None:
    source = Source("program.cu", (BEGIN + "FW_KERNEL k(int) {} FW_KERNEL k(float) {}").encode())

    with pytest.raises(CompileError, match="two kernels are named k"):
        compile_host(source, cache=ArtifactCache(tmp_path))
