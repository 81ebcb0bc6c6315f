"""A discarded version stays discarded, whatever is under way with it and with its files."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.faults import WAIT_S, Faults, FaultyDirectory, Opener
from checkpoint.test_checkpointer import COUNT, assert_restores, history, until
from flashwarp.errors import MissingVersionError


def test_a_consumed_version_is_gone_before_its_files_are(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The files are removed in the background: a restart in between found them, and the version
    # existed again.
    removes = threading.Event()
    discard = FaultyDirectory.discard

    def later(self: FaultyDirectory, *arguments: Any) -> None:
        assert removes.wait(WAIT_S)
        discard(self, *arguments)

    monkeypatch.setattr(FaultyDirectory, "discard", later)
    checkpointer = opened(config={"discard_consumed": True})
    state = history(checkpointer, 2)
    checkpointer.wait()
    assert_restores(checkpointer, state, 1)

    with pytest.raises(MissingVersionError):
        checkpointer.restart(1)
    assert checkpointer.versions() == [0]
    removes.set()


def test_a_version_discarded_while_its_manifest_is_read_stays_discarded(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened()
    history(first, 2)
    first.close()
    looking, goes_on = threading.Event(), threading.Event()
    open_reader = FaultyDirectory.open

    def slowly(self: FaultyDirectory, *arguments: Any, **options: Any) -> Any:
        reader = open_reader(self, *arguments, **options)
        if threading.current_thread().name.endswith("catalog"):
            looking.set()
            assert goes_on.wait(WAIT_S)
        return reader

    monkeypatch.setattr(FaultyDirectory, "open", slowly)
    checkpointer = opened()
    checkpointer.prefetch_enqueue(1)
    assert looking.wait(WAIT_S)
    checkpointer.discard(1)
    checkpointer.prefetch_enqueue(0)  # the next look comes after that one
    goes_on.set()
    until(lambda: ("default", 0) in checkpointer._core.entries, "the next manifest was read")

    assert checkpointer.versions() == [0]
    with pytest.raises(MissingVersionError):
        checkpointer.restart(1)


def test_a_version_discarded_while_it_is_fetched_stays_discarded(
    opened: Opener, faults: Faults, tmp_path: Path
) -> None:
    with opened(remote=tmp_path / "store") as first:
        history(first, 2)
        first.wait(tier="remote")
    shutil.rmtree(tmp_path / "versions")
    checkpointer = opened(remote=tmp_path / "store")
    faults.hold()
    checkpointer.prefetch_enqueue(1)
    faults.until_waiting()

    checkpointer.discard(1)
    faults.release()

    state = np.full(COUNT, 7.0)
    checkpointer.protect("state", state)
    checkpointer.checkpoint(1).result(WAIT_S)
    checkpointer.discard(1)
    assert checkpointer.versions() == [0]
    checkpointer.close()
    assert opened().versions() == []
