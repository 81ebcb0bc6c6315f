"""`Checkpointer`: versions of GPU state, in caches of GPU and host memory and on storage."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from flashwarp import endings
from flashwarp._names import renamed
from flashwarp.checkpoint import report
from flashwarp.checkpoint.capture import Bytes
from flashwarp.checkpoint.directory import Catalog
from flashwarp.checkpoint.directory.names import (
    check_name,
    check_version,
    identity_of,
    rank_of_process,
)
from flashwarp.checkpoint.durability import Durability
from flashwarp.checkpoint.futures import Saved
from flashwarp.checkpoint.lookup import Lookup
from flashwarp.checkpoint.protected import RegionSet
from flashwarp.checkpoint.region import Region
from flashwarp.checkpoint.report import CheckpointStats
from flashwarp.checkpoint.restarts import Restarts
from flashwarp.checkpoint.settings import Settings
from flashwarp.checkpoint.sizes import cache_bytes
from flashwarp.checkpoint.stager import Stager
from flashwarp.checkpoint.storing import Removal
from flashwarp.checkpoint.system import System
from flashwarp.checkpoint.tier import Entry, Key
from flashwarp.config import SIZE_MAX, choice, flag, integer, number
from flashwarp.device import Device, resolve
from flashwarp.errors import (
    ArgumentError,
    MissingVersionError,
    ReadOnlyError,
)
from flashwarp.explanation import Explanation
from flashwarp.observing import counting
from flashwarp.observing.ranges import marked
from flashwarp.storage import files

_log = logging.getLogger(__name__)


@renamed
@marked
class Checkpointer(endings.Closing):
    """Writes versions of arrays, and restores them, through caches in GPU and host memory.

    `checkpoint` copies the protected arrays into a cache in GPU memory. Background threads flush
    each version to a cache in pinned host memory, then to storage, and bring versions back in the
    order that hints name, before they are asked for. Copies come after the caller's present work on
    its stream, and the caller's later work comes after the copies.

    Parameters
    ----------
    path : path-like
        Folder of the versions; made if it does not exist. Ranks share it.
    device : Device, str or torch.device, optional
        Where the arrays are. Default: "cuda:0" if a GPU works, else "cpu". On the CPU, the GPU
        cache is host memory.
    gpu_memory, host_memory : int or str, optional
        Bytes of the two caches; 0: none. Both are allocated once; host memory is pinned in the
        background, and used while it grows. Default: 4 GiB and 32 GiB, at most an eighth of the
        free memory of the GPU and half of that of the host; less on the CPU.
    remote : path-like, str, Catalog, optional
        A second store: a folder of a parallel file system, a URL such as ``"s3://bucket/run"``, or
        `flashwarp.torch.Partners`. Versions go there once they are durable in `path`, and come
        back from there if they are missing or damaged in `path`.
    rank : int, optional
        Which of several processes this one is. Default: the environment's ``RANK``, or 0.
    config : Settings or dict, optional
        See `Settings`.
    keep_last : int, optional
        Once a version is durable, older ones of its name are discarded but for so many, counting
        it. One stays while it is restored or uploaded, and while no newer one is in `remote`.
        Default: all stay.

    Raises
    ------
    LockedError
        If another process uses this path with this rank.
    PathError, DeviceOutOfMemory, ArgumentError
        If the folder cannot be used, or a cache is larger than the free memory.

    Notes
    -----
    Thread-safe; calls of several threads on one version follow each other in any order. Each wait
    has the time limit of the settings, and says what it waited for.

    An application that runs on while storage fails loses nothing that fits into the caches: a
    warning says so, `wait` and the future of `checkpoint` raise the error, and `close` raises it
    if nobody has seen it.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import flashwarp as fw
    >>> folder = tempfile.TemporaryDirectory()
    >>> state = np.zeros(1000)
    >>> with fw.Checkpointer(folder.name, "cpu", "1 MiB", "8 MiB") as checkpointer:
    ...     checkpointer.protect("state", state)
    ...     for step in range(5):
    ...         state += 1
    ...         saved = checkpointer.checkpoint(step)
    ...     for step in reversed(range(5)):
    ...         checkpointer.prefetch_enqueue(step)
    ...     for step in reversed(range(5)):
    ...         restored = checkpointer.restart(step)
    ...     print(saved.result(timeout=60), state[0])
    4 1.0
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: object = None,
        gpu_memory: int | str | None = None,
        host_memory: int | str | None = None,
        remote: str | os.PathLike[str] | Catalog | None = None,
        rank: int | None = None,
        config: Settings | Mapping[str, object] | None = None,
        *,
        keep_last: int | None = None,
    ) -> None:
        endings.check_not_ended()
        self.settings = Settings.of(config)
        self.path = files.check_name(path)
        self.rank = rank_of_process(rank)
        keep = None if keep_last is None else integer("keep_last", keep_last, 1, SIZE_MAX)
        place = resolve(device)
        caches = cache_bytes(place, gpu_memory, host_memory)
        make = partial(self._make, place, caches, remote, keep)
        # As a whole: a signal would leave threads and the lock of the rank to nobody. But the wait
        # for other ranks can be interrupted.
        if self.settings.votes is None:
            endings.uninterrupted(make, lambda _: self._close([]))
        else:
            make()

    def _make(
        self,
        device: Device,
        caches: tuple[int, int],
        remote: str | os.PathLike[str] | Catalog | None,
        keep_last: int | None,
    ) -> None:
        self._system = System(
            self.path, device, caches, remote, self.rank, self.settings, keep_last
        )
        self.device = self._system.device
        self._core = self._system.core
        self._regions = RegionSet(self.device)
        self._made = itertools.count(1)
        self._stager = Stager(self._core, self._system.storing)
        self._lookup = Lookup(self._core, self._system)
        self._restarts = Restarts(self._system, self._lookup, self._stager, self._regions)
        self._durability = Durability(self._core, self.path, self._system.remote)
        self._held = endings.Holder(self)
        self._counted = counting.enter(self.device, partial(report.counts_of, self._core))
        endings.remember(self._held)

    # Regions.

    def protect(
        self, name: str, source: object, *, restore: Callable[[Any], object] | None = None
    ) -> None:
        """Name an array or a state that later checkpoints save, and that restarts fill.

        Parameters
        ----------
        name : str
            Of the region. A name that is protected already gets the new array.
        source : array, module, optimizer, dict or callable
            An array of torch, numpy, cupy, jax or another library, on the device or in host memory,
            without gaps; it is kept alive. Something with `state_dict` and `load_state_dict`, or a
            state dict: each tensor is a region ``name/...``, and `name` holds the rest, without
            pickle. A callable is called at each checkpoint and returns an array, of any size.
        restore : callable, optional
            For a callable: takes the restored array. Otherwise `restart` returns it.

        Raises
        ------
        ArgumentError, DtypeError
            If it is no array without gaps, on another device, or a state with something that only
            pickle could store; the error names it.
        CopyError
            If a state has a table of `flashwarp.torch` in training, whose rows it lacks.
        """
        with self._core.locked():
            self._core.check_usable()
            self._regions.add(name, source, restore)

    def unprotect(self, name: str) -> None:
        """Forget a region: later checkpoints and restarts leave it out. Stored versions keep it."""
        with self._core.locked():
            self._core.check_usable()
            self._regions.remove(name)

    # Writing.

    def checkpoint(
        self,
        version: int,
        name: str = "default",
        only: Iterable[str] | None = None,
        *,
        overlap: bool = False,
    ) -> Saved:
        """Save the protected arrays as a new version.

        On return the version is safe from changes of the arrays: it is in the fastest cache that
        has room, or on its way there in the order of the caller's stream. If no cache can take it,
        the call writes it to storage.

        Parameters
        ----------
        version : int
            From 0 to 2^63 - 1, in any order. A version is written once; `discard` it to write it
            again.
        name : str
            Of the history that the version belongs to.
        only : iterable of str, optional
            Regions to save. Default: all.
        overlap : bool
            Return before the copy; call `wait_staged` before you change the arrays.

        Returns
        -------
        Saved
            A future of the version number, done once the version is durable in `path`.

        Raises
        ------
        ExistingVersionError
            If the version exists.
        CheckpointError
            If no region is protected, or an array was freed or resized since.
        WaitTimeout
            If no room was found in time.
        PathError, StorageError
            If no cache has room and storage fails. Earlier versions stay in the caches.
        """
        began_ns = time.monotonic_ns()
        key = self._key(name, version)
        flag("overlap", overlap)
        if self.settings.read_only:
            raise ReadOnlyError("the checkpointer was opened with read_only: open a writable one")
        self._lookup.know(name)
        sources = self._collect(only)
        if self._restarts.has_passed(key):
            self.discard(version, name)
        regions = tuple(source.region for source in sources)
        entry = Entry(key, regions, identity_of(), next(self._made))
        saved = Saved(str(entry))
        try:
            with self._core.locked():
                self._core.begin(entry, saved, self.path)
            self._stager.stage(entry, sources, overlap=overlap)
            with self._core.locked():
                self._core.saved(entry, began_ns, overlap)
        except BaseException:
            endings.uninterrupted(partial(self._give_up, entry))
            raise
        return saved

    def _give_up(self, entry: Entry) -> None:
        """Take a version back that could not be saved, or whose call a signal has ended."""
        core = self._core
        with core.locked():
            core.staging.discard(entry)
            core.futures.pop(entry, None)
            if core.entries.get(entry.key) is entry:
                self._system.discard(entry)
            core.wake()

    def _collect(self, only: Iterable[str] | None) -> list[Bytes]:
        with self._core.locked():
            self._core.check_usable()
            names = self._regions.names(only)
        # Not under the lock: callables may take long, and may call the checkpointer.
        return self._regions.collect(names)

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Block until no checkpoint reads the protected arrays any more.

        After checkpoints with ``overlap=True``, call it before you change the arrays. Raises what a
        copy has failed with, or WaitTimeout.
        """
        self._stager.wait(self._limit(timeout_s))

    def wait(
        self,
        version: int | None = None,
        tier: str = "ssd",
        name: str = "default",
        timeout_s: float | None = None,
    ) -> None:
        """Block until a version, or all of them, survive this process or this machine.

        Parameters
        ----------
        version : int, optional
            Default: all versions of `name`.
        tier : str
            "ssd": committed in `path`. "remote": in the remote store as well.
        name : str
            Of the history.
        timeout_s : float, optional
            Default: the settings' limit.

        Raises
        ------
        MissingVersionError
            If there is no such version.
        StorageError, PathError, RemoteError
            If the version could not be written. It is tried again in the background.
        WaitTimeout
            If it takes longer.
        """
        choice("tier", tier, ("ssd", "remote"))
        if tier == "remote" and self._system.remote is None:
            raise ArgumentError(
                "wait(tier='remote') needs a remote: open the checkpointer with one"
            )
        self._lookup.know(name)
        core = self._core
        found = self._lookup.to_wait_for(name, version, tier)
        with core.locked():
            core.check_usable()
            self._durability.wait(found, tier, timeout_s)

    # Looking.

    def versions(self, name: str = "default") -> list[int]:
        """Return all versions of a history, in any tier, ascending. Looks into the folder."""
        self._lookup.know(name, again=True)
        with self._core.locked():
            self._core.check_usable()
            return self._core.versions(name)

    def test(
        self, max_version: int | None = None, name: str = "default", *, verify: bool = True
    ) -> int | None:
        """Return the newest version that is not newer than `max_version`, or None.

        A version on storage whose files are damaged is skipped, and a warning names the reason.
        With ``verify=False`` only manifests and the sizes of files are looked at; otherwise all
        bytes of a version are read that is not in a cache, and of all ranks that share the folder.
        """
        most = SIZE_MAX if max_version is None else max_version
        limit = integer("max_version", most, 0, SIZE_MAX)
        return self._lookup.newest(name, limit, verify=flag("verify", verify))

    def recover_size(self, version: int, region: str, name: str = "default") -> int:
        """Return the bytes of a region in a version."""
        self._lookup.know(name)
        return self._lookup.load(self._key(name, version)).region_named(region).nbytes

    def regions(self, version: int, name: str = "default") -> tuple[Region, ...]:
        """Return the regions of a version: name, dtype, shape and bytes of each."""
        self._lookup.know(name)
        return self._lookup.load(self._key(name, version)).regions

    # Reading.

    def restart(
        self,
        version: int,
        only: Iterable[str] | None = None,
        into: Mapping[str, object] | None = None,
        name: str = "default",
    ) -> dict[str, Any]:
        """Restore a version into the protected arrays, or into others.

        Parameters
        ----------
        version : int
            Any version, also one whose flushes are pending.
        only : iterable of str, optional
            Regions to restore. Default: those of the version that are protected or in `into`; if
            none is, all.
        into : mapping, optional
            Arrays to fill, by region, in place of the protected ones.
        name : str
            Of the history.

        Returns
        -------
        dict
            The array of each region: the one that was filled, or a new one if the region is a
            callable, or not protected; for a state the module, the optimizer or the dict. On a GPU
            they are filled in the order of the caller's stream.

        Raises
        ------
        MissingVersionError
            If there is no such version.
        ArgumentError, DtypeError, CheckpointError
            If an array does not fit its region. Nothing was written then.
        DamagedVersionError, StorageError
            If the version cannot be read. A note of the error says which arrays are filled, and the
            contents of which are undefined.
        """
        return self._restarts.restart(self._key(name, version), only, into)

    def restart_latest(
        self,
        name: str = "default",
        only: Iterable[str] | None = None,
        into: Mapping[str, object] | None = None,
    ) -> int | None:
        """Restore the newest version that is whole; return its number, or None if there is none.

        All bytes of a version are checked before the first array changes. Damaged versions are
        passed by, with a warning each; a `checkpoint` of their numbers takes their place.

        Parameters
        ----------
        name : str
            Of the history.
        only, into
            As for `restart`, which says what it raises.

        Raises
        ------
        CheckpointError
            If nothing is protected, or there are versions and none can be read, or the newest lacks
            a region that is protected and `only` is not given. Nothing was changed.
        """
        return self._restarts.latest(name, only, into)

    # Hints.

    def prefetch_enqueue(self, version: int, name: str = "default") -> None:
        """Say that a restart of a version will come, after those that were named before.

        A hint is advice: restarts may deviate from it, its version need not exist yet, and it
        cannot be revoked. Returns at once.
        """
        key = self._key(name, version)
        self._lookup.know(name)
        core = self._core
        with core.locked():
            core.check_usable()
            core.whole(partial(self._hint, key))

    def _hint(self, key: Key) -> None:
        core = self._core
        core.hints.enqueue(key)
        core.look = core.look or key not in core.entries
        core.refresh(key)
        if core.look:
            core.wake("look")

    def prefetch_start(self) -> None:
        """Begin to prefetch in the order of the hints; so does the first restart.

        Until then, versions that hints name stay in the caches longer than others, and no prefetch
        takes bandwidth from the flushes.
        """
        with self._core.locked():
            self._core.check_usable()
            self._core.started = True
            self._core.wake()

    # Ending.

    def discard(self, version: int, name: str = "default") -> None:
        """Remove a version from all tiers; its pending flushes need not end.

        Its future fails, unless it is done. The version may be written again afterwards: a
        checkpoint of its number waits until the files are removed. If the remote store refuses, the
        call raises its error, and the store is asked again in the background.
        """
        self._lookup.know(name)
        key = self._key(name, version)
        core = self._core
        removal = endings.uninterrupted(partial(self._discard, key))
        with core.locked():
            core.wait_for(
                lambda: removal.done, lambda: f"the files of {removal.entry} are not removed"
            )
        if removal.error is not None:
            raise removal.error

    def _discard(self, key: Key) -> Removal:
        try:
            return self._system.discard_key(key)
        except MissingVersionError:
            raise self._lookup.missing(key) from None

    @property
    def stats(self) -> CheckpointStats:
        """A snapshot of the counters."""
        with self._core.locked():
            return report.stats_of(self._core)

    def explain(self) -> Explanation:
        """Explain the tiers, with links, hints and the versions that only memory has."""
        with self._core.locked():
            commits = self._system.commits
            return report.explain(
                self._core,
                f"of rank {self.rank} at {self.path}",
                [] if commits is None else commits.waiting(),
            )

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._core.closed

    def close(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Wait until all versions are durable, end the threads, and free the caches.

        May be called twice. In a forked child it does nothing. A thread frees the pinned cache
        afterwards, piece by piece in pauses of the GPU: in 0.2 s for 16 GiB if nothing runs there.

        Parameters
        ----------
        drain : bool
            If False, versions that are not durable yet are lost.
        timeout_s : float, optional
            Limit of the wait for flushes. Default: the settings'.

        Raises
        ------
        Exception
            What kept a version from being durable, if any is lost now; or a failure that nobody
            has seen. Everything is freed all the same.
        """
        core = self._core
        if core.closed or not core.of_this_process():
            return
        failures: list[BaseException] = []
        limit = self._limit(timeout_s)
        try:
            self._stager.wait(limit)
        except Exception as error:
            failures.append(error)
        if drain:
            try:
                self._durability.drain(limit)
            except Exception as error:
                failures.append(error)
        endings.uninterrupted(partial(self._close, failures))
        failure = endings.first_of(failures)
        if failure is not None:
            raise failure

    def _end_interrupted(self, error: BaseException) -> None:
        if not self.closed and self._core.of_this_process():
            # A signal: the statement ends all the same, and nobody could close it later.
            lost = ", ".join(map(str, self._core.lost()[:8]))
            if lost:
                error.add_note(f"the wait for flushes was interrupted, and lost: {lost}")
            endings.uninterrupted(partial(self._close, []))

    def _close(self, failures: list[BaseException]) -> None:
        core = self._core
        with core.locked():
            core.closing = True
            unseen = core.unseen_failures()
            core.hints.finish()
            core.wake()
        failures += [each for each in unseen if each not in failures]
        failures += self._stager.stop(self.settings.timeout_s)
        self._counted.leave()
        failures += self._system.close()
        with core.locked():
            core.end_futures()
            core.closed = True
            core.wake()
        endings.forget(self._held)

    def __del__(self) -> None:
        if "_held" in self.__dict__:
            self._held.lost(self)

    # Helpers.

    def _key(self, name: str, version: int) -> Key:
        return check_name(name), check_version(version)

    def _limit(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self.settings.timeout_s
        return number("timeout_s", timeout_s, 0, 1e9)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._core.entries)} versions"
        return f"<Checkpointer at {self.path!r}, rank {self.rank}, {self.device.name}, {state}>"
