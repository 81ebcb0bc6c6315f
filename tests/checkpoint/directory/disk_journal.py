"""What a power cut may leave of a folder: a record of system calls, and the trees that it allows.

The model is weaker than every file system that Linux has. Until fsync(2) of a file, each sector of
its writes may be lost, whatever its neighbours hold, and so may its size. Until fsync(2) of a
folder, each change of a name in it may be lost, whatever other changes hold; only one rename within
a folder is one change.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flashwarp.checkpoint.directory import writer
from flashwarp.storage import File

SECTOR = 512


@dataclass
class Node:
    """A file's content, or a folder's names; durable, and changed since."""

    is_folder: bool
    content: bytearray = field(default_factory=bytearray)
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    size: int = 0
    names: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[tuple[str, int | None], ...]] = field(default_factory=list)


@dataclass(frozen=True)
class Tree:
    """A state that a power cut may leave."""

    root: Node
    nodes: dict[int, Node]
    mark: int
    position: int

    def make(self, path: Path) -> None:
        """Write it to disk."""
        self._make(self.root, path)

    def _make(self, node: Node, path: Path) -> None:
        path.mkdir()
        for name, number in node.names.items():
            child = self.nodes[number]
            if child.is_folder:
                self._make(child, path / name)
            else:
                (path / name).write_bytes(child.content)


class Journal:
    """Records what happens below a folder, while `recording` patches the calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[tuple[Any, ...]] = []
        self._numbers: dict[str, int] = {str(root): 0}
        self._descriptors: dict[int, int] = {}
        self._next = 1

    def mark(self, label: int) -> None:
        """Note that the caller has come so far."""
        self.events.append(("mark", label))

    def record(self, patch: pytest.MonkeyPatch) -> None:
        """Patch the calls through which the library changes names and contents."""
        journal = self

        class Recorded(File):
            def write(self, offset: int, data: Any) -> None:
                super().write(offset, data)
                journal.events.append(("write", journal._at(self.path), offset, bytes(data)))

            def flush(self) -> None:
                super().flush()
                journal.events.append(("sync", journal._at(self.path)))

        patch.setattr(writer, "File", Recorded)
        for name in ("open", "write", "fsync", "mkdir", "link", "rename", "replace", "unlink"):
            self._patch(patch, name, getattr(os, name), getattr(self, "_" + name))
        allocate = writer._allocate

        def allocated(descriptor: int, nbytes: int) -> None:
            allocate(descriptor, nbytes)
            journal.events.append(("size", journal._descriptors[descriptor], nbytes))

        patch.setattr(writer, "_allocate", allocated)

    @staticmethod
    def _patch(
        patch: pytest.MonkeyPatch, name: str, real: Callable[..., Any], note: Callable[..., None]
    ) -> None:
        def call(*arguments: Any, **options: Any) -> Any:
            before = name == "open" and os.path.lexists(arguments[0])
            result = real(*arguments, **options)
            note(result, before, *arguments)
            return result

        patch.setattr(os, name, call)

    def _inside(self, path: Any) -> bool:
        return str(path).startswith(f"{self.root}/")

    def _at(self, path: Any) -> int:
        return self._numbers[str(path)]

    def _enter(self, path: Any, number: int | None) -> tuple[int, tuple[str, int | None]]:
        folder, name = os.path.split(str(path))
        if number is None:
            self._numbers.pop(str(path), None)
        else:
            self._numbers[str(path)] = number
        return self._numbers[folder], (name, number)

    def _change(self, *entries: tuple[int, tuple[str, int | None]]) -> None:
        assert len({folder for folder, _ in entries}) == 1, "no renames between folders"
        self.events.append(("names", entries[0][0], tuple(entry for _, entry in entries)))

    def _open(self, fd: int, existed: bool, path: Any, *_: Any) -> None:
        if self._inside(path) and not existed:
            self.events.append(("new", self._next, False))
            self._change(self._enter(path, self._next))
            self._next += 1
        if str(path) in self._numbers:
            self._descriptors[fd] = self._at(path)
        else:
            self._descriptors.pop(fd, None)

    def _write(self, count: int, _: bool, fd: int, data: Any) -> None:
        if fd in self._descriptors:
            self.events.append(("append", self._descriptors[fd], bytes(data)[:count]))

    def _fsync(self, _: None, __: bool, fd: int) -> None:
        if fd in self._descriptors:
            self.events.append(("sync", self._descriptors[fd]))

    def _mkdir(self, _: None, __: bool, path: Any, *___: Any) -> None:
        if self._inside(path):
            self.events.append(("new", self._next, True))
            self._change(self._enter(path, self._next))
            self._next += 1

    def _link(self, _: None, __: bool, source: Any, target: Any, **___: Any) -> None:
        self._change(self._enter(target, self._at(source)))

    def _rename(self, _: None, __: bool, source: Any, target: Any, **___: Any) -> None:
        number = self._at(source)
        self._change(self._enter(source, None), self._enter(target, number))

    _replace = _rename

    def _unlink(self, _: None, __: bool, path: Any, **___: Any) -> None:
        if self._inside(path):
            self._change(self._enter(path, None))

    # What a power cut leaves.

    def trees(self, each: int, seed: int) -> Iterator[Tree]:
        """Yield states for a cut after every event: the extremes, and `each` chosen ones."""
        chooser = random.Random(seed)
        nodes = {0: Node(True)}
        mark = 0
        for position, event in enumerate(self.events):
            if event[0] == "mark":
                mark = event[1]
                continue
            _apply(nodes, event)
            for choose in [lambda: False, lambda: True, *[_coin(chooser) for _ in range(each)]]:
                left = {number: _left(node, choose) for number, node in nodes.items()}
                yield Tree(left[0], left, mark, position)


def _coin(chooser: random.Random) -> Callable[[], bool]:
    share = chooser.random()
    return lambda: chooser.random() < share


def _apply(nodes: dict[int, Node], event: tuple[Any, ...]) -> None:
    kind, number, *rest = event
    if kind == "new":
        nodes[number] = Node(rest[0])
        return
    node = nodes[number]
    if kind == "names":
        node.changes.append(rest[0])
    elif kind == "size":
        node.size = rest[0]
    elif kind == "write":
        node.writes.append((rest[0], rest[1]))
        node.size = max(node.size, rest[0] + len(rest[1]))
    elif kind == "append":
        node.writes.append((node.size, rest[0]))
        node.size += len(rest[0])
    elif kind == "sync":
        settled = _left(node, lambda: True)
        node.content, node.names = settled.content, settled.names
        node.writes, node.changes = [], []


def _left(node: Node, choose: Callable[[], bool]) -> Node:
    """What is left of a node if `choose` decides which of its changes are kept."""
    names = dict(node.names)
    for change in node.changes:
        if choose():
            for name, number in change:
                if number is None:
                    names.pop(name, None)
                else:
                    names[name] = number
    content = bytearray(node.content)
    if node.size > len(content) and choose():
        content += bytes(node.size - len(content))
    for offset, data in node.writes:
        for begin in range(0, len(data), SECTOR):
            piece = data[begin : begin + SECTOR]
            if choose():
                end = offset + begin + len(piece)
                content += bytes(max(0, end - len(content)))
                content[offset + begin : end] = piece
    return Node(node.is_folder, content=content, names=names)
