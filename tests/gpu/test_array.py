"""Arrays on a GPU, against numpy: every route, geometry and library that callers bring."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import errors

pytestmark = pytest.mark.gpu


def save(path: Path, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(7)
    content = rng.integers(0, 100, shape).astype(dtype)
    np.save(path, content)
    return content


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
