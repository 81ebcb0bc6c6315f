"""The score against brute force, and a test for each defect of the printed Algorithm 1."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from checkpoint.fragments import fragments
from flashwarp.checkpoint.buffer import ALIGNMENT, GAP, NEVER_NS, FragmentTable, Window
from flashwarp.checkpoint.eviction import FIFO, LRU, Policy, Score, Urgency, policy_of
from flashwarp.errors import ArgumentError
from support.samples import FUZZ_EXAMPLES

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


def brute_force(
    table: FragmentTable, nbytes: int, keep_urgency: int
) -> tuple[int, int, int] | None:
    """The best (wait, -urgency, bytes) over all windows that are large enough."""
    best = None
    rows = fragments(table)
    for first in range(len(rows)):
        for last in range(first + 1, len(rows) + 1):
            window = rows[first:last]
            if sum(each.nbytes for each in window) < nbytes:
                continue
            if any(
                each.ready_ns == NEVER_NS or each.urgency <= keep_urgency or each.pinned
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


@settings(max_examples=2 * FUZZ_EXAMPLES, deadline=None)
@given(rows.filter(lambda r: len(r) <= 24), st.integers(1, 20), st.integers(-1, 6))
# What the printed Algorithm 1 gets wrong, as section 3.6 of the analysis of the paper numbers it.
@example([(2, 0, 1, False)] * 3, 4, -1)  # 1: no more room than it needs
@example([(1, NOW + 5, 0, False), (1, NOW + 5, 0, False), (8, 0, 0, False)], 4, -1)  # 2: the end
@example([(4, 0, 3, False), (4, 0, GAP, False)], 4, -1)  # 3: gaps first
@example([(4, 0, u, False) for u in (9, Urgency.unhinted(1), Urgency.consumed(9))], 4, -1)  # 3
@example([*[(1, 0, 100, False)] * 4, (4, 0, 300, False)], 4, -1)  # 4: distances do not add up
@example([(2, 0, 1000, False), (2, 0, 1, False), (4, 0, 500, False)], 4, -1)  # 4
@example([(2, NOW + 30, 5, False), (2, NOW + 40, 5, False), (4, NOW + 50, 5, False)], 4, -1)  # 5
@example([(4, NOW - 100, 1, False)], 4, -1)  # 9: a deadline that has passed
@example([(4, 0, 1, False), (4, 0, 1, False)], 9, -1)  # 10: larger than the buffer
def test_the_score_is_the_best_of_all_windows(
    table_rows: list[Row], units: int, keep_urgency: int
) -> None:
    table = table_of(table_rows)
    nbytes = units * ALIGNMENT

    window = Score().choose(table, nbytes, NOW, keep_urgency)

    best = brute_force(table, nbytes, keep_urgency)
    if window is None:
        assert best is None
        return
    assert (window.wait_ns, -window.urgency, window.evicted_bytes) == best
    inside = fragments(table)[window.first : window.last]
    assert sum(each.nbytes for each in inside) >= nbytes
    assert sum(each.nbytes for each in inside if each.key is not None) == window.evicted_bytes


@settings(max_examples=300, deadline=None)
@given(
    rows.filter(lambda r: len(r) <= 24),
    st.integers(1, 20),
    st.integers(-1, 6),
    st.sampled_from([LRU(), FIFO()]),
)
def test_age_finds_a_window_where_there_is_one(
    table_rows: list[Row], units: int, keep_urgency: int, policy: Policy
) -> None:
    table = table_of(table_rows)
    nbytes = units * ALIGNMENT

    window = policy.choose(table, nbytes, NOW, keep_urgency)

    best = brute_force(table, nbytes, keep_urgency)
    assert (window is None) == (best is None)
    if window is not None:
        inside = fragments(table)[window.first : window.last]
        assert sum(each.nbytes for each in inside) >= nbytes
        assert all(each.ready_ns != NEVER_NS and each.urgency > keep_urgency for each in inside)
        assert not any(each.pinned for each in inside)


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
