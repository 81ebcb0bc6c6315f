"""The simulation of many nodes against what can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.base import Record
from benchmarks.checkpoints import nodes as checkpoints_nodes
from benchmarks.checkpoints.nodes import Node, links_of, simulate
from benchmarks.checkpoints.shots import Links
from flashwarp.errors import ArgumentError

NODE = Node(Links(1e12, 25e9, 25e9, 1e9, 2e9), 100_000_000, 48, (4, 32), 0.01)


@pytest.fixture(autouse=True)
def no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_nodes, "_SPREAD", 0.0)


def test_without_links_a_shot_takes_its_computation() -> None:
    fast = replace(NODE, links=Links(1e15, 1e15, 1e15, 1e15, 1e15))
    for order in ("sequential", "reverse", "irregular"):
        found = simulate(fast, 1, order, coupled=False, hints=True)
        assert found.end_s == pytest.approx(2 * 48 * 0.01, rel=0.001)
        assert found.read_s < 0.001


def test_a_forward_pass_waits_for_what_the_caches_do_not_hold() -> None:
    found = simulate(NODE, 1, "reverse", coupled=False, hints=False)
    spilled_s = (48 - 4 - 32) * NODE.nbytes / 1e9

    assert found.write_s + 48 * 0.01 == pytest.approx(spilled_s, rel=0.1)


def test_restores_without_hints_take_what_their_links_take() -> None:
    found = simulate(NODE, 1, "reverse", coupled=False, hints=False)
    up_s = 32 * NODE.nbytes / 25e9
    read_s = 12 * NODE.nbytes / 2e9

    assert found.read_s == pytest.approx(up_s + read_s, rel=0.1)


@pytest.mark.parametrize("order", ["sequential", "reverse", "irregular"])
def test_hints_hide_reads_but_not_more_than_the_link_allows(order: str) -> None:
    without = simulate(NODE, 1, order, coupled=False, hints=False)
    hinted = simulate(NODE, 1, order, coupled=False, hints=True)

    assert hinted.read_s < without.read_s
    if order == "reverse":
        assert hinted.read_s >= 12 * NODE.nbytes / 2e9 - 48 * 0.01


def test_nodes_that_share_nothing_take_as_long_as_one() -> None:
    one = simulate(NODE, 1, "irregular", coupled=False, hints=True)
    many = simulate(NODE, 20, "irregular", coupled=False, hints=True)

    assert many.end_s == pytest.approx(one.end_s)


def test_a_barrier_makes_all_wait_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_nodes, "_SPREAD", 0.2)
    alone = simulate(NODE, 20, "irregular", coupled=False, hints=True)
    coupled = simulate(NODE, 20, "irregular", coupled=True, hints=True)

    assert coupled.end_s > alone.end_s


def test_links_come_from_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"settings": {"measured_bytes_per_s": vars(NODE.links)}}))
    assert links_of(str(path)) == NODE.links

    row = {"name": "shots, uniform reverse, 30 ms, at once, hints: all", "value": 0.3}
    settings = {"measured_bytes_per_s": vars(NODE.links), "steps": 36, "shot_bytes": 36 << 20}
    path.write_text(json.dumps({"settings": settings, "rows": [row, row | {"name": "other"}]}))
    report = Record("t", "d", {}, {})
    checkpoints_nodes.add_checks(report, str(path))
    (found,) = report.rows
    assert found.name == "simulated: the measured node, reverse, 30 ms, hints: all"
    assert found.value == pytest.approx(1 / (2 * 36 * 0.03), rel=0.05)
    assert found.reference == 0.3

    path.write_text("{}")
    with pytest.raises(ArgumentError, match=r"record\.json' is no record"):
        links_of(str(path))
