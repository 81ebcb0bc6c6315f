"""What the benchmark of pipelines stands on: its baselines, its checks, and its counts of lines."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.pipelines import lines as pipelines_lines  # noqa: E402 (needs torch)
from benchmarks.pipelines import pipelines  # noqa: E402
from benchmarks.pipelines import staging as pipelines_staging  # noqa: E402
from benchmarks.pipelines.host import Ahead, Behind, Loops  # noqa: E402
from flashwarp.errors import ArgumentError  # noqa: E402


@pytest.fixture
def loops(tmp_path):
    made = Loops(tmp_path, 3)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    np.arange(1000, dtype=np.int32).tofile(path)
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def test_baseline_reads_and_copies_pieces_in_their_order(loops, file):
    offsets = np.array([396, 0, 3996, 396])
    read, copied = np.zeros(16, np.uint8), np.zeros(16, np.uint8)
    source = np.arange(1000, dtype=np.int32).view(np.uint8)

    loops.read(file, read, offsets, 4)
    loops.gather(source, copied, offsets, 4)

    assert read.view(np.int32).tolist() == copied.view(np.int32).tolist() == [99, 0, 999, 99]


def test_baseline_that_fails_says_so(loops, file):
    with pytest.raises(OSError, match="a baseline failed"):
        loops.read(file, np.zeros(8, np.uint8), np.array([0, 4000]), 4)


def test_errors_of_the_baselines_threads_are_raised():
    def fail(*_):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(Ahead(torch, "cpu", (1, 1), torch.int32, fail).iterate([1]))
    behind = Behind(torch, "cpu", (1, 1), torch.int32, fail)
    behind.write(torch.zeros((1, 1), dtype=torch.int32), 0)
    with pytest.raises(ValueError, match="broken"):
        behind.close()


def small(tmp_path, **options):
    sizes = {"size": "1 MiB", "batch": "64 KiB", "rows": "4 KiB", "steps": 2, "runs": 1}
    return pipelines.run("cpu", tmp_path, **{**sizes, "keys": 1 / 16, "side": 32, **options})


@pytest.mark.parametrize("part", ["sort", "gemm", "rows"])
def test_wrong_data_of_a_baseline_is_found(tmp_path, monkeypatch, part):
    monkeypatch.setattr(Loops, "read", lambda *_: None)

    report = small(tmp_path, parts=part, storages="page cache")

    assert report.wrong
    assert all("memory" not in name for name in report.wrong)


def test_wrong_rows_of_each_graph_network_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Loops, "gather", lambda *_: None)

    report = small(tmp_path, parts="gnn", storages="memory", dims="128", ways="default", seeds=4)

    assert report.wrong == [
        f"{model}, 128 features, memory: pipelined, default"
        for model in ("GraphSAGE", "GCN", "GAT")
    ]


def test_parts_and_ways_that_are_none_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="'row' is none of rows"):
        small(tmp_path, parts="rows,row")
    with pytest.raises(ArgumentError, match="'fast' is none of default"):
        small(tmp_path, parts="rows", ways="fast")
    with pytest.raises(ArgumentError, match="'disk' is none of memory"):
        small(tmp_path, parts="rows", storages="memory,disk")


def test_wrong_writes_and_wrong_staging_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Loops, "write", lambda *_: None)
    monkeypatch.setattr(pipelines_staging, "_NBYTES", 1 << 20)
    monkeypatch.setattr(pipelines_staging.BatchEngine, "wait", lambda *_: None)
    monkeypatch.setattr(pipelines_staging.BatchEngine, "submit", lambda *_: 1)

    wrong = small(tmp_path, parts="where").wrong

    assert any("writes, page cache, pwrite" in name for name in wrong)
    assert any("writes, page cache, the engine" in name for name in wrong)
    assert sum("workers that" in name for name in wrong) == 4
    assert not any("reads, page cache" in name or "controller" in name for name in wrong)


def test_lines_are_counted():
    def step(features, model):
        """Do nothing much."""
        with fw.Pipeline(features, 10) as pipeline:  # noqa: F821
            for rows, _ in pipeline.iterate([]):
                # Rows are data.
                model(rows)
                model(
                    rows,
                )
        return model

    assert pipelines_lines.lines_that_mention(step) == 2
    assert pipelines_lines.code_lines(step) == 8
