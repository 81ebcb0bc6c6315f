"""The built-in kernels: their names, launches, and code for GPUs as CMake builds it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashwarp import _native
from flashwarp._jit import nvrtc
from flashwarp._jit.artifact_cache import content_key
from flashwarp.device import CpuDevice, Device
from flashwarp.policy import CLOCK, POLICIES, Policy
from support.once import once
from support.samples import EVERYTHING

# A policy takes half a minute.
CUBIN_POLICIES = list(POLICIES.values()) if EVERYTHING else [CLOCK]
"""The policies that `cubins` has files of."""

_ROOT = Path(__file__).parents[2]


def built_in_kernels() -> list[str]:
    """Return their names, without the prefix of their symbols; the CPU device has all of them."""
    with CpuDevice() as device:
        device.built_in("gather_rows")
        return [symbol.removeprefix("fw_") for symbol in device._built_in[CLOCK]]


def cubins(factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the files for GPUs of compute capability 9, made once for all runs."""
    # The architecture that serves this one is built.
    chosen = ["91", *(policy.name for policy in CUBIN_POLICIES)]
    sources = sorted((_ROOT / "src" / "flashwarp").rglob("*.cu*"))
    sources += [
        _ROOT / "native" / "cubins.py",
        *(_ROOT / "src" / "flashwarp" / "_jit").glob("*.py"),
    ]
    parts = [each.read_bytes() for each in sources]
    key = content_key(f"{nvrtc.version()} {chosen}".encode(), *parts)
    kept = _ROOT / "build" / "test-cubins" / key[:32]

    def make(folder: Path) -> None:
        if kept.exists():
            return
        script = _ROOT / "native" / "cubins.py"
        new = kept.with_suffix(".new")
        command = [sys.executable, script, Path(_native.__file__).parent, new, *chosen]
        shutil.rmtree(kept.parent, ignore_errors=True)
        subprocess.run(command, capture_output=True, check=True)
        new.rename(kept)

    once(factory, "cubins", make)
    return kept


def launch(
    device: Device,
    name: str,
    params: ctypes.Structure | bytes,
    *,
    policy: Policy = CLOCK,
    **how: Any,
) -> None:
    """Launch the built-in kernel `fw_<name>` with one struct, as `Device.run_kernel` launches."""
    struct = bytes(params)
    device.run_kernel(device.built_in(name, policy, len(struct)), [struct], **how)
