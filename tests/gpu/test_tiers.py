"""Several controllers under one array and the host-memory tier, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import StorageError
from flashwarp.nvme.group import ControllerGroup
from flashwarp.storage import File, Memory, Replicated, Striped
from flashwarp.testing import Faulty

pytestmark = pytest.mark.gpu

LINE = 4096


def churn(x: fw.Array, held: np.ndarray[Any, Any], rounds: int, seed: int) -> None:
    """Stores and loads of random elements, each checked against `held`, which follows."""
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        where = random.permutation(len(held))[:5000]
        values = random.integers(1, 1 << 60, len(where))
        x.scatter(where, values)
        held[where] = values
        some = random.integers(0, len(held), 50_000)
        np.testing.assert_array_equal(x.gather(some), held[some])


def test_a_read_that_fails_on_one_replica_is_answered_by_another() -> None:
    content = np.random.default_rng(1).integers(0, 1 << 60, 1 << 17)
    drives = [Faulty(Memory(content.copy()), "read eio p=0.5") for _ in "ab"]
    good = Memory(content.copy())
    settings = fw.nvme.SoftwareController(route="bounce")
    with fw.open(
        Replicated([drives[0], good, drives[1]]),
        "r+",
        "<i8",
        device="cuda:0",
        cache="256 KiB",
        controller=settings,
    ) as x:
        some = np.random.default_rng(2).integers(0, len(content), 100_000)
        np.testing.assert_array_equal(x.gather(some), content[some])
        assert x.stats.errors == 0
    assert all(drive.hits()[0] > 0 for drive in drives)


def test_a_stripe_that_fails_is_named(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.raw").write_bytes(bytes(1 << 20))
    files: list[Any] = [File(tmp_path / f"{n}.raw", writable=True) for n in range(3)]
    files[1] = Faulty(files[1], "read eio")
    with fw.open(Striped(files, LINE), "r+", "u1", device="cuda:0", cache="256 KiB") as x:
        with pytest.raises(StorageError) as error:
            x.gather(np.arange(0, 3 << 20, LINE))
        assert error.value.filename == str(tmp_path / "1.raw")
        files[1].heal()
        assert not x.gather(np.arange(0, 3 << 20, LINE)).any()


def test_more_misses_of_a_warp_than_any_ring_has_slots() -> None:
    drives = [Memory(1 << 22) for _ in range(4)]
    controllers = [
        fw.nvme.SoftwareController(queue_pairs=1, depth=depth, route="bounce")
        for depth in (2, 4, 8, 2)
    ]
    with fw.open(
        Striped(drives, LINE),
        "r+",
        "<i8",
        device="cuda:0",
        cache="1 MiB",
        controller=ControllerGroup(controllers),
    ) as x:
        held = np.zeros(x.shape, np.int64)
        churn(x, held, 3, 7)


@pytest.mark.parametrize("policy", ["clock", "lru"])
def test_the_tier_answers_what_left_the_frames(policy: str) -> None:
    content = np.random.default_rng(1).integers(0, 1 << 60, 1 << 19)
    with fw.open(
        Memory(content.copy()),
        "r+",
        "<i8",
        device="cuda:0",
        cache=fw.Cache("1 MiB", policy=policy, host_memory="8 MiB"),
        controller=fw.nvme.SoftwareController(route="bounce"),
    ) as x:
        lines = np.arange(0, len(content), LINE // 8)
        np.testing.assert_array_equal(x.gather(lines), content[lines])
        before = x.stats
        for _ in range(4):
            np.testing.assert_array_equal(x.gather(lines), content[lines])
        after = x.stats

        # 4 MiB of data in 1 MiB of frames and 8 MiB of places.
        assert after.tier_hits > before.tier_hits
        assert after.bytes_read == before.bytes_read == content.nbytes
        churn(x, content, 5, 3)
        x.drop_cache()
        np.testing.assert_array_equal(x[:], content)
