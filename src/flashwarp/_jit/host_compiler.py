"""Device source to code for the CPU device: g++ or clang++, with the flags of the built-in kernels.

Compiles twice: quickly, to learn which kernels the text defines, then with optimization and an
entry for each kernel (`entry.cuh`), by which threads of the device run it. What comes out is a
shared library as bytes, kept in the same cache as cubins.
"""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashwarp._jit import compiler, elf, spelling
from flashwarp._jit.artifact_cache import ArtifactCache, Entry
from flashwarp._jit.compiler import INCLUDE_DIR, Source
from flashwarp.errors import CompileError

COMPILERS = ("g++", "clang++", "c++")
"""Looked for in this order where $CXX is not set."""

TIMEOUT_S = 600.0
"""Limit of one run of the compiler; a kernel of ours takes one to two seconds."""

# As CMakeLists.txt compiles the extension. A program's own symbols stay its own.
_FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-pthread",
    "-fno-plt",
    "-fno-exceptions",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-DFW_PROGRAM=1",
)
_OPTIMIZED = ("-O3", "-DNDEBUG")
_DEBUGGED = ("-O1", "-g", "-DFW_DEBUG=1")

_KERNEL_SECTION = "fw_kernels"
# Bumped when a library of the same inputs has to be built again.
_KEY_VERSION = "1"


@dataclass(frozen=True)
class HostArtifact:
    """A compiled program.

    Attributes
    ----------
    key : str
        What it is found by: the same for the same inputs.
    library : bytes
        What the loader takes.
    log : str
        What the compiler said.
    from_cache : bool
        Whether it was found on disk and not compiled now.
    """

    key: str
    library: bytes
    log: str
    from_cache: bool


def find_compiler() -> tuple[str, ...]:
    """Return the compiler's command: $CXX, or the first of `COMPILERS` on the path."""
    chosen = os.environ.get("CXX")
    for words in [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]:
        path = shutil.which(words[0]) if words else None
        if path is not None:
            return (path, *words[1:])
    looked = f"$CXX is {chosen!r}" if chosen else f"$CXX is not set, and {_list(COMPILERS)} are not"
    raise CompileError(
        f"no C++ compiler was found to compile for the CPU device: {looked} on the path. "
        "Install one (on Debian or Ubuntu: apt-get install g++) or let CXX name it"
    )


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def compile_host(
    source: Source,
    *,
    include_dirs: Sequence[Path] = (INCLUDE_DIR,),
    options: Sequence[str] = (),
    debug: bool = False,
    cache: ArtifactCache | None = None,
) -> HostArtifact:
    """Compiles one translation unit to a shared library, or finds it on disk.

    Parameters
    ----------
    source : Source
        The code.
    include_dirs : sequence of Path
        Where its headers are, besides the compiler's own.
    options : sequence of str
        More compiler options.
    debug : bool
        Compile with assertions and debug information.
    cache : ArtifactCache, optional
        Default: the user's cache folder.

    Returns
    -------
    HostArtifact
        Blocks for some seconds when it has to compile.
    """
    cache = ArtifactCache() if cache is None else cache
    command = find_compiler()
    flags = (*_FLAGS, *_machine_flags(), *(_DEBUGGED if debug else _OPTIMIZED), *options)
    headers = compiler.own_headers(source, include_dirs)
    # The entries' own headers, too: the user's text may include less of ours.
    headers |= compiler.own_headers(_ENTRIES, include_dirs)
    key = compiler.source_key(source, headers, (_KEY_VERSION, _identity(command), *flags))

    entry = cache.load(key)
    from_cache = entry is not None
    if entry is None:
        entry = _Build(source, command, flags, include_dirs).run()
        cache.publish(key, entry)
    return HostArtifact(key, entry.cubin, entry.log, from_cache)


_ENTRIES = Source("entries", b'#include "flashwarp/entry.cuh"\n')


def _machine_flags() -> tuple[str, ...]:
    return ("-march=x86-64-v2",) if platform.machine() in ("x86_64", "AMD64") else ()


@functools.cache
def _identity(command: tuple[str, ...]) -> str:
    """What the compiler calls itself: another version may make other code."""
    return _call([*command, "--version"], Path("/")).stdout + platform.machine()


class _Build:
    """One compilation, in a folder of its own."""

    def __init__(
        self,
        source: Source,
        command: Sequence[str],
        flags: Sequence[str],
        include_dirs: Sequence[Path],
    ) -> None:
        self._source = source
        beside = [] if source.folder is None else ["-iquote", str(source.folder.absolute())]
        includes = [f"-I{folder.absolute()}" for folder in include_dirs]
        self._command = [*command, "-x", "c++", *flags, *beside, *includes]

    def run(self) -> Entry:
        with tempfile.TemporaryDirectory(prefix="flashwarp-") as folder:
            self._folder = Path(folder)
            self._compile(b"", "kernels.o", "-O0", "-c")
            symbols = elf.functions((self._folder / "kernels.o").read_bytes(), _KERNEL_SECTION)
            entries = _entries([(_kernel_name(symbol), symbol) for symbol in symbols])
            log = self._compile(entries, "program.so", "-shared")
            return Entry((self._folder / "program.so").read_bytes(), log)

    def _compile(self, appended: bytes, output: str, *flags: str) -> str:
        # Messages name the user's own file and lines.
        name = self._source.name.replace("\\", "\\\\").replace('"', '\\"')
        text = b'#line 1 "%b"\n%b\n%b' % (name.encode(), self._source.text, appended)
        (self._folder / "program.cpp").write_bytes(text)
        result = _call([*self._command, *flags, "-o", output, "program.cpp"], self._folder)
        log = (result.stdout + result.stderr).strip()
        if result.returncode != 0:
            raise CompileError(
                f"{self._source.name} does not compile for the CPU device "
                f"({Path(self._command[0]).name}):\n{log}",
                log,
            )
        return log


def _call(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"running {command[0]}: {error}") from error


def _kernel_name(symbol: str) -> str:
    """Return the qualified name of a kernel, by which the entries refer to it."""
    return spelling.split_signature(spelling.demangle(symbol))[0]


def _entries(kernels: list[tuple[str, str]]) -> bytes:
    """Write an entry for each kernel, given by name and symbol."""
    names = [name for name, _ in kernels]
    for name in names:
        if names.count(name) > 1:
            raise CompileError(f"two kernels are named {name}: rename one")
    rows = "".join(f'    fw::make_entry<&::{name}>("{symbol}"),\n' for name, symbol in kernels)
    return (
        '#line 1 "flashwarp/entries"\n'
        '#include "flashwarp/entry.cuh"\n'
        f"static constexpr fw::entry fw_entry_list[] = {{\n{rows}    {{}}}};\n"
        'extern "C" __attribute__((visibility("default"))) const fw::entry_table fw_entries = '
        f"{{fw_entry_list, {len(kernels)}}};\n"
    ).encode()
