"""A shared cache on a GPU, as far as the driver's calls go: memory exported, mapped, released."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver")

import flashwarp as fw
from flashwarp.device import CudaDevice
from flashwarp.errors import DeviceError, SharedCacheError
from support import fake_cuda
from support.fake_cuda import NOT_SUPPORTED, failing, fake


def check_exported_memory_is_mapped_by_its_descriptor() -> None:
    with CudaDevice() as device:
        before = fake().fake_live_allocations()
        made = device.allocate_exported(3 << 20)
        assert device.download(made.memory.address, 3 << 20) == bytes(3 << 20)

        mapped = device.map_exported(made.descriptor, 3 << 20)

        device.upload(made.memory.address + 5, b"flash")
        assert mapped.address != made.memory.address
        assert device.download(mapped.address, 10) == b"\0\0\0\0\0flash"
        os.close(made.descriptor)
        made.memory.close()
        assert device.download(mapped.address + 5, 5) == b"flash"
        mapped.close()
        assert fake().fake_live_allocations() == before


def check_a_client_cannot_write() -> None:
    with CudaDevice() as device:
        made = device.allocate_exported(4096)
        mapped = device.map_exported(made.descriptor, 4096)
        rights = Path("/proc/self/maps").read_text().splitlines()
        places = [line for line in rights if line.startswith(f"{mapped.address:x}-")]
        assert [place.split()[1] for place in places] == ["r--s"]


def check_a_driver_that_maps_nothing_read_only() -> None:
    with CudaDevice() as device:
        made = device.allocate_exported(4096)
        fake().fake_maps_read_only(0)
        mapped = device.map_exported(made.descriptor, 4096)
        assert mapped.writable
        fake().fake_maps_read_only(1)
        assert not device.map_exported(made.descriptor, 4096).writable


def check_what_fails_leaves_nothing() -> None:
    calls = (
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemExportToShareableHandle",
    )
    with CudaDevice() as device:
        before = fake().fake_live_allocations()
        for call in calls:
            with failing(call, NOT_SUPPORTED), pytest.raises(DeviceError, match=call):
                device.allocate_exported(4096)
            assert fake().fake_live_allocations() == before, call
        made = device.allocate_exported(4096)
        held = fake().fake_live_allocations()
        for call in ("cuMemImportFromShareableHandle", *calls[2:5]):
            with failing(call, NOT_SUPPORTED), pytest.raises(DeviceError, match=call):
                device.map_exported(made.descriptor, 4096)
            assert fake().fake_live_allocations() == held, call


def check_what_is_no_client_of_a_gpu() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLASHWARP_RUNTIME_DIR"] = folder
        with CudaDevice() as device, fw.Cache("4 MiB", shared="rows", device=device) as owner:
            assert owner.owned
            for given in (None, device):
                with pytest.raises(SharedCacheError, match="this process owns the shared cache"):
                    fw.Cache(shared="rows", device=given)
            with pytest.raises(SharedCacheError, match="lies on another device"):
                fw.Cache(shared="rows", device="cpu")


test_fake = fake_cuda.test_of(globals())
