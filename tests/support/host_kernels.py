"""GPUs of the driver without one (`fake_cuda`) whose kernels run: code for the CPU device.

The library takes the same ways as on a GPU: its streams, events, copies and launches, in the order
of each stream and as late as the fake is told. Each kernel runs as one warp.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashwarp import _native
from flashwarp._jit import compiler, precompiled
from flashwarp._jit.artifact_cache import ArtifactCache
from flashwarp._jit.compiler import Artifact, KernelResources, Source
from flashwarp._jit.host_compiler import HostArtifact, compile_host
from flashwarp.device import CudaDevice
from flashwarp.policy import Policy
from support.fake_cuda import fake

# How many threads run what streams are to do.
_THREADS = 2


def _artifact(arch: str, key: str, program: Any, library: bytes) -> Artifact:
    kernels = {}
    for name, params in program.kernels:
        symbol = name if name.startswith("_Z") else f"_Z{len(name)}{name}y"
        sizes = tuple(nbytes for nbytes, _ in params)
        kernels[symbol] = KernelResources(symbol, sum(sizes), sizes, 32, 0, 0, 0)
    return Artifact(arch, key, library, "", kernels, from_cache=True)


def _compile(source: Source, folders: Sequence[Path], options: Sequence[str]) -> HostArtifact:
    """Compile with the macros that a GPU's kernels get; once for all checks that have one fake."""
    macros = [each for each in options if each.startswith("-D")]
    kept = ArtifactCache(Path(os.environ["FAKE_CUDA"]).parent / "kernels")
    return compile_host(source, include_dirs=folders, options=macros, cache=kept)


def gpu(delay_us: int = 0, seed: int = 0) -> CudaDevice:
    """Open a GPU whose streams do each thing up to `delay_us` late, as a seed says."""
    elements: dict[str, int] = {}

    def built_in(_: object, policy: Policy) -> Artifact:
        if policy.built_in and not policy.shared_by_gpus:
            path = Path(_native.__file__).parent / "policies" / f"{policy.name}.so"
            program = _native.CpuProgram.installed(str(path))
            return _artifact("sm_90", policy.name, program, path.read_bytes())
        source, options = compiler.built_in(policy)
        return compiled("sm_90", source, include_dirs=[compiler.INCLUDE_DIR], options=options)

    def compiled(arch: str, source: Source, **how: Any) -> Artifact:
        made = _compile(source, how["include_dirs"], how["options"])
        return _artifact(arch, made.key, _native.CpuProgram(made.library), made.library)

    # For good: this process has no other driver.
    precompiled.find = built_in
    compiler.compile_source = compiled
    compiler.type_sizes = lambda *_, **__: elements
    fake().fake_run_kernels()
    fake().fake_delay(delay_us, seed)
    for _ in range(_THREADS):
        assert fake().fake_run_streams() == 0
    return CudaDevice(0)
