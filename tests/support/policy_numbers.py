"""What a policy in Python works on when Python runs it: numbers of 64 bits, a set, the cache."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

NO_WAY = 0xFFFFFFFF
STEPS = 1 << 14
_MASK = (1 << 64) - 1
_REFERENCED = 1 << 59
_LINE = (1 << 38) - 1


def _wrapping(name: str) -> Callable[[Any, Any], U64]:
    plain = getattr(int, name)
    return lambda a, b: U64(plain(int(a), int(b)) & _MASK)


class U64(int):
    """A number without a sign that wraps at 64 bits; what Python leaves to an error is zero."""

    __add__, __radd__ = _wrapping("__add__"), _wrapping("__radd__")
    __sub__, __rsub__ = _wrapping("__sub__"), _wrapping("__rsub__")
    __mul__, __rmul__ = _wrapping("__mul__"), _wrapping("__rmul__")
    __and__, __or__, __xor__ = _wrapping("__and__"), _wrapping("__or__"), _wrapping("__xor__")

    def __invert__(self) -> U64:
        return U64(int(self) ^ _MASK)

    def __floordiv__(self, other: Any) -> U64:
        return U64(int(self) // int(other) if other else 0)

    def __mod__(self, other: Any) -> U64:
        return U64(int(self) % int(other) if other else 0)

    def __lshift__(self, other: Any) -> U64:
        return U64((int(self) << int(other)) & _MASK if other < 64 else 0)

    def __rshift__(self, other: Any) -> U64:
        return U64(int(self) >> int(other) if other < 64 else 0)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


class Memory:
    """Tags and words, with a fence before and behind; the count of refusals is before the tags."""

    def __init__(self, sets: int, ways: int, fence: int, draw: np.random.Generator) -> None:
        count = sets * ways
        words = -(-count // 16) * 16
        self.sets, self.ways = sets, ways
        # At a multiple of 128 bytes, as in a cache.
        self._whole = draw.integers(0, 1 << 62, 2 * fence + words + count + 16, np.uint64)
        start = (-self._whole.ctypes.data // 8) % 16
        self.cells = self._whole[start : start + 2 * fence + words + count // 2]
        self.tags, self._words = fence, 2 * (fence + words)

    def copy(self) -> Memory:
        same = object.__new__(Memory)
        same.__dict__.update(self.__dict__)
        same._whole = np.zeros(len(self.cells) + 16, np.uint64)
        start = (-same._whole.ctypes.data // 8) % 16
        same.cells = same._whole[start : start + len(self.cells)]
        same.cells[:] = self.cells
        return same

    def refuse(self) -> None:
        self.cells[self.tags - 1] += np.uint64(1)

    @property
    def refusals(self) -> int:
        return int(self.cells[self.tags - 1])

    def word(self, way: int) -> int:
        return int(self.cells.view(np.uint32)[self._words + way])

    def change_word(self, way: int, mask: int, bits: int) -> None:
        cells = self.cells.view(np.uint32)
        cells[self._words + way] = (self.word(way) & ~mask | bits) & NO_WAY

    def tag(self, way: int) -> int:
        return int(self.cells[self.tags + way])

    def set_tag(self, way: int, value: int) -> None:
        self.cells[self.tags + way] = value


class Cache:
    """What `on_hit` gets."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def _has(self, way: int) -> bool:
        there = way < self.memory.sets * self.memory.ways
        if not there:
            self.memory.refuse()
        return there

    def ways(self) -> U64:
        return U64(self.memory.ways)

    def word(self, way: int) -> U64:
        return U64(self.memory.word(way) if self._has(way) else 0)

    def set_word(self, way: int, mask: int, bits: int) -> None:
        if self._has(way):
            self.memory.change_word(way, mask, bits)

    def mark(self, way: int) -> None:
        if self._has(way):
            self.memory.set_tag(way, self.memory.tag(way) | _REFERENCED)


class Lines:
    """What `on_fill` and `choose_victim` get."""

    def __init__(self, memory: Memory, number: int, draw: np.random.Generator) -> None:
        self.__dict__.update(memory=memory, first=number * memory.ways)
        for name in ("resident", "candidates", "referenced", "dirty"):
            self.__dict__[name] = U64(draw.integers(0, 1 << memory.ways))
        self.__dict__["line"] = U64(draw.integers(1 << 40))
        self.__dict__["prefetched"] = U64(draw.integers(2))
        self.hand, self.next = int(draw.integers(1 << 31)), NO_WAY

    def copy(self, memory: Memory) -> Lines:
        same = object.__new__(Lines)
        same.__dict__.update(self.__dict__)
        same.__dict__["memory"] = memory
        return same

    def __setattr__(self, name: str, value: int) -> None:
        if name == "hand":
            value &= (1 << 31) - 1
        elif name == "next":
            value = min(value, NO_WAY)
        self.__dict__[name] = U64(value)

    def _has(self, way: int) -> bool:
        if way >= self.memory.ways:
            self.memory.refuse()
        return way < self.memory.ways

    def ways(self) -> U64:
        return U64(self.memory.ways)

    def has(self, mask: int, way: int) -> U64:
        return U64(way < 32 and (mask & NO_WAY) >> int(way) & 1)

    def word(self, way: int) -> U64:
        return U64(self.memory.word(self.first + way) if self._has(way) else 0)

    def set_word(self, way: int, mask: int, bits: int) -> None:
        if self._has(way):
            self.memory.change_word(self.first + int(way), mask, bits)

    def line_at(self, way: int) -> U64:
        return U64(self.memory.tag(self.first + way) & _LINE if self._has(way) else 0)

    def clear_mark(self, way: int) -> None:
        if self._has(way):
            self.referenced = self.referenced & ~(1 << int(way))
            place = self.first + int(way)
            self.memory.set_tag(place, self.memory.tag(place) & ~_REFERENCED)


class _OverBudget(Exception):
    pass


class _Rewrite(ast.NodeTransformer):
    """Constants become numbers of 64 bits; each round of a loop is counted."""

    def generic_visit(self, node: Any) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Constant):
            return ast.Call(ast.Name("U64", ast.Load()), [node], [])
        if not isinstance(node, ast.For | ast.While):
            return node  # type: ignore[no-any-return]
        node.body.insert(0, ast.Expr(ast.Call(ast.Name("step_", ast.Load()), [], [])))
        return node


def in_python(function: Callable[..., Any]) -> Callable[..., int]:
    """Return the function as Python runs it, on what this file defines."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree = ast.fix_missing_locations(_Rewrite().visit(tree))
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps > STEPS:
            raise _OverBudget

    def ranged(*bounds: int) -> Iterator[U64]:
        return (U64(i & _MASK) for i in builtins.range(*(_signed(int(b)) for b in bounds)))

    def lowest_bit(a: int) -> U64:
        return U64((int(a) & -int(a)).bit_length() - 1 if a else NO_WAY)

    names = {
        "U64": U64,
        "step_": step,
        "range": ranged,
        "lowest_bit": lowest_bit,
        "popcount": lambda a: U64(int(a).bit_count()),
    }
    exec(compile(tree, "<policy>", "exec"), names)
    body: Any = names[function.__name__]

    def run(owner: Any, *arguments: int) -> int:
        nonlocal steps
        steps = 0
        try:
            result = body(owner, *map(U64, arguments))
        except _OverBudget:
            owner.memory.refuse()
            return NO_WAY
        return min(int(result or 0), NO_WAY)

    return run
