"""VELOC's client interface on a `Checkpointer`, for programs that are ported from it.

Names, arguments and configuration keys are VELOC's, in Python; where VELOC's header, code and paper
differ, the docstring says what holds here. Failures raise flashwarp's errors in place of returning
-1. New programs use `flashwarp.Checkpointer`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flashwarp._names import refuse
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.futures import Saved
from flashwarp.config import choice
from flashwarp.endings import Closing
from flashwarp.errors import ArgumentError, CheckpointError

_log = logging.getLogger(__name__)

CKPT_ALL, CKPT_SOME, CKPT_REST = "all", "some", "rest"
"""Modes of the selective calls: all regions, those named, or all but those named."""

_PREFIX = "VELOC_"

# VELOC's keys that mean something here, and the default of each.
_USED = {
    "scratch": "",
    "persistent": "",
    "mode": "async",
    "max_versions": "0",
    "persistent_interval": "0",
    "gpu_memory": "",
    "host_memory": "",
    "device": "",
}
# Keys whose work is done in another way here, or not at all: read, and logged where they are set.
_OTHER = {
    "ec_interval": "versions are not erasure-coded",
    "watchdog_interval": "each wait has a time limit instead",
    "scratch_versions": "scratch and persistent keep the same versions",
    "chksum": "every chunk has a checksum always",
    "meta": "manifests lie beside the data",
    "axl_type": "transfers use the I/O engine",
    "aggregated": "each rank has a file",
    "daos_pool": "DAOS is not supported",
    "daos_cont": "DAOS is not supported",
    "threaded": "there is no backend process",
    "max_parallelism": "each kind of transfer has a thread",
    "log_prefix": "messages go to Python's logging",
    "failure_domain": "versions are not spread over nodes",
}


def read_config(
    config: str | os.PathLike[str] | Mapping[str, str],
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Read VELOC's configuration: ``key = value`` lines, or a mapping.

    Parameters
    ----------
    config : path-like or mapping
        VELOC's configuration file, without sections, or its keys.
    environment : mapping, optional
        A variable ``VELOC_<KEY>`` overrides a key. Default: the process's environment.

    Returns
    -------
    dict
        The keys that flashwarp uses, with their values, and those of VELOC's other keys that are
        set.

    Raises
    ------
    ArgumentError
        For a line that is none, an unknown key, or a missing ``scratch``.
    """
    given = dict(config) if isinstance(config, Mapping) else _parse(Path(os.fspath(config)))
    variables = os.environ if environment is None else environment
    known = [*_USED, *_OTHER]
    for key in known:
        override = variables.get(_PREFIX + key.upper())
        if override is not None:
            given[key] = override
    for key in given:
        refuse("read_config", f"{key}=")
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ArgumentError(
            f"unknown keys {', '.join(unknown)} in VELOC's configuration; known are "
            f"{', '.join(sorted(known))}"
        )
    if not given.get("scratch"):
        raise ArgumentError("VELOC's configuration must have scratch = FOLDER")
    return {**_USED, **given}


def ignored(config: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a configuration that have no effect here, with the reasons."""
    return {key: _OTHER[key] for key in config if key in _OTHER}


def _parse(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.split("#", 1)[0].split(";", 1)[0].strip()
        if not text or (text.startswith("[") and text.endswith("]")):
            continue
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ArgumentError(f"line {number} of {path} is not KEY = VALUE: {line[:80]!r}")
        found[key.strip()] = value.strip()
    return found


class Client(Closing):
    """VELOC's client: one process's checkpoints.

    Parameters
    ----------
    id : int
        The rank.
    config : path-like or mapping
        See `read_config`. ``scratch`` is the folder of versions, ``persistent`` the second store
        (VELOC: the parallel file system), ``mode = sync`` makes `Checkpoint` wait until the version
        is durable, ``max_versions`` keeps so many of the newest versions of a name.
        ``persistent_interval = -1`` leaves the second store out. Of flashwarp's own are
        ``gpu_memory``, ``host_memory`` and ``device``.
    """

    def __init__(
        self,
        id: int,  # noqa: A002 - VELOC's name
        config: str | os.PathLike[str] | Mapping[str, str],
    ) -> None:
        found = read_config(config)
        choice("mode", found["mode"], ("sync", "async"))
        self.config = found
        for key, reason in ignored(found).items():
            _log.info("VELOC's key %s has no effect: %s", key, reason)
        self._sync = found["mode"] == "sync"
        self._keep = _count("max_versions", found["max_versions"])
        remote = found["persistent"] if found["persistent_interval"] != "-1" else ""
        self.checkpointer = Checkpointer(
            found["scratch"],
            found["device"] or None,
            found["gpu_memory"] or None,
            found["host_memory"] or None,
            remote or None,
            id,
        )
        self._names: dict[str, Any] = {}
        self._writing: tuple[str, int] | None = None
        self._saving: Saved | None = None
        self._saving_name = ""
        self._restoring: tuple[str, int] | None = None

    # Regions. VELOC's have numbers; a number is the name of the region.

    def Mem_protect(self, id: int | str, array: object) -> None:  # noqa: A002, N802
        """Protect an array under a number. VELOC takes pointer, count and size of an element."""
        self.checkpointer.protect(str(id), array)
        self._names[str(id)] = array

    def Mem_unprotect(self, id: int | str) -> None:  # noqa: A002, N802
        """Forget a region."""
        self.checkpointer.unprotect(str(id))
        del self._names[str(id)]

    def Mem_clear(self) -> None:  # noqa: N802
        """Forget all regions."""
        for name in list(self._names):
            self.Mem_unprotect(name)

    # Checkpoints.

    def Checkpoint_begin(self, name: str, version: int) -> None:  # noqa: N802
        """Begin a version; `Checkpoint_mem` or `Checkpoint_selective` writes it."""
        if self._writing is not None:
            raise CheckpointError(f"version {self._writing[1]} was begun and not ended")
        self._writing = name, version

    def Checkpoint_mem(self) -> None:  # noqa: N802
        """Write all regions of the version that was begun."""
        self.Checkpoint_selective(CKPT_ALL, ())

    def Checkpoint_selective(self, mode: str, ids: Iterable[int | str]) -> None:  # noqa: N802
        """Write regions of the version that was begun: all, those in `ids`, or all others."""
        if self._writing is None:
            raise CheckpointError("no version was begun: call Checkpoint_begin first")
        name, version = self._writing
        self._saving_name = name
        self._saving = self.checkpointer.checkpoint(
            version, name, only=self._selected(mode, ids, list(self._names))
        )

    def Checkpoint_end(self, success: bool = True) -> None:  # noqa: N802
        """End the version; without success it is discarded."""
        if self._writing is None:
            raise CheckpointError("no version was begun: call Checkpoint_begin first")
        (name, version), self._writing = self._writing, None
        if not success:
            if self._saving is not None:
                self.checkpointer.discard(version, name)
            self._saving = None
            return
        if self._sync:
            self.Checkpoint_wait()
        self._prune(name)

    def Checkpoint(self, name: str, version: int) -> None:  # noqa: N802
        """Wait for the checkpoint before, then write all regions as a version."""
        self.Checkpoint_wait()
        self.Checkpoint_begin(name, version)
        try:
            self.Checkpoint_mem()
        except BaseException:
            self._writing = None
            raise
        self.Checkpoint_end(True)

    def Checkpoint_wait(self) -> None:  # noqa: N802
        """Wait until the last checkpoint is durable; raises what failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result(self.checkpointer.settings.timeout_s)

    def Checkpoint_finished(self) -> bool:  # noqa: N802
        """Return whether the last checkpoint is durable. Does not block; raises what failed."""
        if self._saving is None:
            return True
        return self._saving.done() and self._saving.result(0) is not None

    def _prune(self, name: str) -> None:
        if self._keep:
            for version in self.checkpointer.versions(name)[: -self._keep]:
                self.checkpointer.discard(version, name)

    # Restarts.

    def Restart_test(self, name: str, version: int = 0) -> int:  # noqa: N802
        """Return the newest version that is at most `version`, or -1.

        VELOC's header says "less than", its code "at most"; 0 means any version.
        """
        found = self.checkpointer.test(version or None, name)
        return -1 if found is None else found

    def Restart_begin(self, name: str, version: int) -> None:  # noqa: N802
        """Begin to restore a version."""
        self.checkpointer.regions(version, name)  # raises if there is none
        self._restoring = name, version

    def Recover_size(self, id: int | str, version: int | None = None) -> int:  # noqa: A002, N802
        """Return the bytes of a region; -1 if the version has no such region.

        The version is the one that `Restart_begin` named, or `version` of the name "default" (as in
        the paper's listing).
        """
        name, number = self._version(version)
        regions = {each.name: each for each in self.checkpointer.regions(number, name)}
        found = regions.get(str(id))
        return -1 if found is None else found.nbytes

    def Recover_mem(self) -> None:  # noqa: N802
        """Restore all protected regions of the version that was begun."""
        self.Recover_selective(CKPT_ALL, ())

    def Recover_selective(self, mode: str, ids: Iterable[int | str]) -> None:  # noqa: N802
        """Restore regions: all, those in `ids`, or all others."""
        name, version = self._version(None)
        stored = [each.name for each in self.checkpointer.regions(version, name)]
        self.checkpointer.restart(version, only=self._selected(mode, ids, stored), name=name)

    def Restart_end(self, success: bool = True) -> None:  # noqa: N802
        """End the restore. Unsuccessful ones change nothing: try another version."""
        del success
        self._restoring = None

    def Restart(self, name: str, version: int) -> None:  # noqa: N802
        """Restore all regions of a version."""
        self.Restart_begin(name, version)
        try:
            self.Recover_mem()
        finally:
            self.Restart_end()

    # Hints (Score).

    def Prefetch_enqueue(self, version: int, name: str = "default") -> None:  # noqa: N802
        """Say that a restart of a version will come, after those named before."""
        self.checkpointer.prefetch_enqueue(version, name)

    def Prefetch_start(self) -> None:  # noqa: N802
        """Begin to prefetch."""
        self.checkpointer.prefetch_start()

    # The rest.

    def Cleanup(self, name: str) -> None:  # noqa: N802
        """Remove all versions of a name. VELOC removes those on scratch alone."""
        if self._saving is not None and self._saving_name == name:
            self._saving = None
        for version in self.checkpointer.versions(name):
            self.checkpointer.discard(version, name)

    def Finalize(self, drain: bool = True) -> None:  # noqa: N802
        """Close; with `drain` after all versions are durable."""
        self.checkpointer.close(drain=drain)

    def close(self) -> None:
        """Close, after all versions are durable."""
        self.Finalize(True)

    def _version(self, version: int | None) -> tuple[str, int]:
        if version is not None:
            return (self._restoring or ("default", 0))[0], version
        if self._restoring is None:
            raise CheckpointError("no restart was begun: call Restart_begin first")
        return self._restoring

    @staticmethod
    def _selected(mode: str, ids: Iterable[int | str], names: list[str]) -> list[str]:
        choice("mode", mode, (CKPT_ALL, CKPT_SOME, CKPT_REST))
        chosen = [str(each) for each in ids]
        if mode == CKPT_ALL:
            return names
        return chosen if mode == CKPT_SOME else [each for each in names if each not in chosen]


def Init_single(  # noqa: N802
    id: int,  # noqa: A002 - VELOC's name
    config: str | os.PathLike[str] | Mapping[str, str],
) -> Client:
    """Return the client of a process that checkpoints for itself."""
    return Client(id, config)


def Init(  # noqa: N802
    comm: Any, config: str | os.PathLike[str] | Mapping[str, str]
) -> Client:
    """Return the client of a rank of an MPI communicator (mpi4py's, or any with ``Get_rank``)."""
    return Client(int(comm.Get_rank()), config)


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ArgumentError(f"{name} = {text!r} in VELOC's configuration is no number of versions")
    return int(text)
