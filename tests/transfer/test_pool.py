"""Blocks of any size from one budget: what is lent again, what waits, and how it ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwarp.device import CpuDevice
from flashwarp.errors import ArgumentError, ClosedError, DeviceTimeout
from flashwarp.transfer import StagingPool

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[StagingPool]:
    with CpuDevice(1) as device, StagingPool(device, "8 MiB") as made:
        yield made


def test_a_block_that_came_back_is_lent_again(pool: StagingPool) -> None:
    first = pool.acquire(3 * MIB)
    address = first.address
    first.release()

    assert pool.acquire(2 * MIB).address == address
    assert pool.allocated_bytes == 3 * MIB


def test_a_block_in_use_is_not(pool: StagingPool) -> None:
    held = pool.acquire(3 * MIB)

    assert pool.acquire(3 * MIB).address != held.address
    with pytest.raises(DeviceTimeout, match="3145728 of 8388608 bytes are allocated, and 0 of"):
        pool.acquire(6 * MIB, timeout_s=0.02)


def test_free_blocks_that_do_not_fit_make_room(pool: StagingPool) -> None:
    pool.acquire(5 * MIB).release()

    assert pool.acquire(8 * MIB, timeout_s=1).nbytes == 8 * MIB
    assert pool.allocated_bytes == 8 * MIB


def test_more_than_the_budget_is_refused_at_once(pool: StagingPool) -> None:
    with pytest.raises(ArgumentError, match="8388609 bytes are more than the budget of 8388608"):
        pool.acquire(8 * MIB + 1)


def test_after_close_what_is_held_stays(pool: StagingPool) -> None:
    held = pool.acquire(MIB)
    data = held.as_numpy()
    data[:] = 3

    pool.close()
    pool.close()

    assert (data == 3).all()
    with pytest.raises(ClosedError, match="pool was closed"):
        pool.acquire(1)
    del data, held
    gc.collect()
    assert pool.allocated_bytes == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4 * MIB)), max_size=40))
def test_the_budget_holds_whatever_is_asked_for(steps: list[tuple[bool, int]]) -> None:
    with CpuDevice(1) as device, StagingPool(device, "8 MiB") as pool:
        held = []
        for release, nbytes in steps:
            if release and held:
                held.pop(nbytes % len(held)).release()
                continue
            try:
                buffer = pool.acquire(nbytes, timeout_s=0)
            except DeviceTimeout:
                assert sum(each.nbytes for each in held) + nbytes > 8 * MIB
                continue
            begin, end = buffer.address, buffer.address + buffer.nbytes
            assert all(e.address >= end or e.address + e.nbytes <= begin for e in held)
            held.append(buffer)
            assert pool.allocated_bytes <= 8 * MIB
