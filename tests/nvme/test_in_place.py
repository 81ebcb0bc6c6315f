"""Storage that the device reaches itself: what takes commands, and what takes none."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.storage import Memory, Replicated, Striped
from flashwarp.storage.file import Mapping

LINE = 512
LINES = 64


def words(seed: int = 1) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(1, 1 << 40, LINES * LINE // 8)


def combined(spread: str, held: np.ndarray[Any, Any]) -> fw.storage.Storage:
    if spread == "one":
        return Memory(held.copy())
    if spread == "replicas":
        return Replicated([Memory(held.copy()) for _ in range(3)])
    stripes = held.reshape(-1, 2, 4096 // 8)
    return Striped([Memory(np.ascontiguousarray(stripes[:, n])) for n in range(2)], 4096)


def opened(storage: fw.storage.Storage, **settings: Any) -> fw.Array:
    """Open it through a cache of an eighth of its lines."""
    mode = "r+" if storage.writable else "r"
    return fw.open(
        storage,
        mode,
        "int64",
        device="cpu",
        line=LINE,
        cache=LINES * LINE // 8,
        controller=fw.nvme.SoftwareController(**settings),
    )


@pytest.mark.parametrize("commands", [False, True])
@pytest.mark.parametrize("spread", ["one", "stripes", "replicas"])
def test_loads_and_stores_in_place_take_no_commands(spread: str, commands: bool) -> None:
    held = words()
    storage = combined(spread, held)
    members = {"one": 1, "stripes": 2, "replicas": 3}[spread]
    rng = np.random.default_rng(2)

    with opened(storage, commands=commands) as x:
        assert x.explain().route == "in_place"
        for _ in range(20):
            index = np.unique(rng.integers(0, held.size, 200))
            held[index] = rng.integers(1, 1 << 40, index.size)
            x.scatter(index, held[index])
            np.testing.assert_array_equal(x.gather(index), held[index])
        x.flush()

        assert x.stats.write_backs > LINES
        assert (x.stats.commands == members) != commands  # of a flush
        np.testing.assert_array_equal(x[:], held)
    assert storage.read(0, held.nbytes) == held.tobytes()


def test_prefetched_line_is_there_at_once() -> None:
    with opened(Memory(words(), writable=False)) as x:
        x.prefetch(np.arange(0, LINE, LINE // 8))
        before = x.stats.misses

        x.gather(np.arange(0, LINE, LINE // 8))

        assert before == LINE // (LINE // 8)
        assert x.stats.misses == before
        assert x.stats.commands == 0


KERNEL = """
#include "flashwarp/array.cuh"

// Swaps neighbouring blocks of 96 words by tokens: both reads are started before either is waited
// for. Counts tokens that were not over when they were started.
FW_KERNEL swap_blocks(fw::array<int64_t> x, uint32_t* late) {
  int64_t a[96], b[96];
  for (uint64_t i = 0; i + 192 <= x.size(); i += 192) {
    fw::token first = x.read_async(i, 96, a);
    fw::token second = x.read_async(i + 96, 96, b);
    *late += !first.done() + !second.done();
    second.wait();
    x.write_async(i + 96, 96, a).wait();
    x.write_async(i, 96, b).wait();
    *late += !x.write_back(i, 192).done();
  }
}
"""


def test_tokens_in_place_are_over_at_once_and_take_no_commands(tmp_path: Path) -> None:
    (tmp_path / "swap.cu").write_text(KERNEL)
    program = fw.compile(tmp_path / "swap.cu", "cpu")
    held = words(3)[: LINES * 64 // 192 * 192]
    storage = Memory(held.copy())
    late = np.zeros(1, np.uint32)

    with opened(storage) as x:
        program["swap_blocks"](x, late, warps=1)
        x.wait()

        assert late[0] == 0
        assert x.stats.commands == 0
    swapped = held.reshape(-1, 2, 96)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(np.frombuffer(storage.read(0, held.nbytes), np.int64), swapped)


@pytest.mark.parametrize("writable", [False, True])
def test_threads_sleep_on_while_an_array_can_submit_no_command(writable: bool) -> None:
    with opened(Memory(words(), writable), threads=1) as x:
        assert x.service.needs_wake == writable
        before = x.service.stats["wakes"]

        for _ in range(10):
            x.gather(np.arange(8))

        assert (x.service.stats["wakes"] == before) != writable


@pytest.mark.parametrize(("offset", "path"), [(8, "in_place"), (4096 + 24, "in_place"), (12, "")])
def test_data_that_begins_at_a_word_is_read_in_place(
    offset: int, path: str, tmp_path: Path
) -> None:
    held = words()
    (tmp_path / "x").write_bytes(b"." * offset + held.tobytes() + b"behind")
    index = np.random.default_rng(5).integers(0, held.size, 2000)
    options: dict[str, Any] = {
        "dtype": "int64", "shape": held.shape, "offset": offset, "device": "cpu", "line": LINE,
        "cache": LINES * LINE // 8,
    }  # fmt: skip
    asked = fw.nvme.SoftwareController(route="in_place")

    if not path:
        with pytest.raises(fw.errors.ArgumentError, match="in_place"):
            fw.open(tmp_path / "x", controller=asked, **options)
        return
    with fw.open(tmp_path / "x", controller=asked, **options) as x:
        assert x.explain().route == path
        np.testing.assert_array_equal(x.gather(index), held[index])
        assert x.in_place is None


def test_a_mapping_begins_at_the_page_of_the_data(tmp_path: Path) -> None:
    content = os.urandom(20_000)
    (tmp_path / "x").write_bytes(content)

    mapping = Mapping(tmp_path / "x", 15_000, 9_000)

    assert mapping.nbytes == 15_000 - 8_192, "what lies before is not pinned"
    assert ctypes.string_at(mapping.origin + 9_000, 6_000) == content[9_000:15_000]
    mapping.close()
