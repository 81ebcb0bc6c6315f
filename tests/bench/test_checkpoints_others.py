"""Each other way to save a state or a shot runs, restores what it wrote, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is an extra")

from flashwarp.bench import checkpoints_others as others
from flashwarp.bench.checkpoints_shots import Links, sizes_of
from flashwarp.device import resolve
from flashwarp.probe.report import Report

LINKS = Links(1e10, 1e10, 1e10, 1e9, 1e9)
PACKAGES = {"orbax": "orbax.checkpoint"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("default"),  # of libraries that this one does not control
]


def empty() -> Report:
    return Report(title="others", device="cpu", settings={}, seeds={})


@pytest.mark.parametrize("way", others.WAYS)
def test_a_state_is_saved(way: str, tmp_path: Path) -> None:
    if way in PACKAGES:
        pytest.importorskip(PACKAGES[way])
    report = empty()

    others.add_state(report, resolve("cpu"), tmp_path, 1 << 20, 1e-3, lambda: False, [way])

    assert "left out" not in report.settings
    assert [row.reference_name for row in report.rows] == [way]
    assert list(tmp_path.iterdir()) == []


def test_a_shot_is_restored(tmp_path: Path) -> None:
    report = empty()

    others.add_shot(
        report, resolve("cpu"), tmp_path, sizes_of("uniform", 12, 3 << 20, 0), LINKS, lambda: False
    )

    left_out = report.settings.get("left out", {})
    assert left_out in ({}, {"adios2": "not installed"})
    assert len(report.rows) == 2 - len(left_out)
    assert report.wrong == []
    assert all(row.checked for row in report.rows)
    assert list(tmp_path.iterdir()) == []


def test_what_comes_too_late_is_said(tmp_path: Path) -> None:
    report = empty()

    others.add_state(report, resolve("cpu"), tmp_path, 1 << 20, 1e-3, lambda: True, others.WAYS)

    assert report.settings["left out"] == dict.fromkeys(others.WAYS, "no time was left")
    assert report.rows == []
