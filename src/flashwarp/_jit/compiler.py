"""Device code to cubins: NVRTC, the package's own headers and nothing else.

A translation unit is compiled once for each architecture and kept on disk.
Headers are handed to the compiler in memory under the names that `#include` uses, and it looks
nowhere else, so what is hashed is what is compiled, and the place of installation changes neither
key nor code. Needs no GPU.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashwarp._jit import elf, nvrtc
from flashwarp._jit.artifact_cache import ArtifactCache, Entry, content_key
from flashwarp._waiting import saying_if_slow
from flashwarp.errors import CompileError
from flashwarp.policy import Policy

_log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parent.parent

INCLUDE_DIR = _PACKAGE / "include"
"""Where `#include "flashwarp/..."` is found."""

MODULE = _PACKAGE / "kernels" / "module.cuh"
"""The translation unit with all built-in kernels."""

PROGRAM_OPTIONS = ("-DFW_PROGRAM=1",)
"""Of every program that a device loads: the names of its kernels are mangled."""

# The verbose assembler reports each kernel's registers and spills. Kernels are optimized on all
# cores. Without the last one, NVRTC would find headers in the working directory, too.
OPTIONS = ("--std=c++20", "--ptxas-options=-v", "--split-compile=0", "--no-source-include")

# By default the assembler gives each kernel its own copies of all functions that the kernel may
# call through a pointer: of all slow paths. With this option kernels share one copy of each, and
# have as many registers as before. A program of one kernel compiles in two thirds of the time, one
# of nine in a fifth. As NVRTC's own option it would take time from the optimizer, too, but kernels
# would need up to 8 more registers.
_SHARED_FUNCTIONS = ("--ptxas-options=--Ofast-compile=min",)
_SHARED_FUNCTIONS_SINCE = (12, 9)

# The headers use `st.mmio`, which is younger than CUDA 12.
_NVRTC_OLDEST = (12, 2)

# Bumped when a cubin of the same inputs has to be built again.
_KEY_VERSION = "4"


@dataclass(frozen=True)
class Source:
    """One translation unit: its name in the compiler's messages, and the code.

    Headers that it includes with quotes may lie in `folder`.
    """

    name: str
    text: bytes
    folder: Path | None = None

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a file."""
        return cls(path.name, _read(path), path.parent)

    def behind(self, policy: Policy) -> Source:
        """Return it with the text of a replacement policy before it."""
        if not policy.prelude:
            return self
        before = f'{policy.prelude}#line 1 "{self.name}"\n'.encode()
        return replace(self, text=before + self.text)


@dataclass(frozen=True)
class KernelResources:
    """The resources of one kernel without the functions it calls; None if the compiler tells none.

    Spills come from the assembler's log, the rest from the code itself.
    """

    name: str
    param_bytes: int
    each_param_bytes: tuple[int, ...]
    registers: int | None
    stack_bytes: int | None
    spill_store_bytes: int | None
    spill_load_bytes: int | None


@dataclass(frozen=True)
class Artifact:
    """Compiled code for one architecture, such as "sm_90", which the driver loads.

    It is kept under `key`, the same for the same inputs. `log` is the compiler's output, with every
    kernel's spills; `kernels` are resources by kernel name; `from_cache`: it was found on disk and
    not compiled now.
    """

    arch: str
    key: str
    cubin: bytes
    log: str
    kernels: dict[str, KernelResources]
    from_cache: bool


def architecture(compute_capability: tuple[int, int]) -> str:
    """Choose the best architecture for a GPU: same major version, minor not above its own."""
    major, minor = compute_capability
    supported = nvrtc.architectures()
    fitting = [arch for arch in supported if arch // 10 == major and arch % 10 <= minor]
    if not fitting:
        version = ".".join(map(str, nvrtc.version()))
        known = ", ".join(f"sm_{arch}" for arch in supported)
        raise CompileError(
            f"NVRTC {version} cannot compile for compute capability {major}.{minor}, only for "
            f"{known}: install another version of nvidia-cuda-nvrtc"
        )
    return f"sm_{max(fitting)}"


def compile_source(
    arch: str,
    source: Source,
    *,
    include_dirs: Sequence[Path] = (INCLUDE_DIR,),
    options: Sequence[str] = (),
    cache: ArtifactCache | None = None,
) -> Artifact:
    """Compiles one translation unit to a cubin for `arch`, or finds it on disk.

    Blocks for one to several seconds if it must compile. Its own headers are in `include_dirs`;
    headers elsewhere are not found. `options` are more compiler options, such as "-DFW_DEBUG=1";
    `cache` is by default the user's cache folder.
    """
    key, entry, from_cache = _compiled(
        source, include_dirs, _cubin_options(arch), options, "CUBIN", cache
    )
    return Artifact(
        arch, key, entry.cubin, entry.log, kernel_resources(entry.cubin, entry.log), from_cache
    )


def _cubin_options(arch: str) -> tuple[str, ...]:
    shared = nvrtc.version() >= _SHARED_FUNCTIONS_SINCE
    return (f"--gpu-architecture={arch}", *OPTIONS, *(_SHARED_FUNCTIONS if shared else ()))


def built_in(policy: Policy) -> tuple[Source, tuple[str, ...]]:
    """Return the program of all built-in kernels for a policy, and its options."""
    return Source.read(MODULE).behind(policy), policy.options


def compile_anew(arch: str, source: Source, options: Sequence[str]) -> Entry:
    """Compiles one translation unit of the package's own headers to a cubin, kept nowhere."""
    headers = Headers(source, [INCLUDE_DIR])
    return Entry(*_compile(source, headers, (*_cubin_options(arch), *options), "CUBIN"))


def key_without_compiler(arch: str, source: Source, options: Sequence[str]) -> str:
    """Make a key of all inputs but the compiler, for what another machine has compiled."""
    headers = Headers(source, [INCLUDE_DIR])
    return _key(source, headers, "", arch, *OPTIONS, *options)


def _key(source: Source, headers: Headers, *inputs: str) -> str:
    # Never from a path: the same text is found wherever it lies.
    contents = (
        part for name, text in sorted(headers.contents.items()) for part in (name.encode(), text)
    )
    return content_key(
        "\0".join((_KEY_VERSION, *inputs)).encode(), source.name.encode(), source.text, *contents
    )


def compile_lto(
    source: Source,
    *,
    include_dirs: Sequence[Path] = (INCLUDE_DIR,),
    options: Sequence[str] = (),
    cache: ArtifactCache | None = None,
) -> bytes:
    """Compiles one translation unit to LTO-IR, or finds it on disk.

    It holds no kernels but functions, which nvJitLink puts into kernels of other compilers. Made
    for the oldest architecture that NVRTC knows, it serves all others.
    """
    arch = f"--gpu-architecture=compute_{nvrtc.architectures()[0]}"
    how = (arch, "--std=c++20", "-dlto", "--no-source-include")
    return _compiled(source, include_dirs, how, options, "LTOIR", cache)[1].cubin


def _compiled(
    source: Source,
    include_dirs: Sequence[Path],
    how: Sequence[str],
    options: Sequence[str],
    form: str,
    cache: ArtifactCache | None,
) -> tuple[str, Entry, bool]:
    """Compiles, or finds what was compiled; returns its key, the entry, and whether it was found.

    `options` are the user's. Where they name folders or files, those become part of what is handed
    to the compiler.
    """
    cache = ArtifactCache() if cache is None else cache
    folders, includes, options = _split_options(options)
    headers = Headers(source, [*include_dirs, *folders])
    for name in includes:
        # NVRTC takes them from the working directory, the others from there as well.
        headers.include(name, Path.cwd())
        options = (*options, f"--pre-include={name}")
    arguments = (*how, *options)
    key = _key(source, headers, nvrtc.identity(), form, *arguments)
    kept = headers.known and not any(map(_READS_MORE.search, options))

    entry = cache.load(key) if kept else None
    if entry is not None:
        return key, entry, True
    entry = Entry(*_compile(source, headers, arguments, form))
    if kept:
        cache.publish(key, entry)
    else:
        key = content_key(key.encode(), entry.cubin)
    return key, entry, False


def _compile(
    source: Source, headers: Headers, arguments: Sequence[str], form: str
) -> tuple[bytes, str]:
    """Compiles. If the compiler lacks a header, which a macro names, compiles again with it."""
    version = nvrtc.version()
    if version < _NVRTC_OLDEST:
        raise CompileError(
            f"NVRTC {version[0]}.{version[1]} is too old for kernels of flashwarp, which need "
            f"{_NVRTC_OLDEST[0]}.{_NVRTC_OLDEST[1]} or later: update nvidia-cuda-nvrtc"
        )
    while True:
        try:
            with saying_if_slow(_log, "compiling %s for a GPU", source.name):
                return nvrtc.compile_program(
                    source.text, source.name, headers.contents, arguments, form
                )
        except CompileError as error:
            missing = _MISSING.search(error.log)
            # Each round adds a header, so there are no more rounds than headers.
            if missing is None or not headers.include_in(missing["includer"], missing["name"]):
                raise


# As NVRTC says it, in two ways.
_MISSING = re.compile(
    r"^(?P<includer>.+)\(\d+\): catastrophic error: (?:could not|cannot) open source file "
    r'"(?P<name>[^"]+)"',
    re.MULTILINE,
)
# Options that read files, or make the result depend on the time.
_READS_MORE = re.compile(r"^--?(?:use-pch|create-pch|pch-dir)|__(?:DATE|TIME|TIMESTAMP)__")


_PATH_OPTION = re.compile(r"(?P<name>-I|--include-path|-include|--pre-include)(?:=?(?P<value>.*))")


def _split_options(options: Sequence[str]) -> tuple[list[Path], list[str], tuple[str, ...]]:
    """Return the folders of headers and the headers that options name, and all other options."""
    folders: list[Path] = []
    includes: list[str] = []
    others: list[str] = []
    words = iter(options)
    for word in words:
        match = _PATH_OPTION.fullmatch(word)
        if match is None:
            others.append(word)
            continue
        value = match["value"] or next(words, "")
        if "nclude" in match["name"] and "path" not in match["name"]:
            includes.append(value)
        else:
            folders.append(Path(value))
    return folders, includes, tuple(others)


_SIZE_PROBES = """
template <typename T> concept fw_complete = requires { sizeof(T); };
template <typename T> struct fw_size { char bytes[1]; };
template <fw_complete T> struct fw_size<T> { char bytes[sizeof(T) < 4000 ? sizeof(T) + 1 : 1]; };
"""


def type_sizes(
    arch: str,
    source: Source,
    types: Sequence[str],
    *,
    include_dirs: Sequence[Path] = (INCLUDE_DIR,),
    options: Sequence[str] = (),
) -> dict[str, int]:
    """Tell the sizes of types that a source defines; 0 for those that it does not complete.

    Compiles kernels with a parameter one byte longer: compiled code lists its parameters' sizes.
    """
    probes = "".join(
        f'extern "C" __global__ void fw_size_{i}(fw_size<{each}>) {{}}\n'
        for i, each in enumerate(types)
    )
    text = source.text + f'\n#line 1 "flashwarp/sizes"\n{_SIZE_PROBES}{probes}'.encode()
    probed = replace(source, text=text)
    artifact = compile_source(arch, probed, include_dirs=include_dirs, options=options)
    return {each: artifact.kernels[f"fw_size_{i}"].param_bytes - 1 for i, each in enumerate(types)}


# Headers.

# What may stand between the words of a directive, once lines that end in a backslash are joined.
_GAP = rb"(?:[ \t\v\f]|/\*.*?\*/)*+"
_NAME = rb'(?:"(?P<quoted>[^"\n]+)"|<(?P<angled>[^>\n]+)>)'
_JOINED = re.compile(rb"\\[ \t]*\r?\n")
# `%:` is another spelling of `#`. Directives in comments and strings are found too: an unneeded
# header costs nothing.
_INCLUDE = re.compile(rb"(?:\#|%%:)%b\binclude(?:_next)?\b%b(?:%b)?" % (_GAP, _GAP, _NAME), re.S)
_HAS_INCLUDE = re.compile(rb"__has_include(?:_next)?\b(?:%b\(%b%b)?" % (_GAP, _GAP, _NAME), re.S)
_ASKS_FOR_IT = re.compile(rb"(?:def|defined)[\s(]*\Z")
_CLOCK = re.compile(rb"__(?:DATE|TIME|TIMESTAMP)__")


class Headers:
    """Every header that a source can reach, by the name that includes it, as `contents`.

    A name found nowhere is left out: it belongs to a host compiler's branch of the code, or else
    the compiler says where it is missing.

    If they are `known`, they are all that the code depends on. Names that a macro makes are not
    known before the compiler asks for them, and may be absolute; neither is the time of day.
    """

    def __init__(self, source: Source, include_dirs: Sequence[Path]) -> None:
        self.contents: dict[str, bytes] = {}
        self.known = True
        self._include_dirs = include_dirs
        self._found: dict[str, Path] = {}
        self._source = source
        self._read_all(source.text, source.folder, source.name)

    def include(self, name: str, beside: Path | None, includer: str = "") -> bool:
        """Add a header and all that it includes; False where it is not found, or there already."""
        folders = [*([] if beside is None else [beside]), *self._include_dirs]
        places = (folder / name for folder in folders)
        header = next((place.resolve() for place in places if place.is_file()), None)
        known = self._found.get(name)
        if header is None or header == known:
            return False
        if known is not None:
            raise CompileError(
                f'#include "{name}" means {known} in one file, {header} in {includer}: '
                "name headers from the include folder"
            )
        self._found[name] = header
        self.contents[name] = _read(header)
        self._read_all(self.contents[name], header.parent, str(header))
        return True

    def include_in(self, includer: str, name: str) -> bool:
        """Add a header that a file includes, which is named as in the compiler's messages."""
        header = self._found.get(includer)
        return self.include(name, self._source.folder if header is None else header.parent)

    def _read_all(self, text: bytes, folder: Path | None, includer: str) -> None:
        joined = _JOINED.sub(b"", text)
        for match in (*_INCLUDE.finditer(joined), *_HAS_INCLUDE.finditer(joined)):
            name = match["quoted"] or match["angled"]
            if name is not None:
                self.include(name.decode(), folder if match["quoted"] else None, includer)
            elif not _ASKS_FOR_IT.search(joined, max(0, match.start() - 16), match.start()):
                self.known = False
        if _CLOCK.search(joined):
            self.known = False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CompileError(f"device source {path} cannot be read: {error.strerror}") from error


# What a cubin and the assembler's log have about each kernel.

# The assembler works on several functions at once, and mixes their lines: only neighbours belong
# together.
_LOG_SPILLS = re.compile(
    r"Function properties for (?P<name>\w+)\n.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)


def kernel_resources(cubin: bytes, log: str) -> dict[str, KernelResources]:
    """List every kernel of a cubin by name: spills from the log, the rest from its own tables."""
    spills = {found["name"]: found for found in _LOG_SPILLS.finditer(log)}
    try:
        sections = dict(elf.sections(cubin))
        symbols = elf.symbols(cubin)
        counts = _function_counts(sections.get(_INFO, b""))
        kernels = {}
        for index, symbol in enumerate(symbols):
            if not (symbol.is_function and symbol.other & _KERNEL_ENTRY):
                continue
            name = symbol.name
            total, each = _params_of(sections.get(f"{_INFO}.{name}", b""))
            found = spills.get(name)
            kernels[name] = KernelResources(
                name=name,
                param_bytes=total,
                each_param_bytes=each,
                registers=counts.get((_CODE_REGISTERS, index)),
                stack_bytes=counts.get((_CODE_STACK_BYTES, index)),
                spill_store_bytes=int(found["stores"]) if found else None,
                spill_load_bytes=int(found["loads"]) if found else None,
            )
    except struct.error as error:
        raise CompileError(f"the compiled code is damaged: {error}") from error
    return kernels


# Section .nv.info describes all functions, section .nv.info.KERNEL a kernel's parameters. Each
# attribute is a format byte, a code byte and 16 bits: a value, or with format 4 the length of what
# follows. Codes 0x2f and 0x11 hold a function's index in the symbol table and its number of
# registers, or bytes of stack. Code 0x19 holds the size of the kernel's parameters, and a code 0x17
# for each of them its number, its place, and its size above 18 other bits.
_INFO = ".nv.info"
_KERNEL_ENTRY = 0x10  # in a symbol's `other`
_ATTRIBUTE = struct.Struct("<BBH")
_COUNT = struct.Struct("<II")
_PARAM = struct.Struct("<IHHI")
_FORMAT_SIZED = 4
_CODE_REGISTERS = 0x2F
_CODE_STACK_BYTES = 0x11
_CODE_PARAM_BYTES = 0x19
_CODE_PARAM = 0x17
_PARAM_SIZE_SHIFT = 18


def _attributes(info: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield each attribute's code, value and content."""
    position = 0
    while position + _ATTRIBUTE.size <= len(info):
        form, code, value = _ATTRIBUTE.unpack_from(info, position)
        position += _ATTRIBUTE.size
        nbytes = value if form == _FORMAT_SIZED else 0
        yield code, value, info[position : position + nbytes]
        position += nbytes


def _function_counts(info: bytes) -> dict[tuple[int, int], int]:
    """Read registers and bytes of stack, by code and the function's index."""
    return {
        (code, index): count
        for code, _, content in _attributes(info)
        if code in (_CODE_REGISTERS, _CODE_STACK_BYTES)
        for index, count in (_COUNT.unpack(content),)
    }


def _params_of(info: bytes) -> tuple[int, tuple[int, ...]]:
    """Read the sizes of a kernel's parameters: of all, and of each."""
    total = 0
    each: dict[int, int] = {}
    for code, value, content in _attributes(info):
        if code == _CODE_PARAM_BYTES:
            total = value
        elif code == _CODE_PARAM:
            _, ordinal, _, packed = _PARAM.unpack_from(content)
            each[ordinal] = packed >> _PARAM_SIZE_SHIFT
    return total, tuple(each[ordinal] for ordinal in sorted(each))
