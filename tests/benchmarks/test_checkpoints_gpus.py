"""Shots of several processes at a time: rows, what is left out, and processes that fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.base import Record
from benchmarks.checkpoints import checkpoints
from benchmarks.checkpoints import gpus as checkpoints_gpus
from flashwarp.errors import FlashwarpError

SMALL: dict[str, Any] = {
    "parts": "gpus",
    "mib": 3,
    "steps": 12,
    "intervals_ms": "0.1",
    "sizes": "variable",
    "orders": "irregular",
    "hints": "all",
    "state": "1 MiB",
}


def test_two_processes_restore_what_they_wrote(tmp_path: Path) -> None:
    report = checkpoints.run("cpu", tmp_path, **SMALL)

    plan = "variable (sigma 0.3) irregular, 0.1 ms, at once, hints: all"
    names = [
        f"{what}, {count}, {coupling}, {plan}"
        for count in ("1 GPU", "2 GPUs")
        for coupling in ("no barrier", "a barrier in each step")
        for what in ("restore", "shots")
    ]
    assert [row.name for row in report.rows] == names
    assert [row.checked for row in report.rows] == [True, None] * 4
    assert all(row.value > 0 and row.reference > 0 for row in report.rows)
    assert list(tmp_path.iterdir()) == []


def test_gpus_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_gpus.cuda_api, "device_count", lambda: 0)
    report = Record("gpus", "none", {}, {})

    class Gpu:
        kind = "cuda"

    checkpoints_gpus.add_gpus(
        report, Gpu(), tmp_path, 1, 1, [1, 2], [], checkpoints_gpus.Links(1, 1, 1, 1, 1)
    )

    assert report.settings["left out"] == {
        "1 GPU at a time": "the driver sees 0 GPUs",
        "2 GPUs at a time": "the driver sees 0 GPUs",
    }


def test_a_process_that_fails_is_told() -> None:
    failed = pytest.raises(FlashwarpError, match=r"rank \d has failed:\n(.*\n)*.*'plan'")
    with checkpoints_gpus._processes(["cpu"] * 2) as ask, failed:
        ask("no order")


def test_a_process_that_dies_is_told() -> None:
    died = pytest.raises(FlashwarpError, match="rank 0 has died")
    with checkpoints_gpus._processes(["cpu"]) as ask, died:
        ask(_Killer())


class _Killer:
    """Ends the process that receives it."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)
