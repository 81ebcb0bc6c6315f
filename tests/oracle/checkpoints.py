"""Versions of arrays: written, restored, discarded, written again, and found by other programs."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import flashwarp as fw
from flashwarp.checkpoint import straight
from flashwarp.errors import (
    CheckpointError,
    ExistingVersionError,
    FlashwarpError,
    LockedError,
    MissingVersionError,
)
from oracle.model import Wrong
from oracle.steps import step
from oracle.world import RECORD, Hand

_GAPS = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [0, 8]})
_DTYPES = [np.dtype("i4"), np.dtype("f8"), np.dtype("u1"), np.dtype("i2"), RECORD, _GAPS]
_CACHES = [("64 KiB", "256 KiB")] * 3 + [(0, "256 KiB"), ("64 KiB", 0), (0, 0)]
_STRAIGHT_BYTES = straight.LEAST_BYTES
_VERSIONS = 6
_LIMIT_S = 30


@dataclass
class Region:
    """A protected array, and what it must hold."""

    array: Any
    content: npt.NDArray[Any]


@dataclass
class Saved:
    """A folder of versions, who writes it, and what each version must give."""

    folder: Path
    remote: Path | None
    device: Any
    caches: tuple[int | str, int | str]
    writer: Any = None
    reader: Any = None
    regions: dict[str, Region] = field(default_factory=dict)
    versions: dict[int, dict[str, npt.NDArray[Any]]] = field(default_factory=dict)

    def open(self) -> None:
        """Open the folder for writing, with small caches, as a process does that begins."""
        self.writer = fw.Checkpointer(
            self.folder, self.device, *self.caches, self.remote, config={"timeout_s": 30}
        )
        for name, region in self.regions.items():
            self.writer.protect(name, region.array)

    def open_when_free(self) -> None:
        """Open the folder once the checkpointer that was lost has let go of it."""
        end = time.monotonic() + _LIMIT_S
        while self.writer is None:
            try:
                self.open()
            except LockedError:
                if time.monotonic() > end:
                    raise
                time.sleep(1e-3)

    def close(self) -> None:
        """Close what is open, and remove the folder."""
        try:
            if self.reader is not None:
                self.reader.close()
            if self.writer is not None:
                self.writer.close()
        finally:
            for folder in (self.folder, self.remote):
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)


def _of(hand: Hand) -> Saved:
    saved = hand.world.extras.get("checkpoints")
    if saved is None:
        folder = hand.world.folders["memory"] / "versions"
        remote = folder.with_name("remote") if hand.odds(0.4) else None
        for each in (folder, remote):
            if each is not None:
                shutil.rmtree(each, ignore_errors=True)
        if remote is not None:
            remote.mkdir()
        caches = hand.random.choice(_CACHES)
        # Restores of any size may be read as large ones are.
        straight.LEAST_BYTES = hand.random.choice([0, _STRAIGHT_BYTES])
        hand.say(f"straight.LEAST_BYTES = {straight.LEAST_BYTES}")
        saved = Saved(folder, remote, hand.machine.devices[hand.world.device], caches)
        hand.world.closing.append(saved)
        saved.open()
        hand.say(f"c = fw.Checkpointer(folder, device, {caches}, remote={remote})")
        hand.world.extras["checkpoints"] = saved
        for name in ("a", "b")[: hand.random.randint(1, 2)]:
            _protect(hand, saved, name)
    return saved


def _content(hand: Hand, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    generator = np.random.default_rng(hand.random.getrandbits(32))
    content = np.zeros(count, dtype)
    for name in dtype.names or [""]:
        view = content[name] if name else content
        view[...] = generator.integers(0, 120, count).astype(view.dtype)
    return content


def _protect(hand: Hand, saved: Saved, name: str) -> None:
    dtype = hand.random.choice(_DTYPES)
    content = _content(hand, dtype, hand.random.choice((1, 3, 100, 3000)))
    on_device = hand.machine.on_gpu and dtype.names is None and hand.odds(0.6)
    array = hand.machine.place(content, "flashwarp") if on_device else content.copy()
    saved.regions[name] = Region(array, content)
    hand.say(f"c.protect({name!r}, array)  # {dtype}[{len(content)}], on device: {on_device}")
    saved.writer.protect(name, array)


def _dtype(text: str) -> np.dtype[Any]:
    """Read the dtype of a region; of a record, its fields as JSON."""
    if not text.startswith("["):
        return np.dtype(text)
    return np.lib.format.descr_to_dtype(
        [tuple(tuple(each) if isinstance(each, list) else each for each in field)
         for field in json.loads(text)]
    )  # fmt: skip


def _same(hand: Hand, what: str, got: dict[str, Any], want: dict[str, npt.NDArray[Any]]) -> None:
    hand.world.checks += 1
    for name, right in want.items():
        seen = hand.machine.fetch(got[name])
        same = seen.dtype == right.dtype and seen.shape == right.shape
        if not same or not np.array_equal(seen, right):
            raise Wrong(f"{what}: region {name!r} is {seen.dtype}{seen.shape} {seen[:4]}, not "
                        f"{right.dtype}{right.shape} {right[:4]}")  # fmt: skip


def _discard(hand: Hand, saved: Saved, version: int) -> None:
    hand.say(f"c.discard({version})")
    saved.writer.discard(version)
    del saved.versions[version]


@step(3, alone=True)
def change_region(hand: Hand) -> None:
    """Change what a region holds, or protect another array under its name."""
    saved = _of(hand)
    name = hand.random.choice(list(saved.regions))
    if hand.odds(0.2):
        _protect(hand, saved, name)
        return
    region = saved.regions[name]
    region.content = _content(hand, region.content.dtype, len(region.content))
    hand.say(f"{name}[...] = others")
    if isinstance(region.array, np.ndarray):
        region.array[...] = region.content
    else:
        hand.machine.devices[0].upload(region.array.address, region.content)


@step(5, alone=True)
def write_version(hand: Hand) -> None:
    """Write a version; one that exists only after it was discarded."""
    saved = _of(hand)
    version = hand.random.randrange(_VERSIONS)
    if version in saved.versions:
        if hand.odds(0.3):
            hand.say(f"c.checkpoint({version})  # exists")
            try:
                saved.writer.checkpoint(version)
            except ExistingVersionError:
                return
            raise Wrong(f"version {version} was written twice")
        _discard(hand, saved, version)
    overlap = hand.odds(0.3)
    hand.say(f"f = c.checkpoint({version}, overlap={overlap})")
    future = saved.writer.checkpoint(version, overlap=overlap)
    saved.versions[version] = {name: each.content.copy() for name, each in saved.regions.items()}
    if overlap:
        saved.writer.wait_staged()
    if hand.odds(0.4):
        hand.say("f.result()")
        future.result(timeout=_LIMIT_S)


@step(5, alone=True)
def restore_version(hand: Hand) -> None:
    """Restore a version, into new arrays or the protected ones."""
    saved = _of(hand)
    version = hand.random.randrange(_VERSIONS)
    latest = hand.odds(0.2) and saved.versions
    if latest:
        version = max(saved.versions)
    want = saved.versions.get(version)
    fits = want is not None and all(
        name in saved.regions
        and (content.dtype, content.shape)
        == (saved.regions[name].content.dtype, saved.regions[name].content.shape)
        for name, content in want.items()
    )
    if want is None:
        hand.say(f"c.restart({version})  # missing")
        try:
            saved.writer.restart(version)
        except MissingVersionError:
            return
        raise Wrong(f"version {version} was restored, and there is none")
    lacking = latest and set(saved.regions) - set(want)
    if lacking:
        hand.say(f"c.restart_latest()  # version {version} lacks {lacking}")
        try:
            saved.writer.restart_latest()
        except CheckpointError:
            return
        raise Wrong(f"version {version} was restored, and lacks {lacking}")
    if fits:
        if latest:
            hand.say(f"c.restart_latest()  # {version}")
            if saved.writer.restart_latest() != version:
                raise Wrong(f"version {version} is the newest, and another one was restored")
        else:
            hand.say(f"c.restart({version})")
            _same(hand, f"restart({version})", saved.writer.restart(version), want)
        for name, content in want.items():
            saved.regions[name].content = content.copy()
            _same(hand, "the region", {name: saved.regions[name].array}, {name: content})
        return
    into = {name: np.empty_like(content) for name, content in want.items()}
    hand.say(f"c.restart({version}, into=arrays)")
    _same(hand, f"restart({version}, into)", saved.writer.restart(version, into=into), want)


@step(1, alone=True)
def restore_into_other_fields(hand: Hand) -> None:
    """Restore records into records of as many bytes with other fields, which is refused."""
    saved = _of(hand)
    for version, want in saved.versions.items():
        for name, content in want.items():
            if content.dtype.names is None:
                continue
            renamed = np.dtype(
                {
                    "names": [f"other_{each}" for each in content.dtype.names],
                    "formats": [content.dtype[each] for each in content.dtype.names],
                    "offsets": [content.dtype.fields[each][1] for each in content.dtype.names],
                    "itemsize": content.dtype.itemsize,
                }
            )
            hand.say(f"c.restart({version}, [{name!r}], into={{{name!r}: {renamed}}})")
            into = {name: np.empty(len(content), renamed)}
            try:
                saved.writer.restart(version, [name], into=into)
            except FlashwarpError:
                return
            raise Wrong(f"fields {content.dtype.names} were restored into {renamed.names}")


@step(2, alone=True)
def discard_version(hand: Hand) -> None:
    """Discard a version."""
    saved = _of(hand)
    if saved.versions:
        _discard(hand, saved, hand.random.choice(list(saved.versions)))


@step(2, alone=True)
def look_at_versions(hand: Hand) -> None:
    """Ask which versions there are."""
    saved = _of(hand)
    hand.say("c.versions(), c.test(), c.regions(version)")
    hand.world.checks += 1
    if saved.writer.versions() != sorted(saved.versions):
        raise Wrong(f"versions {saved.writer.versions()}, not {sorted(saved.versions)}")
    for version, want in saved.versions.items():
        for region in saved.writer.regions(version):
            content = want[region.name]
            if (_dtype(region.dtype), tuple(region.shape)) != (content.dtype, content.shape):
                raise Wrong(f"version {version}: {region}, not {content.dtype}{content.shape}")


@step(2, alone=True)
def hint(hand: Hand) -> None:
    """Say which versions will be restored."""
    saved = _of(hand)
    version = hand.random.randrange(_VERSIONS)
    hand.say(f"c.prefetch_enqueue({version}); c.prefetch_start()")
    saved.writer.prefetch_enqueue(version)
    if hand.odds(0.5):
        saved.writer.prefetch_start()
    if version in saved.versions and hand.odds(0.3):
        time.sleep(hand.random.choice((0, 1e-4, 1e-3)))  # a prefetch may have begun
        _discard(hand, saved, version)


@step(2, alone=True)
def read_versions_elsewhere(hand: Hand) -> None:
    """Restore a version in a program that only reads."""
    saved = _of(hand)
    if not saved.versions:
        return
    version = hand.random.choice(list(saved.versions))
    hand.say(f"c.wait({version})")
    saved.writer.wait(version, timeout_s=_LIMIT_S)
    if saved.reader is None:
        hand.say("r = fw.Checkpointer(folder, device, '64 KiB', '64 KiB', read_only)")
        settings = {"read_only": True}
        saved.reader = fw.Checkpointer(
            saved.folder, saved.device, "64 KiB", "64 KiB", config=settings
        )
    if hand.odds(0.3):
        saved.reader.prefetch_enqueue(version)
        saved.reader.prefetch_start()
    hand.say(f"r.restart({version})")
    want = saved.versions[version]
    _same(hand, f"the reader's restart({version})", saved.reader.restart(version), want)


@step(1, alone=True)
def begin_again(hand: Hand) -> None:
    """Close or lose what has the folder open, and open it; perhaps after the loss of the disk."""
    saved = _of(hand)
    if hand.odds(0.2):
        hand.say("c = None; c = fw.Checkpointer(...)")
        saved.writer = None  # a thread closes it
        saved.open_when_free()
        return
    lost = saved.remote is not None and hand.odds(0.5)
    if lost:
        hand.say("c.wait(tier='remote')")
        saved.writer.wait(tier="remote", timeout_s=_LIMIT_S)
    hand.say("c.close(); c = fw.Checkpointer(...)" + ("  # on a new disk" if lost else ""))
    saved.writer.close()
    if lost:
        if saved.reader is not None:
            saved.reader.close()
            saved.reader = None
        shutil.rmtree(saved.folder)
    saved.open()
