"""The measured bandwidth of a link: exact for equal transfers, soon right after a change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwarp.errors import ArgumentError
from flashwarp.transfer import LinkBandwidth

transfers = st.lists(
    st.tuples(st.integers(1, 1 << 40), st.integers(1, 1 << 40)), min_size=1, max_size=50
)


def test_nothing_is_known_before_the_first_transfer() -> None:
    link = LinkBandwidth("disk")

    assert link.bytes_per_second is None
    assert link.nanoseconds_for(1) is None
    assert link.age_ns is None
    assert "not measured" in repr(link)


@given(transfers)
def test_the_rate_lies_between_the_slowest_and_the_fastest(pairs: list[tuple[int, int]]) -> None:
    link = LinkBandwidth("disk")

    for nbytes, nanoseconds in pairs:
        link.record(nbytes, nanoseconds)

    # The sums are scaled by 8 and decay by whole numbers: an error of one in 8.
    rates = [nbytes * 10**9 / nanoseconds for nbytes, nanoseconds in pairs]
    assert link.bytes_per_second is not None
    assert min(rates) * 0.85 - 1 <= link.bytes_per_second <= max(rates) * 1.15 + 1


@given(st.integers(1 << 20, 1 << 34), st.integers(1000, 1 << 34), st.integers(1, 200))
def test_equal_transfers_have_their_own_rate(nbytes: int, nanoseconds: int, count: int) -> None:
    link = LinkBandwidth("disk")

    for _ in range(count):
        link.record(nbytes, nanoseconds)

    assert link.bytes_per_second == pytest.approx(nbytes * 1e9 / nanoseconds, rel=1e-3, abs=1)
    assert link.nanoseconds_for(nbytes) == pytest.approx(nanoseconds, rel=1e-3, abs=1)


def test_a_link_that_slows_down_is_known_after_a_few_transfers() -> None:
    link = LinkBandwidth("disk")
    for _ in range(100):
        link.record(1 << 20, 1 << 18)

    for _ in range(20):
        link.record(1 << 20, 1 << 20)

    assert link.bytes_per_second == pytest.approx(1e9, rel=0.1)


def test_what_took_no_time_changes_no_rate() -> None:
    link = LinkBandwidth("disk")
    link.record(1000, 1000)

    link.record(1 << 40, 0)
    link.record(1 << 40, -5)
    link.record(0, 1000)

    assert link.bytes_per_second == 10**9
    assert (link.transfers, link.unmeasurable) == (1, 3)


def test_age_is_that_of_the_last_transfer_and_never_negative() -> None:
    now = [5000]
    link = LinkBandwidth("disk", clock=lambda: now[0])
    link.record(1000, 1000)

    now[0] = 7500
    assert link.age_ns == 2500
    now[0] = 100  # a clock that jumps back
    assert link.age_ns == 0


@pytest.mark.parametrize("nbytes", [-1, 1.5, "1"])
def test_a_number_of_bytes_is_checked(nbytes: object) -> None:
    with pytest.raises(ArgumentError, match="nbytes"):
        LinkBandwidth("disk").record(nbytes, 1)  # type: ignore[arg-type]
