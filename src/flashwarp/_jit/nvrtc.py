"""NVRTC, the compiler of device code at run time, which needs no GPU and no driver."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashwarp._jit.cuda_api import import_package
from flashwarp.errors import CompileError, DeviceError

# The headers use instructions that came with it, and the versions of CUDA 12 know older ones.
_ARCHITECTURE_OLDEST = 70


@functools.cache
def _nvrtc() -> Any:
    try:
        return import_package("cuda.bindings.nvrtc")
    except DeviceError as error:
        raise CompileError(str(error)) from error


def _nvrtc_call(call: str, *arguments: Any) -> Any:
    nvrtc = _nvrtc()
    try:
        status, *values = getattr(nvrtc, call)(*arguments)
    except RuntimeError as error:
        raise CompileError(
            f"CUDA's run-time compiler was not found: {error}. "
            "Install it with: pip install 'flashwarp[cuda]'"
        ) from error
    if int(status) != 0:
        text = nvrtc.nvrtcGetErrorString(status)[1].decode()
        raise CompileError(f"{call} failed with {text}")
    return values[0] if len(values) == 1 else (tuple(values) or None)


def version() -> tuple[int, int]:
    """Return the version of the run-time compiler, as (major, minor)."""
    major, minor = _nvrtc_call("nvrtcVersion")
    return int(major), int(minor)


@functools.cache
def identity() -> str:
    """Tell one build of the run-time compiler from another: version, and its libraries' files."""
    major, minor = version()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    loaded = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libnvrtc.so" in line}
    files = []
    folders = {Path(line).parent for line in loaded}
    for path in sorted(file for folder in folders for file in folder.glob("libnvrtc*")):
        status = path.stat()
        files.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return f"{major}.{minor} {files}"


def architectures() -> tuple[int, ...]:
    """List what the headers can be compiled for: 90 for sm_90, in ascending order."""
    known = map(int, _nvrtc_call("nvrtcGetSupportedArchs"))
    return tuple(sorted(arch for arch in known if arch >= _ARCHITECTURE_OLDEST))


def compile_program(
    source: bytes,
    name: str,
    headers: dict[str, bytes],
    options: Sequence[str],
    form: str = "CUBIN",
) -> tuple[bytes, str]:
    """Compiles to a cubin, or with form "LTOIR" to what a linker optimizes with other code.

    Returns it and the compiler's log; raises CompileError with the log.
    """
    program = _nvrtc_call(
        "nvrtcCreateProgram",
        source,
        name.encode(),
        len(headers),
        list(headers.values()),
        [spelling.encode() for spelling in headers],
    )
    try:
        failure: CompileError | None = None
        try:
            _nvrtc_call("nvrtcCompileProgram", program, len(options), [o.encode() for o in options])
        except CompileError as error:
            failure = error
        # NVRTC writes into the bytes objects made here, which no other code has seen yet.
        log = bytes(_nvrtc_call("nvrtcGetProgramLogSize", program))
        _nvrtc_call("nvrtcGetProgramLog", program, log)
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if failure is not None:
            raise CompileError(
                f"{name} ({' '.join(options)}): {failure}\n{text}", text
            ) from failure
        code = bytes(_nvrtc_call(f"nvrtcGet{form}Size", program))
        _nvrtc_call(f"nvrtcGet{form}", program, code)
        return code, text
    finally:
        _nvrtc_call("nvrtcDestroyProgram", program)
