"""The built-in kernels as the package ships them: compiled for GPUs when it was built.

One file holds all built-in kernels for one architecture and one of flashwarp's own policies. It has
a key of the text that it was compiled from, so a file of other headers is never used: what is not
found is compiled when it is needed. Needs no compiler and no GPU, except to build.
"""

from __future__ import annotations

import logging
import lzma
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from flashwarp import _native, endings
from flashwarp._jit import compiler
from flashwarp._jit.artifact_cache import decode, encode
from flashwarp.errors import CompileError
from flashwarp.policy import POLICIES, Policy

_log = logging.getLogger(__name__)

ARCHITECTURES = (75, 80, 90, 100, 120)
"""Every GPU from sm_75 on runs the code of one of them: the same major version, a minor version not
above its own."""

FOLDER = Path(_native.__file__).parent / "cubins"
"""Where the package has them, beside its extension; missing if it was built without."""


def find(compute_capability: tuple[int, int], policy: Policy) -> compiler.Artifact | None:
    """Return all built-in kernels for a GPU, or None where the package lacks them."""
    major, minor = compute_capability
    number = _serving(10 * major + minor)
    if number is None or not policy.built_in:
        return None
    arch = f"sm_{number}"
    path = _file(FOLDER, arch, policy)
    key = _key(arch, policy)
    try:
        entry = decode(key, lzma.decompress(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, lzma.LZMAError) as error:
        _log.warning("%s cannot be read, so kernels are compiled: %s", path, error)
        return None
    if entry is None:
        _log.info("%s is of other headers, so kernels are compiled", path)
        return None
    kernels = compiler.kernel_resources(entry.cubin, entry.log)
    return compiler.Artifact(arch, key, entry.cubin, entry.log, kernels, from_cache=True)


def build(
    folder: Path, architectures: Sequence[str], policies: Iterable[Policy] = POLICIES.values()
) -> None:
    """Compile all built-in kernels to files in a folder.

    Takes up to a minute of a core for each file. Architectures are such as "90"; "all" for
    `ARCHITECTURES`. For "86" the one that serves it is built. Raises CompileError if NVRTC is
    missing, or does not know one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = ARCHITECTURES if "all" in architectures else tuple(map(_number, architectures))
    files = [(f"sm_{arch}", policy) for policy in policies for arch in sorted(set(wanted))]
    with endings.Pool(os.cpu_count() or 1, "flashwarp-build") as pool:
        for build in [pool.submit(_build, folder, *file) for file in files]:
            build.result()


def _number(architecture: str) -> int:
    number = _serving(int(architecture)) if architecture.isdecimal() else None
    if number is None:
        known = ", ".join(map(str, ARCHITECTURES))
        raise CompileError(f"none of {known} serves architecture {architecture!r}; 'all' is all")
    return number


def _serving(architecture: int) -> int | None:
    """Return the one whose code a GPU of this architecture runs."""
    fitting = [
        each for each in ARCHITECTURES if each // 10 == architecture // 10 and each <= architecture
    ]
    return max(fitting, default=None)


def _build(folder: Path, arch: str, policy: Policy) -> None:
    entry = compiler.compile_anew(arch, *_program(policy))
    _file(folder, arch, policy).write_bytes(lzma.compress(encode(_key(arch, policy), entry)))


def _program(policy: Policy) -> tuple[compiler.Source, tuple[str, ...]]:
    source, options = compiler.built_in(policy)
    return source, (*compiler.PROGRAM_OPTIONS, *options)


def _key(arch: str, policy: Policy) -> str:
    return compiler.key_without_compiler(arch, *_program(policy))


def _file(folder: Path, arch: str, policy: Policy) -> Path:
    return folder / f"{arch}.{policy.name}.xz"
