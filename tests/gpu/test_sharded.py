"""Sharded arrays on GPUs: rows by NCCL, in CUDA graphs, and ranks that are lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist

from distributed.loads import write
from distributed.pool import Pool
from flashwarp._jit import cuda_api
from flashwarp.errors import DeviceError
from gpu import sharded_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def gpus() -> int:
    try:
        return cuda_api.device_count()
    except DeviceError:
        return 0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not dist.is_nccl_available():
        pytest.skip("needs a torch with NCCL")
    made = Pool(tmp_path_factory.mktemp("pool"), 2)
    yield made
    made.close()


@pytest.fixture
def two(pool: Any) -> Any:
    if gpus() < 2:
        pytest.skip(f"needs two GPUs, and the driver sees {gpus()}")
    return pool


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("deal", "dtype", "count"),
    [("range", "f4", 5000), ("hash", "i8", 5000), ("hash", "i2", 1001), ("range", "u1", 2)],
)
def test_every_rank_reads_and_stores_all_rows(
    pool: Any, tmp_path: Path, ranks: int, deal: str, dtype: str, count: int
) -> None:
    if gpus() < ranks:
        pytest.skip(f"needs {ranks} GPUs, and the driver sees {gpus()}")

    pool.run(ranks, sharded_ranks.rows, tmp_path, deal, dtype, count)


def test_several_tables_share_a_communicator(two: Any, tmp_path: Path) -> None:
    two.run(2, sharded_ranks.several_tables, tmp_path)


def test_calls_run_in_the_order_of_the_stream(two: Any, tmp_path: Path) -> None:
    two.run(2, sharded_ranks.streams, tmp_path)


def test_a_graph_has_gathers_of_a_capacity(two: Any, tmp_path: Path) -> None:
    two.run(2, sharded_ranks.graphs, tmp_path)


def test_bad_input_of_one_rank_is_the_same_error_on_all(two: Any, tmp_path: Path) -> None:
    found = two.run(2, sharded_ranks.refuses, tmp_path)

    assert found[0] == found[1]
    assert [kind.removesuffix("Error") for kind, _ in found[0]] == [
        *("Argument", "Argument", "Argument", "Bounds", "IndexDtype", "Argument", "Argument"),
        *("Capture", "Dtype", "Argument", "Argument"),
    ]
    texts = [text for _, text in found[0]]
    assert "give gather capacity=" in texts[7]
    assert "use one GPU" in texts[9]
    assert "on cpu (ranks [1])" in texts[10]


def test_tables_train_as_on_cpus(two: Any, tmp_path: Path) -> None:
    two.run(2, sharded_ranks.trains, tmp_path)


@pytest.mark.parametrize("share", [4096, 1 << 20])
def test_all_ranks_load_what_each_reads_a_share_of(two: Any, tmp_path: Path, share: int) -> None:
    write(tmp_path, 2)

    two.run(2, sharded_ranks.loads, tmp_path, share)


# Ranks that are lost.


@pytest.mark.parametrize("graphed", [False, True], ids=["stream", "graph"])
def test_a_message_of_a_killed_rank_is_aborted(two: Any, tmp_path: Path, graphed: bool) -> None:
    doomed = Pool(tmp_path, two.count)
    try:
        doomed.start(2, sharded_ranks.in_a_message, tmp_path / "x", graphed)
        waited, kinds = doomed.result(0)
    finally:
        doomed.close()

    assert waited < sharded_ranks.TIMEOUT_S + 20
    assert set(kinds) == {"RankLostError"}


def test_a_killed_rank_loses_nothing_that_was_flushed(two: Any, tmp_path: Path) -> None:
    doomed, folder = Pool(tmp_path, 2), tmp_path / "x"
    try:
        doomed.start(2, sharded_ranks.until_killed, folder)
        end = time.monotonic() + 60
        while not (folder / "flushed-1").exists() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(doomed.processes[1].pid, signal.SIGKILL)
        number, waited = doomed.result(0)
    finally:
        doomed.close()

    assert waited < 30
    rows = two.run(2, sharded_ranks.all_rows, folder)
    assert (rows[0] == rows[1]).all()
    flushed = max(int((folder / f"flushed-{rank}").read_text() or 0) for rank in range(2))
    assert flushed <= rows[0].min() <= rows[0].max() <= number + 1
