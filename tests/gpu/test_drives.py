"""What a GPU needs to drive an NVMe controller, as far as it shows without a drive.

The software controller stands for the drive: kernels ring its doorbells as they ring registers, and
put their commands in a drive's terms. What a drive's own side needs is tested in `tests/qemu`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.cli.doctor_nvme import Machine
from flashwarp.device import CudaDevice
from flashwarp.device.memory import align_up
from flashwarp.errors import DeviceError
from flashwarp.nvme import gpu_mapping
from support.drive_terms import put_in_terms_of_a_drive
from support.extents import check_arrays_by_extents

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

_EXPORT_BYTES = 2 << 20


@pytest.mark.parametrize("line", [512, 4096, 8192])
def test_doorbells_rung_as_registers_are_served(tmp_path: Path, line: int) -> None:
    values = np.random.default_rng(7).integers(0, 1 << 30, (4096, line // 4), np.int32)
    np.save(tmp_path / "rows.npy", values)
    rows = np.random.default_rng(8).integers(0, len(values), 20_000)
    controller = fw.nvme.SoftwareController(4, 64, route="bounce", commands=True)
    settings = {"device": "cuda:0", "cache": "1 MiB", "line": line, "controller": controller}
    with fw.open(tmp_path / "rows.npy", "r+", **settings) as x:
        queues = x.service.queues
        put_in_terms_of_a_drive(queues)

        np.testing.assert_array_equal(x[rows], values[rows])
        x[:256] = values[256:512]
        x.flush()

        assert queues.counters().doorbells > 100
    np.testing.assert_array_equal(
        np.load(tmp_path / "rows.npy"), np.vstack([values[256:512], values[256:]])
    )


@pytest.mark.parametrize("line", [512, 4096, 8192])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_kernels_look_extents_up(tmp_path: Path, line: int, count: int) -> None:
    check_arrays_by_extents(tmp_path, "cuda:0", "bounce", line, count)


def test_memory_is_exported_as_a_dma_buf(device: CudaDevice) -> None:
    if not device.context.exports_dma_buf:
        pytest.skip(gpu_mapping.NO_EXPORT)
    with device.allocate(2 * _EXPORT_BYTES) as memory:
        begin = align_up(memory.address, _EXPORT_BYTES)

        with gpu_mapping.dma_buf(device, (begin, _EXPORT_BYTES)) as file:
            facts = Path(f"/proc/self/fdinfo/{file}").read_text()
            nbytes = os.lseek(file, 0, os.SEEK_END)
            said = _native.try_iommufd(file, _EXPORT_BYTES)

        assert "exp_name:" in facts
        assert nbytes == _EXPORT_BYTES
        refused = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTTY, errno.EOPNOTSUPP)
        assert said in (0, *refused)


def test_memory_of_the_host_is_not_exported(device: CudaDevice) -> None:
    with device.allocate_host(4096) as memory, pytest.raises(DeviceError, match="as a dma-buf"):
        device.export_dma_buf(memory.address, 4096)


def test_what_is_no_io_memory_is_refused_and_the_gpu_goes_on(device: CudaDevice) -> None:
    pages = mmap.mmap(-1, 16384)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))

    with pytest.raises(DeviceError, match="16384 bytes of I/O memory at 0x"):
        device.register_io(address, 16384)

    with device.allocate(4096) as memory:
        assert device.download(memory.address, 4096) == bytes(4096)


def test_doctor_knows_each_step(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0/class").write_text("0x010802\n")

    checks: dict[str, Callable[[], object]] = dict(Machine(tmp_path).checks())
    found = {name: str(check()) for name, check in checks.items() if name.startswith("GPU")}

    assert len(found) == 5
    assert all("no GPU" not in each for each in found.values())
