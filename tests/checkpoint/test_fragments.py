"""The allocation table of a cache, against a list of who owns each unit of the buffer."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from checkpoint.fragments import check, fragments
from flashwarp.checkpoint.buffer import ALIGNMENT, FragmentTable, Window

UNITS = 24


def table_of(*sizes: tuple[str | None, int], units: int) -> FragmentTable:
    """A table with these fragments, in units of the alignment."""
    table = FragmentTable(units * ALIGNMENT)
    for index, (_, size) in enumerate(sizes):
        table.take(table_end(table), size * ALIGNMENT, index)
    for index, (name, _) in enumerate(sizes):
        if name is None:
            table.free(index)
    return table


def table_end(table: FragmentTable) -> Window:
    return Window(len(table) - 1, len(table), 0, 0, 0)


def sizes(table: FragmentTable) -> list[tuple[bool, int]]:
    return [(each.key is None, each.nbytes // ALIGNMENT) for each in fragments(table)]


def test_what_is_left_of_a_window_merges_with_the_gap_on_its_right() -> None:
    # The printed algorithm leaves two gaps there.
    table = table_of(("a", 4), (None, 2), units=8)

    table.take(Window(0, 1, 0, 0, 0), 3 * ALIGNMENT, "new")

    assert sizes(table) == [(False, 3), (True, 5)]
    check(table)


def test_a_version_is_placed_away_from_the_gap_on_its_left() -> None:
    # The printed algorithm places it at the left edge always, which leaves two small gaps.
    table = table_of((None, 2), ("a", 4), ("b", 2), units=8)

    offset = table.take(Window(1, 2, 0, 0, 0), 3 * ALIGNMENT, "new")

    assert offset == 3 * ALIGNMENT
    assert sizes(table) == [(True, 3), (False, 3), (False, 2)]
    check(table)


def test_a_block_begins_at_a_multiple_of_the_alignment() -> None:
    table = FragmentTable(4 * ALIGNMENT)

    first = table.take(Window(0, 1, 0, 0, 0), 10, "a")
    second = table.take(Window(1, 2, 0, 0, 0), 10, "b")

    assert (first, second) == (0, ALIGNMENT)


def test_one_owner_has_one_block() -> None:
    table = table_of(("a", 1), units=4)

    with pytest.raises(AssertionError, match="has a block already"):
        table.take(table_end(table), ALIGNMENT, 0)


class Blocks(RuleBasedStateMachine):
    """Any order of taking, freeing and growing, against one owner a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FragmentTable(UNITS * ALIGNMENT)
        self.owners: list[int | None] = [None] * UNITS
        self.next = 0

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(self.table) - 1))
        last = data.draw(st.integers(first + 1, len(self.table)))
        window = fragments(self.table)[first:last]
        units = sum(each.nbytes for each in window) // ALIGNMENT
        nbytes = data.draw(st.integers(1, units * ALIGNMENT))
        start = window[0].offset // ALIGNMENT

        offset = self.table.take(Window(first, last, 0, 0, 0), nbytes, self.next) // ALIGNMENT

        taken = -(-nbytes // ALIGNMENT)
        assert start <= offset <= offset + taken <= start + units
        self.owners[start : start + units] = [None] * units
        self.owners[offset : offset + taken] = [self.next] * taken
        self.next += 1

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        held = sorted({owner for owner in self.owners if owner is not None})
        if held:
            owner = data.draw(st.sampled_from(held))
            self.table.free(owner)
            self.owners = [None if each == owner else each for each in self.owners]

    @rule(units=st.integers(1, 3))
    def grow(self, units: int) -> None:
        self.table.grow(units * ALIGNMENT)
        self.owners += [None] * units

    @invariant()
    def the_table_agrees(self) -> None:
        check(self.table)
        found = [
            each.key for each in fragments(self.table) for _ in range(each.nbytes // ALIGNMENT)
        ]
        assert found == self.owners


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(deadline=None)


@settings(deadline=None)
@given(st.lists(st.integers(1, 8), min_size=80, max_size=200))
def test_a_table_of_many_fragments_keeps_all(sizes_taken: list[int]) -> None:
    table = FragmentTable(sum(sizes_taken) * ALIGNMENT)

    for index, size in enumerate(sizes_taken):
        table.take(table_end(table), size * ALIGNMENT, index)

    assert table.owners() == list(range(len(sizes_taken)))
    check(table)
