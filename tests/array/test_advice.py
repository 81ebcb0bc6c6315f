"""What `explain` advises: each sentence when its counters say so, and nothing otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.array.advice import Usage, advise
from flashwarp.array.stats import Stats
from flashwarp.storage import Memory

MIB = 1 << 20
GIB = 1 << 30

NOTHING_DONE = Stats(
    hits=0,
    misses=0,
    evictions=0,
    write_backs=0,
    bytes_read=0,
    bytes_written=0,
    bytes_used=0,
    commands=0,
    doorbells=0,
    helps=0,
    errors=0,
)
# A gigabyte that was read once, by rows of a line in calls of a thousand.
FINE = Usage(
    nbytes=GIB,
    row_bytes=4096,
    line_bytes=4096,
    capacity=256 * MIB,
    host_memory=0,
    on_cpu=False,
    in_place=False,
    o_direct=True,
    alignment=512,
    device_free_bytes=8 * GIB,
    host_free_bytes=8 * GIB,
    page_room=7 * GIB,
    calls=262,
    rows=262_144,
    stats=replace(
        NOTHING_DONE,
        misses=262_144,
        evictions=196_608,
        bytes_read=GIB,
        bytes_used=GIB,
        commands=262_144,
    ),
)
SHORT = replace(FINE, row_bytes=512, stats=replace(FINE.stats, bytes_used=GIB // 8))
LONG = replace(FINE, row_bytes=16384)
AGAIN = replace(FINE.stats, bytes_read=3 * GIB, bytes_used=3 * GIB, evictions=700_000)


def with_stats(usage: Usage, **changes: int) -> Usage:
    return replace(usage, stats=replace(usage.stats, **changes))


@pytest.mark.parametrize(
    "usage",
    [
        FINE,
        replace(FINE, stats=NOTHING_DONE),
        replace(FINE, nbytes=0, row_bytes=0, stats=NOTHING_DONE),
        # Short rows that are used together, because they are read in order or again and again.
        with_stats(SHORT, bytes_used=GIB),
        # More than rows alone can cost: kernels read too, and what they use is not counted.
        with_stats(SHORT, bytes_used=GIB // 16),
        # Too little to judge by.
        with_stats(SHORT, bytes_read=64 << 10, bytes_used=8 << 10),
        # Shorter lines are what the drive does not have.
        replace(SHORT, alignment=4096),
        replace(SHORT, line_bytes=512),
        # Long rows: in lines that fit, of no whole number of lines, on no drive, in a small cache.
        replace(LONG, line_bytes=16384),
        replace(LONG, row_bytes=3 * 4096),
        replace(LONG, in_place=True),
        replace(LONG, capacity=MIB),
        with_stats(LONG, commands=999),
        # Past the page cache, once; or through it; or more than it can take.
        replace(FINE, o_direct=True),
        replace(FINE, o_direct=False, capacity=2 * GIB, stats=AGAIN),
        replace(FINE, page_room=GIB // 2, capacity=2 * GIB, stats=AGAIN),
        # A small cache of data that was read again, where no memory is left for a larger one.
        replace(FINE, o_direct=False, device_free_bytes=0, host_free_bytes=0, stats=AGAIN),
        replace(FINE, o_direct=False, in_place=True, stats=AGAIN),
        replace(FINE, o_direct=False, on_cpu=True, device_free_bytes=0, stats=AGAIN),
        # A tier that answers, or that has not been filled yet.
        with_stats(replace(FINE, host_memory=GIB), tier_hits=100_000, tier_lines=10**6),
        with_stats(replace(FINE, host_memory=GIB), tier_lines=1000),
        # Few calls, or calls of many rows.
        replace(FINE, calls=999, rows=999),
        replace(FINE, calls=5000, rows=40_000),
    ],
)
def test_nothing_is_advised_where_nothing_is_wrong(usage: Usage) -> None:
    assert advise(usage) == ()


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        (SHORT, ("8.0 bytes were read for each byte used", "rows of 512", "line=512 ")),
        (replace(SHORT, alignment=1024), ("line=1024 reads about 2.0",)),
        (with_stats(replace(SHORT, row_bytes=1000), bytes_used=GIB // 4), ("line=1024 ",)),
        (LONG, ("262144 commands were submitted, 4 for each row of 16384", "line=16384 needs 1.")),
        (replace(LONG, row_bytes=24576), ("6 for each row of 24576", "line=8192 needs 3.")),
        (replace(LONG, row_bytes=MIB, capacity=GIB), ("line=65536 needs 16.",)),
        (
            replace(FINE, capacity=2 * GIB, stats=AGAIN),
            ("3221225472 bytes went past the page cache", "3.0 times", "o_direct=False"),
        ),
        (
            with_stats(replace(FINE, capacity=2 * GIB), bytes_written=GIB),
            ("2.0 times", "o_direct=False"),
        ),
        (
            replace(FINE, o_direct=False, stats=AGAIN),
            ("read 3.0 times on average", "700000 lines", "25% of the array", 'cache="1088 MiB"'),
        ),
        (
            replace(FINE, o_direct=False, device_free_bytes=MIB, stats=AGAIN),
            ('host_memory="832 MiB"',),
        ),
        (
            with_stats(replace(FINE, host_memory=GIB // 4), tier_hits=100, tier_lines=200_000),
            ("The host tier answered 0.0% of 262144 misses", "268435456"),
        ),
        (
            with_stats(replace(FINE, host_memory=GIB // 4, on_cpu=True), tier_hits=100_000),
            ("100000 misses were answered by a host tier", 'cache="512 MiB"'),
        ),
        (
            replace(FINE, calls=5000, rows=6000),
            ("5000 calls moved 1.2 rows each", "many indices at a time"),
        ),
    ],
)
def test_advice_names_the_figure_and_the_way_out(usage: Usage, told: tuple[str, ...]) -> None:
    found = advise(usage)

    assert len(found) == 1
    for part in told:
        assert part in found[0]
    assert found[0].endswith(".")


# The figures are those of real arrays, whose reads take commands as those past the page cache do.


def opened(folder: Path, columns: int, mib: int = 16, **options: Any) -> fw.Array:
    path = folder / "x.npy"
    np.save(path, np.zeros((mib * MIB // (8 * columns), columns), np.int64))
    return fw.open(
        path, device="cpu", controller=fw.nvme.SoftwareController(commands=True), **options
    )


def test_short_rows_that_are_copied_out_of_the_page_cache_are_advised_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones((4096, 64), np.int64))
    with fw.open(path, device="cpu", cache="1 MiB", o_direct=False) as x:
        for seed in range(4):
            x.gather(np.random.default_rng(seed).permutation(len(x)))

        assert x.stats.io_amplification == 1
        assert x.explain().advice == ()


def test_short_rows_at_random_are_advised_a_line_that_fits(tmp_path: Path) -> None:
    with opened(tmp_path, 64, cache="1 MiB", o_direct=False) as x:
        assert x.explain().advice == ()

        x.gather(np.random.default_rng(1).permutation(len(x))[:8192])
        # A busy machine may have another sentence, on memory that others take meanwhile.
        (sentence,) = (each for each in x.explain().advice if "for each byte used" in each)

        assert f"{x.stats.io_amplification:.1f} bytes were read for each byte used" in sentence
        assert "line=512 " in sentence
        assert f"advice      {sentence}" in str(x.explain())


def test_the_line_that_was_advised_silences_it(tmp_path: Path) -> None:
    with opened(tmp_path, 64, cache="1 MiB", o_direct=False, line=512) as x:
        x.gather(np.random.default_rng(1).permutation(len(x))[:8192])

        assert x.stats.io_amplification < 2
        assert x.explain().advice == ()


def test_reading_in_order_is_advised_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, 64, cache="1 MiB", o_direct=False) as x:
        for first in range(0, len(x), 4096):
            x[first : first + 4096]

        assert x.explain().advice == ()
        assert "advice" not in str(x.explain())


def test_long_rows_are_advised_long_lines(tmp_path: Path) -> None:
    with opened(tmp_path, 2048, cache="8 MiB", o_direct=False, line=4096) as x:
        x.gather(np.random.default_rng(1).permutation(len(x)))

        (sentence,) = x.explain().advice
        assert f"{x.stats.commands} commands" in sentence
        assert "line=16384 needs 1." in sentence


def test_rows_read_again_past_the_page_cache_are_advised_to_go_through_it(tmp_path: Path) -> None:
    np.save(tmp_path / "probe.npy", np.zeros(1024))
    refusal = _native.direct_io_alignment(str(tmp_path / "probe.npy"))
    if isinstance(refusal, str):
        pytest.skip(f"no O_DIRECT here: {refusal}")
    with opened(tmp_path, 512, mib=4, cache="3 MiB", o_direct=True) as x:
        for seed in range(12):
            x.gather(np.random.default_rng(seed).permutation(len(x)))

        advice = x.explain().advice
        assert any("o_direct=False" in sentence for sentence in advice)
        assert any(f"{x.stats.evictions} lines were evicted" in sentence for sentence in advice)


def test_calls_of_a_row_each_are_advised_to_be_fewer(tmp_path: Path) -> None:
    with opened(tmp_path, 512, mib=1) as x:
        for n in range(1000):
            x[n % len(x)]

        (sentence,) = x.explain().advice
        assert "1000 calls moved 1.0 rows each" in sentence


def test_memory_that_is_mapped_is_advised_nothing_about_lines() -> None:
    memory = Memory(16 * MIB)
    with fw.open(memory, "r+", "i8", (256, 8192), device="cpu", cache="8 MiB") as x:
        for _ in range(8):
            x.gather(np.arange(len(x)))

        assert x.explain().advice == ()
