"""Each other way to save a state or a shot runs, restores what it wrote, and leaves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is an extra")

from benchmarks.base import Record
from benchmarks.checkpoints import others
from benchmarks.checkpoints.shots import Links, sizes_of
from flashwarp.device import resolve

LINKS = Links(1e10, 1e10, 1e10, 1e9, 1e9)
PACKAGES = {"orbax": "orbax.checkpoint"}
NAMES = {
    "thread": "dcp.async_save, a thread",
    "save": "torch.save",
    "process": "dcp.async_save, a process and pinned memory",
    "orbax": "orbax",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("default"),  # of libraries that this one does not control
]


def empty() -> Record:
    return Record(title="others", device="cpu", settings={}, seeds={})


@pytest.mark.parametrize("way", others.STATES)
def test_a_state_is_saved(way: str, tmp_path: Path) -> None:
    if way in PACKAGES:
        pytest.importorskip(PACKAGES[way])
    report = empty()

    others.add_state(report, resolve("cpu"), tmp_path, 1 << 20, 1e-3, [way])

    assert "left out" not in report.settings
    assert [row.reference_name for row in report.rows] == [NAMES[way]]
    assert list(tmp_path.iterdir()) == []


def test_a_shot_is_restored(tmp_path: Path) -> None:
    report = empty()

    others.add_shot(
        report,
        resolve("cpu"),
        tmp_path,
        sizes_of("uniform", 12, 3 << 20, 0),
        LINKS,
        others.SHOTS,
    )

    left_out = report.settings.get("left out", {})
    assert left_out in ({}, {"adios2": "not installed"})
    assert len(report.rows) == 2 - len(left_out)
    assert report.wrong == []
    assert all(row.checked for row in report.rows)
    assert list(tmp_path.iterdir()) == []


def test_what_comes_too_late_is_said(tmp_path: Path) -> None:
    report = empty()
    report.end_in(-1)

    others.add_state(report, resolve("cpu"), tmp_path, 1 << 20, 1e-3, others.STATES)

    assert report.settings["left out"] == dict.fromkeys(NAMES.values(), "no time was left")
    assert report.rows == []


def test_a_torch_whose_stager_closes_its_copier_saves_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch before 2.13 does so at the end of each save, and the second one failed.
    import torch.distributed.checkpoint.staging as staging

    stage, closed = staging.DefaultStager.stage, []

    def closing(self: Any, *arguments: Any, **options: Any) -> Any:
        staged = stage(self, *arguments, **options)
        self._state_dict_stager.close()
        closed.append(self)
        return staged

    monkeypatch.setattr(staging.DefaultStager, "stage", closing)
    report = empty()

    others.add_state(report, resolve("cpu"), tmp_path, 1 << 20, 1e-3, ["process"])

    assert "left out" not in report.settings
    assert len(closed) == 2
