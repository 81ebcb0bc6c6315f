"""The engine of batches on a GPU: rows into and out of device memory, by its own stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashwarp.errors import BoundsError, StorageError
from flashwarp.pipeline.engine import BatchEngine, Ring
from flashwarp.storage import File, Memory
from flashwarp.testing.faults import FaultPlan, Faulty

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

ROWS, ROW_BYTES = 4096, 4096
RING = Ring(1 << 20, 4)


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)


def engine_on(device, storage, **options) -> BatchEngine:
    return BatchEngine(
        device,
        storage,
        rows=ROWS,
        row_bytes=ROW_BYTES,
        batch_rows=ROWS,
        ring=RING,
        copies=True,
        **options,
    )


def test_rows_arrive_in_device_memory_and_go_back(device):
    data = table(1)
    expected = data.copy()
    random = np.random.default_rng(2)
    with engine_on(
        device, Memory(data), directions=("prefetch", "write_back"), workers=4
    ) as engine:
        for _ in range(10):
            ids = random.integers(0, ROWS, 3000)
            buffer = torch.zeros((3000, ROW_BYTES), dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            engine.wait("prefetch", engine.submit("prefetch", ids, buffer.data_ptr()))
            np.testing.assert_array_equal(buffer.cpu().numpy(), expected[ids])

            ids = random.permutation(ROWS)[:2000]
            source = torch.randint(0, 256, (2000, ROW_BYTES), dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            engine.wait("write_back", engine.submit("write_back", ids, source.data_ptr()))
            expected[ids] = source.cpu().numpy()
            np.testing.assert_array_equal(data, expected)


def test_a_failing_row_leaves_the_others_in_device_memory(device, tmp_path: Path):
    data = table(3)
    data.tofile(tmp_path / "a")
    faulty = Faulty(File(tmp_path / "a", o_direct=True), FaultPlan.parse("read eio bytes=0-4096"))
    buffer = torch.full((3, ROW_BYTES), 9, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with engine_on(device, faulty, workers=2) as engine:
        with pytest.raises(StorageError, match="row 1"):
            engine.wait("prefetch", engine.submit("prefetch", [5, 0, 7], buffer.data_ptr()))
        found = buffer.cpu().numpy()
        np.testing.assert_array_equal(found[[0, 2]], data[[5, 7]])
        assert not found[1].any()
        with pytest.raises(BoundsError):
            engine.wait("prefetch", engine.submit("prefetch", [ROWS], buffer.data_ptr()))


def test_close_with_batches_under_way_leaves_the_device_usable(device):
    data = table(4)
    buffers = [torch.zeros((ROWS, ROW_BYTES), dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    engine = engine_on(device, Memory(data), workers=2)
    for buffer in buffers:
        engine.submit("prefetch", range(ROWS), buffer.data_ptr())
    engine.close()
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
