"""The score against brute force, and a test for each defect of the printed Algorithm 1."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from flashwarp.checkpoint.buffer import ALIGNMENT, GAP, NEVER_NS, FragmentTable, Window
from flashwarp.checkpoint.eviction import FIFO, LRU, Policy, Score, Urgency, policy_of
from flashwarp.errors import ArgumentError

NOW = 1_000_000

# (units, ready_ns, urgency, pinned); a urgency of GAP makes a gap.
Row = tuple[int, int, int, bool]


def table_of(rows: list[Row]) -> FragmentTable:
    """Make a table; neighbouring gaps become one."""
    table = FragmentTable(sum(row[0] for row in rows) * ALIGNMENT)
    for index, row in enumerate(rows):
        table.take(Window(len(table) - 1, len(table), 0, 0, 0), row[0] * ALIGNMENT, index)
    for index, (_, ready, urgency, pinned) in enumerate(rows):
        if urgency == GAP:
            table.free(index)
        else:
            table.set(index, ready_ns=ready, urgency=urgency, pinned=pinned)
            table.use(index)
    return table


def choose(
    rows: list[Row], units: int, policy: Policy | None = None, **conditions: bool | int
) -> list[object] | None:
    """The owners that the policy evicts."""
    table = table_of(rows)
    chosen = policy or Score()
    window = chosen.choose(table, units * ALIGNMENT, NOW, **conditions)  # type: ignore[arg-type]
    return None if window is None else table.keys_in(window)


def brute_force(
    table: FragmentTable, nbytes: int, keep_urgency: int, waits_for_restores: bool
) -> tuple[int, int, int] | None:
    """The best (wait, -urgency, bytes) over all windows that are large enough."""
    best = None
    fragments = table.fragments()
    for first in range(len(fragments)):
        for last in range(first + 1, len(fragments) + 1):
            window = fragments[first:last]
            if sum(each.nbytes for each in window) < nbytes:
                continue
            if any(
                each.ready_ns == NEVER_NS
                or each.urgency <= keep_urgency
                or (each.pinned and not waits_for_restores)
                for each in window
            ):
                continue
            waits = [each.ready_ns and max(each.ready_ns - NOW, 1) for each in window]
            evicted = sum(each.nbytes for each in window if each.key is not None)
            score = max(waits), -min(each.urgency for each in window), evicted
            best = score if best is None else min(best, score)
    return best


times = st.one_of(
    st.just(0), st.integers(NOW - 5, NOW + 5), st.integers(NOW, NOW + 1000), st.just(NEVER_NS)
)
urgencies = st.one_of(
    st.just(GAP),
    st.integers(0, 6),
    st.integers(0, 5).map(Urgency.unhinted),
    st.integers(0, 5).map(Urgency.consumed),
)
rows = st.lists(st.tuples(st.integers(1, 6), times, urgencies, st.booleans()), min_size=1)


@settings(max_examples=1000, deadline=None)
@given(rows.filter(lambda r: len(r) <= 24), st.integers(1, 20), st.integers(-1, 6), st.booleans())
@example([(1, NOW + 5, 0, False), (1, NOW + 5, 0, False), (8, 0, 0, False)], 4, -1, False)
def test_the_score_is_the_best_of_all_windows(
    table_rows: list[Row], units: int, keep_urgency: int, waits_for_restores: bool
) -> None:
    table = table_of(table_rows)
    nbytes = units * ALIGNMENT

    window = Score().choose(
        table, nbytes, NOW, keep_urgency=keep_urgency, waits_for_restores=waits_for_restores
    )

    best = brute_force(table, nbytes, keep_urgency, waits_for_restores)
    if window is None:
        assert best is None
        return
    assert (window.wait_ns, -window.urgency, window.evicted_bytes) == best
    inside = table.fragments()[window.first : window.last]
    assert sum(each.nbytes for each in inside) >= nbytes
    assert sum(each.nbytes for each in inside if each.key is not None) == window.evicted_bytes


@settings(max_examples=300, deadline=None)
@given(
    rows.filter(lambda r: len(r) <= 24),
    st.integers(1, 20),
    st.integers(-1, 6),
    st.booleans(),
    st.sampled_from([LRU(), FIFO()]),
)
def test_age_finds_a_window_where_there_is_one(
    table_rows: list[Row], units: int, keep_urgency: int, waits_for_restores: bool, policy: Policy
) -> None:
    table = table_of(table_rows)
    nbytes = units * ALIGNMENT

    window = policy.choose(
        table, nbytes, NOW, keep_urgency=keep_urgency, waits_for_restores=waits_for_restores
    )

    best = brute_force(table, nbytes, keep_urgency, waits_for_restores)
    assert (window is None) == (best is None)
    if window is not None:
        inside = table.fragments()[window.first : window.last]
        assert sum(each.nbytes for each in inside) >= nbytes
        assert all(each.ready_ns != NEVER_NS and each.urgency > keep_urgency for each in inside)
        assert waits_for_restores or not any(each.pinned for each in inside)


# The defects of Algorithm 1, as section 3.6 of the analysis of the paper numbers them.


def test_1_a_window_has_room_for_the_new_version_and_no_more_than_it_needs() -> None:
    assert choose([(2, 0, 1, False), (2, 0, 1, False), (2, 0, 1, False)], 4) == [0, 1]


def test_2_a_window_at_the_end_of_the_buffer_is_tried() -> None:
    assert choose([(1, NOW + 5, 0, False), (1, NOW + 5, 0, False), (8, 0, 0, False)], 4) == [2]


@pytest.mark.parametrize(
    "urgency", [3, Urgency.unhinted(1), Urgency.consumed(1)], ids=["hinted", "flushed", "consumed"]
)
def test_3_a_gap_is_taken_before_any_version(urgency: int) -> None:
    assert choose([(4, 0, urgency, False), (4, 0, GAP, False)], 4) == []


def test_3_consumed_versions_go_before_flushed_ones_and_these_before_hinted_ones() -> None:
    hinted, flushed, consumed = 9, Urgency.unhinted(1), Urgency.consumed(9)

    assert choose([(4, 0, u, False) for u in (hinted, flushed, consumed)], 4) == [2]
    assert choose([(4, 0, u, False) for u in (hinted, flushed)], 4) == [1]
    assert choose([(4, 0, u, False) for u in (3, hinted)], 4) == [1]


def test_4_one_version_needed_late_goes_before_four_whose_distances_add_up() -> None:
    small = [(1, 0, 100, False)] * 4
    assert choose([*small, (4, 0, 300, False)], 4) == [4]


def test_4_a_version_needed_soon_does_not_hide_among_late_ones() -> None:
    late, soon = 1000, 1
    assert choose([(2, 0, late, False), (2, 0, soon, False), (4, 0, 500, False)], 4) == [2]


def test_5_the_wait_for_a_window_is_that_of_its_last_flush() -> None:
    # Two flushes of one queue end at 30 and 40. Their sum is 70, but the wait is 40.
    pair = [(2, NOW + 30, 5, False), (2, NOW + 40, 5, False)]
    assert choose([*pair, (4, NOW + 50, 5, False)], 4) == [0, 1]


def test_6_equal_waits_are_equal_after_any_number_of_steps() -> None:
    # 0.1 + 0.2 + 0.3 - 0.3 - 0.2 - 0.1 is not 0 with floats.
    waits = [(1, NOW + n, 1, False) for n in (100_000_001, 200_000_002, 300_000_003)]
    assert choose([*waits, (1, 0, 1, False), (1, 0, 7, False)], 1) == [4]


def test_7_deadlines_are_absolute() -> None:
    table = table_of([(4, NOW + 100, 1, False), (4, NOW + 50, 1, False)])

    early = Score().choose(table, 4 * ALIGNMENT, NOW)
    late = Score().choose(table, 4 * ALIGNMENT, NOW + 49)

    assert early is not None
    assert late is not None
    assert (early.wait_ns, late.wait_ns) == (50, 1)


def test_9_a_passed_deadline_is_an_estimate_and_no_eviction() -> None:
    rows: list[Row] = [(4, NOW - 100, 1, False), (4, 0, 1, False)]

    assert choose(rows, 4) == [1]
    window = Score().choose(table_of(rows[:1]), 4 * ALIGNMENT, NOW)
    assert window is not None
    assert window.wait_ns == 1


def test_10_a_version_larger_than_the_buffer_gets_no_window() -> None:
    assert choose([(4, 0, 1, False), (4, 0, 1, False)], 9) is None


def test_11_a_caller_that_restores_does_not_wait_for_restores() -> None:
    rows: list[Row] = [(4, NOW + 10, 1, True), (4, NOW + 1000, 1, False)]

    assert choose(rows, 4, waits_for_restores=False) == [1]
    assert choose(rows, 4, waits_for_restores=True) == [0]
    assert choose(rows[:1], 4, waits_for_restores=False) is None


def test_a_prefetch_evicts_nothing_that_is_needed_before_what_it_fetches() -> None:
    assert choose([(4, 0, 5, False), (4, 0, 7, False)], 4, keep_urgency=6) == [1]
    assert choose([(4, 0, 5, False), (4, 0, 6, False)], 4, keep_urgency=6) is None


def test_gaps_around_a_small_version_make_it_the_best_to_evict() -> None:
    rows: list[Row] = [(3, 0, GAP, False), (1, 0, 9, False), (3, 0, GAP, False), (7, 0, 9, False)]

    assert choose(rows, 6) == [1]


def test_ages_follow_their_order() -> None:
    table = table_of([(4, 0, 1, False)] * 3)
    table.use(0)

    lru = LRU().choose(table, 4 * ALIGNMENT, NOW)
    fifo = FIFO().choose(table, 4 * ALIGNMENT, NOW)

    assert lru is not None
    assert fifo is not None
    assert (table.keys_in(lru), table.keys_in(fifo)) == ([1], [0])


def test_policies_have_names() -> None:
    assert [policy_of(name).name for name in ("score", "lru", "fifo")] == ["score", "lru", "fifo"]
    with pytest.raises(ArgumentError, match="'mru' is none of fifo, lru, score"):
        policy_of("mru")
