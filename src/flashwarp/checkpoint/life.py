"""The life of one version on one tier: facts that hold, and the events that change them.

`TRANSITIONS` says which event is allowed when, and what it changes. The caches apply it, the
documentation prints it, and the property test walks it. The states of the paper's Figure 1 (Maurya
et al., HPDC '23) derive from the facts by `state`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fact(enum.IntFlag):
    """What holds of a version on a tier. The facts are orthogonal: each can hold without the rest.

    `DURABLE_BELOW` means that a slower tier has all bytes and keeps them: either that tier is
    storage, or it evicts them only when they are durable below it.
    """

    WRITING = enum.auto()
    """A checkpoint or a flush copies the bytes into this tier."""
    FETCHING = enum.auto()
    """A prefetch copies the bytes into this tier from a slower one."""
    RESIDENT = enum.auto()
    """All bytes are here."""
    FLUSHING = enum.auto()
    """A flush reads the bytes here."""
    DURABLE_BELOW = enum.auto()
    """A slower tier has all bytes and keeps them."""
    READING = enum.auto()
    """A restore or a prefetch into a faster tier reads the bytes here."""
    PINNED = enum.auto()
    """A hint holds the bytes here until a restore has consumed them."""
    CONSUMED = enum.auto()
    """A restore has copied the bytes, or a faster tier has taken them over, since the last hint."""
    FAILED = enum.auto()
    """The last flush failed, and no later one succeeded."""
    DISCARDED = enum.auto()
    """The user needs the version no more: its flushes need not complete."""


class Event(enum.Enum):
    """What happens to a version on a tier."""

    WRITE = "write"
    FETCH = "fetch"
    FILLED = "filled"
    FILL_FAILED = "fill failed"
    FLUSH = "flush"
    FLUSHED = "flushed"
    FLUSH_FAILED = "flush failed"
    SAVED_BELOW = "saved below"
    PIN = "pin"
    UNPIN = "unpin"
    READ = "read"
    READ_DONE = "read done"
    READ_FAILED = "read failed"
    PROMOTED = "promoted"
    SERVED_ELSEWHERE = "served elsewhere"
    DISCARD = "discard"
    EVICT = "evict"


class State(enum.Enum):
    """The states of the paper's Figure 1, and two that it lacks: FAILED and DISCARDED."""

    INIT = "init"
    WRITE_IN_PROGRESS = "write in progress"
    WRITE_COMPLETE = "write complete"
    FLUSHED = "flushed"
    READ_IN_PROGRESS = "read in progress"
    READ_COMPLETE = "read complete"
    CONSUMED = "consumed"
    FAILED = "failed"
    DISCARDED = "discarded"


_NONE = Fact(0)


@dataclass(frozen=True)
class Transition:
    """When an event is allowed, and what it changes."""

    # All of `needs` and none of `forbids` must hold.
    needs: Fact = _NONE
    needs_one: Fact = _NONE  # at least one of these must hold; empty: no such condition
    forbids: Fact = _NONE
    # Facts that hold, or hold no more, after the event.
    sets: Fact = _NONE
    clears: Fact = _NONE
    why: str = ""  # the meaning, for the documentation

    def allows(self, facts: Fact) -> bool:
        """Return whether the event may happen where these facts hold."""
        return (
            facts & self.needs == self.needs
            and not facts & self.forbids
            and (not self.needs_one or bool(facts & self.needs_one))
        )


_F = Fact
_ALL = ~Fact(0)
_FILLING = _F.WRITING | _F.FETCHING
_IN_USE = _FILLING | _F.FLUSHING | _F.READING

TRANSITIONS: dict[Event, Transition] = {
    Event.WRITE: Transition(
        forbids=_FILLING | _F.RESIDENT | _F.DISCARDED,
        sets=_F.WRITING,
        why="a checkpoint, or a flush from a faster tier, begins to fill a block",
    ),
    Event.FETCH: Transition(
        forbids=_FILLING | _F.RESIDENT | _F.DISCARDED,
        sets=_F.FETCHING,
        why="a prefetch begins to fill a block from a slower tier",
    ),
    Event.FILLED: Transition(
        needs_one=_FILLING,
        sets=_F.RESIDENT,
        clears=_FILLING,
        why="all bytes have arrived",
    ),
    Event.FILL_FAILED: Transition(
        needs_one=_FILLING,
        clears=_ALL,
        why="the copy into this tier failed: the block is free again",
    ),
    Event.FLUSH: Transition(
        needs=_F.RESIDENT,
        forbids=_F.FLUSHING | _F.DURABLE_BELOW | _F.DISCARDED,
        sets=_F.FLUSHING,
        why="a flush begins to read the bytes",
    ),
    Event.FLUSHED: Transition(
        needs=_F.FLUSHING,
        sets=_F.DURABLE_BELOW,
        clears=_F.FLUSHING | _F.FAILED,
        why="the flush has ended: a slower tier has all bytes",
    ),
    Event.FLUSH_FAILED: Transition(
        needs=_F.FLUSHING,
        sets=_F.FAILED,
        clears=_F.FLUSHING,
        why="the flush failed: this copy stays, and is not evictable",
    ),
    Event.SAVED_BELOW: Transition(
        needs_one=_FILLING | _F.RESIDENT,
        forbids=_F.FLUSHING,
        sets=_F.DURABLE_BELOW,
        clears=_F.FAILED,
        why="a slower tier has all bytes, without a flush from here",
    ),
    Event.PIN: Transition(
        needs_one=_FILLING | _F.RESIDENT,
        forbids=_F.DISCARDED,
        sets=_F.PINNED,
        clears=_F.CONSUMED,
        why="a hint says that a restore will come: condition 4 of the paper",
    ),
    Event.UNPIN: Transition(
        needs=_F.PINNED,
        clears=_F.PINNED,
        why="the hint is given up: restores have passed it, or it was wrong",
    ),
    Event.READ: Transition(
        needs=_F.RESIDENT,
        sets=_F.READING,
        why="a restore, or a prefetch into a faster tier, begins to read; several may",
    ),
    Event.READ_DONE: Transition(
        needs=_F.READING,
        sets=_F.CONSUMED,
        clears=_F.READING | _F.PINNED,
        why="a restore has copied all bytes; READING holds until the last reader has ended",
    ),
    Event.READ_FAILED: Transition(
        needs=_F.READING,
        clears=_F.READING,
        why="the reader failed or stopped: nothing was consumed",
    ),
    Event.PROMOTED: Transition(
        needs=_F.READING,
        sets=_F.CONSUMED,
        clears=_F.READING | _F.PINNED,
        why="a faster tier has taken the bytes over, and with them the pin (4.3.2 of the paper)",
    ),
    Event.SERVED_ELSEWHERE: Transition(
        needs=_F.RESIDENT,
        sets=_F.CONSUMED,
        clears=_F.PINNED,
        why="a restore has copied the bytes from another tier",
    ),
    Event.DISCARD: Transition(
        sets=_F.DISCARDED,
        clears=_F.PINNED,
        why="the user needs the version no more: condition 5 of the paper",
    ),
    Event.EVICT: Transition(
        needs=_F.RESIDENT,
        needs_one=_F.DURABLE_BELOW | _F.DISCARDED,
        forbids=_IN_USE | _F.PINNED,
        clears=_ALL,
        why="another version, or nobody, takes the block",
    ),
}


def evictable(facts: Fact) -> bool:
    """Return whether the block may be given to another version now."""
    return TRANSITIONS[Event.EVICT].allows(facts)


# The first row whose facts all hold names the state.
_STATES = (
    (_F.DISCARDED, State.DISCARDED),
    (_F.WRITING, State.WRITE_IN_PROGRESS),
    (_F.FETCHING, State.READ_IN_PROGRESS),
    (_F.RESIDENT | _F.READING, State.READ_COMPLETE),
    (_F.RESIDENT | _F.PINNED, State.READ_COMPLETE),
    (_F.RESIDENT | _F.CONSUMED | _F.DURABLE_BELOW, State.CONSUMED),
    (_F.RESIDENT | _F.DURABLE_BELOW, State.FLUSHED),
    (_F.RESIDENT | _F.FAILED, State.FAILED),
    (_F.RESIDENT, State.WRITE_COMPLETE),
)


def state(facts: Fact) -> State:
    """Return the paper's state of a version on a tier.

    The paper leaves open where an unfinished flush belongs. Here WRITE_IN_PROGRESS means that bytes
    arrive in this tier, and WRITE_COMPLETE that they are here and nowhere below. A consumed version
    that is not durable below stays WRITE_COMPLETE, because it is not evictable.
    """
    return next((name for needed, name in _STATES if facts & needed == needed), State.INIT)


class Life:
    """The facts of one version on one tier; changed by `apply` alone. Not thread-safe."""

    def __init__(self) -> None:
        self.facts = Fact(0)
        self.readers = 0

    def allows(self, event: Event) -> bool:
        """Return whether the event may happen now."""
        return TRANSITIONS[event].allows(self.facts)

    def apply(self, event: Event) -> None:
        """Change the facts as `TRANSITIONS` says; an event that it forbids is a caller's bug."""
        transition = TRANSITIONS[event]
        if not transition.allows(self.facts):
            raise AssertionError(f"event {event.value!r} is not allowed where {self.facts!r} hold")
        ends = transition.needs == Fact.READING
        self.readers += (event is Event.READ) - ends
        self.facts = (self.facts & ~transition.clears) | transition.sets
        if self.readers > 0:
            self.facts |= Fact.READING

    @property
    def evictable(self) -> bool:
        """Whether the block may be given to another version now."""
        return evictable(self.facts)

    @property
    def state(self) -> State:
        """The paper's state."""
        return state(self.facts)

    def __repr__(self) -> str:
        return f"Life({self.state.value}: {self.facts!r})"
