"""Checkpointers in the folder of a test, closed at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.faults import WAIT_S, Faults, FaultyDirectory, Opener
from flashwarp.checkpoint import system
from flashwarp.checkpoint.checkpointer import Checkpointer


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    found = Faults()
    monkeypatch.setattr(FaultyDirectory, "faults", found)
    monkeypatch.setattr(system, "Directory", FaultyDirectory)
    yield found
    found.release()


@pytest.fixture
def opened(tmp_path: Path, faults: Faults) -> Iterator[Opener]:
    """Open checkpointers in the test's folder; they are closed at its end, whatever failed."""
    made: list[Checkpointer] = []

    def make(
        gpu_memory: int | str = "64 KiB", host_memory: int | str = "256 KiB", **options: Any
    ) -> Checkpointer:
        options.setdefault("config", {"timeout_s": WAIT_S})
        options["config"] = {"timeout_s": WAIT_S, **options["config"]}
        path = options.pop("path", tmp_path / "versions")
        made.append(Checkpointer(path, "cpu", gpu_memory, host_memory, **options))
        return made[-1]

    yield make
    faults.release()
    for each in made:
        with contextlib.suppress(Exception):
            each.close(drain=False)
