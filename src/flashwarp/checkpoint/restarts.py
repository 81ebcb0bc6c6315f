"""Restarts: a version that is named, or the newest that is whole, into the user's arrays."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from flashwarp import endings
from flashwarp.checkpoint.lookup import Lookup
from flashwarp.checkpoint.protected import RegionSet
from flashwarp.checkpoint.restoring import Restore, Restorer
from flashwarp.checkpoint.stager import Stager
from flashwarp.checkpoint.system import System
from flashwarp.checkpoint.targets import give, targets_of
from flashwarp.checkpoint.tier import Key
from flashwarp.config import SIZE_MAX
from flashwarp.errors import CheckpointError


class Restarts:
    """Restarts of one checkpointer. Any thread may call."""

    def __init__(self, system: System, lookup: Lookup, stager: Stager, regions: RegionSet) -> None:
        self._core = system.core
        self._system = system
        self._lookup = lookup
        self._stager = stager
        self._regions = regions
        self._restorer = Restorer(self._core, system.storing)
        # Versions that `latest` could not read.
        self._passed: set[Key] = set()

    def restart(
        self, key: Key, only: Iterable[str] | None, into: Mapping[str, object] | None
    ) -> dict[str, Any]:
        """Restore a version, and return what was filled."""
        began_ns = time.monotonic_ns()
        self._lookup.know(key[0])
        core = self._core
        with core.kept(key):
            entry = self._lookup.load(key)
            targets = targets_of(entry, only, dict(into or {}), self._regions, core.mover.device)
            restore = Restore(entry)
            try:
                with core.locked():
                    core.check_usable()
                    self._restorer.begin(restore)
                arrays = [target for target, _ in targets]
                pending = self._restorer.read(restore, arrays)
                self._stager.settle(pending, arrays, partial(self._end, restore))
            except BaseException:
                with core.locked():
                    self._restorer.end(restore, done=False)
                raise
        with core.locked():
            core.counts["restart_bytes"] += sum(target.region.nbytes for target, _ in targets)
            core.counts["restart_ns"] += time.monotonic_ns() - began_ns
        return give(targets, self._regions)

    def _end(self, restore: Restore, done: bool) -> None:
        core = self._core
        with core.locked():
            self._restorer.end(restore, done=done)
        if done and core.settings.discard_consumed:
            endings.uninterrupted(partial(self._system.discard, restore.entry))

    def latest(
        self, name: str, only: Iterable[str] | None, into: Mapping[str, object] | None
    ) -> int | None:
        """Restore the newest version that is whole, and return its number; None: there is none."""
        if not into and not self._regions.names():
            raise CheckpointError("no region is protected: call protect() before restart_latest()")
        version = self._lookup.newest(name, SIZE_MAX, verify=True)
        with self._core.locked():
            there = self._core.versions(name)
        if version is None and there:
            raise CheckpointError(
                f"none of the {len(there)} versions of {name!r} can be read, and nothing was "
                "changed: 'flashwarp ckpt verify' says what is damaged"
            )
        if version is None:
            return None
        if only is None:
            stored = {region.name for region in self._lookup.load((name, version)).regions}
            missing = [each for each in self._regions.names() if each not in stored]
            if missing:
                raise CheckpointError(
                    f"version {version} of {name!r} has no region {', '.join(map(repr, missing))}, "
                    "which would keep what it has; nothing was changed. To restore the others, "
                    f"name them: only={[each for each in self._regions.names() if each in stored]}"
                )
        self.restart((name, version), only, into)
        self._passed.update((name, each) for each in there if each > version)
        return version

    def has_passed(self, key: Key) -> bool:
        """Return, the first time, whether a version is one that `latest` could not read."""
        found = key in self._passed
        self._passed.discard(key)
        return found
