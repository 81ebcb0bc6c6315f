"""Device source to code for the CPU device: g++ or clang++, with the flags of the built-in kernels.

The text is preprocessed first, each time, by the compiler itself: what comes out is what is found
in the cache by its content, and what is compiled, so no header, macro or variable of the
environment can change without a new compilation. It is compiled with an entry for each kernel
(`entry.cuh`), by which threads of the device run it. The kernels' names are read from the text, and
compared with the symbols of what was compiled. If they differ, as for a kernel that is declared
only, the text is compiled once more, without entries, for its symbols. The result is a shared
library as bytes, kept in the same cache as cubins.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashwarp import config
from flashwarp._jit import elf, spelling
from flashwarp._jit.artifact_cache import ArtifactCache, Entry, content_key
from flashwarp._jit.compiler import INCLUDE_DIR, Source
from flashwarp._jit.private_folder import build_folder
from flashwarp._waiting import saying_if_slow
from flashwarp.errors import CompileError

_log = logging.getLogger(__name__)

COMPILERS = ("g++", "clang++", "c++")
"""Looked for in this order where $CXX is not set."""

TIMEOUT_S = 600.0
"""Limit of one run of the compiler. A kernel takes seconds, a policy some ten of them."""

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
_MACHINE = ("-march=x86-64-v2",) if platform.machine() in ("x86_64", "AMD64") else ()
_DEBUGGED = ("-O1", "-g", "-DFW_DEBUG=1")

_KERNEL_SECTION = "fw_kernels"
# Bumped when a library of the same inputs has to be built again.
_KEY_VERSION = "3"

# Only the linker reads these; the effect of all others is in the preprocessed text and commands.
_LINKER_VARIABLES = ("LIBRARY_PATH", "LD_RUN_PATH")

# Options of the preprocessor alone; each takes the next word where none is joined to it.
_PREPROCESSOR_WORDS = (
    "-D",
    "-U",
    "-I",
    "-include",
    "-imacros",
    "-iquote",
    "-isystem",
    "-idirafter",
)
# Options of the compiler that make it read nothing. With any other, such as a plugin, a profile or
# a library, what is read is not known, and the code is not kept.
_READS_NOTHING = re.compile(
    r"-(?:[Ogw]|std=|pedantic|pthread$|nostdinc|m(?!llvm)|W(?![alp],)"
    r"|f(?!lto|modules|profile|branch-prob|auto-prof)[A-Za-z0-9-]+$"
    r"|f(?:visibility|fp-contract|fp-model|tls-model|sanitize|abi-version|cf-protection"
    r"|inline-limit|template-depth|constexpr-[a-z-]+|diagnostics-[a-z-]+|[a-z]+-prefix-map)=)"
)
# Assembly that reads a file.
_READING_DIRECTIVE = re.compile(rb"\.(?:incbin|include)\b")


@dataclass(frozen=True)
class HostArtifact:
    """A compiled program: a shared library, kept under `key`, the same for the same inputs.

    `log` is the compiler's output; `from_cache`: it was found on disk and not compiled now.
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
    names = f"{', '.join(COMPILERS[:-1])} and {COMPILERS[-1]}"
    looked = f"$CXX is {chosen!r}" if chosen else f"$CXX is not set, and {names} are not"
    raise CompileError(
        f"no C++ compiler was found to compile for the CPU device: {looked} on the path. "
        "Install one (on Debian or Ubuntu: apt-get install g++) or let CXX name it"
    )


def compile_host(
    source: Source,
    *,
    include_dirs: Sequence[Path] = (INCLUDE_DIR,),
    options: Sequence[str] = (),
    debug: bool = False,
    cache: ArtifactCache | None = None,
) -> HostArtifact:
    """Compiles one translation unit to a shared library, or finds it on disk.

    Blocks for some seconds when it has to compile, and else for the preprocessor's tenth of a
    second. Its headers are in `include_dirs`, besides the compiler's own. With `debug` it has
    assertions and debug information. `cache` is by default the user's cache folder.
    """
    cache = ArtifactCache() if cache is None else cache
    command = find_compiler()
    level = config.current("host_optimization").host_optimization
    flags = (*_FLAGS, *_MACHINE, *(_DEBUGGED if debug else (f"-O{level}", "-DNDEBUG")), *options)
    with build_folder() as folder:
        build = _Build(source, command, flags, include_dirs, folder)
        text, said = build.preprocess()
        key = content_key(_KEY_VERSION.encode(), build.identity(), text)
        kept = all(map(_READS_NOTHING.match, build.compiler_options))
        entry = cache.load(key) if kept else None
        from_cache = entry is not None
        if entry is None:
            with saying_if_slow(_log, "compiling %s for the CPU device", source.name):
                entry, reads_more = build.run(text, said)
            if kept and not reads_more:
                cache.publish(key, entry)
            else:
                key = content_key(key.encode(), entry.cubin)
    return HostArtifact(key, entry.cubin, entry.log, from_cache)


def _programs(command: Sequence[str]) -> Sequence[str]:
    """Return what comes before the options in a command such as `ccache g++ -DX`."""
    count = next((i for i, word in enumerate(command) if word.startswith("-")), len(command))
    return command[:count]


def _without_preprocessor(options: Iterable[str]) -> Iterator[str]:
    """Return the options that remain for text that has been preprocessed."""
    words = iter(options)
    for word in words:
        if word in _PREPROCESSOR_WORDS:
            next(words, None)
        elif not word.startswith(_PREPROCESSOR_WORDS):
            yield word


def _program_identity(word: str) -> str:
    """Tell one program from another under its name, such as a compiler from its next version."""
    path = shutil.which(word)
    if path is None:
        return word
    status = Path(path).stat()
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


class _Build:
    """One compilation, in its own folder."""

    def __init__(
        self,
        source: Source,
        command: Sequence[str],
        flags: Sequence[str],
        include_dirs: Sequence[Path],
        folder: Path,
    ) -> None:
        self._source = source
        self._folder = folder
        self._programs = _programs(command)
        beside = [] if source.folder is None else ["-iquote", str(source.folder.absolute())]
        includes = [f"-I{each.absolute()}" for each in include_dirs]
        options = (*command[len(self._programs) :], *flags)
        self._preprocessor = [*self._programs, *options, *beside, *includes]
        self.compiler_options = tuple(_without_preprocessor(options))
        self._compiler = [*self._programs, *self.compiler_options]
        # No other user may exchange the compiler's own temporary files either.
        self._environment = {**os.environ, "TMPDIR": str(folder)}

    def preprocess(self) -> tuple[bytes, str]:
        """Return the text with everything in it that is included, and what the compiler said."""
        # Messages name the user's own file and lines. The entries' headers come too: the user's
        # text may include less of ours. Two line ends: the text may end in a backslash.
        name = self._source.name.replace("\\", "\\\\").replace('"', '\\"')
        text = b'#line 1 "%b"\n%b\n\n#line 1 "flashwarp/entries"\n#include "flashwarp/entry.cuh"\n'
        command = [*self._preprocessor, "-x", "c++", "-E", "-"]
        result = self._call(command, text % (name.encode(), self._source.text))
        said = self._checked(result)
        return self._without_folder(result.stdout), said

    def identity(self) -> bytes:
        """Return the compiler and its full options: `-###` shows the command that it would run.

        There the driver has put its defaults, what the environment changes, and the processor that
        -march=native stands for.
        """
        command = [*self._compiler, "-###", *_AS_IT_IS, "-S", "-o", "program.s", "program.ii"]
        # The language of messages is not part of the code.
        said = self._call(command, LC_ALL="C").stderr
        parts = [
            platform.machine(),
            *map(_program_identity, self._programs),
            # The compiler proper, which programs such as ccache may hide.
            *map(_program_identity, sorted(set(_PROGRAM.findall(said.decode(errors="replace"))))),
            *(f"{name}={os.environ.get(name, '')}" for name in _LINKER_VARIABLES),
        ]
        return "\0".join(parts).encode() + self._without_folder(said)

    def run(self, text: bytes, said: str) -> tuple[Entry, bool]:
        """Compile; returns the library, and whether its assembly reads files itself."""
        names = _kernels_in(text)
        try:
            log, symbols = self._assemble(text, names)
        except CompileError as error:
            # An error of the user's text has nothing to do with the entries.
            if _ENTRIES not in error.log:
                raise
            symbols = {}
        if list(symbols) != names:
            self._write("program.ii", text)
            self._compile("-O0", "-c", "-o", "program.o")
            log, symbols = self._assemble(text, list(self._symbols()))
        self._write("symbols.s", _symbol_strings(symbols.values()))
        self._checked(
            self._call([*self._compiler, "-shared", "-o", "program.so", "program.o", "symbols.s"])
        )
        reads_more = _READING_DIRECTIVE.search(self._read("program.s")) is not None
        return Entry(self._read("program.so"), "\n".join(filter(None, (said, log)))), reads_more

    def _assemble(self, text: bytes, names: list[str]) -> tuple[str, dict[str, str]]:
        """Compile with entries for these kernels; returns the log, and the symbols by name."""
        self._write("program.ii", text + _entries(names))
        log = self._compile("-S", "-o", "program.s")
        self._checked(self._call([*self._compiler, "-c", "-o", "program.o", "program.s"]))
        symbols = self._symbols()
        return log, {name: symbols[name] for name in names if name in symbols} | symbols

    def _symbols(self) -> dict[str, str]:
        """Return the symbols of the kernels in the object, by name."""
        symbols = elf.functions(self._read("program.o"), _KERNEL_SECTION)
        named = [(spelling.kernel_name(symbol), symbol) for symbol in symbols]
        for name, symbol in named:
            if dict(named)[name] != symbol:
                raise CompileError(f"two kernels are named {name}: rename one")
        return dict(named)

    def _compile(self, *how: str) -> str:
        return self._checked(self._call([*self._compiler, *_AS_IT_IS, *how, "program.ii"]))

    def _read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def _write(self, name: str, text: bytes) -> None:
        try:
            (self._folder / name).write_bytes(text)
        except OSError as error:
            raise CompileError(f"{self._folder / name} cannot be written: {error}") from error

    def _without_folder(self, text: bytes) -> bytes:
        # Its name is another one each time.
        return text.replace(os.fsencode(self._folder), b".")

    def _call(
        self, command: Sequence[str], text: bytes = b"", **environment: str
    ) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                command,
                cwd=self._folder,
                env={**self._environment, **environment},
                input=text,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"running {command[0]}: {error}") from error

    def _checked(self, result: subprocess.CompletedProcess[bytes]) -> str:
        """Return what the compiler said; raises CompileError where it failed."""
        log = result.stderr.decode(errors="replace").strip()
        if result.returncode != 0:
            raise CompileError(
                f"{self._source.name} does not compile for the CPU device "
                f"({Path(self._programs[0]).name}):\n{log}",
                log,
            )
        return log


# The language of the compiler's input, once preprocessed.
_AS_IT_IS = ("-x", "c++-cpp-output")
# A line of `-###` that runs something, by its whole path.
_PROGRAM = re.compile(r'^ "?(/[^\s"]+)', re.MULTILINE)


# What matters to find kernels in preprocessed text: literals, scopes, and `FW_KERNEL name(`.
_TOKEN = re.compile(
    rb"""
      "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    | (?:\bnamespace\s+(?P<space>\w[\w:]*)\s*)?(?P<open>\{)
    | (?P<close>\})
    | section\("fw_kernels"\)\)\)\s*void\s+(?P<kernel>\w+)\s*\(
    """,
    re.VERBOSE,
)


def _kernels_in(text: bytes) -> list[str]:
    """Return the names of the kernels that a preprocessed text seems to define."""
    names: dict[str, None] = {}
    scopes: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["open"]:
            scopes.append((token["space"] or b"").decode())
        elif token["close"]:
            del scopes[-1:]
        elif token["kernel"]:
            names["::".join((*filter(None, scopes), token["kernel"].decode()))] = None
    return list(names)


_ENTRIES = "flashwarp/entries"


def _entries(names: Sequence[str]) -> bytes:
    """Write an entry for each kernel; the strings of their symbols come later."""
    symbols = "".join(
        f'extern "C" __attribute__((visibility("hidden"))) const char fw_symbol_{i}[];\n'
        for i in range(len(names))
    )
    rows = "".join(
        f"    fw::make_entry<&::{name}>(fw_symbol_{i}),\n" for i, name in enumerate(names)
    )
    return (
        f'\n# 1 "{_ENTRIES}"\n{symbols}'
        f"static constexpr fw::entry fw_entry_list[] = {{\n{rows}    {{}}}};\n"
        'extern "C" __attribute__((visibility("default"))) const fw::entry_table fw_entries = '
        f"{{fw_entry_list, {len(names)}}};\n"
    ).encode()


def _symbol_strings(symbols: Iterable[str]) -> bytes:
    """Write the assembly of the strings that the entries name."""
    strings = "".join(
        f'.globl fw_symbol_{i}\n.hidden fw_symbol_{i}\nfw_symbol_{i}: .string "{symbol}"\n'
        for i, symbol in enumerate(symbols)
    )
    # Without the last line, the linker would take it that the stack must be executable.
    return f'.section .rodata\n{strings}.section .note.GNU-stack,"",%progbits\n'.encode()
