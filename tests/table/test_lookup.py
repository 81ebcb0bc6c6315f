"""Lookups without a library of tensors: layouts, and what they read."""

from __future__ import annotations

import time

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, BoundsError, ClosedError
from flashwarp.table.lookup import Bags, Ids, Lookup, Number, Pooling, Table

ROWS, WIDTH = 3000, 40


@pytest.fixture
def content():
    return np.random.default_rng(3).random((ROWS, WIDTH), np.float32)


@pytest.fixture
def x(tmp_path, content):
    np.save(tmp_path / "x.npy", content)
    with fw.open(tmp_path / "x.npy", device="cpu", cache="64 KiB", line=512) as opened:
        yield opened


def table(x, **options):
    return Table(x, Number.FLOAT32, WIDTH, range(ROWS), **options)


def where(ids):
    return Ids(ids.ctypes.data, ids.size, ids.itemsize)


@pytest.mark.parametrize(
    ("number", "dtype", "times"),
    [(Number.FLOAT32, np.float32, 40), (Number.FLOAT16, np.float16, 500)],
)
def test_repeated_ids_fetch_their_lines_once(tmp_path, content, number, dtype, times):
    np.save(tmp_path / "x.npy", content)
    ids = np.tile(np.arange(100, 110), times)
    out = np.empty((ids.size, WIDTH), dtype)
    # By commands, because a thread reads around the cache what the page cache has.
    controller = fw.nvme.SoftwareController(commands=True)
    with fw.open(
        tmp_path / "x.npy", device="cpu", cache="64 KiB", line=512, controller=controller
    ) as x:
        Lookup([table(x)]).rows(where(ids), out.ctypes.data, number, None)

        lines = {byte // 512 for row in range(100, 110) for byte in (row * 160, row * 160 + 159)}
        assert (out == content[ids].astype(dtype)).all()
        assert x.stats.bytes_read == len(lines) * 512
        assert x.stats.bytes_used == ids.size * WIDTH * 4


def test_prefetch_brings_what_a_lookup_then_finds(x, content):
    ids = np.arange(0, 64, 2)
    out = np.empty((32, WIDTH), np.float32)
    lookup = Lookup([table(x)])

    lookup.prefetch(where(ids), None, None)
    before = x.stats
    lookup.rows(where(ids), out.ctypes.data, Number.FLOAT32, None)

    assert before.bytes_read > 0
    assert (x.stats.misses, x.stats.bytes_read) == (before.misses, before.bytes_read)
    assert (out == content[ids]).all()


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("number", [Number.FLOAT32, Number.FLOAT16])
def test_rows_are_fetched_ahead_where_the_storage_makes_a_thread_wait(
    tmp_path, content, number, pools
):
    """Each read takes 20 ms, so one after the other they would take eight seconds."""
    latency = (19_900, 20_000, 20_100)
    model = fw.nvme.SSDModel(
        name="slow",
        read_iops=((4096, 1e6),),
        write_iops=((4096, 1e6),),
        read_bytes_per_s=1e10,
        write_bytes_per_s=1e10,
        read_latency_us=latency,
        write_latency_us=latency,
        units=256,
    )
    content.tofile(tmp_path / "x.bin")
    ids = np.random.default_rng(5).permutation(ROWS)[:400]
    out = np.empty((400, WIDTH), np.float32)
    with fw.open(
        *(tmp_path / "x.bin", "r", "f4", (ROWS, WIDTH)),
        device="cpu",
        cache="1 MiB",
        line=512,
        controller=fw.nvme.SoftwareController(model=model),
    ) as x:
        lookup, bags = Lookup([table(x)]), Bags(20, 20)
        begin = time.perf_counter()
        if pools:
            lookup.bags(where(ids), bags, Pooling.SUM, None, out.ctypes.data, number, None)
        else:
            lookup.rows(where(ids), out.ctypes.data, number, None)
        took = time.perf_counter() - begin
        lines = {byte // 512 for row in ids for byte in (row * 160, row * 160 + 159)}
        accesses = sum(2 if row * 160 % 512 > 512 - 160 else 1 for row in ids.tolist())

        assert took < 4
        assert x.stats.misses == len(lines)
        assert x.stats.hits == accesses - len(lines)


@pytest.mark.parametrize(
    ("number", "dtype"), [(Number.FLOAT32, np.float32), (Number.FLOAT16, np.float16)]
)
@pytest.mark.parametrize("stray", [-1, ROWS, 1 << 40, (1 << 63) - 1, -(1 << 63)])
def test_an_id_out_of_bounds_has_a_row_of_zeros_and_raises(x, content, stray, number, dtype):
    ids = np.array([5, stray, 7])
    out = np.full((3, WIDTH), np.nan, dtype)

    with pytest.raises(BoundsError, match=f"index {stray} is out of bounds .* 3000"):
        Lookup([table(x)]).rows(where(ids), out.ctypes.data, number, None)

    assert (out[[0, 2]] == content[[5, 7]].astype(dtype)).all()
    assert (out[1] == 0).all()
    assert (x[5] == content[5]).all()  # the error was of that call


@pytest.mark.parametrize("stray", [-1, -20, 10, 1 << 40, (1 << 63) - 1, -(1 << 63)])
def test_ids_of_some_rows_reach_no_others(x, content, stray):
    ids = np.array([0, stray, 9])
    out = np.full((3, WIDTH), np.nan, np.float32)

    with pytest.raises(BoundsError, match=f"index {stray} is out of bounds"):
        Lookup([Table(x, Number.FLOAT32, WIDTH, range(20, 30))]).rows(
            where(ids), out.ctypes.data, Number.FLOAT32, None
        )

    assert (out[[0, 2]] == content[[20, 29]]).all()
    assert (out[1] == 0).all()


@pytest.mark.parametrize(("offsets", "wrong"), [([0, 5, 3], 3), ([0, 2, 11], 11), ([0, -1, 4], -1)])
def test_bags_of_which_an_offset_is_wrong_are_empty_and_raise(x, content, offsets, wrong):
    ids, begins = np.arange(10), np.array(offsets)
    out = np.full((3, WIDTH), np.nan, np.float32)
    bags = Bags(3, offsets=begins.ctypes.data, offset_count=3)

    with pytest.raises(BoundsError, match=f"offset {wrong} of a bag lies"):
        Lookup([table(x)]).bags(
            where(ids), bags, Pooling.SUM, None, out.ctypes.data, Number.FLOAT32, None
        )

    assert not np.isnan(out).any()


def test_a_lookup_of_a_closed_array_raises(tmp_path, content):
    np.save(tmp_path / "x.npy", content)
    with fw.open(tmp_path / "x.npy", device="cpu") as x:
        lookup = Lookup([table(x)])
    ids, out = np.arange(3), np.empty((3, WIDTH), np.float32)

    with pytest.raises(ClosedError, match="is closed"):
        lookup.rows(where(ids), out.ctypes.data, Number.FLOAT32, None)


def test_tables_of_caches_with_other_policies_are_refused(x, tmp_path, content):
    np.save(tmp_path / "y.npy", content)
    with (
        fw.Cache("64 KiB", device=x.device, line=512, policy="lru") as cache,
        fw.open(tmp_path / "y.npy", cache=cache) as y,
        pytest.raises(ArgumentError, match="caches of policies 'clock' and 'lru'"),
    ):
        Lookup([table(x), table(y)])
