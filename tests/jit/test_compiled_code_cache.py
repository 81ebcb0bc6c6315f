"""Compiled code is never older than what it was compiled from, whichever way that came in.

Each way brings a value into a program; the value changes, and the next compilation must give it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flashwarp._jit import host_compiler
from flashwarp._jit.artifact_cache import ArtifactCache, Entry
from flashwarp._jit.compiler import Source
from flashwarp.errors import CompileError
from support.samples import sample

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

# In place of ours, which take seconds: a program without kernels needs no more.
ENTRIES = """
#pragma once
namespace fw {
struct entry { const char* name; };
struct entry_table { const entry* entries; unsigned count; };
}
"""
ANSWER = """
extern "C" __attribute__((visibility("default"))) int answer() { return VALUE; }
"""


@dataclass
class Way:
    """How a value gets into a program: its text, the compiler's surroundings, and a change."""

    text: str
    change: Callable[[], object]
    options: Sequence[str] = ()
    folders: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    kept: bool = True


def header(path: Path, value: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#define VALUE {value}\n")
    return path


def script(path: Path, *words: str) -> Path:
    """Stand in for a compiler: run g++ with more words."""
    path.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} {" ".join(words)} "$@"\n')
    path.chmod(0o755)
    return path


def included(spelling: str, kept: bool = True) -> Callable[[Path], Way]:
    """Reach a header in a folder by an odd spelling of the directive."""

    def way(root: Path) -> Way:
        path = header(root / "inc" / "x.h", 1)
        return Way(spelling, lambda: header(path, 2), folders=[path.parent], kept=kept)

    return way


def optioned(*options: str, text: str = "#include <x.h>") -> Callable[[Path], Way]:
    """Reach a header by the compiler's options, in which {} is its folder."""

    def way(root: Path) -> Way:
        path = header(root / "opt" / "x.h", 1)
        words = [option.format(path.parent) for option in options]
        return Way(text, lambda: header(path, 2), words)

    return way


def from_environment(name: str) -> Callable[[Path], Way]:
    def way(root: Path) -> Way:
        path = header(root / "env" / "x.h", 1)
        environment = {name: str(path.parent)}
        return Way("#include <x.h>", lambda: header(path, 2), environment=environment)

    return way


def beside(root: Path) -> Way:
    path = header(root / "x.h", 1)
    return Way('#include "x.h"', lambda: header(path, 2))


def absolute(root: Path) -> Way:
    path = header(root / "far" / "x.h", 1)
    return Way(f'#include "{path}"', lambda: header(path, 2))


def nested(root: Path) -> Way:
    path = header(root / "inc" / "deep" / "y.h", 1)
    (root / "inc" / "x.h").write_text('#include "deep/y.h"\n')
    return Way("#include <x.h>", lambda: header(path, 2), folders=[root / "inc"])


def included_next(root: Path) -> Way:
    path = header(root / "second" / "x.h", 1)
    (root / "first").mkdir()
    (root / "first" / "x.h").write_text("#include_next <x.h>\n")
    folders = [root / "first", root / "second"]
    return Way("#include <x.h>", lambda: header(path, 2), folders=folders)


def looked_for(root: Path) -> Way:
    """It is never included: that it is there is enough."""
    text = "#if __has_include(<x.h>)\n#define VALUE 2\n#else\n#define VALUE 1\n#endif"
    return Way(text, lambda: header(root / "inc" / "x.h", 3), folders=[root / "inc"])


def shadowed(root: Path) -> Way:
    header(root / "second" / "x.h", 1)
    folders = [root / "first", root / "second"]
    return Way("#include <x.h>", lambda: header(root / "first" / "x.h", 2), folders=folders)


def shadowed_beside(root: Path) -> Way:
    header(root / "inc" / "x.h", 1)
    return Way('#include "x.h"', lambda: header(root / "x.h", 2), folders=[root / "inc"])


def link_moved(root: Path) -> Way:
    link = root / "x.h"
    link.symlink_to(header(root / "old" / "x.h", 1))

    def change() -> None:
        link.unlink()
        link.symlink_to(header(root / "new" / "x.h", 2))

    return Way('#include "x.h"', change)


def same_size_and_time(root: Path) -> Way:
    path = header(root / "x.h", 1)

    def change() -> None:
        status = path.stat()
        header(path, 2)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return Way('#include "x.h"', change)


def words_of_cxx(root: Path) -> Way:
    return Way(
        "", lambda: os.environ.update(CXX="g++ -DVALUE=2"), environment={"CXX": "g++ -DVALUE=1"}
    )


def folder_in_cxx(root: Path) -> Way:
    path = header(root / "cxx" / "x.h", 1)
    environment = {"CXX": f"g++ -I {path.parent}"}
    return Way("#include <x.h>", lambda: header(path, 2), environment=environment)


def compiler_replaced(root: Path) -> Way:
    """The preprocessor gives the same text: only the compilation differs."""
    path = script(root / "compiler", "-fwrapv")
    text = "static int grows(int i) { return i + 1 > i; }\nvolatile int most = 0x7fffffff;\n"
    text += "#define VALUE grows(most) + 1"
    return Way(text, lambda: script(path, "-fno-wrapv"), ["-O2"], environment={"CXX": str(path)})


def program_behind_a_program(root: Path) -> Way:
    script(root / "compiler", "-DVALUE=1")
    environment = {"CXX": f"env {root / 'compiler'}"}
    return Way("", lambda: script(root / "compiler", "-DVALUE=2"), environment=environment)


def other_processor(root: Path) -> Way:
    """As a shared home does, seen from two machines: -march=native is what the driver makes it."""
    path = root / "compiler"

    def machine(name: str) -> None:
        path.write_text(f'#!/bin/sh\nexec g++ "$@" -march={name}\n')
        path.chmod(0o755)
        os.utime(path, (0, 0))

    machine("x86-64-v2")
    text = "#ifdef __AVX2__\n#define VALUE 2\n#else\n#define VALUE 1\n#endif"
    return Way(text, lambda: machine("x86-64-v3"), environment={"CXX": str(path)})


def day_of_compilation(root: Path) -> Way:
    text = "#define VALUE (__DATE__[5] == '2' ? 1 : 2)"  # "Jan  2 1970", "Jan  3 1970"
    return Way(
        text,
        lambda: os.environ.update(SOURCE_DATE_EPOCH=str(2 * 86400)),
        environment={"SOURCE_DATE_EPOCH": str(86400)},
    )


def assembled_file(root: Path) -> Way:
    path = root / "value"
    path.write_bytes(b"\1\0\0\0")
    text = f"""
    asm(".pushsection .data\\nvalue: .inc" "bin \\"{path}\\"\\n.popsection");
    extern "C" __attribute__((visibility("hidden"))) int value;
    #define VALUE value
    """
    return Way(text, lambda: path.write_bytes(b"\2\0\0\0"), kept=False)


def linked_library(root: Path) -> Way:
    def archive(value: int) -> None:
        source = root / "value.cpp"
        source.write_text(f"int value() {{ return {value}; }}\n")
        subprocess.run(["g++", "-fPIC", "-c", source, "-o", root / "value.o"], check=True)
        subprocess.run(["ar", "rcs", root / "libvalue.a", root / "value.o"], check=True)

    archive(1)
    text = "int value();\n#define VALUE value()"
    # After our own file, as linkers want it.
    library = f"-Wl,--whole-archive,{root / 'libvalue.a'},--no-whole-archive"
    return Way(text, lambda: archive(2), [library], kept=False)


def options_in_a_file(root: Path) -> Way:
    path = root / "options"
    path.write_text("-DVALUE=1\n")
    return Way("", lambda: path.write_text("-DVALUE=2\n"), [f"@{path}"], kept=False)


WAYS: dict[str, Callable[[Path], Way]] = {
    "beside the source": beside,
    "absolute": absolute,
    "nested": nested,
    "folder": included("#include <x.h>"),
    "spaces": included("  #  include\t<x.h>"),
    "comments": included("/* a */ # /* b */ include /* c */ <x.h>"),
    "continued line": included("#inc\\\nlude <x.h>"),
    "digraph": included("%: include <x.h>"),
    "macro": included("#define HEADER <x.h>\n#include HEADER"),
    "macro with arguments": included("#define TEXT(s) #s\n#define H(s) TEXT(s.h)\n#include H(x)"),
    "import": included("#import <x.h>"),
    "include_next": included_next,
    "__has_include": looked_for,
    "shadowing": shadowed,
    "shadowing beside": shadowed_beside,
    "link": link_moved,
    "same size and time": same_size_and_time,
    "-I": optioned("-I{}"),
    "-I, two words": optioned("-I", "{}"),
    "-isystem": optioned("-isystem", "{}"),
    "-iquote": optioned("-iquote", "{}", text='#include "x.h"'),
    "-idirafter": optioned("-idirafter{}"),
    "-include": optioned("-include", "{}/x.h", text=""),
    "-imacros": optioned("-imacros", "{}/x.h", text=""),
    "-D names the header": optioned("-DHEADER=<{}/x.h>", text="#include HEADER"),
    "CPATH": from_environment("CPATH"),
    "CPLUS_INCLUDE_PATH": from_environment("CPLUS_INCLUDE_PATH"),
    "words of CXX": words_of_cxx,
    "folder in CXX": folder_in_cxx,
    "compiler replaced": compiler_replaced,
    "program behind a program": program_behind_a_program,
    "other processor": other_processor,
    "day of compilation": day_of_compilation,
    "file of the assembler": assembled_file,
    "library": linked_library,
    "options in a file": options_in_a_file,
}


@pytest.mark.parametrize("name", sample(list(WAYS), 3))
def test_what_has_changed_is_compiled_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    way = WAYS[name](root)
    monkeypatch.delenv("CXX", raising=False)
    for variable, value in way.environment.items():
        monkeypatch.setenv(variable, value)
    cache = ArtifactCache(tmp_path / "cache")

    def build() -> tuple[int, bool]:
        built = compile_here(root, way.text, cache, way.folders, way.options)
        return answer_of(built, tmp_path), built.from_cache

    assert build() == (1, False)
    assert build() == (1, way.kept)

    way.change()

    assert build() == (2, False)
    assert build() == (2, way.kept)


def compile_here(
    root: Path,
    text: str,
    cache: ArtifactCache,
    folders: Sequence[Path] = (),
    options: Sequence[str] = (),
) -> host_compiler.HostArtifact:
    ours = root / "ours" / "flashwarp"
    ours.mkdir(parents=True, exist_ok=True)
    (ours / "entry.cuh").write_text(ENTRIES)
    source = Source("k.cu", f"{text}\n{ANSWER}".encode(), root)
    return host_compiler.compile_host(
        source, include_dirs=[*folders, ours.parent], options=options, cache=cache
    )


def answer_of(built: host_compiler.HostArtifact, folder: Path) -> int:
    """Load the library and run its function."""
    path = folder / f"{time.monotonic_ns()}.so"
    path.write_bytes(built.library)
    return int(ctypes.CDLL(str(path)).answer())


def test_what_means_the_same_is_found(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path / "cache")
    compile_here(tmp_path, "#define VALUE 1", cache)

    again = compile_here(tmp_path, "#define VALUE 1 // the answer", cache)

    assert again.from_cache


def test_working_folder_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ArtifactCache(tmp_path / "cache")
    compile_here(tmp_path, "#define VALUE 1", cache, options=["-g"])
    monkeypatch.chdir("/")

    assert compile_here(tmp_path, "#define VALUE 1", cache, options=["-g"]).from_cache


def test_entry_of_another_key_is_not_taken(tmp_path: Path) -> None:
    """Whoever could write to the folder once could give entries other names."""
    cache = ArtifactCache(tmp_path)
    cache.publish("one", Entry(b"one", ""))
    (tmp_path / "one.fwcubin").rename(tmp_path / "two.fwcubin")

    assert cache.load("two") is None


def publish_until_killed(folder: Path) -> None:
    cache = ArtifactCache(folder)
    while True:
        cache.publish("key", Entry(b"code" * 1_000_000, "log"))


def test_killed_writers_leave_whole_entries(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    cache = ArtifactCache(tmp_path)
    for delay_ms in (0, 3, 7):
        writer = spawn.Process(target=publish_until_killed, args=(tmp_path,))
        writer.start()
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
        time.sleep(delay_ms / 1000)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()

        entry = cache.load("key")
        assert entry is None or entry == Entry(b"code" * 1_000_000, "log")
    for left in tmp_path.glob("*.tmp"):
        os.utime(left, (0, 0))
    cache.publish("key", Entry(b"code", ""))

    assert [path.name for path in tmp_path.iterdir()] == ["key.fwcubin"]


def test_errors_name_the_users_lines_as_before(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"k\.cu:2:.*mistake"):
        compile_here(
            tmp_path, "#define VALUE 1\nint f() { return mistake; }", ArtifactCache(tmp_path)
        )
    with pytest.raises(CompileError, match=r"k\.cu:1:.*absent\.h"):
        compile_here(tmp_path, '#include "absent.h"', ArtifactCache(tmp_path))


# The compiler for GPUs, which is handed its headers.

GPU_ANSWER = '\nextern "C" __global__ void answer(int* p) { *p = VALUE; }\n'


def gpu_pre_include(root: Path) -> Way:
    path = header(root / "opt" / "x.h", 1)
    return Way("", lambda: header(path, 2), [f"--pre-include={path}"])


def gpu_absolute_macro(root: Path) -> Way:
    path = header(root / "far" / "x.h", 1)
    text = f'#define HEADER "{path}"\n#include HEADER'
    return Way(text, lambda: header(path, 2), kept=False)


GPU_WAYS: dict[str, Callable[[Path], Way]] = {
    **{name: WAYS[name] for name in ("beside the source", "absolute", "nested", "shadowing")},
    **{name: WAYS[name] for name in ("shadowing beside", "link", "same size and time")},
    **{name: WAYS[name] for name in ("folder", "spaces", "comments", "continued line", "digraph")},
    **{name: WAYS[name] for name in ("__has_include", "-I", "-I, two words")},
    "--include-path": optioned("--include-path={}"),
    "macro": included("#define HEADER <x.h>\n#include HEADER", kept=False),
    "macro, -I": optioned("-DHEADER=<x.h>", "-I{}", text="#include HEADER"),
    "absolute macro": gpu_absolute_macro,
    "-include": WAYS["-include"],
    "--pre-include": gpu_pre_include,
}


@pytest.mark.parametrize("name", sample(list(GPU_WAYS), 3))
def test_what_has_changed_is_compiled_again_for_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = gpu_compiler()
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.chdir(root)
    way = GPU_WAYS[name](root)
    kept = way.kept and not name.startswith("macro")
    cache = ArtifactCache(tmp_path / "cache")
    # What another value gives, without any header.
    one, two = (
        compiler.compile_source(
            "sm_90",
            Source("k.cu", f"#define VALUE {value}{GPU_ANSWER}".encode()),
            include_dirs=[],
            cache=ArtifactCache(tmp_path / "plain"),
        ).cubin
        for value in (1, 2)
    )

    def build() -> tuple[bytes, bool]:
        source = Source("k.cu", f"{way.text}\n{GPU_ANSWER}".encode(), root)
        built = compiler.compile_source(
            "sm_90", source, include_dirs=way.folders, options=way.options, cache=cache
        )
        return built.cubin, built.from_cache

    assert build() == (one, False)
    assert build() == (one, kept)

    way.change()

    assert build() == (two, False)
    assert build() == (two, kept)


def test_time_of_compilation_is_not_kept(tmp_path: Path) -> None:
    compiler = gpu_compiler()
    source = Source("k.cu", f"#define VALUE sizeof(__TIME__){GPU_ANSWER}".encode())
    cache = ArtifactCache(tmp_path)

    found = [
        compiler.compile_source("sm_90", source, include_dirs=[], cache=cache).from_cache
        for _ in range(2)
    ]

    assert found == [False, False]


def test_gpu_compiler_sees_no_header_but_those_it_is_handed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found those in the working folder, which were not part of the key."""
    compiler = gpu_compiler()
    header(tmp_path / "x.h", 1)
    monkeypatch.chdir(tmp_path)
    source = Source("k.cu", f'#include "x.h"{GPU_ANSWER}'.encode())

    with pytest.raises(CompileError, match=r"x\.h"):
        compiler.compile_source("sm_90", source, include_dirs=[], cache=ArtifactCache(tmp_path))


def gpu_compiler():  # type: ignore[no-untyped-def]
    pytest.importorskip("cuda.bindings.nvrtc")
    from flashwarp._jit import compiler

    return compiler
