"""Checkpoints on two GPUs: in one process, in two, and with copies on a partner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
from benchmarks.checkpoints import checkpoints
from checkpoint.rank_processes import Ranks
from flashwarp._jit import cuda_api
from flashwarp.checkpoint.directory import Directory
from flashwarp.errors import DeviceError
from gpu.checkpoint_ranks import (
    COUNT,
    VERSIONS,
    keep_copies,
    opened,
    value,
    write_together,
    write_until_killed,
)
from interop import dcp_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    try:
        count = cuda_api.device_count()
    except DeviceError as error:
        pytest.skip(str(error))
    if count < 2:
        pytest.skip(f"needs two GPUs, and the driver sees {count}")


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize(
    "caches",
    [{}, {"gpu_memory": 0}, {"host_memory": 0}, {"gpu_memory": 0, "host_memory": 0}],
    ids=str,
)
def test_the_second_gpu_is_as_good_as_the_first(
    tmp_path: Path, caches: dict[str, Any], current: int
) -> None:
    state = torch.empty(COUNT, device="cuda:1")
    options = {"gpu_memory": "16 MiB", "host_memory": "64 MiB"} | caches
    with torch.cuda.device(current), fw.Checkpointer(tmp_path, "cuda:1", **options) as made:
        made.protect("state", state)
        for version in reversed(range(VERSIONS)):
            made.prefetch_enqueue(version)
        for version in range(VERSIONS):
            state.fill_(version)
            made.checkpoint(version)
        state.fill_(-1)
        for version in reversed(range(VERSIONS)):
            made.restart(version)
            assert bool((state == version).all())
        assert torch.cuda.current_device() == current


def test_copies_are_ordered_on_a_stream_of_the_second_gpu(tmp_path: Path) -> None:
    state = torch.zeros(COUNT, device="cuda:1")
    stream = torch.cuda.Stream(device="cuda:1")
    with opened(tmp_path, 1) as made, torch.cuda.stream(stream):
        made.protect("state", state)
        for version in range(20):
            torch.cuda._sleep(2_000_000)
            state.fill_(version)
            made.checkpoint(version)
            state.fill_(-1)
        for version in reversed(range(20)):
            made.restart(version)
            kept = state.clone()
            state.fill_(-1)
            assert bool((kept == version).all())


def test_two_ranks_in_one_process_commit_together(tmp_path: Path) -> None:
    states = [torch.empty(COUNT, device=f"cuda:{rank}") for rank in range(2)]
    with opened(tmp_path, 0, ranks=2) as first, opened(tmp_path, 1, ranks=2) as second:
        both = [first, second]
        for rank, made in enumerate(both):
            made.protect("state", states[rank])
        for version in range(VERSIONS):
            for rank, made in enumerate(both):
                states[rank].fill_(value(rank, version))
                made.checkpoint(version)
        for made in both:
            made.wait()
            assert made.versions() == list(range(VERSIONS))
        for version in reversed(range(VERSIONS)):
            for rank, made in enumerate(both):
                states[rank].fill_(-1)
                made.restart(version)
                assert bool((states[rank] == value(rank, version)).all())


def test_states_move_between_gpus(tmp_path: Path) -> None:
    state = torch.arange(COUNT, device="cuda:1", dtype=torch.float32)
    with opened(tmp_path, 1) as made:
        made.protect("state", state)
        made.checkpoint(0)
        made.wait()
    found = torch.zeros(COUNT, device="cuda:0")
    with fw.Checkpointer(tmp_path, "cuda:0", "16 MiB", "64 MiB", rank=1) as again:
        again.restart(0, into={"state": found})
    assert torch.equal(found.cpu(), state.cpu())


def test_two_processes_commit_together(tmp_path: Path) -> None:
    with Ranks(2, write_together, tmp_path) as ranks:
        assert ranks.heard(2) == {rank: list(range(VERSIONS)) for rank in range(2)}
    for rank in range(2):
        with Directory(tmp_path, rank, writable=False) as directory:
            seen = directory.examine("default", verify=True)
            assert [each.problem for each in seen] == [""] * VERSIONS


def test_a_rank_on_the_other_gpu_that_dies_is_raised(tmp_path: Path) -> None:
    with Ranks(2, write_until_killed, tmp_path) as ranks:
        ranks.heard(2)
        ranks.processes[1].kill()
        assert ranks.heard(1)[0][:1] == [0]
    with Directory(tmp_path, 0, writable=False) as directory:
        assert next(iter(directory.examine("default", verify=True))).problem == ""


def test_partners_bring_back_what_a_gpus_node_has_lost(tmp_path: Path) -> None:
    folder = tmp_path / "nodes"
    assert dcp_ranks.run(2, keep_copies, folder, "write") == [""] * 2
    assert dcp_ranks.run(2, keep_copies, folder, "read") == [""] * 2


def test_the_benchmark_shares_the_disk_among_gpus(tmp_path: Path) -> None:
    report = checkpoints.run(
        "cuda:0",
        tmp_path,
        parts="gpus",
        mib=96,
        steps=12,
        sizes="variable",
        orders="irregular",
        hints="all",
        intervals_ms="1",
    )
    assert [row.name.split(",")[1] for row in report.rows] == [" 1 GPU"] * 4 + [" 2 GPUs"] * 4
    assert not report.wrong
    assert np.isfinite([row.value for row in report.rows]).all()
