"""What the host compiles for its guests, whose emulated processor would take long for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from qemu.image import ROOT
from qemu.machine import COMPILED
from support import fake_cuda

_LIMIT_S = 120

# The kernel of the graph example, and that of the raw queue pairs.
_KERNELS = """
import runpy, sys, flashwarp
from qemu.suites.commands import load_kernel
flashwarp.compile(runpy.run_path(sys.argv[1])["KERNEL"], flashwarp.device.CpuDevice())
load_kernel(flashwarp.device.CpuDevice(1))
"""


def compile_for_guests() -> None:
    """Compile kernels and programs of the suites, unless they are there."""
    COMPILED.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "FLASHWARP_CACHE_DIR": str(COMPILED),
        "PYTHONPATH": str(ROOT / "tests"),
    }
    command = [sys.executable, "-c", _KERNELS, str(ROOT / "examples" / "bfs.py")]
    subprocess.run(command, env=environment, check=True, timeout=_LIMIT_S)
    shutil.copy(fake_cuda.build(COMPILED)["FAKE_CUDA"], COMPILED)
    library = COMPILED / "plain_loop.so"
    source = ROOT / "tests" / "qemu" / "suites" / "plain_loop.cpp"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        command = ["g++", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
        subprocess.run([*command, "-o", library, source], check=True, timeout=_LIMIT_S)
