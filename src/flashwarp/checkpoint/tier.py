"""A cache tier: one contiguous buffer of device or host memory, and the lives of what is in it.

The tier decides who is where, and copies nothing. It is not thread-safe: the checkpointer has one
lock for all its tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from flashwarp.checkpoint.buffer import ALIGNMENT, NEVER_NS, FragmentTable, Window
from flashwarp.checkpoint.eviction import Policy, Urgency
from flashwarp.checkpoint.life import Event, Fact, Life, State
from flashwarp.checkpoint.prediction import Backlog
from flashwarp.checkpoint.region import Region
from flashwarp.device.memory import align_up
from flashwarp.errors import ArgumentError

Key = tuple[str, int]
"""The name of a checkpoint, and the number of a version."""

# Expected of a link that was never used: 1 GB/s. Any finite number orders flushes by their place.
_NS_A_BYTE = 1

_SMALL_ALIGNMENT = 256


def block_offsets(regions: tuple[Region, ...]) -> tuple[dict[str, int], int]:
    """Return where each region begins in the block of a version, and the bytes of the block."""
    offsets: dict[str, int] = {}
    end = 0
    for region in regions:
        small = region.nbytes < ALIGNMENT
        end = align_up(end, _SMALL_ALIGNMENT if small else ALIGNMENT)
        offsets[region.name] = end
        end += region.nbytes
    return offsets, max(align_up(end, ALIGNMENT), ALIGNMENT)


@dataclass(eq=False)
class Entry:
    """A version that the checkpointer knows."""

    key: Key  # its name and number
    regions: tuple[Region, ...]  # what it holds
    # Tells it from other versions of its number, before and after it; its copies have it too.
    identity: str = ""
    made: int = 0  # which call of `checkpoint` made it, from 1 on; 0: it was found
    # Where each region begins in a block of the version.
    offsets: dict[str, int] = field(init=False)
    nbytes: int = field(init=False)  # bytes of a block
    # Whether it is committed in the directory, and whether the remote store is known to have it: it
    # was stored there, or compared, by this process.
    stored: bool = False
    remote: bool = False
    # Whether an upload has begun: the store may have the version though it has never said so.
    sent: bool = False
    discarded: bool = False  # whether the user needs it no more
    # Whether a prefetch from storage failed, so that only a restore tries again.
    unreadable: bool = False
    failure: BaseException | None = None  # why the last flush failed
    failed_ns: int = 0  # when that flush had begun

    def __post_init__(self) -> None:
        self.offsets, self.nbytes = block_offsets(self.regions)

    @property
    def data_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.nbytes for region in self.regions)

    def region(self, name: str) -> Region | None:
        """Return a region by its name."""
        return next((each for each in self.regions if each.name == name), None)

    def region_named(self, name: str) -> Region:
        """Return a region by its name; raises ArgumentError if there is none."""
        found = self.region(name)
        if found is None:
            raise ArgumentError(
                f"{self} has no region {name!r}; it has "
                f"{', '.join(repr(each.name) for each in self.regions)}"
            )
        return found

    def __repr__(self) -> str:
        return f"version {self.key[1]} of {self.key[0]!r}"


class Tier:
    """One cache tier.

    `nbytes` are those of the buffer when it has grown; `usable_bytes` can be used at first, by
    default all. `hint_number` returns the number of the first open hint for a version, or None.
    """

    def __init__(
        self,
        name: str,
        address: int,
        nbytes: int,
        on_host: bool,
        policy: Policy,
        backlog: Backlog,
        hint_number: Callable[[Key], int | None],
        usable_bytes: int | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.nbytes = nbytes
        self.on_host = on_host
        self.policy = policy
        self.backlog = backlog
        self.table = FragmentTable(nbytes if usable_bytes is None else usable_bytes)
        self.lives: dict[Entry, Life] = {}
        self.demands: set[Entry] = set()
        """Versions for which threads of the user's wait for room: prefetches let them go first."""
        self.flushes_waiting: set[Entry] = set()
        """Versions whose flushes from the tier above wait for room here."""
        self.awaited: dict[Entry, list[Hashable]] = {}
        """By the version that waits for room here: those that must leave for it."""
        self.evictions = 0
        self.above: Tier | None = None
        """The next faster cache."""
        self._hint_number = hint_number

    @property
    def grown(self) -> bool:
        """Whether all of the buffer can be used."""
        return self.table.nbytes >= self.nbytes

    @property
    def demanded(self) -> bool:
        """Whether a thread of the user's waits for room here, or for a flush that does."""
        if self.demands:
            return True
        return bool(self.flushes_waiting) and self.above is not None and self.above.demanded

    # What is here.

    def life(self, entry: Entry) -> Life | None:
        """Return the life of a version on this tier, if it has one."""
        return self.lives.get(entry)

    def holds(self, entry: Entry) -> bool:
        """Return whether all bytes of a version are here."""
        life = self.lives.get(entry)
        return life is not None and Fact.RESIDENT in life.facts

    def filling(self, entry: Entry) -> bool:
        """Return whether bytes of a version are on their way to here."""
        life = self.lives.get(entry)
        return life is not None and bool(life.facts & (Fact.WRITING | Fact.FETCHING))

    def pins(self, entry: Entry) -> bool:
        """Return whether a hint holds a version here until it is restored."""
        life = self.lives.get(entry)
        return life is not None and Fact.PINNED in life.facts

    def block(self, entry: Entry) -> int:
        """Return the address of a version's block."""
        return self.address + self.table.offset(entry)

    def states(self) -> Iterator[tuple[Entry, State]]:
        """Yield the versions here, with their states in the paper's words."""
        return ((entry, life.state) for entry, life in self.lives.items())

    # Room.

    def fits(self, nbytes: int) -> bool:
        """Return whether a version of this size can ever be here."""
        return nbytes <= self.nbytes

    def choose(
        self,
        nbytes: int,
        now_ns: int,
        keep_urgency: int = Urgency.KEEP_NONE,
    ) -> Window | None:
        """Return the best window for a version; see `eviction.Policy.choose`."""
        return self.policy.choose(self.table, nbytes, now_ns, int(keep_urgency))

    def take(self, window: Window, entry: Entry, event: Event, now_ns: int) -> list[Entry]:
        """Give a window that is free now to a version, and return what was evicted.

        `event` begins the filling: `WRITE` or `FETCH`.
        """
        evicted: list[Entry] = []
        for key in self.table.keys_in(window):
            assert isinstance(key, Entry)
            self.lives.pop(key).apply(Event.EVICT)
            evicted.append(key)
        self.evictions += len(evicted)
        self.table.take(window, entry.nbytes, entry)
        self.lives[entry] = Life()
        self.apply(entry, event, now_ns)
        self.table.use(entry)
        return evicted

    def apply(self, entry: Entry, event: Event, now_ns: int) -> None:
        """Change the life of a version, and free its block if nobody needs it any more."""
        life = self.lives[entry]
        life.apply(event)
        if event is Event.READ:
            self.table.use(entry)
        gone = event in (Event.FILL_FAILED, Event.EVICT)
        if gone or (Fact.DISCARDED in life.facts and life.evictable):
            self.drop(entry)
        else:
            self.refresh(entry, now_ns)

    def drop(self, entry: Entry) -> None:
        """Free the block of a version that nobody uses."""
        self.backlog.remove(entry)
        del self.lives[entry]
        self.table.free(entry)

    # What the policy knows of each block.

    def refresh(self, entry: Entry, now_ns: int, ends_ns: int | None = None) -> None:
        """Tell the table when a block can be evicted, and how soon its version is needed."""
        life = self.lives[entry]
        self.table.set(
            entry,
            ready_ns=self._ready_ns(entry, life, now_ns, ends_ns),
            urgency=self._urgency(entry, life),
            pinned=Fact.PINNED in life.facts,
        )

    def refresh_flushes(self, now_ns: int) -> None:
        """Move the deadlines of all queued flushes to what the link does now."""
        for entry, ends_ns in self.backlog.deadlines(now_ns).items():
            if entry in self.lives:
                assert isinstance(entry, Entry)
                self.refresh(entry, now_ns, ends_ns)

    def _ready_ns(self, entry: Entry, life: Life, now_ns: int, ends_ns: int | None) -> int:
        if life.evictable:
            return 0
        if Fact.FAILED in life.facts and Fact.FLUSHING not in life.facts:
            return NEVER_NS
        if Fact.RESIDENT in life.facts and Fact.DURABLE_BELOW in life.facts:
            # Pinned, or being read: the copy takes about as long as a flush of the bytes.
            return now_ns + self._takes_ns(entry.nbytes)
        if ends_ns is None:
            before = self.backlog.nbytes if self.backlog.in_order else 0
            ends_ns = now_ns + self._takes_ns(before + entry.nbytes)
        return ends_ns

    def _takes_ns(self, nbytes: int) -> int:
        takes = self.backlog.link.nanoseconds_for(nbytes)
        return nbytes * _NS_A_BYTE if takes is None else takes

    def _urgency(self, entry: Entry, life: Life) -> int:
        # A restore will take a version that is pinned above from there: this copy is not needed.
        taken_over = self.above is not None and self.above.pins(entry)
        number = self._hint_number(entry.key)
        if number is not None and not taken_over:
            return Urgency.hinted(number)
        used = self.table.last_use(entry)
        if taken_over or Fact.CONSUMED in life.facts:
            return Urgency.consumed(used)
        return Urgency.unhinted(used)
