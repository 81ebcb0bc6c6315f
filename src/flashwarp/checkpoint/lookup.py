"""Which versions there are: those that this process holds, and those of the folder."""

from __future__ import annotations

import logging

from flashwarp.checkpoint.core import Core
from flashwarp.checkpoint.directory.names import check_version
from flashwarp.checkpoint.system import System
from flashwarp.checkpoint.tier import Entry, Key
from flashwarp.errors import FlashwarpError, MissingVersionError

_log = logging.getLogger(__name__)


class Lookup:
    """Versions of one checkpointer, by name and number."""

    def __init__(self, core: Core, system: System) -> None:
        self._core = core
        self._system = system

    def know(self, name: str, *, again: bool = False) -> None:
        """List the versions of a name in the folder, the first time or again."""
        with self._core.locked():
            self._core.check_usable()
            known = name in self._core.listed
        if not known or again:
            self._system.list_versions(name)

    def entry(self, key: Key) -> Entry | None:
        """Return a version that exists, if it is known here; raises if it does not exist."""
        found = self._core.entries.get(key)
        if found is None and not self._core.exists(key):
            raise self.missing(key)
        return found

    def load(self, key: Key) -> Entry:
        """Return a version, after a look at its manifest if only storage has it."""
        with self._core.locked():
            self._core.check_usable()
            found = self._core.entries.get(key)
        # What a reader knows, another process may have written again since.
        if found is not None and not self._core.settings.read_only:
            return found
        try:
            return self._system.load(key)
        except MissingVersionError:
            raise self.missing(key) from None

    def to_wait_for(self, name: str, version: int | None, tier: str) -> list[Entry]:
        """Return a version, or all of a name, as far as they may not be durable in a tier yet."""
        core = self._core
        with core.locked():
            core.check_usable()
            numbers = core.versions(name) if version is None else [version]
            keys = [(name, check_version(number)) for number in numbers]
            found = {key: self.entry(key) for key in keys}
        for key in [key for key, entry in found.items() if entry is None]:
            # Only the folder or the remote store has it. Of the folder's, the remote may have
            # another one, and of the remote's, the folder has none.
            if tier == "remote":
                found[key] = self._system.load_here(key)
            elif version is not None:
                found[key] = self.load(key)
        return [each for each in found.values() if each]

    def newest(self, name: str, limit: int, *, verify: bool) -> int | None:
        """Return the newest version up to a limit that is not damaged, or None.

        With `verify`, all bytes are read that a restart would read from storage.
        """
        self.know(name, again=True)
        with self._core.locked():
            self._core.check_usable()
            candidates = [each for each in self._core.versions(name) if each <= limit]
        for version in reversed(candidates):
            try:
                entry = self.load((name, version))
                if verify and entry.stored and not self._is_cached(entry):
                    self._system.storing.read(entry, lambda reader: reader.verify())
                if entry.stored and self._system.commits is not None:
                    self._system.commits.check_all(name, version, verify=verify)
            except FlashwarpError as error:
                _log.warning("skipped version %d of %r: %s", version, name, error)
                continue
            return version
        return None

    def _is_cached(self, entry: Entry) -> bool:
        with self._core.locked():
            return self._core.tier_of(entry) is not None

    def missing(self, key: Key) -> MissingVersionError:
        """Make the error of a version that does not exist."""
        some = self._core.versions(key[0])
        there = f"the newest is {some[-1]}" if some else "there is none"
        return MissingVersionError(f"there is no version {key[1]} of {key[0]!r}: {there}")
