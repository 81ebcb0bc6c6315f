"""Waits until versions are durable, in the folder or in the remote store, and the last one of all.

A version that could not be written is tried again in the background. A wait does not outlast a
failure: it raises it.
"""

from __future__ import annotations

from typing import Any

from flashwarp.checkpoint.core import Core
from flashwarp.checkpoint.flushing import retry_now
from flashwarp.checkpoint.tier import Entry


class Durability:
    """Waits of one checkpointer."""

    def __init__(self, core: Core, path: str, remote: Any) -> None:
        self._core = core
        self._path = path
        self._remote = remote

    def wait(self, entries: list[Entry], tier: str, timeout_s: float | None) -> None:
        """Wait until versions are in "ssd" or "remote"; called under the lock."""
        core = self._core
        if tier == "remote":
            for entry in entries:
                # The remote store may have these, from an earlier run: the upload compares them.
                if entry.stored and not entry.remote and entry not in core.queues["remote"]:
                    core.remote_failures.pop(entry, None)
                    core.queues["remote"].append(entry)
            core.wake()

        def open_ones() -> list[Entry]:
            there = [each for each in entries if not each.discarded]
            return [each for each in there if not (each.stored and (tier == "ssd" or each.remote))]

        def failed() -> Entry | None:
            return next((each for each in open_ones() if self._failure_of(each, tier)), None)

        def what() -> str:
            left = open_ones()
            where = "in the remote store" if tier == "remote" else f"durable in {self._path}"
            return f"{len(left)} versions are not {where}, the first is {left[0]}"

        core.wait_for(
            lambda: not open_ones() or failed() is not None, what, timeout_s, flushes_first=True
        )
        found = failed()
        if found is not None:
            future = core.futures.get(found)
            if future is not None:
                future.observed = True
            failure = self._failure_of(found, tier)
            assert failure is not None
            raise failure

    def _failure_of(self, entry: Entry, tier: str) -> BaseException | None:
        if not entry.stored:
            return entry.failure
        return self._core.remote_failures.get(entry) if tier == "remote" else None

    def drain(self, timeout_s: float) -> None:
        """Wait until all versions are durable, or were tried once more; raises what is lost."""
        core = self._core
        with core.locked():
            began_ns = core.now_ns()

            def tried() -> bool:
                """Whether all that is not durable was tried once more, and failed."""
                retry_now(core, began_ns)
                return all(each.failure and each.failed_ns >= began_ns for each in core.lost())

            core.wait_for(
                tried,
                lambda: f"{len(core.lost())} versions are not durable in {self._path}",
                timeout_s,
                flushes_first=True,
            )
            lost = core.lost()
            if lost:
                failure = lost[0].failure
                assert failure is not None
                for entry in lost:
                    future = core.futures.get(entry)
                    if future is not None:
                        future.observed = True
                failure.add_note(
                    f"{len(lost)} versions are lost by closing, the first is {lost[0]}"
                )
                raise failure
            if self._remote is not None:
                on_their_way = {*core.queues["remote"], *core.busy, *core.remote_failures}
                self.wait(
                    [each for each in core.entries.values() if each in on_their_way],
                    "remote",
                    timeout_s,
                )
