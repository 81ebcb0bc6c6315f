"""Policies in Python, as Python runs them against what they are compiled to.

The same function runs twice on the same set: in Python, on numbers that wrap at 64 bits and
stand-ins for the set and the cache, and compiled, on memory that has a fence on each side. Answer,
memory and the count of refusals must be the same.
"""

# The policies' variables are part of what is tested, used or not.
# ruff: noqa: B007
from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import CpuDevice
from flashwarp.errors import CompileError
from flashwarp.policy import REFERENCED, Policy
from support.policy_numbers import NO_WAY, STEPS, Cache, Lines, Memory, in_python
from support.samples import EVERYTHING

SETS, WAYS = 3, 4
FENCE = 64
"""Words of 64 bits on each side of tags and words."""

RUN = """
#include "flashwarp/cache/policy.cuh"
{structs}
template <typename P>
static void run(uint32_t part, fw::cache::geometry g, uint64_t* io) {{
  if (part == 0) {{
    P::on_hit(g, io[0], io[1]);
    return;
  }}
  fw::cache::set_view s = {{g, io[0], io[1], uint32_t(io[2]), uint32_t(io[3]), uint32_t(io[4]),
                           uint32_t(io[5]), uint32_t(io[6]), uint32_t(io[7]), io[8] != 0}};
  if (part == 1) P::on_fill(s, uint32_t(io[9]));
  if (part == 2) io[10] = P::choose_victim(s);
  io[4] = s.referenced;
  io[6] = s.hand;
  io[7] = s.next;
}}
FW_KERNEL call(uint32_t which, uint32_t part, uint64_t* tags, uint64_t* io) {{
  const fw::cache::geometry g = {{tags, nullptr, {sets}, ~uint64_t(0) / {sets} + 1, {ways}, 9}};
  switch (which) {{
{cases}
  }}
}}
"""


class Compiled:
    """Functions of many policies in one program, to be called one by one on memory of a test's."""

    def __init__(self, policies: list[Policy], device: CpuDevice) -> None:
        cases = "".join(
            f"    case {i}: return run<::{each.name}>(part, g, io);\n"
            for i, each in enumerate(policies)
        )
        text = RUN.format(
            structs="\n".join(each.source for each in policies), cases=cases, sets=SETS, ways=WAYS
        )
        self._call = fw.compile(text, device, options=["-O0"])["call"]

    def on_hit(self, which: int, memory: Memory, way: int, seen: int) -> None:
        self._run(which, 0, memory, np.array([way, seen], np.uint64))

    def on_fill(self, which: int, lines: Lines, way: int) -> None:
        self._on_lines(which, 1, lines, way)

    def choose_victim(self, which: int, lines: Lines) -> int:
        return self._on_lines(which, 2, lines, 0)

    def _on_lines(self, which: int, part: int, lines: Lines, way: int) -> int:
        masks = (lines.resident, lines.candidates, lines.referenced, lines.dirty)
        rest = (lines.hand, lines.next, lines.prefetched, way, 0)
        io = np.array([lines.first, lines.line, *masks, *rest], np.uint64)
        self._run(which, part, lines.memory, io)
        lines.referenced, lines.hand, lines.next = int(io[4]), int(io[6]), int(io[7])
        return int(io[10])

    def _run(self, which: int, part: int, memory: Memory, io: Any) -> None:
        self._call(which, part, memory.cells[memory.tags :], io, warps=1)


# Random functions, in the statements that a policy may have.


class Writer:
    """Writes functions at random; most go wrong somewhere, as functions of users may."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def function(self, name: str, parameters: str) -> str:
        self.names = ["a", "b", "c"]
        self.owner = parameters.split(", ", maxsplit=1)[0]
        self.loops = 0
        first = [f"    {name} = 0" for name in self.names]
        first += [f"    {name} = {self.number(1)}" for name in self.names]
        body = [line for _ in range(self.draw.randint(2, 5)) for line in self.statement(1)]
        last = [f"    return {self.number(2)}"] if name.startswith("choose") else []
        return "\n".join([f"def {name}({parameters}):", *first, *body, *last]) + "\n"

    def statement(self, depth: int) -> Iterator[str]:
        pad = "    " * depth
        kinds = ["assign", "change", "memory", "memory", "if"]
        if self.loops < 3 and depth < 4:
            kinds += ["for", "for", "while"]
        match self.draw.choice(kinds):
            case "assign":
                yield f"{pad}{self.target()} = {self.number(2)}"
            case "change":
                sign = self.draw.choice(["+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>"])
                yield f"{pad}{self.draw.choice(self.names)} {sign}= {self.number(1)}"
            case "memory":
                yield f"{pad}{self.memory_call()}"
            case "if":
                yield f"{pad}if {self.condition()}:"
                yield from self.statement(depth + 1)
                yield f"{pad}else:"
                yield from self.statement(depth + 1)
            case "for":
                self.loops += 1
                bounds = self.draw.choice(
                    [
                        f"{self.number(1)} & 7",
                        f"{self.number(1)} % 5, {self.number(1)} % 9",
                        f"{self.draw.choice(self.names)} - 1",
                        f"{self.number(1)}, {self.number(1)}, {self.draw.choice([1, 3, 1 << 62])}",
                        f"0, {self.number(1)}, {1 << 60}",
                    ]
                )
                yield f"{pad}for {self.draw.choice(self.names)} in range({bounds}):"
                yield from self.body(depth)
            case "while":
                self.loops += 1
                yield f"{pad}while {self.condition()}:"
                yield from self.body(depth)

    def body(self, depth: int) -> Iterator[str]:
        for _ in range(self.draw.randint(1, 3)):
            yield from self.statement(depth + 1)
        if self.draw.random() < 0.6:
            yield "    " * (depth + 1) + f"if {self.condition()}:"
            yield "    " * (depth + 2) + self.draw.choice(["break", "continue"])

    def target(self) -> str:
        own = ["lines.hand", "lines.next"] if self.owner == "lines" else []
        return self.draw.choice([*self.names, *own])

    def memory_call(self) -> str:
        way = self.way()
        if self.owner == "cache":
            return self.draw.choice([f"cache.mark({way})", self.set_word(way)])
        return self.draw.choice([f"lines.clear_mark({way})", self.set_word(way)])

    def set_word(self, way: str) -> str:
        return f"{self.owner}.set_word({way}, {self.number(1)}, {self.number(1)})"

    def way(self) -> str:
        # Often one that is there.
        ways = SETS * WAYS if self.owner == "cache" else WAYS
        return self.draw.choice([f"({self.number(1)}) % {ways}", self.number(1)])

    def condition(self) -> str:
        a, b, c = (self.number(1) for _ in range(3))
        sign = self.draw.choice(["<", "<=", ">", ">=", "==", "!="])
        return self.draw.choice([f"{a} {sign} {b}", f"not {a} < {b}", f"{a} < {b} and {c}", a])

    def number(self, depth: int) -> str:
        if depth == 0 or self.draw.random() < 0.2:
            return self.leaf()
        a, b = self.number(depth - 1), self.number(depth - 1)
        sign = self.draw.choice(["+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>"])
        return self.draw.choice(
            [f"({a} {sign} {b})", f"(~{a})", f"({a} if {self.leaf()} < {b} else {b})"]
        )

    def leaf(self) -> str:
        big = self.draw.choice([1 << 31, (1 << 32) + 1, 1 << 63, (1 << 64) - 1])
        fixed = [*self.names, str(self.draw.randint(0, 9)), str(big), f"{self.owner}.ways()"]
        way = self.draw.choice([*self.names, str(self.draw.randint(0, 15)), str(big)])
        if self.owner == "cache":
            return self.draw.choice([*fixed, "way", "seen", f"cache.word({way})"])
        masks = ["candidates", "resident", "referenced", "dirty", "hand", "next", "line"]
        return self.draw.choice(
            [
                *fixed,
                f"lines.{self.draw.choice([*masks, 'prefetched'])}",
                f"lines.word({way})",
                f"lines.line_at({way})",
                f"lines.has(lines.candidates, {way})",
                f"lowest_bit({way})",
                f"popcount({way})",
            ]
        )


def functions_of(path: Path, writer: Writer) -> dict[str, Callable[..., Any]]:
    """Write a module, so that the functions have a source to be read."""
    text = "".join(
        writer.function(name, parameters)
        for name, parameters in (
            ("on_hit", "cache, way, seen"),
            ("on_fill", "lines, way"),
            ("choose_victim", "lines"),
        )
    )
    path.write_text(text)
    module: dict[str, Any] = {"__name__": path.stem}
    exec(compile(text, str(path), "exec"), module)
    return {name: module[name] for name in ("on_hit", "on_fill", "choose_victim")}


COUNT = 15 if EVERYTHING else 8
CALLS = 3
"""Of each function."""


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    with CpuDevice(1) as made:
        yield made


@pytest.mark.parametrize("seed", range(1, 11 if EVERYTHING else 2))
def test_random_policies_do_compiled_what_they_do_in_python(
    seed: int, tmp_path: Path, device: CpuDevice
) -> None:
    made = [functions_of(tmp_path / f"p{i}.py", Writer(seed * 1000 + i)) for i in range(COUNT)]
    policies = [Policy.from_python(f"p{i}", **each) for i, each in enumerate(made)]
    compiled = Compiled(policies, device)
    draw = np.random.default_rng(seed)
    for which, functions in enumerate(made):
        python = {name: in_python(each) for name, each in functions.items()}
        for part in python:
            source = inspect.getsource(functions[part])
            for _ in range(CALLS):
                how = f"seed {seed}, policy {which}, {part}:\n{source}"
                compare(part, python[part], compiled, which, draw, how)


def compare(
    part: str,
    python: Callable[..., int],
    compiled: Compiled,
    which: int,
    draw: np.random.Generator,
    how: str,
) -> None:
    """Call a function in both ways on one memory and one set, drawn at random."""
    theirs = Memory(SETS, WAYS, FENCE, draw)
    ours = theirs.copy()
    if part == "on_hit":
        way, seen = int(draw.integers(SETS * WAYS)), int(draw.integers(1 << 63)) * 2 + 1
        python(Cache(theirs), way, seen)
        compiled.on_hit(which, ours, way, seen)
    else:
        lines = Lines(theirs, int(draw.integers(SETS)), draw)
        same = lines.copy(ours)
        if part == "on_fill":
            way = int(draw.integers(WAYS))
            python(lines, way)
            compiled.on_fill(which, same, way)
        else:
            expected = python(lines)
            assert compiled.choose_victim(which, same) == expected, how
        state = (lines.referenced, lines.hand, lines.next)
        assert (same.referenced, same.hand, same.next) == state, how
    np.testing.assert_array_equal(ours.cells, theirs.cells, err_msg=how)


# Ways that are not there.


def hits_beyond(cache, way, seen):
    cache.set_word(cache.ways() * 3, 0xFFFFFFFF, 77)
    cache.set_word(1 << 32, 0xFFFFFFFF, 77)
    cache.set_word(0 - 1, 0xFFFFFFFF, 77)
    cache.mark(12)
    cache.mark((1 << 63) + 1)
    cache.set_word(0, 0xFFFFFFFF, cache.word(12) + cache.word(1 << 40))


def fills_beyond(lines, way):
    lines.set_word(lines.ways(), 0xFFFFFFFF, 77)
    lines.set_word((1 << 32) + 1, 0xFFFFFFFF, 77)
    lines.clear_mark(4)
    lines.clear_mark(64)
    lines.hand = lines.word(4) + lines.word(0 - 1) + lines.line_at(4) + lines.line_at(1 << 32)


def names_a_way_by_its_lower_half(lines):
    return (1 << 32) + 1


def ends_at_once(lines):
    total = 0
    for i in range(0):
        total += 100
    for i in range(5, 2):
        total += 100
    for i in range(lines.hand - 1):  # the hand is 0: to -1
        total += 100
    for i in range(lines.hand - 5, 0 - 2, 2):
        total += 1  # -5, -3
    for i in range((1 << 63) - 3, (1 << 63) - 1, 0x4000000000000000):
        total += 1
    for i in range(2):
        i = 9
        total += 1
    return total + i


def never_ends(lines):
    while lines.hand == 0:
        lines.next = 1
    return 0


def never_ends_in_a_range(lines):
    for i in range((1 << 63) - 1):
        for k in range(3):
            lines.next = k
    return 0


def fill_never_ends(lines, way):
    while 1:
        lines.hand += 1


def hit_never_ends(cache, way, seen):
    while 1:
        cache.mark(0)


def nothing(lines):
    return 0


@pytest.fixture(scope="module")
def by_hand(device: CpuDevice) -> tuple[Compiled, dict[str, int]]:
    victims = [
        names_a_way_by_its_lower_half,
        ends_at_once,
        never_ends,
        never_ends_in_a_range,
    ]
    policies = [Policy.from_python(each.__name__, choose_victim=each) for each in victims]
    policies += [
        Policy.from_python(
            "beyond", choose_victim=nothing, on_hit=hits_beyond, on_fill=fills_beyond
        ),
        Policy.from_python(
            "endless", choose_victim=nothing, on_hit=hit_never_ends, on_fill=fill_never_ends
        ),
    ]
    return Compiled(policies, device), {each.name: i for i, each in enumerate(policies)}


def a_set() -> Lines:
    draw = np.random.default_rng(0)
    lines = Lines(Memory(SETS, WAYS, FENCE, draw), 1, draw)
    lines.hand = 0
    return lines


def test_ways_that_are_not_there_are_not_touched(by_hand: tuple[Compiled, dict[str, int]]) -> None:
    compiled, number = by_hand
    lines = a_set()
    before = lines.memory.copy()

    compiled.on_fill(number["beyond"], lines, 0)
    assert lines.hand == 0
    assert lines.memory.refusals == before.refusals + 8
    compiled.on_hit(number["beyond"], lines.memory, 0, REFERENCED)

    assert lines.memory.refusals == before.refusals + 15
    changed = np.flatnonzero(lines.memory.cells != before.cells)
    assert lines.memory.word(0) == 0
    assert len(changed) == 2  # the count, and the word that was stored to


def test_number_beyond_32_bits_is_no_way(by_hand: tuple[Compiled, dict[str, int]]) -> None:
    compiled, number = by_hand

    assert compiled.choose_victim(number["names_a_way_by_its_lower_half"], a_set()) == NO_WAY


def test_ranges_end_as_in_python(by_hand: tuple[Compiled, dict[str, int]]) -> None:
    compiled, number = by_hand

    assert compiled.choose_victim(number["ends_at_once"], a_set()) == 2 + 1 + 2 + 9


@pytest.mark.parametrize("name", ["never_ends", "never_ends_in_a_range"])
def test_loop_without_an_end_is_ended(name: str, by_hand: tuple[Compiled, dict[str, int]]) -> None:
    compiled, number = by_hand
    lines = a_set()
    before = lines.memory.refusals

    assert compiled.choose_victim(number[name], lines) == NO_WAY
    assert lines.memory.refusals == before + 1


def test_hit_and_fill_without_an_end_are_ended(by_hand: tuple[Compiled, dict[str, int]]) -> None:
    compiled, number = by_hand
    lines = a_set()
    before = lines.memory.refusals

    compiled.on_fill(number["endless"], lines, 0)
    compiled.on_hit(number["endless"], lines.memory, 0, 0)

    assert lines.hand == STEPS
    assert lines.memory.refusals == before + 2


# In a cache.


def test_policy_without_words_cannot_use_any() -> None:
    def uses_a_word(lines):
        lines.set_word(0, 1, 1)
        return 0

    with pytest.raises(CompileError, match=r"set_word: it was made with keeps_words=False"):
        Policy.from_python("wordless", choose_victim=uses_a_word, keeps_words=False)


def test_policy_in_c_without_words_reads_zeros(device: CpuDevice) -> None:
    """Its words lay where the sets' locks are: a store locked a set for ever."""
    text = """
    struct wordless {
      FW_DEVICE static void on_hit(const fw::cache::geometry& g, uint64_t way, uint64_t) {
        fw::cache::hit_view{g}.set_word(way, ~0u, ~0u);
      }
      FW_DEVICE static void on_fill(fw::cache::set_view& s, uint32_t way) {
        s.set_word(way, ~0u, ~0u);
      }
      FW_DEVICE static uint32_t choose_victim(fw::cache::set_view& s) { return s.word(0); }
    };
    """
    policy = Policy("wordless", text, keeps_words=False)
    data = np.arange(60 * 64, dtype=np.int64).reshape(60, 64)
    with (
        fw.Cache(3 * 4 * 512, 512, 4, policy, device) as cache,
        fw.open(fw.storage.Memory(data), "r+", np.int64, data.shape, cache=cache) as x,
    ):
        rows = np.random.default_rng(0).integers(0, 60, 300)
        np.testing.assert_array_equal(x.gather(rows), data[rows])

        assert cache.refusals > 300
