"""The built-in kernels: their names, launches, and code for GPUs as CMake builds it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashwarp import _native
from flashwarp.device import CpuDevice, Device
from flashwarp.policy import CLOCK, POLICIES, Policy
from support.once import once
from support.samples import sample

# A policy takes a quarter of a minute: the default one, and another one.
_OTHERS = [policy for policy in POLICIES.values() if policy != CLOCK]
CUBIN_POLICIES = [CLOCK, *sample(_OTHERS, len(_OTHERS))]
"""The policies that `cubins` has files of."""


def built_in_kernels() -> list[str]:
    """Return their names, without the prefix of their symbols; the CPU device has all of them."""
    with CpuDevice() as device:
        device.built_in("gather_rows")
        return [symbol.removeprefix("fw_") for symbol in device._built_in[CLOCK]]


def cubins(factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the files for GPUs of compute capability 9, made once in a run."""

    def make(folder: Path) -> None:
        script = Path(__file__).parents[2] / "native" / "cubins.py"
        # The architecture that serves this one is built.
        chosen = ["91", *(policy.name for policy in CUBIN_POLICIES)]
        command = [sys.executable, script, Path(_native.__file__).parent, folder, *chosen]
        subprocess.run(command, capture_output=True, check=True)

    return once(factory, "cubins", make)


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
