"""Any order of calls, with real threads and tiny caches, against a dict; storage fails at times."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from checkpoint.faults import Faults, FaultyDirectory
from checkpoint.fragments import check
from flashwarp.checkpoint import system
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.life import Fact
from flashwarp.errors import ExistingVersionError, MissingVersionError, PathError

VERSIONS = st.integers(0, 12)
WAIT_S = 60.0


class AnyOrder(RuleBasedStateMachine):
    """The dict is the oracle: which versions exist, and what each holds."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = FaultyDirectory.faults = Faults()
        self.folder = tempfile.mkdtemp()
        self.kept: dict[int, tuple[int, float]] = {}
        self.written = 0
        self.content = (0, 0.0)

    @initialize(
        gpu_kib=st.sampled_from([0, 16, 32, 48]),
        host_kib=st.sampled_from([0, 16, 32, 64]),
        eviction=st.sampled_from(["score", "lru", "fifo"]),
        restarts_once=st.booleans(),
    )
    def open(self, gpu_kib: int, host_kib: int, eviction: str, restarts_once: bool) -> None:
        self.how = (
            "cpu",
            gpu_kib << 10,
            host_kib << 10,
            None,
            0,
            {
                "eviction": eviction,
                "timeout_s": WAIT_S,
                "retry_s": 0.005,
                "passed_max": 3,
                "discard_consumed": restarts_once,
            },
        )
        self.restarts_once = restarts_once
        self.checkpointer = Checkpointer(self.folder, *self.how)

    def packed(self) -> np.ndarray:
        size, value = self.content
        return np.full(size, value)

    @rule(version=VERSIONS, size=st.integers(1, 5000), overlap=st.booleans())
    def checkpoint(self, version: int, size: int, overlap: bool) -> None:
        self.checkpointer.protect("packed", self.packed)
        self.written += 1
        self.content = size, float(self.written)
        if version in self.kept:
            with pytest.raises(ExistingVersionError):
                self.checkpointer.checkpoint(version)
            return
        try:
            self.checkpointer.checkpoint(version, overlap=overlap)
            self.checkpointer.wait_staged()
        except PathError:
            assert self.faults.write_error is not None
            assert version not in self.checkpointer.versions()
        else:
            self.kept[version] = self.content

    @rule(version=VERSIONS)
    def restart(self, version: int) -> None:
        if version not in self.kept:
            with pytest.raises(MissingVersionError):
                self.checkpointer.restart(version)
            return
        size, value = self.kept[version]
        assert self.checkpointer.recover_size(version, "packed") == size * 8
        restored = self.checkpointer.restart(version)["packed"]
        assert restored.shape == (size,)
        assert (restored == value).all()
        if self.restarts_once:
            del self.kept[version]

    @rule(version=VERSIONS)
    def discard(self, version: int) -> None:
        if version in self.kept:
            self.checkpointer.discard(version)
            del self.kept[version]
        else:
            with pytest.raises(MissingVersionError):
                self.checkpointer.discard(version)

    @rule(versions=st.lists(VERSIONS, max_size=6), start=st.booleans())
    def hint(self, versions: list[int], start: bool) -> None:
        for version in versions:
            self.checkpointer.prefetch_enqueue(version)
        if start:
            self.checkpointer.prefetch_start()

    @rule(fails=st.booleans())
    def storage(self, fails: bool) -> None:
        self.faults.write_error = PathError(errno.ENOSPC, "full", "folder") if fails else None

    @rule()
    def wait(self) -> None:
        if self.faults.write_error is None:
            # A flush that failed before may have its next try still before it.
            with contextlib.suppress(PathError):
                self.checkpointer.wait()

    @rule()
    def reopen(self) -> None:
        self.faults.write_error = None
        self.checkpointer.close()
        self.checkpointer = Checkpointer(self.folder, *self.how)

    @invariant()
    def all_versions_are_known(self) -> None:
        if hasattr(self, "checkpointer"):
            assert self.checkpointer.versions() == sorted(self.kept)

    @invariant()
    def tiers_are_consistent(self) -> None:
        if not hasattr(self, "checkpointer"):
            return
        core = self.checkpointer._core
        with core.changed:
            for tier in core.tiers:
                check(tier.table)
                owners = [owner for owner in tier.table.owners() if owner is not None]
                assert set(owners) == set(tier.lives)
            for entry in core.entries.values():
                lives = [tier.lives[entry] for tier in core.tiers if entry in tier.lives]
                resident = any(Fact.RESIDENT in life.facts for life in lives)
                filling = any(Fact.WRITING in life.facts for life in lives)
                assert resident or filling or entry.stored, f"{entry} is nowhere"
                for life in lives:
                    assert (Fact.READING in life.facts) == (life.readers > 0)

    def teardown(self) -> None:
        self.faults.write_error = None
        try:
            if hasattr(self, "checkpointer"):
                card = self.checkpointer.stats.hints
                assert card.hints == card.honoured + card.wrong + card.open
                self.checkpointer.close()
                with Checkpointer(self.folder, "cpu", 0, 0) as last:
                    assert last.versions() == sorted(self.kept)
                    for version, (size, value) in self.kept.items():
                        assert (last.restart(version)["packed"] == np.full(size, value)).all()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def test_any_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "Directory", FaultyDirectory)

    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
