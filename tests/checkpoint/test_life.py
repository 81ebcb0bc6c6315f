"""The life cycle: every walk through the table keeps the conditions of the paper's section 2."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flashwarp.checkpoint.life import TRANSITIONS, Event, Fact, Life, State, evictable, state

events = st.sampled_from(list(Event))
facts = st.integers(0, (1 << len(Fact)) - 1).map(Fact)


def walked(*walk: Event) -> Life:
    life = Life()
    for event in walk:
        life.apply(event)
    return life


WRITTEN = (Event.WRITE, Event.FILLED)
FLUSHED = (*WRITTEN, Event.FLUSH, Event.FLUSHED)


@pytest.mark.parametrize(
    ("walk", "expected"),
    [
        ((), State.INIT),
        ((Event.WRITE,), State.WRITE_IN_PROGRESS),
        (WRITTEN, State.WRITE_COMPLETE),
        ((*WRITTEN, Event.FLUSH), State.WRITE_COMPLETE),
        (FLUSHED, State.FLUSHED),
        ((*WRITTEN, Event.PIN), State.READ_COMPLETE),
        ((*FLUSHED, Event.PIN), State.READ_COMPLETE),
        ((*FLUSHED, Event.READ, Event.READ_DONE), State.CONSUMED),
        ((*FLUSHED, Event.EVICT, Event.FETCH), State.READ_IN_PROGRESS),
        ((*FLUSHED, Event.EVICT, Event.FETCH, Event.FILLED, Event.PIN), State.READ_COMPLETE),
        ((*WRITTEN, Event.FLUSH, Event.FLUSH_FAILED), State.FAILED),
        ((*WRITTEN, Event.DISCARD), State.DISCARDED),
        ((*WRITTEN, Event.READ, Event.READ_DONE), State.WRITE_COMPLETE),
    ],
)
def test_states_of_the_paper_derive_from_facts(walk: tuple[Event, ...], expected: State) -> None:
    assert walked(*walk).state is expected


def test_what_a_hint_pinned_is_evictable_only_after_a_restore() -> None:
    life = walked(*FLUSHED, Event.PIN)
    assert not life.evictable  # condition 4

    life.apply(Event.READ)
    assert not life.evictable
    life.apply(Event.READ_DONE)

    assert life.evictable


def test_a_discarded_version_needs_no_flush() -> None:
    life = walked(*WRITTEN, Event.FLUSH, Event.DISCARD)
    assert not life.evictable, "the flush still reads the bytes"

    life.apply(Event.FLUSH_FAILED)

    assert life.evictable  # condition 5


def test_an_event_out_of_place_changes_nothing() -> None:
    life = walked(Event.WRITE)

    with pytest.raises(AssertionError, match="'evict' is not allowed"):
        life.apply(Event.EVICT)

    assert life.facts == Fact.WRITING


@settings(deadline=None)
@given(facts)
def test_each_combination_of_facts_has_one_state(held: Fact) -> None:
    assert isinstance(state(held), State)


@settings(deadline=None)
@given(facts)
def test_only_what_is_safe_below_or_discarded_is_evictable(held: Fact) -> None:
    if evictable(held):
        assert held & Fact.RESIDENT
        assert held & (Fact.DURABLE_BELOW | Fact.DISCARDED)
        busy = Fact.WRITING | Fact.FETCHING | Fact.FLUSHING | Fact.READING | Fact.PINNED
        assert not held & busy


def test_each_event_has_a_row_and_a_meaning() -> None:
    assert set(TRANSITIONS) == set(Event)
    assert all(transition.why for transition in TRANSITIONS.values())


class TwoTiers(RuleBasedStateMachine):
    """A version on a fast and on a slow tier, above storage, under any order of allowed events.

    The oracle is where the bytes are: two booleans and storage, changed by the copies alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = Life(), Life()
        self.stored = False
        self.discarded = False
        self.written = False

    # The application and the flush of the fast tier.

    @precondition(lambda self: not self.written)
    @rule()
    def checkpoint(self) -> None:
        self.fast.apply(Event.WRITE)
        self.fast.apply(Event.FILLED)
        self.written = True

    @precondition(lambda self: self.fast.allows(Event.FLUSH) and self.slow.allows(Event.WRITE))
    @rule(ends=st.booleans())
    def flush_to_slow(self, ends: bool) -> None:
        self.fast.apply(Event.FLUSH)
        self.slow.apply(Event.WRITE)
        self.slow.apply(Event.FILLED if ends else Event.FILL_FAILED)
        self.fast.apply(Event.FLUSHED if ends else Event.FLUSH_FAILED)

    @precondition(lambda self: self.slow.allows(Event.FLUSH))
    @rule(ends=st.booleans())
    def flush_to_storage(self, ends: bool) -> None:
        self.slow.apply(Event.FLUSH)
        self.slow.apply(Event.FLUSHED if ends else Event.FLUSH_FAILED)
        self.stored |= ends

    # Prefetches.

    @precondition(lambda self: self.stored and self.slow.allows(Event.FETCH))
    @rule(ends=st.booleans())
    def fetch_to_slow(self, ends: bool) -> None:
        self.slow.apply(Event.FETCH)
        self.slow.apply(Event.PIN)
        if not ends:
            self.slow.apply(Event.FILL_FAILED)
            return
        self.slow.apply(Event.SAVED_BELOW)
        self.slow.apply(Event.FILLED)

    @precondition(lambda self: self.slow.allows(Event.READ) and self.fast.allows(Event.FETCH))
    @rule(ends=st.booleans())
    def fetch_to_fast(self, ends: bool) -> None:
        self.slow.apply(Event.READ)
        self.fast.apply(Event.FETCH)
        if not ends:
            self.fast.apply(Event.FILL_FAILED)
            self.slow.apply(Event.READ_FAILED)
            return
        self.fast.apply(Event.SAVED_BELOW)
        self.fast.apply(Event.FILLED)
        self.fast.apply(Event.PIN)
        self.slow.apply(Event.PROMOTED)

    # What may happen to either at any time.

    @rule(fast=st.booleans(), event=st.sampled_from([Event.PIN, Event.UNPIN, Event.READ]))
    def touch(self, fast: bool, event: Event) -> None:
        life = self.fast if fast else self.slow
        if life.allows(event):
            life.apply(event)

    @rule(fast=st.booleans(), ends=st.booleans())
    def end_read(self, fast: bool, ends: bool) -> None:
        life = self.fast if fast else self.slow
        if life.readers:
            life.apply(Event.READ_DONE if ends else Event.READ_FAILED)

    @rule(fast=st.booleans())
    def evict(self, fast: bool) -> None:
        life = self.fast if fast else self.slow
        if life.evictable:
            life.apply(Event.EVICT)

    @precondition(lambda self: self.written)
    @rule()
    def discard(self) -> None:
        self.discarded = True
        for life in (self.fast, self.slow):
            life.apply(Event.DISCARD)

    @invariant()
    def no_version_is_lost(self) -> None:
        if self.written and not self.discarded:
            held = [Fact.RESIDENT in life.facts for life in (self.fast, self.slow)]
            assert any(held) or self.stored

    @invariant()
    def readers_hold_the_bytes(self) -> None:
        for life in (self.fast, self.slow):
            assert (Fact.READING in life.facts) == (life.readers > 0)
            assert not life.readers or Fact.RESIDENT in life.facts

    @invariant()
    def states_agree_with_facts(self) -> None:
        for life in (self.fast, self.slow):
            if life.state in (State.FLUSHED, State.CONSUMED):
                assert life.evictable
            if life.state in (State.READ_COMPLETE, State.WRITE_COMPLETE, State.FAILED):
                assert not life.evictable


TestTwoTiers = TwoTiers.TestCase
TestTwoTiers.settings = settings(deadline=None)
