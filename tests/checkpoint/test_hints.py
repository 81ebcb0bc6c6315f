"""Hints: any order of hints and restores, against lists; and what the score card counts."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flashwarp.checkpoint.hints import RestoreQueue, ScoreCard
from flashwarp.checkpoint.prediction import Backlog, RestoreInterval
from flashwarp.errors import ArgumentError


def queue_of(*keys: int, passed_max: int = 100) -> RestoreQueue:
    queue = RestoreQueue(passed_max=passed_max)
    for key in keys:
        queue.enqueue(key)
    return queue


def upcoming(queue: RestoreQueue) -> list[object]:
    return [hint.key for hint in queue.upcoming()]


def test_hints_come_in_their_order() -> None:
    queue = queue_of(3, 1, 2)

    queue.restored(3, ready=True)
    queue.enqueue(3)

    assert upcoming(queue) == [1, 2, 3]
    assert queue.number(1) == 1
    assert queue.number(3) == 3
    assert queue.number(9) is None


def test_a_restore_out_of_order_leaves_earlier_hints() -> None:
    queue = queue_of(1, 2, 3)

    queue.restored(3, ready=False)

    assert upcoming(queue) == [1, 2]
    assert queue.card() == ScoreCard(hints=3, honoured=1, late=1, open=2, out_of_order=1)


def test_a_hint_that_restores_pass_by_is_given_up() -> None:
    queue = queue_of(99, 1, 2, 3, passed_max=3)

    assert queue.restored(1, ready=True) == []
    assert queue.restored(2, ready=True) == []
    given_up = queue.restored(3, ready=True)

    assert [hint.key for hint in given_up] == [99]
    assert upcoming(queue) == []
    assert queue.number(99) is None
    assert queue.card().open == 1


def test_a_version_restored_after_its_hint_was_given_up_still_honours_it() -> None:
    queue = queue_of(99, 1, passed_max=1)
    queue.restored(1, ready=True)

    queue.restored(99, ready=False)

    assert queue.card() == ScoreCard(hints=2, honoured=2, useful=1, late=1, out_of_order=1)


def test_restores_without_hints_pass_the_next_hint_alone() -> None:
    queue = queue_of(1, 2, passed_max=2)

    queue.restored(7, ready=False)
    given_up = queue.restored(8, ready=False)

    assert [hint.key for hint in given_up] == [1]
    assert upcoming(queue) == [2]
    assert queue.card().unhinted == 2


def test_hints_of_discarded_versions_are_wrong() -> None:
    queue = queue_of(1, 2, 1)

    queue.drop(1)

    assert upcoming(queue) == [2]
    assert queue.card() == ScoreCard(hints=3, wrong=2, open=1)


def test_the_queue_has_a_bound() -> None:
    queue = RestoreQueue(hints_max=2)
    queue.enqueue(1)
    queue.enqueue(2)

    with pytest.raises(ArgumentError, match="2 hints are open"):
        queue.enqueue(3)
    queue.restored(1, ready=True)
    queue.enqueue(3)


steps = st.lists(st.tuples(st.sampled_from(["hint", "restore", "drop"]), st.integers(0, 5)))


@settings(deadline=None)
@given(steps, st.integers(1, 4))
def test_each_hint_is_counted_once(walk: list[tuple[str, int]], passed_max: int) -> None:
    queue = RestoreQueue(passed_max=passed_max)
    hinted: list[int] = []  # the oracle: all hints that no restore and no drop has closed
    honoured = dropped = unhinted = given = 0
    for what, key in walk:
        if what == "hint":
            queue.enqueue(key)
            hinted.append(key)
            given += 1
        elif what == "restore":
            queue.restored(key, ready=key % 2 == 0)
            if key in hinted:
                hinted.remove(key)
                honoured += 1
            else:
                unhinted += 1
        else:
            queue.drop(key)
            dropped += hinted.count(key)
            hinted = [each for each in hinted if each != key]

        card = queue.card()
        assert card.hints == given == card.honoured + card.wrong + card.open
        assert card.honoured == honoured == card.useful + card.late
        assert (card.wrong, card.unhinted, card.open) == (dropped, unhinted, len(hinted))
        open_now = list(hinted)
        for hint in queue.upcoming():
            open_now.remove(hint.key)  # each is one of the oracle's
            assert hint.passed < passed_max
    assert queue.finish().open == 0


# Prediction.


def test_the_interval_follows_the_restores() -> None:
    interval = RestoreInterval()
    assert interval.estimate_ns is None

    for step in range(50):
        interval.note(step * 1000)
    for step in range(50):
        interval.note(50_000 + step * 3000)

    assert interval.estimate_ns == pytest.approx(3000, rel=0.01)


def test_a_clock_that_jumps_back_makes_no_negative_interval() -> None:
    interval = RestoreInterval()

    for now in (1000, 2000, 500, 1500):
        interval.note(now)

    assert interval.estimate_ns == 1000


class OneByteAtATime:
    bytes_per_second: int | None = 1_000_000_000

    def nanoseconds_for(self, nbytes: int) -> int | None:
        return None if self.bytes_per_second is None else nbytes


def test_a_transfer_ends_after_those_before_it() -> None:
    backlog = Backlog(OneByteAtATime())
    backlog.add("a", 100)
    backlog.add("b", 50)

    assert backlog.deadlines(1000) == {"a": 1100, "b": 1150}
    assert backlog.ends_ns(1000) == 1150
    backlog.remove("a")
    backlog.remove("a")

    assert backlog.deadlines(1000) == {"b": 1050}
    assert (backlog.nbytes, len(backlog)) == (50, 1)


def test_a_transfer_that_may_go_first_waits_for_itself_alone() -> None:
    backlog = Backlog(OneByteAtATime(), in_order=False)
    backlog.add("a", 100)
    backlog.add("b", 50)

    assert backlog.deadlines(1000) == {"a": 1100, "b": 1050}
    assert backlog.ends_ns(1000) == 1150, "all of them"


def test_nothing_is_expected_of_a_link_that_was_never_used() -> None:
    link = OneByteAtATime()
    link.bytes_per_second = None
    backlog = Backlog(link)
    backlog.add("a", 100)

    assert backlog.deadlines(0) == {}
    assert backlog.ends_ns(0) is None
