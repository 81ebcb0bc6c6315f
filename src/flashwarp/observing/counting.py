"""What a process has counted: an entry for each open array, pipeline and checkpointer.

Entries are read only when somebody asks. What has ended leaves its last counts in the sums, so the
sums of a process never fall.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flashwarp import endings
from flashwarp.device import Device, OwnedStream, host_memory
from flashwarp.errors import FlashwarpError

_COMMAND_MAX = 200
_MEMORY = {"RssAnon": "anonymous", "RssShmem": "shared", "RssFile": "mapped files"}


class Key(NamedTuple):
    """What is summed up together."""

    kind: str
    route: str
    disks: str = ""
    """Numbers of the disks that are read past the page cache, as "259:0+259:1"."""
    device: str = ""
    """That of the entry."""


Read = Callable[[], Mapping[str, tuple[Key, Mapping[str, int]]]]
"""Reads the counts of one source, named as in `Stats`, by a name for each part of it. It waits for
no kernel: see `side_stream`."""


class Entry:
    """The counts of one source from its opening to its end."""

    def __init__(self, device: Device, read: Read) -> None:
        self.device = device
        self.keys: list[Key] = []
        self._read: Read | None = read
        self._seen: dict[str, Mapping[str, int]] = {}
        # Held while counts are read: `leave` waits, and what they lie in is freed after it.
        self._lock = endings.Lock()

    def look(self) -> None:
        """Add what was counted since the last look to the sums."""
        with self._lock:
            if self._read is None:
                return
            try:
                found = self._read()
            except FlashwarpError:  # the GPU is lost
                return
            self.keys = []
            for part, (own, counts) in found.items():
                key = own._replace(device=self.device.name)
                self.keys.append(key)
                change = Counter(counts)
                change.subtract(self._seen.get(part, {}))
                self._seen[part] = counts
                with _lock:
                    _sums.setdefault(key, Counter()).update(change)

    def leave(self) -> None:
        """Count for the last time. May be called twice."""
        self.look()
        with self._lock:
            self._read = None
        _entries.discard(self)


_lock = endings.Lock()
_sums: dict[Key, Counter[str]] = {}
_entries: set[Entry] = set()
_since = time.monotonic()
_streams: weakref.WeakKeyDictionary[Device, OwnedStream] = weakref.WeakKeyDictionary()


def enter(device: Device, read: Read) -> Entry:
    """Count a source until its entry leaves; from the first one on, the process can be asked."""
    from flashwarp.observing import endpoint

    endpoint.begin(counters)
    entry = Entry(device, read)
    _entries.add(entry)
    return entry


def side_stream(device: Device) -> OwnedStream | None:
    """Return the stream on which counters are read beside kernels; None if none is needed."""
    if device.kind == "cpu":
        return None
    with _lock:
        found = _streams.get(device)
        if found is None or found.closed:
            found = _streams[device] = device.create_stream()
        return found


def disk_names(disks: Iterable[int]) -> str:
    """Write device numbers as a key has them."""
    return "+".join(f"{os.major(each)}:{os.minor(each)}" for each in sorted(disks))


def counters() -> dict[str, Any]:
    """Return what this process has counted since its start, for JSON.

    Waits for no call or kernel. Takes about 50 us for each open array.

    Returns
    -------
    dict
        "pid", "command", "uptime_s", "threads", "pinned" (bytes by use), "memory" (resident bytes
        by kind: "anonymous", "shared", and the "mapped files", whose pages the kernel takes back
        when it needs them), and "sums": for each kind, route, device and set of disks the counts of
        `Stats`, and how many are "open" now.

    Examples
    --------
    >>> import flashwarp as fw, flashwarp.observing
    >>> with fw.create("rows.npy", "float32", (1000, 64), device="cpu") as x:
    ...     x[3] = 1
    ...     sum(each["open"] for each in fw.observing.counters()["sums"])
    1
    """
    entries = list(_entries)
    for each in entries:
        each.look()
    opened = Counter(key for each in entries for key in each.keys)
    with _lock:
        sums = {key: dict(counts) for key, counts in _sums.items()}
    words = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    command = "".join(each if each.isprintable() else " " for each in " ".join(words).strip())
    return {
        "pid": os.getpid(),
        "command": command[:_COMMAND_MAX],
        "uptime_s": time.monotonic() - _since,
        "threads": len(os.listdir("/proc/self/task")),
        "pinned": _pinned({each.device for each in entries}),
        "memory": _memory(),
        "sums": [{**key._asdict(), "open": opened[key], **sums[key]} for key in sums],
    }


def _memory() -> dict[str, int]:
    """Return resident bytes of the process by kind, as proc_pid_status(5) tells them apart."""
    told = dict(re.findall(r"^(\w+):\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M))
    return {shown: int(told.get(name, 0)) << 10 for name, shown in _MEMORY.items()}


def _pinned(devices: set[Device]) -> dict[str, int]:
    """Return bytes of pinned host memory by use; memory of the CPU device is not pinned."""
    found = Counter({"pages of files": host_memory.pinned_files.nbytes})
    for device in devices:
        pool = device.pools.get(os.getpid())
        if pool is not None and device.kind != "cpu":
            found.update(pool.pinned_bytes)
    return dict(+found)


def _forget() -> None:
    """A forked child counts for itself: it has none of its parent's arrays."""
    global _lock
    _lock = endings.Lock()
    _entries.clear()
    _sums.clear()
    _streams.clear()


os.register_at_fork(after_in_child=_forget)
