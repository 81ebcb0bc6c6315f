"""What lookups in CUDA graphs keep alive; the GPU is `support.fake_cuda`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp._jit import compiler, precompiled
from flashwarp._jit.compiler import Artifact, KernelResources
from flashwarp.device import CudaDevice
from flashwarp.errors import CaptureError
from flashwarp.launch.rows import MaintenanceParams, RowParams
from flashwarp.table.lookup import Ids, Lookup, Number, Scales, Table
from flashwarp.table.structs import LookupParams
from support import fake_cuda
from support.fake_cuda import fake

STREAM = 1  # of the caller


def gpu() -> CudaDevice:
    """A GPU whose kernels nobody had to compile."""
    sizes = dict.fromkeys(("flush_lines", "submit_command", "quiesce"), MaintenanceParams)
    sizes |= {"look_up_rows": LookupParams, "gather_rows": RowParams}
    kernels = {}
    for name, params in sizes.items():
        symbol, nbytes = f"_Z{len(name) + 3}fw_{name}y", ctypes.sizeof(params)
        kernels[symbol] = KernelResources(symbol, nbytes, (nbytes,), 32, 0, 0, 0)

    def compiled(arch: str, *_: Any, **__: Any) -> Artifact:
        return Artifact(arch, "built in", b"\x7fELF", "", kernels, from_cache=False)

    # For good: this process runs one check.
    compiler.compile_source = compiled
    precompiled.find = lambda *_: None
    return CudaDevice(0)


class Owner:
    """Owns the memory of scales."""


@contextlib.contextmanager
def opened() -> Iterator[fw.Array]:
    memory = fw.storage.Memory(np.zeros((64, 4), np.float32))
    with fw.open(memory, "r", "f4", shape=(64, 4), device=gpu(), cache="64 KiB") as x:
        yield x


def scaled(x: fw.Array) -> Table:
    """A table with a scale in memory of its own."""
    owner = Owner()
    owner.memory = x.device.allocate(16)
    scales = Scales(Number.FLOAT32, 0, 4, address=owner.memory.address, owner=owner)
    return Table(x, Number.FLOAT32, 4, range(64), scales=scales)


def captured(lookup: Lookup, ids: Any, out: Any) -> None:
    fake().fake_capture_begin(STREAM)
    lookup.rows(Ids(ids.address, 4, 8), out.address, Number.FLOAT16, STREAM)
    assert fake().fake_capture_end(), "the capture broke"


def check_a_lost_group_keeps_what_a_graph_reads() -> None:
    with opened() as x:
        ids, out = x.device.allocate(64), x.device.allocate(256)
        lookup = Lookup([scaled(x), scaled(x)])
        captured(lookup, ids, out)
        kept = [weakref.ref(lookup._memory)]
        kept += [weakref.ref(table.scales.owner) for table in lookup.tables]
        live = fake().fake_live_allocations()

        with pytest.raises(CaptureError):
            lookup.close()
        del lookup
        gc.collect()

        assert all(each() is not None for each in kept)
        assert fake().fake_live_allocations() == live, "a replay would read what is free"

        fake().fake_destroy_graphs()
        with contextlib.closing(Lookup([scaled(x)] * 2)) as other:
            captured(other, ids, out)
            fake().fake_destroy_graphs()
        del other
        gc.collect()
        assert not any(each() is not None for each in kept)


def check_what_graphs_used_goes_with_the_array() -> None:
    with opened() as x:
        ids, out = x.device.allocate(64), x.device.allocate(256)
        lookup = Lookup([scaled(x), scaled(x)])
        captured(lookup, ids, out)
        memory = weakref.ref(lookup._memory)
        del lookup
        fake().fake_destroy_graphs()
    gc.collect()
    assert memory() is None


def check_a_lost_group_without_a_graph_is_freed() -> None:
    with opened() as x:
        before = fake().fake_live_allocations()
        lookup = Lookup([scaled(x), scaled(x)])
        assert fake().fake_live_allocations() == before + 3

        del lookup
        gc.collect()

        assert fake().fake_live_allocations() == before


test_on_a_fake_gpu = fake_cuda.test_of(globals())
