"""Random programs on sharded arrays beside numpy arrays, the same on all ranks by one seed.

A program has segments, each on a number of ranks of its own. Every rank draws the steps of all
ranks, so each knows what must be in the arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distributed.programs import (
    RECORD,
    TIMEOUT_S,
    content,
    create,
    failure,
    home,
    reopen,
    same,
)
from flashwarp.distributed import gather, reshard

KINDS: list[tuple[Any, tuple[int, ...]]] = [
    ("u1", (12,)),
    ("f4", (128,)),
    ("i8", ()),
    ("f8", (3, 5)),
    ("?", (41,)),
    (RECORD, ()),
    ("u1", (3,)),
    ("u1", (5000,)),
    (">u2", (9,)),
    ("c16", (4,)),
    ("S3", (7,)),
]


@dataclass
class Step:
    """What all ranks do: `ids` and `values` have one entry a rank."""

    name: str
    table: int
    ids: list[Any]
    values: list[Any]


class Program:
    """What follows from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = np.random.default_rng(seed)
        self.kinds = [KINDS[number] for number in draw.integers(len(KINDS), size=2)]
        self.rows = [int(draw.choice([1, 3, 17, 200])) for _ in self.kinds]
        self.deals = [str(draw.choice(["range", "hash"])) for _ in self.kinds]
        self.shared = bool(draw.random() < 0.5)
        self.ranks = [int(each) for each in draw.integers(1, 5, size=3)]  # of each segment
        self.truth = [
            np.zeros((rows, *shape), dtype)
            for rows, (dtype, shape) in zip(self.rows, self.kinds, strict=True)
        ]

    def steps(self, segment: int) -> Iterator[Step]:
        """Draw the steps of a segment, and change what is true behind each."""
        draw = np.random.default_rng([self.seed, segment])
        names = ["gather", "gather", "gather all", "scatter", "scatter", "flush", "stray", "reopen"]
        for _ in range(int(draw.integers(5, 25))):
            table, ranks = int(draw.integers(2)), self.ranks[segment]
            truth = self.truth[table]
            counts = draw.choice([0, 1, 5, 60], size=ranks)
            ids = [draw.integers(-len(truth), len(truth), count) for count in counts]
            shapes = [(len(each), *truth.shape[1:]) for each in ids]
            values = [content(truth.dtype, shape, int(draw.integers(1000))) for shape in shapes]
            step = Step(str(draw.choice(names)), table, ids, values)
            yield step
            if step.name == "scatter":
                for each, rows in zip(ids, values, strict=True):  # the highest rank last
                    truth[each] = rows


def run(rank: int, group: Any, folder: Path, seed: int, segment: int) -> None:
    """Run a segment, after those before it."""
    program = Program(seed)
    for before in range(segment):
        for _ in program.steps(before):
            pass
    paths = [home(folder / str(number), rank, program.shared) for number in range(2)]
    with contextlib.ExitStack() as held:
        tables: list[Any] = []
        held.callback(lambda: [table.close() for table in tables])
        for path, truth, deal in zip(paths, program.truth, program.deals, strict=True):
            if segment == 0:
                made = create(group, path, truth.dtype, truth.shape, deal, cache="16 KiB", line=512)
            else:
                made = reopen(group, path, cache="16 KiB", line=512)
            tables.append(made)
        for number, step in enumerate(program.steps(segment)):
            try:
                do(step, tables, paths, program.truth, rank, group)
            except AssertionError as error:
                raise AssertionError(f"program {seed}, segment {segment}, step {number}") from error
        for table, truth in zip(tables, program.truth, strict=True):
            same(table.gather(np.arange(len(truth))), truth)


def do(
    step: Step, tables: list[Any], paths: list[Path], truths: list[Any], rank: int, group: Any
) -> None:
    table, truth, ids = tables[step.table], truths[step.table], step.ids[rank]
    if step.name == "gather":
        same(table.gather(ids), truth[ids])
    elif step.name == "gather all":
        mine = [ids % len(each) for each in truths]
        found = gather(list(zip(tables, mine, strict=True)))
        for got, each, rows in zip(found, mine, truths, strict=True):
            same(got, rows[each])
    elif step.name == "scatter":
        table.scatter(ids, step.values[rank])
    elif step.name == "flush":
        table.flush()
    elif step.name == "stray":
        stray = len(truth) if rank == table.ranks - 1 else 0
        assert failure(lambda: table.scatter([0, stray], truth[:1]))[0] == "BoundsError"
    else:
        table.close()
        tables[step.table] = reopen(group, paths[step.table], cache="16 KiB", line=512)


def deal(rank: int, group: Any, folder: Path, shared: bool, ranks: int) -> None:
    """Deal both tables over another number of ranks."""
    for number in range(2):
        path = home(folder / str(number), rank, shared)
        reshard(path, ranks, group=group, timeout_s=TIMEOUT_S)
