"""Counters of a process: what is summed up, while arrays come and go."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.observing import counting


@pytest.fixture
def table(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.arange(4096.0).reshape(64, 64))
    return tmp_path / "x.npy"


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_sums", {})
    monkeypatch.setattr(counting, "_entries", set())


def sums(kind: str = "array") -> list[dict[str, Any]]:
    return [each for each in fw.observing.counters()["sums"] if each["kind"] == kind]


def test_sums_of_arrays_are_their_stats(table: Path) -> None:
    with fw.open(table, device="cpu") as x, fw.open(table, device="cpu") as y:
        for each in (x, x, y):
            each.gather([3, 7])
        (found,) = sums()

        stats = [each.stats.as_dict() for each in (x, y)]
        assert found["open"] == 2
        assert {name: found[name] for name in ("hits", "misses", "bytes_used")} == {
            name: stats[0][name] + stats[1][name] for name in ("hits", "misses", "bytes_used")
        }
        assert found["bytes_used"] == 6 * 512


def test_what_closed_arrays_have_counted_stays(table: Path) -> None:
    for _ in range(3):
        with fw.open(table, device="cpu") as x:
            x.gather([3])

    (found,) = sums()
    assert (found["open"], found["bytes_used"]) == (0, 3 * 512)


def test_looking_often_counts_once(table: Path) -> None:
    with fw.open(table, device="cpu") as x:
        for _ in range(4):
            x.gather([3])
            (found,) = sums()

    assert found["bytes_used"] == 4 * 512
    assert sums()[0]["bytes_used"] == 4 * 512


def test_bytes_past_the_page_cache_name_their_disk(table: Path) -> None:
    with fw.open(table, device="cpu", o_direct=True) as x:
        if not x.service.describe()["storage"]["o_direct"]:
            pytest.skip("the file system has no O_DIRECT")
        x.gather([3])
        (found,) = sums()

    device = table.stat().st_dev
    assert found["disks"] == f"{os.major(device)}:{os.minor(device)}"


def test_an_array_that_cannot_be_read_any_more_is_left_out(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fw.open(table, device="cpu") as x:

        def fail(_: object) -> None:
            raise fw.errors.DeviceError("lost")

        monkeypatch.setattr(x._attachment, "stats", fail)
        assert sums() == []


def test_pipelines_and_checkpointers_are_counted(table: Path, tmp_path: Path) -> None:
    with fw.open(table, device="cpu") as x, fw.Pipeline(x, batch_rows=4) as pipeline:
        for _ in pipeline.iterate([np.array([1, 2]), np.array([3])]):
            pass
    state = np.arange(1000)
    with fw.Checkpointer(tmp_path / "versions", device="cpu", host_memory="1 MiB") as saved:
        saved.protect("state", state)
        saved.checkpoint(1)

    assert sum(each["bytes_read"] for each in sums("pipeline")) == 3 * 512
    assert sum(each["bytes_written"] for each in sums("checkpointer")) == state.nbytes


def test_a_forked_child_counts_for_itself(table: Path) -> None:
    with fw.open(table, device="cpu") as x:
        x.gather([3])
        child = os.fork()
        if not child:
            os._exit(len(counting._entries) + len(counting._sums))
        assert os.waitpid(child, 0)[1] == 0


def test_prometheus_collects_counters(table: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="prometheus_client is an extra")
    registry = prometheus.CollectorRegistry()
    collector = fw.observing.register(registry)

    with fw.open(table, device="cpu") as x:
        x.gather([3])
        text = prometheus.generate_latest(registry).decode()

    labels = '{device="cpu",disks="",kind="array",route="direct"}'
    assert f"flashwarp_bytes_used_total{labels} 512.0\n" in text
    assert f"flashwarp_open{labels} 1.0\n" in text
    registry.unregister(collector)
    assert prometheus.generate_latest(registry) == b""


def test_metrics_without_their_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    monkeypatch.delitem(sys.modules, "flashwarp.observing.prometheus", raising=False)

    with pytest.raises(fw.errors.MissingFileError, match=r"flashwarp\[prometheus\]"):
        __import__("flashwarp.observing.prometheus")


def test_a_program_that_may_import_nothing_more_goes_on(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As root it has become another user, who cannot read the library.
    monkeypatch.setattr("flashwarp.observing.endpoint._begun", False)
    monkeypatch.setitem(sys.modules, "flashwarp.sharing.listener", None)

    with fw.open(table, device="cpu") as x:
        assert x[3, 3] == 3 * 64 + 3


def test_pages_of_mapped_files_are_no_memory_of_the_process(tmp_path: Path) -> None:
    nbytes = 64 << 20
    np.zeros(nbytes, np.uint8).tofile(tmp_path / "x.bin")
    before = fw.observing.counters()["memory"]

    mapped = np.memmap(tmp_path / "x.bin", np.uint8, "r")
    assert not mapped.any()
    of_files = fw.observing.counters()["memory"]
    held = np.ones(nbytes, np.uint8)
    own = fw.observing.counters()["memory"]

    assert of_files["mapped files"] - before["mapped files"] > nbytes // 2
    assert of_files["anonymous"] - before["anonymous"] < nbytes // 2
    assert own["anonymous"] - of_files["anonymous"] > nbytes // 2
    assert held[-1] == 1
