"""Replacement: each policy against a plain model of it, and caches that keep their promises."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashwarp as fw
import flashwarp.trace
from flashwarp._jit import compiler
from flashwarp.cache.cache import Cache
from flashwarp.device import CpuDevice
from flashwarp.errors import CacheError, ClosedError, CompileError
from flashwarp.nvme.software import SoftwareController
from flashwarp.policy import POLICIES, Policy
from flashwarp.trace import Trace
from support.policy_models import MODELS, SetAssociative
from support.samples import sample

LINE = 512
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="user policies need g++")


@pytest.fixture
def one_thread() -> Iterator[CpuDevice]:
    with CpuDevice(threads=1) as device:
        yield device


def array_of(lines: int, cache: Cache, writable: bool = False) -> fw.Array:
    """One row is one line; row i holds i."""
    data = np.repeat(np.arange(lines, dtype=np.int64), LINE // 8).reshape(lines, -1)
    return fw.open(
        fw.storage.Memory(data, writable),
        "r+" if writable else "r",
        np.int64,
        data.shape,
        cache=cache,
        controller=SoftwareController(queue_pairs=1),
    )


def hits_of_model(policy: str, lines: Sequence[int], sets: int, ways: int) -> int:
    model = SetAssociative(policy, sets, ways)
    return sum(model.access(line) for line in lines)


# Each policy is what its name says.


@pytest.mark.parametrize("policy", MODELS)
@pytest.mark.parametrize(("sets", "ways"), sample([(1, 4), (1, 8), (3, 8), (5, 16)], 4))
def test_every_access_hits_and_misses_as_in_the_model(
    one_thread: CpuDevice, policy: str, sets: int, ways: int
) -> None:
    model = SetAssociative(policy, sets, ways)
    random = np.random.default_rng(ways * sets)
    lines = random.zipf(1.3, 400) % (3 * sets * ways)

    with (
        Cache(sets * ways * LINE, LINE, ways, policy, one_thread) as cache,
        array_of(3 * sets * ways, cache) as x,
    ):
        for step, line in enumerate(lines.tolist()):
            before = x.stats.hits
            assert x.gather(np.array([line]))[0, 0] == line
            assert x.stats.hits - before == model.access(line), f"access {step}, line {line}"


@pytest.mark.parametrize("policy", MODELS)
@settings(max_examples=40, deadline=None)
@given(
    lines=st.lists(st.integers(0, 39), min_size=1, max_size=300),
    sets=st.sampled_from([1, 3]),
    ways=st.sampled_from([4, 8]),
)
def test_any_trace_hits_as_often_as_in_the_model(
    policy: str, lines: list[int], sets: int, ways: int
) -> None:
    trace = Trace(np.array(lines), LINE, "drawn")

    result = fw.trace.replay(trace, policy, capacity_lines=sets * ways, ways=ways)

    dense = trace.numbered_densely().lines.tolist()
    assert result.capacity_lines == sets * ways
    assert result.hits == hits_of_model(policy, dense, sets, ways)
    assert result.misses == len(lines) - result.hits
    assert result.refusals == 0


# A set numbers its lines, and gives new numbers before they run out: at 2^12 or 2^16 fills.
@pytest.mark.parametrize(
    ("policy", "accesses"), [("sieve", 30_000), ("s3_fifo", 30_000), ("fifo", 200_000)]
)
def test_order_outlasts_its_numbers(policy: str, accesses: int) -> None:
    lines = np.random.default_rng(1).zipf(1.2, accesses) % 50

    result = fw.trace.replay(Trace(lines, LINE, "long"), policy, capacity_lines=8, ways=8)

    assert result.evictions > (1 << 16 if policy == "fifo" else 1 << 12)
    assert result.hits == hits_of_model(policy, lines.tolist(), 1, 8)


@pytest.mark.parametrize("policy", ["sieve", "s3_fifo"])
def test_first_use_of_a_prefetched_line_is_no_hit(one_thread: CpuDevice, policy: str) -> None:
    lines = np.random.default_rng(2).zipf(1.3, 500) % 30

    with (
        Cache(8 * LINE, LINE, 8, policy, one_thread) as cache,
        array_of(30, cache) as x,
    ):
        for line in lines:
            x.prefetch(np.array([line]))
            x.gather(np.array([line]))
        misses = x.stats.misses

    assert misses == len(lines) - hits_of_model(policy, lines.tolist(), 1, 8)


def test_papers_order_of_policies_holds_on_a_skewed_trace() -> None:
    trace = fw.trace.make("zipf", accesses=60_000)

    def rate(policy: str) -> float:
        return fw.trace.replay(trace, policy, capacity_lines=1000, ways=8).hit_rate

    fifo = rate("fifo")
    assert rate("sieve") > rate("lru") + 0.02
    assert rate("s3_fifo") > rate("lru") + 0.02
    assert rate("lru") > rate("clock") > fifo
    assert abs(rate("random") - fifo) < 0.01


# No policy breaks the cache.


def use(x: fw.Array, seed: int) -> None:
    """Random gathers, scatters and prefetches, each compared with numpy."""
    random = np.random.default_rng(seed)
    expected = x[:].copy()
    for _ in range(60):
        rows = random.integers(0, len(x), random.integers(1, 40))
        match random.integers(4):
            case 0:
                values = random.integers(0, 1 << 40, (len(rows), x.shape[1]))
                x[rows] = values
                expected[rows] = values
            case 1:
                x.prefetch(rows)
            case _:
                np.testing.assert_array_equal(x.gather(rows), expected[rows])
    np.testing.assert_array_equal(x[:], expected)
    x.flush()
    np.testing.assert_array_equal(x.gather(np.arange(len(x))), expected)


def test_arrays_on_one_cache_share_its_policy(one_thread: CpuDevice) -> None:
    with (
        Cache(4 * LINE, LINE, 4, "lru", one_thread) as cache,
        array_of(10, cache) as x,
        array_of(10, cache) as y,
    ):
        for line in range(4):
            x.gather(np.array([line]))
        x.gather(np.array([0]))
        y.gather(np.array([0]))
        x.gather(np.array([0]))

        assert (x.stats.misses, y.stats.misses) == (4, 1)


def test_only_policies_that_need_words_take_memory_for_them() -> None:
    def metadata(policy: str) -> int:
        with Cache(7 * 4 * LINE, LINE, 4, policy, "cpu") as cache:
            return cache.metadata_bytes

    # Seven sets of four bytes, made up to a multiple of eight.
    assert metadata("clock") == metadata("random") == 28 * 8 + 32
    # The words follow the tags at a multiple of 128 bytes.
    assert metadata("lru") == metadata("sieve") == 256 + 28 * 4 + 32


def test_open_takes_a_cache_with_a_policy(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000))

    cache = fw.Cache("auto", policy="sieve")
    with fw.open(tmp_path / "x.npy", device="cpu", cache=cache) as x:
        assert x.cache.policy.name == "sieve"
        assert x[500] == 500


# A user's own.

NEWEST = """
struct newest {
  FW_DEVICE static void on_hit(const fw::cache::geometry&, uint64_t, uint64_t) {}
  FW_DEVICE static void on_fill(fw::cache::set_view& s, uint32_t way) { s.hand = way; }
  FW_DEVICE static uint32_t choose_victim(fw::cache::set_view& s) { return s.hand; }
};
"""

# Ways that are not there, or not to be had; rubbish wherever it may be left.
HOSTILE = """
struct hostile {
  FW_DEVICE static void on_hit(const fw::cache::geometry& g, uint64_t way, uint64_t seen) {
    fw::atomic::store_relaxed(fw::cache::policy_word(g, way), uint32_t(seen));
  }
  FW_DEVICE static void on_fill(fw::cache::set_view& s, uint32_t) { s.next = ~0u; s.hand = ~0u; }
  FW_DEVICE static uint32_t choose_victim(fw::cache::set_view& s) {
    const uint32_t dice = uint32_t(s.line * 7 + s.hand);
    s.hand = ~dice;
    s.next = dice % 5;
    s.candidates = s.dirty = ~0u;
    return dice % 3 == 0 ? fw::cache::kNoWay : dice % 9;
  }
};
"""


@needs_compiler
def test_policy_of_ones_own_decides(one_thread: CpuDevice) -> None:
    newest = Policy("newest", NEWEST, keeps_words=False)

    with (
        Cache(4 * LINE, LINE, 4, newest, one_thread) as cache,
        array_of(10, cache) as x,
    ):
        for line in (0, 1, 2, 3, 4, 5, 6, 0, 1, 2):
            x.gather(np.array([line]))

        assert (x.stats.hits, x.stats.misses, cache.refusals) == (3, 7, 0)


@needs_compiler
@pytest.mark.parametrize("seed", sample(range(4), 2))
def test_hostile_policy_is_refused_and_breaks_nothing(seed: int) -> None:
    with (
        CpuDevice(threads=2) as device,
        Cache(3 * 4 * LINE, LINE, 4, Policy("hostile", HOSTILE), device) as cache,
        array_of(60, cache, writable=True) as x,
    ):
        use(x, seed)

        assert cache.refusals > 0


@needs_compiler
def test_policy_may_build_on_ours_and_outlive_its_numbers(one_thread: CpuDevice) -> None:
    # Thirty-one numbers for hits that change the order, and no fill among a hundred of them.
    tiny = Policy("tiny_lru", "using tiny_lru = fw::cache::basic_lru_policy<5>;")
    with (
        Cache(4 * LINE, LINE, 4, tiny, one_thread) as cache,
        array_of(10, cache) as x,
    ):
        for line in [0, 1, 2, 3, *[0, 1] * 50, 4, 5, 0, 1]:
            assert x.gather(np.array([line]))[0, 0] == line

        assert x.stats.misses == 6
        assert cache.refusals == 0


TOUCH = """
#include "flashwarp/array.cuh"
FW_KERNEL touch(fw::array<int64_t> x, uint64_t i, int64_t* out) {
  if (fw::base::thread_index() == 0) *out = x[i];
}
"""


@needs_compiler
def test_kernels_of_ones_own_are_compiled_for_the_policy_of_their_arrays(
    one_thread: CpuDevice,
) -> None:
    newest = Policy("newest", NEWEST, keeps_words=False)
    out = np.zeros(1, np.int64)
    for policy in ("lru", newest):
        touch = fw.compile(TOUCH, one_thread, policy=policy)["touch"]
        with (
            Cache(4 * LINE, LINE, 4, policy, one_thread) as cache,
            array_of(10, cache, writable=True) as x,
        ):
            for line in (0, 1, 2, 3, 0, 4):
                touch(x, line * LINE // 8, out)
                x.wait()
                assert out[0] == line
            before = x.stats.misses
            touch(x, 0, out)
            x.wait()

            # Line 0 was used again: LRU has kept it. The newest frame had line 3.
            assert x.stats.misses == before


@needs_compiler
def test_kernel_for_another_policy_is_refused(one_thread: CpuDevice) -> None:
    touch = fw.compile(TOUCH, one_thread)["touch"]

    with (
        Cache(4 * LINE, LINE, 4, "lru", one_thread) as cache,
        array_of(10, cache, writable=True) as x,
        pytest.raises(fw.errors.ArgumentError, match="compile it with policy='lru'"),
    ):
        touch(x, 0, np.zeros(1, np.int64))


@needs_compiler
def test_policy_that_does_not_compile_says_where(one_thread: CpuDevice) -> None:
    broken = Policy("broken", "struct broken {\n  no_such_type x;\n};")

    with (
        Cache(4 * LINE, LINE, 4, broken, one_thread) as cache,
        pytest.raises(CompileError, match="policy broken:2"),
        array_of(10, cache) as x,
    ):
        x.gather(np.array([0]))


# A user's own in Python: not called, but read and compiled.

ALL = 0xFFFFFFFF
NOT_THERE = 99


def lru_hit(cache, way, seen):
    first = way - way % cache.ways()
    newest = 0
    for other in range(first, first + cache.ways()):
        if other != way and cache.word(other) > newest:
            newest = cache.word(other)
    if cache.word(way) <= newest:
        cache.set_word(way, ALL, newest + 1)


def lru_fill(lines, way):
    """The last one."""
    newest = 0
    other = 0
    while other < lines.ways():
        if not (other == way or lines.word(other) <= newest):
            newest = lines.word(other)
        other += 1
    lines.set_word(way, ALL, newest + 1)


def lru_victim(lines):
    best = NOT_THERE
    for way in range(lines.ways()):
        if not lines.has(lines.candidates, way):
            continue
        if best == NOT_THERE or lines.word(way) < lines.word(best):
            best = way
    return best


@needs_compiler
def test_policy_in_python_does_what_it_says() -> None:
    trace = fw.trace.make("zipf", accesses=30_000)
    ours = Policy.from_python(
        "python_lru", on_hit=lru_hit, on_fill=lru_fill, choose_victim=lru_victim
    )

    results = [fw.trace.replay(trace, p, capacity_lines=500) for p in (ours, "lru")]

    assert results[0].hits == results[1].hits
    assert results[0].refusals == 0


def uses_float(lines):
    return lines.hand * 0.5


def uses_list(lines):
    best = [0]
    return best[0]


def uses_names(lines):
    return np.argmax(lines.candidates)


def writes_candidates(lines):
    lines.candidates = 15
    return 0


def returns_nothing(lines):
    return


def divides_truly(lines):
    return lines.hand / 2


def loops_down(lines):
    for way in range(3, 0, -1):
        return way
    return 0


def is_negative(lines):
    return -1


def has_too_many(lines, way):
    return way


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (uses_float, "this expression: 0.5"),
        (uses_list, r"this expression: \[0\]"),
        (uses_names, "this call: np.argmax"),
        (writes_candidates, "an assignment to lines.candidates"),
        (returns_nothing, "a return without a way"),
        (divides_truly, "this operator: lines.hand / 2"),
        (loops_down, "a range whose step is no positive constant"),
        (is_negative, "this expression: -1"),
        (has_too_many, r"takes 1 parameters: \(lines\)"),
        (lambda lines: 0, "no function defined with def"),
        (len, "cannot be read"),
    ],
)
def test_python_without_translation_is_refused_with_its_line(function, why: str) -> None:
    with pytest.raises(CompileError, match=why) as caught:
        Policy.from_python("wrong", choose_victim=function)

    code = getattr(function, "__code__", None)
    if "a policy cannot have" in str(caught.value):
        line = int(str(caught.value).split(":")[1])
        assert code.co_firstlineno < line <= code.co_firstlineno + 3


def test_policy_that_cannot_be_is_refused() -> None:
    with pytest.raises(CacheError, match="none of clock, lru, fifo, sieve, s3_fifo, random"):
        fw.Cache("1 MiB", policy="mru", device="cpu")
    with pytest.raises(CacheError, match="struct"):
        Policy("not a name", "struct x {};")
    with pytest.raises(CacheError, match="another name"):
        Policy("lru", "struct lru {};")
    with pytest.raises(CacheError, match="no source"):
        Policy("mine", "")


def test_refusals_of_a_closed_cache_are_not_known() -> None:
    cache = fw.Cache("1 MiB", device="cpu")
    cache.close()

    with pytest.raises(ClosedError):
        _ = cache.refusals


# Five seconds each.
@pytest.mark.parametrize(
    "policy", sample([*POLICIES.values(), Policy("newest", NEWEST)], 7), ids=str
)
def test_policy_compiles_for_a_gpu(policy: Policy, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHWARP_CACHE_DIR", str(tmp_path))
    kernel = (
        '#include "flashwarp/array.cuh"\n'
        "FW_KERNEL touch(fw::array<float> x, float* out) { *out = x[3]; x.store(4, 1.0f); }\n"
    )

    built = compiler.compile_source(
        "sm_90", compiler.Source("touch", kernel.encode()).behind(policy), options=policy.options
    )

    assert built.kernels["touch"].spill_store_bytes == 0
