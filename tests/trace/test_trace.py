"""Traces: what is recorded, the optimum beside every policy, and the commands."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashwarp as fw
import flashwarp.trace
from flashwarp.cli import main as cli
from flashwarp.errors import ArgumentError, CacheError, FileFormatError, MissingFileError
from flashwarp.trace import Trace, compare, make, min_misses, min_misses_in_sets, replay
from flashwarp.trace.compare import plot

# Belady's optimum.


def fewest_misses(lines: tuple[int, ...], capacity: int) -> int:
    """By trying every choice of victims."""
    states = {frozenset[int](): 0}
    for line in lines:
        following: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            if line in held:
                choices = [held]
            elif len(held) < capacity:
                choices = [held | {line}]
            else:
                choices = [held - {victim} | {line} for victim in held]
            for choice in choices:
                count = misses + (line not in held)
                following[choice] = min(count, following.get(choice, count))
        states = following
    return min(states.values())


@settings(max_examples=150, deadline=None)
@given(lines=st.lists(st.integers(0, 5), max_size=12), capacity=st.integers(1, 4))
def test_no_choice_of_victims_misses_less_than_min(lines: list[int], capacity: int) -> None:
    assert min_misses(np.array(lines, np.int64), capacity) == fewest_misses(tuple(lines), capacity)


def test_min_in_sets_is_the_sum_over_the_sets() -> None:
    lines = np.random.default_rng(1).integers(0, 30, 300)

    apart = sum(min_misses(lines[lines % 3 == number], 4) for number in range(3))

    assert min_misses_in_sets(lines, 3, 4) == apart >= min_misses(lines, 12)
    assert min_misses_in_sets(np.empty(0, np.int64), 3, 4) == 0


@pytest.mark.parametrize("policy", ["clock", "lru", "fifo", "sieve", "s3_fifo", "random"])
def test_no_policy_beats_the_optimum_of_its_sets(policy: str) -> None:
    for name, ways in itertools.product(("zipf", "scan+zipf", "loop"), (4, 16)):
        trace = make(name, accesses=20_000)
        done = replay(trace, policy, capacity_lines=400, ways=ways)
        lines = trace.numbered_densely().lines

        assert done.misses >= min_misses_in_sets(lines, done.capacity_lines // ways, ways)


def test_bad_capacities_are_refused() -> None:
    with pytest.raises(ArgumentError, match="0 lines"):
        min_misses(np.arange(3), 0)
    with pytest.raises(ArgumentError, match="0 sets"):
        min_misses_in_sets(np.arange(3), 0, 4)
    with pytest.raises(ArgumentError, match="no set of 8 ways"):
        replay(make("loop", 10), capacity_lines=7, ways=8)
    with pytest.raises(CacheError, match="ways=5"):
        replay(make("loop", 10), capacity_lines=50, ways=5)


# What is recorded.


def test_rows_become_the_lines_that_they_touch() -> None:
    trace = fw.trace.trace_of_indices(np.array([[0, 2], [1, 0]]), 1536, line_bytes=1024, name="x")

    assert trace.lines.tolist() == [0, 1, 3, 4, 1, 2, 0, 1]
    assert (trace.footprint, trace.line_bytes, trace.name) == (5, 1024, "x")


@pytest.mark.parametrize(
    ("indices", "row_bytes", "line_bytes", "why"),
    [
        ([0.5], 4, 4096, "must be integers"),
        ([-1], 4, 4096, "-1 is negative"),
        ([1], 0, 4096, "rows of 0 bytes"),
        ([1], 4, 1000, "no power of two"),
        ([1 << 50], 4096, 512, "leave 0 to"),
    ],
)
def test_what_is_no_gather_is_refused(
    indices: list[float], row_bytes: int, line_bytes: int, why: str
) -> None:
    with pytest.raises(ArgumentError, match=why):
        fw.trace.trace_of_indices(indices, row_bytes, line_bytes=line_bytes)


def test_calls_of_an_array_are_recorded_in_order(tmp_path: Path) -> None:
    with fw.create(tmp_path / "x.npy", np.float32, (100, 256), device="cpu", line=1024) as x:
        x.gather(np.array([9]))
        with fw.trace.record(x) as seen:
            x.gather(np.array([5, -1], np.int64))
            x.gather(np.array([[7]], np.int32))
            x[2:4] = 1
            x.prefetch(np.array([50]))
            _ = x[10]
            x.scatter(np.array([5]), np.ones((1, 256)))
        x.gather(np.array([8]))

        assert seen.trace().lines.tolist() == [5, 99, 7, 2, 3, 10, 5]
        assert seen.trace().line_bytes == 1024


def test_asynchronous_calls_are_recorded(tmp_path: Path) -> None:
    with fw.create(tmp_path / "x.npy", np.float32, (100, 256), device="cpu", line=1024) as x:
        with fw.trace.record(x) as seen:
            x.gather_async(np.array([5, 6])).result()

        assert seen.trace().lines.tolist() == [5, 6]


def test_recorded_trace_misses_as_often_as_the_array_did(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).zipf(1.2, 3000) % 200
    data = np.zeros((200, 128), np.float32)
    with (
        fw.device.CpuDevice(threads=1) as device,
        fw.Cache(5 * 8 * 512, 512, 8, "lru", device) as cache,
        fw.open(fw.storage.Memory(data), "r+", np.float32, data.shape, cache=cache) as x,
    ):
        with fw.trace.record(x) as seen:
            for part in np.split(rows, 3):
                x.gather(part)
        misses = x.stats.misses

    # All rows occur, so numbering the trace densely changes nothing.
    assert seen.trace().footprint == 200
    assert replay(seen.trace(), "lru", capacity_lines=40, ways=8).misses == misses


def test_file_gives_the_trace_again(tmp_path: Path) -> None:
    trace = make("zipf", accesses=100)
    trace.save(tmp_path / "t.npz")

    again = Trace.load(tmp_path / "t.npz")

    assert again.lines.tolist() == trace.lines.tolist()
    assert (again.line_bytes, again.name) == (trace.line_bytes, "zipf")


def test_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        Trace.load(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("no zip file")
    np.save(tmp_path / "array.npy", np.arange(3))
    np.savez(tmp_path / "other.npz", lines=np.arange(3))
    np.savez(tmp_path / "old.npz", version=9, lines=np.arange(3), line_bytes=512, name="x")
    np.savez(tmp_path / "bad.npz", version=1, lines=np.ones(3), line_bytes=512, name="x")
    for name, told in {
        "text.npz": "is text, not a trace",
        "array.npy": "is a .npy file, not a trace",
        "other.npz": "cut short or damaged, or another archive",
        "old.npz": "version 9, and this flashwarp reads version 1",
        "bad.npz": "not float64",
    }.items():
        with pytest.raises(FileFormatError, match=f"{name} .*{told}.*flashwarp.trace.record"):
            Trace.load(tmp_path / name)


@pytest.mark.parametrize("name", ["zipf", "scan+zipf", "loop"])
def test_made_trace_is_the_same_for_the_same_seed(name: str) -> None:
    trace = make(name, accesses=5000)

    assert len(trace) == 5000
    assert trace.lines.tolist() == make(name, accesses=5000).lines.tolist()
    if name != "loop":
        assert trace.lines.tolist() != make(name, accesses=5000, seed=2).lines.tolist()
    with pytest.raises(ArgumentError, match="no trace is called"):
        make("absent")


def test_search_reads_each_vertex_list_once() -> None:
    from flashwarp.trace.synthetic import _search

    # 0 - 1, 0 - 2, 1 - 3; line 0 holds 128 entries.
    neighbours = np.array([1, 2, 0, 3, 0, 1], np.uint32)
    offsets = np.array([0, 2, 4, 5, 6])

    levels = _search(offsets, neighbours, 0)

    assert [level.tolist() for level in levels] == [[0], [0, 0], [0]]


# Comparisons.


def test_comparison_has_every_policy_and_both_bounds(tmp_path: Path) -> None:
    result = compare(make("zipf", accesses=5000), capacities=(100, 400), ways=4)

    names = ["clock", "lru", "fifo", "sieve", "s3_fifo", "random", "MIN in sets", "MIN"]
    assert list(result.hit_rates) == names
    assert result.capacities == (100, 396)
    for at in range(2):
        rates = [rates[at] for rates in result.hit_rates.values()]
        assert max(rates[:-2]) <= rates[-2] <= rates[-1] < 1
    json.dumps(result.as_dict())


def test_plot_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = compare(make("loop", accesses=3000), policies=("lru",), ways=4)

    plot([result] * 3, tmp_path / "x.png")
    plot([result], tmp_path / "x.svg")

    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "x.svg").read_bytes()
    with pytest.raises(ArgumentError, match=r"x\.nonsense"):
        plot([result], tmp_path / "x.nonsense")


def test_plot_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = compare(make("loop", accesses=3000), policies=("lru",), ways=4)

    with pytest.raises(MissingFileError, match=r"pip install 'flashwarp\[plot\]'"):
        plot([result], tmp_path / "x.png")


def test_empty_trace_cannot_be_compared() -> None:
    with pytest.raises(ArgumentError, match="empty"):
        compare(Trace(np.empty(0, np.int64), 512, "empty"))


# The commands.


def run(*arguments: object) -> None:
    cli.run(["trace", *map(str, arguments)])


def test_commands_record_replay_and_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indices, rows, output = (tmp_path / name for name in ("i.npy", "rows.npy", "t.npz"))
    np.save(indices, np.arange(3000) % 300)
    np.save(rows, np.zeros((300, 1024), np.float32))

    run("record", indices, output, "--rows-of", rows)
    assert "3,000 accesses to 300 lines" in capsys.readouterr().out
    run("replay", output, "--policy", "lru", "--lines", 1000, "--ways", 4)
    replayed = capsys.readouterr().out
    run("compare", output, "--policies", "lru,sieve", "--sizes", "60", "--json", tmp_path / "c")
    compared = capsys.readouterr().out
    run("compare", output, "--policies", "lru", "--sizes", "60", "--json")
    printed = json.loads(capsys.readouterr().out)["comparisons"][0]

    assert printed["capacities"] == [56]
    assert "2,700 of 3,000 accesses hit (90.00%)" in replayed
    assert "sieve" in compared
    assert "clock" not in compared
    stored = json.loads((tmp_path / "c").read_text())["comparisons"][0]
    assert (stored["trace"], stored["capacities"]) == ("i", [56])


def test_commands_say_what_is_missing(tmp_path: Path) -> None:
    np.save(tmp_path / "i.npy", np.array([5]))
    np.save(tmp_path / "rows.npy", np.zeros((3, 4)))
    i, rows, out = tmp_path / "i.npy", tmp_path / "rows.npy", tmp_path / "o.npz"

    with pytest.raises(ArgumentError, match="either --rows-of or --row-bytes"):
        run("record", i, out)
    with pytest.raises(ArgumentError, match="index 5 is beyond the 3 rows"):
        run("record", i, out, "--rows-of", rows)
    with pytest.raises(MissingFileError):
        run("record", tmp_path / "absent.npy", out, "--row-bytes", 4)
    with pytest.raises(FileFormatError):
        run("replay", i)
    with pytest.raises(ArgumentError, match="'many' is not a number"):
        run("compare", "loop", "--sizes", "many")
    with pytest.raises(CacheError, match="none of"):
        run("replay", "loop", "--policy", "mru")


def test_a_damaged_trace_is_a_typed_error_or_a_trace(tmp_path: Path) -> None:
    path, draw = tmp_path / "t.npz", random.Random(1)
    Trace(np.arange(300) % 7, 4096, "sound").save(path)
    sound, refused = path.read_bytes(), 0

    for _ in range(600):
        damaged = bytearray(sound)
        for _ in range(draw.choice([1, 1, 3])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])
        try:
            found = Trace.load(path)
        except FileFormatError:
            refused += 1
        else:
            assert found.lines.max() < 7
    assert refused > 100


@pytest.mark.parametrize("line_bytes", [0, -4096, "4096", 1.5])
def test_lines_of_no_size_are_refused(line_bytes: Any) -> None:
    with pytest.raises(ArgumentError, match="line_bytes"):
        Trace(np.arange(3), line_bytes, "none")
