"""A cache between processes: what its owner exports, and what a client maps of it.

The owner's memory of tags and of frames is exported by descriptors. Clients map both, and can only
read them. What they ask for goes through a table of requests, which each shares with the owner.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashwarp import _native, endings
from flashwarp.cache.memory import CacheMemory
from flashwarp.cache.sizes import geometry_of
from flashwarp.cache.structs import GeometryStruct
from flashwarp.device import Device, DeviceMemory, find, shared_memory
from flashwarp.device.memory import Exported, OwnedStream, Registration
from flashwarp.errors import CacheError, FlashwarpError, SharedCacheError
from flashwarp.sharing import names, sessions_of
from flashwarp.sharing.connection import Connection
from flashwarp.sharing.listener import Answer, Listener, Session

# Requests of one client that are under way: so many that the owner's work on all of them takes
# longer than a client's turn, in at most so many bytes of buffers. On the CPU device, fewer than
# the lines of a call that copies most of them around the cache, where other clients want them. On a
# GPU there are more threads, and each round of answers takes longer.
_SLOTS = {"cpu": 255, "cuda": 1024}
_SLOTS_MIN = 2
_BUFFER_BYTES = {"cpu": 4 << 20, "cuda": 16 << 20}
_START_S = 10.0
_RETRY_S = 0.01
_SIZE_MAX = 1 << 48


class Sessions(Protocol):
    """What answers the clients of one cache."""

    def begin(self, pid: int) -> Session:
        """Make the session of a client, of process `pid`."""

    def close(self) -> None:
        """Close what was opened for clients; no session is left."""

    def give_up(self, path: str) -> None:
        """Close a file that clients have read and none has open."""

    @property
    def opened(self) -> int:
        """How many arrays are open on behalf of clients."""


def meet(name: str, *, may_own: bool) -> names.OwnerLock | Connection:
    """Connect to the owner of a name; if there is none, become the owner.

    Raises SharedCacheError if there is none and this process may not own it, and what `Connection`
    raises.
    """
    end = time.monotonic() + _START_S
    while True:
        found = Connection.to(name)
        if found is not None:
            return found
        lock = names.OwnerLock.take(name)
        if lock is not None and may_own:
            return lock
        if lock is not None:
            lock.release()
            raise SharedCacheError(
                f"no process owns a shared cache {name!r} in {names.folder_path()}: start one with "
                f"`flashwarp serve {name} CAPACITY`, or give a capacity, and this process owns it"
            )
        if time.monotonic() > end:
            who = names.holder(name)
            raise SharedCacheError(
                f"process {who or 'unknown'} owns the shared cache {name!r}, but does not listen: "
                "end it, or take another name"
            )
        time.sleep(_RETRY_S)


@dataclass(frozen=True)
class Facts:
    """What a client must know of a cache; all of it comes from the owner, and is checked."""

    kind: str
    device: str
    policy: str
    line: int
    ways: int
    sets: int
    host_memory: int
    metadata_bytes: int
    """To map; the tags begin at `tags`."""
    tags: int
    frames_bytes: int
    """To map; the frames begin at `frames`."""
    frames: int
    slots: int
    """Requests that are under way at most; each has a buffer of a line."""

    @classmethod
    def of(cls, body: object) -> Facts:
        """Check what an owner has sent; raises SharedCacheError."""
        texts = ("kind", "device", "policy")
        given = body if isinstance(body, dict) else {}
        values: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            value = given.get(name)
            if isinstance(value, str) if name in texts else type(value) is int:
                values[name] = value
        if len(values) != len(cls.__dataclass_fields__):
            raise SharedCacheError("the owner did not describe its cache")
        facts = cls(**values)
        facts.check()
        return facts

    def check(self) -> None:
        """Raise SharedCacheError unless all parts lie in the memory that is there."""
        lines = self.sets * self.ways
        fits = (
            self.kind in ("cpu", "cuda")
            and 512 <= self.line <= 2 << 20
            and self.line & (self.line - 1) == 0
            and self.ways in (4, 8, 16)
            and 1 <= lines <= 1 << 32
            and self.host_memory >= 0
            and 0 <= self.tags <= self.metadata_bytes - 8 * lines
            and self.tags % 16 == 0
            and 0 <= self.frames <= self.frames_bytes - lines * self.line
            and self.frames % 256 == 0
            and 1 <= self.slots <= 4096
            and max(self.metadata_bytes, self.frames_bytes) <= _SIZE_MAX
        )
        if not fits:
            raise SharedCacheError(f"the owner describes no cache that can be: {self}")

    @property
    def lines(self) -> int:
        """Lines that the cache holds."""
        return self.sets * self.ways

    @property
    def requests_bytes(self) -> int:
        """Size of the memory for requests, which client and owner map."""
        return _native.request_bytes(self.slots, self.line)


class Owner:
    """What a process has of a cache that it shares, beside the cache itself."""

    def __init__(self, name: str, lock: names.OwnerLock) -> None:
        self.name = name
        self._lock = lock
        self._exported: list[Exported] = []
        self._listener: Listener | None = None
        self._sessions: Sessions | None = None
        self.facts: Facts | None = None

    def allocate(self, device: Device, nbytes: int) -> DeviceMemory:
        """Allocate the frames, then the metadata."""
        made = device.allocate_exported(nbytes)
        self._exported.append(made)
        return made.memory

    def start(self, cache: Any) -> None:
        """Serve clients from now on."""
        frames, metadata = self._exported
        line, kind = cache.line_bytes, cache.device.kind
        self.facts = Facts(
            kind=kind,
            device=cache.device.identity,
            policy=cache.policy.name,
            line=line,
            ways=cache.ways,
            sets=cache.set_count,
            host_memory=cache.host_memory,
            metadata_bytes=metadata.offset + metadata.memory.nbytes,
            tags=metadata.offset + cache.geometry.tags - metadata.memory.address,
            frames_bytes=frames.offset + frames.memory.nbytes,
            frames=frames.offset,
            slots=max(_SLOTS_MIN, min(_SLOTS[kind], _BUFFER_BYTES[kind] // line)),
        )
        sessions: Sessions = sessions_of(cache)
        self._sessions = sessions
        self._listener = Listener(self.name, self._lock, sessions.begin)

    def greet(self, requests: int) -> Answer:
        """Describe the cache, for a client whose requests lie in memory with this descriptor."""
        assert self.facts is not None
        frames, metadata = self._exported
        return (
            {"cache": self.facts.__dict__, "pid": os.getpid()},
            (metadata.descriptor, frames.descriptor, requests),
        )

    def give_up(self, path: str) -> None:
        """Close a file that is open only to be warm: this program opens it for storing."""
        if self._sessions is not None:
            self._sessions.give_up(path)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return 0 if self._listener is None else self._listener.clients

    @property
    def opened(self) -> int:
        """How many arrays are open on behalf of clients."""
        return 0 if self._sessions is None else self._sessions.opened

    def close(self) -> None:
        """End all sessions, and close what was opened for clients. May be called twice."""
        if self._listener is not None:
            self._listener.close()
        if self._sessions is not None:
            self._sessions.close()
        self._lock.release()
        while self._exported:
            os.close(self._exported.pop().descriptor)


@dataclass
class Client:
    """What a process has of another's cache."""

    connection: Connection
    facts: Facts
    device: Device
    metadata: DeviceMemory
    frames: DeviceMemory
    mapped: shared_memory.Mapped
    """The memory of requests."""
    pinned: Registration
    """It, for kernels."""
    stream: OwnedStream
    """On which waits of kernels are ended, beside these."""
    arrays: dict[object, list[int]] = field(default_factory=dict)
    """Those that are open, and the words that end their kernels' waits."""
    lost: bool = False
    guard: endings.Lock = field(default_factory=endings.Lock)

    @classmethod
    def of(cls, connection: Connection, device: Device | None) -> Client:
        """Map what the owner has sent; `device` is the user's choice."""
        try:
            return cls._of(connection, device)
        except BaseException:
            connection.close()
            raise
        finally:
            connection.hello.close()

    @classmethod
    def _of(cls, connection: Connection, device: Device | None) -> Client:
        message = connection.hello
        if "peers" in message.body:
            raise SharedCacheError(
                f"the shared cache {connection.name!r} lies on several GPUs, which share it: give "
                "peers= and the capacity as its other processes do"
            )
        facts = Facts.of(message.body.get("cache"))
        if len(message.descriptors) != 3:
            raise SharedCacheError(
                f"the owner sent {len(message.descriptors)} descriptors of memory, not 3"
            )
        here = find(facts.kind, facts.device) if device is None else device
        if (here.kind, here.identity) != (facts.kind, facts.device):
            raise SharedCacheError(
                f"the shared cache {connection.name!r} lies on another device ({facts.kind} "
                f"{facts.device}) than {here.name}: leave device= out"
            )
        if here.kind != "cpu" and connection.owner_pid == os.getpid():
            raise SharedCacheError(
                f"this process owns the shared cache {connection.name!r}, and its kernels would "
                "wait for others of it that find no room on the GPU: open arrays on the cache "
                "that owns it"
            )
        metadata, frames, shared = message.descriptors
        with contextlib.ExitStack() as made:

            def closing(part: Any) -> Any:
                made.callback(part.close)
                return part

            mapped = shared_memory.map_memory(shared, facts.requests_bytes, writable=True)
            client = cls(
                connection,
                facts,
                here,
                closing(here.map_exported(metadata, facts.metadata_bytes)),
                closing(here.map_exported(frames, facts.frames_bytes)),
                mapped,
                closing(here.register_host(mapped.address, mapped.nbytes, read_only=False)),
                closing(here.create_stream()),
            )
            client.pinned.owner = mapped
            made.pop_all()
        connection.watch(weakref.WeakMethod(client.lose))
        return client

    def enter(self, array: object, words: list[int]) -> None:
        """Note an array that is open, whose kernels' waits end by nonzero words."""
        with self.guard:
            self.arrays[array] = words
            if self.lost:
                self.lose()

    def leave(self, array: object) -> None:
        """Forget an array that is closed."""
        with self.guard:
            self.arrays.pop(array, None)

    def lose(self) -> None:
        """End all waits for the owner, who has gone."""
        with self.guard:
            self.lost = True
            for words in self.arrays.values():
                for word in words:
                    with contextlib.suppress(FlashwarpError):  # no kernel runs any more
                        self.device.upload(word, (1).to_bytes(4, "little"), self.stream)

    def check_asked(self, sets: int, line: int, ways: int, policy: str) -> None:
        """Raise SharedCacheError, and leave, unless the cache is as the user asked for."""
        facts = self.facts
        if (sets, line, ways, policy) == (facts.sets, facts.line, facts.ways, facts.policy):
            return
        self.close()
        raise SharedCacheError(
            f"the shared cache {self.connection.name!r} has {facts.lines} lines of {facts.line} "
            f"bytes in sets of {facts.ways} under {facts.policy!r}, not the {sets * ways} of "
            f"{line} in sets of {ways} under {policy!r} that were asked for: leave capacity, line, "
            "ways and policy out to take it as it is"
        )

    @functools.cached_property
    def geometry(self) -> GeometryStruct:
        """The cache's, by this process's addresses."""
        facts = self.facts
        tags, frames = self.metadata.address + facts.tags, self.frames.address + facts.frames
        return geometry_of(tags, frames, facts.sets, facts.ways, facts.line)

    def memory(self) -> CacheMemory:
        """Make the memory of the client's cache, which ends the mappings as it is closed."""
        table = self.mapped.address, self.facts.slots
        parts = self.geometry, self.metadata, self.frames
        return CacheMemory.of_client(self.device, *parts, *table)

    def close(self) -> None:
        """Leave the owner, and its requests. May be called twice."""
        self.connection.close()
        with self.guard:  # a thread may be ending waits
            self.stream.close()
        self.pinned.close()


def join(
    name: str, wanted: int | None, automatic: bool, device: Device | None
) -> names.OwnerLock | Client:
    """Join the processes that share a cache of this name.

    Returns the lock of its owner, if there was none, or a client of the owner.
    """
    names.check_name(name)
    if automatic:
        raise CacheError(
            'capacity="auto" depends on the first array, and a shared cache has its memory before: '
            "give bytes, or leave the capacity out to use the owner's"
        )
    met = meet(name, may_own=wanted is not None)
    return met if isinstance(met, names.OwnerLock) else Client.of(met, device)
