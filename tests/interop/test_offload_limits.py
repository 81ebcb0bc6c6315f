"""What offloaded tables take of a GPU and of the host; the GPU is `support.fake_cuda`.

It counts what is allocated and registered while all tables are open. Lookups need a real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import nn

from flashwarp._jit import compiler
from flashwarp._jit.compiler import Artifact, KernelResources
from flashwarp.device.cuda import CudaDevice
from flashwarp.errors import CacheError
from flashwarp.interop.torch.offloading.modules import tables_of
from flashwarp.interop.torch.offloading.plan import Need, Plan
from flashwarp.interop.torch.offloading.tensors import find_tensors
from flashwarp.launch.rows import MaintenanceParams
from flashwarp.storage.safetensors import read_checkpoint
from support import fake_cuda

MIB = 1 << 20
ROWS = 20_011


def gpu() -> CudaDevice:
    """A GPU whose maintenance kernels nobody had to compile."""
    nbytes = ctypes.sizeof(MaintenanceParams)

    def compiled(arch: str, *_: Any, options: tuple[str, ...] = (), **__: Any) -> Artifact:
        (name,) = re.findall(r"-DFW_ONLY_(\w+)=1", " ".join(options))
        symbol = f"_Z{len(name) + 3}fw_{name}y"
        resources = KernelResources(symbol, nbytes, (nbytes,), 32, 0, 0, 0)
        return Artifact(arch, name, b"\x7fELF", "", {symbol: resources}, from_cache=False)

    # For good: this process runs one check.
    compiler.compile_source = compiled
    return CudaDevice(0)


def counted(device: CudaDevice) -> dict[str, int]:
    """Count bytes of the GPU, and pinned bytes of the host, from now on."""
    sums = {"gpu": 0, "ram": 0}
    for name, which, at in (("allocate", "gpu", 0), ("allocate_host", "ram", 0),
                            ("register_host", "ram", 1)):  # fmt: skip
        act = getattr(device, name)

        def count(*args: Any, act: Any = act, which: str = which, at: int = at, **more: Any) -> Any:
            sums[which] += args[at]
            return act(*args, **more)

        setattr(device, name, count)
    return sums


def checkpoint(folder: str, tables: int, row_bytes: int) -> tuple[nn.Module, Path]:
    """Make a file of tables of zeros, in the page cache, and their model on the meta device."""
    width = row_bytes // 2
    header = {
        f"{i}.weight": {"dtype": "BF16", "shape": [ROWS, width],
                        "data_offsets": [i * ROWS * row_bytes, (i + 1) * ROWS * row_bytes]}
        for i in range(tables)
    }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = Path(folder) / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(tables * ROWS * row_bytes))
    with torch.device("meta"):
        table = nn.Embedding(ROWS, width, dtype=torch.bfloat16)
        return nn.ModuleList([type(table)(ROWS, width) for _ in range(tables)]), path


@contextlib.contextmanager
def opened(device: CudaDevice, model: nn.Module, path: Path, ram: int, gpu_bytes: int) -> Any:
    """Open the tables of a model as `offload` does; yields their paths and the plan."""
    tables = tables_of(model, ["*"])
    find_tensors(tables, read_checkpoint(path), {})
    plan = Plan(device, Need.of(tables, None), ram, gpu_bytes, "lru", True)
    with contextlib.ExitStack() as stack:
        _, found = plan.open(tables, stack)
        yield {each.rows.service.route for each in found}, plan


def check_limits_hold() -> None:
    seen = set()
    for tables, row_bytes in itertools.product([1, 3], [64, 160, 1024]):
        with TemporaryDirectory() as folder, gpu() as device:
            model, path = checkpoint(folder, tables, row_bytes)
            sums = counted(device)
            for ram, on_gpu in itertools.product([8, 24, 200], [12, 48, 200]):
                sums.update(gpu=0, ram=0)
                try:
                    with opened(device, model, path, ram * MIB, on_gpu * MIB) as (paths, _):
                        last = dict(sums)
                except CacheError:
                    assert on_gpu == 12 or ram == 8
                    continue
                fits = tables * ROWS * row_bytes < 0.8 * ram * MIB
                assert paths == {"in_place"} or not fits or ram < 24
                assert 0 < last["gpu"] <= on_gpu * MIB, (tables, row_bytes, ram, on_gpu, last)
                assert last["ram"] <= ram * MIB, (tables, row_bytes, ram, on_gpu, last)
                seen |= paths
    assert seen == {"in_place", "bounce"}


def check_a_refusal_names_what_suffices() -> None:
    with TemporaryDirectory() as folder, gpu() as device:
        model, path = checkpoint(folder, 3, 160)
        limits = {"host_memory": 64 * MIB, "gpu_memory": 64 * MIB}
        for name in limits:
            small = {**limits, name: 1 * MIB}
            with (
                pytest.raises(CacheError, match=f"{name}={MIB} bytes") as refused,
                opened(device, model, path, small["host_memory"], small["gpu_memory"]),
            ):
                pass
            suffices = int(re.search(r"at least (\d+) bytes", str(refused.value))[1])
            enough = {**limits, name: suffices}
            with opened(device, model, path, enough["host_memory"], enough["gpu_memory"]):
                pass


def check_the_rest_of_the_limit_is_a_tier() -> None:
    with TemporaryDirectory() as folder, gpu() as device:
        model, path = checkpoint(folder, 1, 1024)
        sums = counted(device)
        with opened(device, model, path, 16 * MIB, 16 * MIB) as (paths, _):
            assert paths == {"bounce"}
            assert sums["ram"] > 12 * MIB, "buffers, and a tier of what they leave"


test_on_a_fake_gpu = fake_cuda.test_of(globals())
