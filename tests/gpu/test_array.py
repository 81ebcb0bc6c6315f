"""Arrays on a GPU, against numpy: every route, geometry and library that callers bring."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import errors

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    with fw.device.CudaDevice(0) as found:
        yield found


def save(path: Path, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(7)
    content = rng.integers(0, 100, shape).astype(dtype)
    np.save(path, content)
    return content


@pytest.mark.parametrize("row", [1, 3, 64, 100, 1024, 1025, 5000])
@pytest.mark.parametrize("o_direct", [None, True, False])
def test_gather_matches_numpy(tmp_path, device, row, o_direct):
    content = save(tmp_path / "a.npy", (3000, row))
    index = np.random.default_rng(1).integers(-3000, 3000, 5000)

    with fw.open(tmp_path / "a.npy", device=device, cache="4 MiB", o_direct=o_direct) as x:
        assert (x.gather(index) == content[index]).all()
        assert (x.gather(index) == content[index]).all()
        assert (x[17:1234] == content[17:1234]).all()


@pytest.mark.parametrize("line", [512, 4096, 65536])
def test_lines_of_every_size(tmp_path, device, line):
    content = save(tmp_path / "a.npy", (4000, 256))
    index = np.random.default_rng(1).integers(0, 4000, 9000)

    with fw.open(tmp_path / "a.npy", device=device, cache=64 * line, line=line) as x:
        assert (x.gather(index) == content[index]).all()


def test_long_ranges_go_by_copy_engines_and_see_what_was_stored(device):
    content = np.random.default_rng(5).integers(0, 1 << 30, (4096, 1024), np.int32)  # 16 MiB
    torch = pytest.importorskip("torch")
    out = torch.empty((4000, 1024), dtype=torch.int32, device="cuda")
    memory = fw.storage.Memory(content.copy())
    with fw.open(memory, "r+", "i4", content.shape, device=device, cache="1 MiB") as x:
        # Some of these lines stay in the cache, dirty, and others are evicted meanwhile.
        now = content.copy()
        for first in (90, 3900, 2000):
            now[first : first + 100] += first
            x.scatter(np.arange(first, first + 100), now[first : first + 100])
        rows = np.array([95, 4095])
        now[rows] = -1
        stream = torch.cuda.Stream()
        x.scatter(rows, now[rows], stream=stream)
        x.gather(slice(90, 4090), out=out, stream=stream)
        with torch.cuda.stream(stream):
            behind = out + 1
        stream.synchronize()
        assert (behind.cpu().numpy() == now[90:4090] + 1).all()
        assert (x[:] == now).all()
        assert (x.gather_async(range(4000), out).result().cpu().numpy() == now[:4000]).all()
        assert x.stats.bytes_copied == (4000 + 4096 + 4000) * 4096
        assert "by copy engines" in x.explain().facts["ranges"]


def test_read_only_resident_file_is_mapped(tmp_path, device):
    save(tmp_path / "a.npy", (4000, 256))

    with fw.open(tmp_path / "a.npy", device=device, strict="in_place") as x:
        assert x.explain().route == "in_place"


def test_depth_two_and_one_set_make_progress(tmp_path, device):
    content = save(tmp_path / "a.npy", (500, 256))
    index = np.random.default_rng(1).integers(0, 500, 2000)
    for path in ("in_place", "bounce"):
        controller = fw.nvme.SoftwareController(queue_pairs=1, depth=2, route=path)

        with fw.open(
            tmp_path / "a.npy", device=device, cache=4 * 512, line=512, controller=controller
        ) as x:
            assert (x.gather(index) == content[index]).all()


def test_stores_are_durable_after_flush(tmp_path, device):
    rng = np.random.default_rng(3)
    content = rng.standard_normal((5000, 300))
    with fw.create(tmp_path / "a.npy", "float64", content.shape, device=device, cache="1 MiB") as x:
        x[...] = content
        rows = rng.permutation(5000)[:2000]
        content[rows] = -content[rows]
        x.scatter(rows, content[rows])
        x.flush()
        assert (np.load(tmp_path / "a.npy") == content).all()
        assert (x[...] == content).all()


def test_memory_storage_is_written_in_place(device):
    held = np.zeros((1000, 512), np.float32)
    content = np.random.default_rng(3).standard_normal(held.shape).astype(np.float32)

    with fw.open(
        fw.storage.Memory(held), "r+", "float32", held.shape, device=device, cache="256 KiB"
    ) as x:
        x[...] = content
        x.flush()

        assert x.explain().route == "in_place"
    assert (held == content).all()


def test_torch_in_torch_out(tmp_path, device):
    torch = pytest.importorskip("torch")
    content = save(tmp_path / "a.npy", (3000, 128))
    index = torch.randint(-3000, 3000, (40, 50), device="cuda")
    out = torch.empty((40, 50, 128), device="cuda")

    with fw.open(tmp_path / "a.npy", device=device, cache="1 MiB") as x:
        result = x[index]
        assert isinstance(result, torch.Tensor)
        assert result.is_cuda
        assert (result.cpu().numpy() == content[index.cpu().numpy()]).all()
        stream = torch.cuda.Stream()
        assert x.gather(index, out=out, stream=stream) is out
        stream.synchronize()
        assert (out == result).all()
        with pytest.raises(errors.BoundsError, match="3000"):
            x.gather(torch.tensor([1, 3000], device="cuda"))
        assert (x.gather(index) == result).all()


def test_cupy_in_cupy_out(tmp_path, device):
    cupy = pytest.importorskip("cupy")
    content = save(tmp_path / "a.npy", (3000, 128))
    index = cupy.random.randint(0, 3000, 500)

    with fw.open(tmp_path / "a.npy", "r+", device=device, cache="1 MiB") as x:
        result = x.gather(index)
        assert isinstance(result, cupy.ndarray)
        assert (result.get() == content[index.get()]).all()
        x.scatter(cupy.arange(10), cupy.full((10, 128), 7, cupy.float32))
        assert (x[:10] == 7).all()


def test_prefetched_rows_hit(tmp_path, device):
    content = save(tmp_path / "a.npy", (4000, 1024))
    with fw.open(tmp_path / "a.npy", device=device) as x:
        x.prefetch(slice(0, 4000))
        assert (x.gather(np.arange(4000)) == content).all()
        before = x.stats.bytes_read
        assert (x.gather(np.arange(4000)) == content).all()
        assert x.stats.bytes_read == before


def test_truncated_file_raises_and_the_array_stays_usable(tmp_path, device):
    path = tmp_path / "a.npy"
    content = save(path, (4000, 1024))
    for o_direct in (False, True):
        np.save(path, content)
        with fw.open(path, "r+", device=device, cache="64 KiB", o_direct=o_direct) as x:
            os.truncate(path, 1 << 20)
            with pytest.raises(errors.StorageError) as caught:
                x.gather(np.array([3999]))
            assert caught.value.filename == str(path)
            assert (x.gather(np.array([5])) == content[[5]]).all()


def test_arrays_share_a_cache(tmp_path, device):
    one = save(tmp_path / "a.npy", (2000, 256))
    with fw.Cache("256 KiB", device=device) as cache:
        with (
            fw.open(tmp_path / "a.npy", cache=cache) as x,
            fw.create(tmp_path / "b.npy", "float32", (2000, 256), cache=cache) as y,
        ):
            y[...] = one * 2
            assert (x[...] == one).all()
            assert (y[...] == one * 2).all()
        assert (np.load(tmp_path / "b.npy") == one * 2).all()


def test_out_of_device_memory_is_typed(tmp_path, device):
    save(tmp_path / "a.npy", (10, 10))
    with pytest.raises(errors.DeviceOutOfMemory):
        fw.open(tmp_path / "a.npy", device=device, cache="900 GiB")


@pytest.mark.parametrize("o_direct", [None, True, False])
@pytest.mark.parametrize("offset", [0, 5, 16, 4096, 4100])
def test_raw_data_begins_at_any_byte(tmp_path, device, offset, o_direct):
    content = np.random.default_rng(offset).standard_normal((3000, 130))
    path = tmp_path / "model"
    path.write_bytes(os.urandom(offset) + content.tobytes() + b"behind")
    index = np.random.default_rng(1).integers(-3000, 3000, 5000)

    with fw.open(
        path,
        "r",
        "f8",
        content.shape,
        device=device,
        cache="1 MiB",
        offset=offset,
        o_direct=o_direct,
    ) as x:
        assert (x.gather(index) == content[index]).all()
        assert x.in_place is None or x.in_place % 16 == 0
    with fw.open(path, "r+", "f8", content.shape, device=device, cache="1 MiB", offset=offset) as x:
        x[[5, 2999]] = 1.5

    content[[5, 2999]] = 1.5
    assert path.read_bytes()[offset:] == content.tobytes() + b"behind"


@pytest.mark.parametrize("o_direct", [True, False])
def test_refresh_reads_what_another_process_has_flushed(tmp_path, device, o_direct):
    path = tmp_path / "a.npy"
    content = save(path, (4000, 256))
    store = f"""
import flashwarp as fw
with fw.open({str(path)!r}, "r+", device="cpu", o_direct={o_direct}) as x:
    x[100:200] = -1
"""
    with fw.open(path, device=device, cache="16 MiB", o_direct=o_direct) as x:
        assert (x[...] == content).all()
        subprocess.run([sys.executable, "-c", store], check=True, timeout=60)

        x.refresh()

        content[100:200] = -1
        assert (x[...] == content).all()


def test_stores_to_a_file_that_was_cut_are_reported(tmp_path, device):
    path = tmp_path / "a.npy"
    content = save(path, (4000, 1024))
    for o_direct in (False, True):
        np.save(path, content)
        x = fw.open(path, "r+", device=device, cache="4 MiB", o_direct=o_direct)
        x[3990:] = 7
        os.truncate(path, 1 << 20)
        time.sleep(0.01)  # writers rely on a look at the file for a millisecond
        with pytest.raises(errors.StorageError, match="truncated"):
            x.flush()
        with pytest.raises(errors.StorageError, match="truncated"):
            x.close()
        assert path.stat().st_size == 1 << 20
