"""Programs written for VELOC: its calls in their order, its configuration, its modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashwarp.checkpoint import veloc
from flashwarp.errors import ArgumentError, CheckpointError, ExistingVersionError

SMALL = {"gpu_memory": "64 KiB", "host_memory": "256 KiB", "device": "cpu"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[veloc.Client]:
    with veloc.Init_single(0, {"scratch": str(tmp_path / "scratch"), **SMALL}) as found:
        yield found


def test_the_listing_of_the_paper_runs(client: veloc.Client) -> None:
    count = 20
    for version in reversed(range(count)):
        client.Prefetch_enqueue(version)
    for version in range(count):
        client.Mem_protect(1, np.full(100 + version, float(version)))  # compressed: any size
        client.Checkpoint("default", version)
    client.Prefetch_start()
    for version in reversed(range(count)):
        size = client.Recover_size(1, version)
        state = np.zeros(size // 8)
        client.Mem_protect(1, state)
        client.Restart("default", version)
        assert (state == version).all()
        assert state.size == 100 + version

    assert client.checkpointer.stats.hints.honoured == count


def test_begin_mem_end_are_a_checkpoint(client: veloc.Client) -> None:
    a, b, c = (np.full(10, float(n)) for n in range(3))
    for number, array in enumerate((a, b, c)):
        client.Mem_protect(number, array)
    client.Checkpoint_begin("run", 1)
    client.Checkpoint_selective(veloc.CKPT_REST, [1])
    client.Checkpoint_end(True)
    client.Checkpoint_wait()
    assert client.Checkpoint_finished()
    for array in (a, b, c):
        array[:] = -1

    client.Restart_begin("run", client.Restart_test("run"))
    assert [client.Recover_size(n) for n in range(3)] == [80, -1, 80]
    client.Recover_selective(veloc.CKPT_SOME, [2])
    client.Restart_end()

    assert (a[0], b[0], c[0]) == (-1, -1, 2)


def test_an_unsuccessful_checkpoint_does_not_exist(client: veloc.Client) -> None:
    client.Mem_protect(1, np.zeros(10))
    client.Checkpoint_begin("run", 1)
    client.Checkpoint_mem()
    client.Checkpoint_end(False)

    assert client.Restart_test("run") == -1


def test_restart_test_returns_the_newest_that_is_not_newer(client: veloc.Client) -> None:
    client.Mem_protect(1, np.zeros(10))
    for version in (3, 5, 9):
        client.Checkpoint("run", version)

    assert [client.Restart_test("run", v) for v in (0, 2, 3, 8, 9, 99)] == [9, -1, 3, 5, 9, 9]


def test_calls_out_of_order_are_named(client: veloc.Client) -> None:
    client.Mem_protect(1, np.zeros(10))
    with pytest.raises(CheckpointError, match="Checkpoint_begin first"):
        client.Checkpoint_mem()
    with pytest.raises(CheckpointError, match="Restart_begin first"):
        client.Recover_mem()
    client.Checkpoint_begin("run", 1)
    with pytest.raises(CheckpointError, match="version 1 was begun and not ended"):
        client.Checkpoint_begin("run", 2)
    client.Checkpoint_mem()
    client.Checkpoint_end()
    with pytest.raises(ExistingVersionError):
        client.Checkpoint("run", 1)
    client.Checkpoint("run", 2)


def test_cleared_regions_and_names_are_gone(client: veloc.Client) -> None:
    client.Mem_protect(1, np.zeros(10))
    client.Checkpoint("run", 1)
    client.Cleanup("run")
    client.Mem_clear()

    assert client.Restart_test("run") == -1
    with pytest.raises(CheckpointError, match="no region is protected"):
        client.Checkpoint("run", 2)


def test_max_versions_and_sync_mode(tmp_path: Path) -> None:
    config = {"scratch": str(tmp_path), "mode": "sync", "max_versions": "2", **SMALL}
    with veloc.Client(3, config) as client:
        client.Mem_protect(1, np.zeros(10))
        for version in range(5):
            client.Checkpoint("run", version)
            assert client.Checkpoint_finished()
        assert client.checkpointer.versions("run") == [3, 4]
        assert client.checkpointer.rank == 3


def test_persistent_is_the_second_store(tmp_path: Path) -> None:
    config = {"scratch": str(tmp_path / "s"), "persistent": str(tmp_path / "p"), **SMALL}
    with veloc.Client(0, config) as client:
        client.Mem_protect(1, np.zeros(10))
        client.Checkpoint("run", 1)
    assert list((tmp_path / "p").rglob("*.manifest"))

    config |= {"scratch": str(tmp_path / "t"), "persistent": str(tmp_path / "q")}
    with veloc.Client(0, {**config, "persistent_interval": "-1"}) as client:
        client.Mem_protect(1, np.zeros(10))
        client.Checkpoint("run", 1)
    assert not (tmp_path / "q").exists()


def test_the_configuration_file_and_its_overrides(tmp_path: Path) -> None:
    file = tmp_path / "veloc.cfg"
    file.write_text("# a comment\nscratch = /a\n\nmode=sync ; another\nchksum = true\n")

    found = veloc.read_config(file, {"VELOC_SCRATCH": "/b", "VELOC_MAX_VERSIONS": "7", "HOME": "/"})

    assert (found["scratch"], found["mode"], found["max_versions"]) == ("/b", "sync", "7")
    assert veloc.ignored(found) == {"chksum": "every chunk has a checksum always"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mode = sync", "must have scratch"),
        ("scratch = /a\nscrtch = /b", "unknown keys scrtch"),
        ("scratch /a", "line 1 of .* is not KEY = VALUE"),
    ],
)
def test_a_bad_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "veloc.cfg"
    file.write_text(text)

    with pytest.raises(ArgumentError, match=message):
        veloc.read_config(file, {})


def test_init_takes_the_rank_of_a_communicator(tmp_path: Path) -> None:
    class Communicator:
        def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
            return 5

    with veloc.Init(Communicator(), {"scratch": str(tmp_path), **SMALL}) as client:
        assert client.checkpointer.rank == 5
