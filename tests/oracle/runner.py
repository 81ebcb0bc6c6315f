"""Running programs: from a seed, with threads, a watchdog, and fewer steps after a failure."""

from __future__ import annotations

import faulthandler
import gc
import io
import logging
import os
import queue
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle import (  # noqa: F401 - their steps
    arrays,
    checkpoints,
    files,
    futures,
    kernels,
    misuse,
    peers,
    pipelines,
    shards,
    sharing,
    tables,
    torches,
    training,
    whole_files,
)
from oracle.machine import Machine
from oracle.steps import STEPS, Step
from oracle.world import Hand, World

ROOMS = sorted({each.room for each in STEPS})
ALWAYS = ("arrays", "futures")
"""Rooms of all programs; a program has a few of the others."""

ASKED = ("shards",)
"""Rooms of programs that are asked for them, because their processes take seconds to start."""

HANG_S = 60.0
"""A program that makes no call for longer hangs; on a GPU, which compiles kernels, five times."""

SHRINK_S = 30.0
"""How long a program that fails is shrunk."""

TRIES = 4
"""How often a program with fewer steps runs before it counts as right: streams are late by luck."""


@dataclass
class Outcome:
    """What programs have come to."""

    programs: int = 0
    calls: int = 0
    checks: int = 0
    failures: list[str] = field(default_factory=list)
    hangs: int = 0
    first: int = -1
    last: int = -1


class _Threads:
    """The threads of programs, which stay for the next one."""

    def __init__(self) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self, jobs: dict[int, Callable[[], None]]) -> None:
        """Run jobs side by side, each in the thread of its number; raise what the first raises."""
        for number, job in jobs.items():
            while len(self._queues) <= number:
                self._queues.append(queue.SimpleQueue())
                threading.Thread(target=self._work, args=(self._queues[-1],), daemon=True).start()
            self._queues[number].put(job)
        failures = [self._done.get() for _ in jobs]
        for failure in failures:
            if failure is not None:
                raise failure

    def _work(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)


@dataclass(frozen=True)
class Planned:
    """A step of a program: its number, whose it is, and whether others wait meanwhile."""

    number: int
    hand: int
    step: Step
    alone: bool


class Runner:
    """Runs programs on one machine.

    Parameters
    ----------
    device : str
        "cpu", "fake" or "cuda:N".
    rooms : collection of str
        The rooms whose steps are drawn; empty: all.
    but : collection of str
        Steps that are not drawn.

    Attributes
    ----------
    folders : dict
        Where files lie, see `folders.folders`; set before programs run.
    """

    def __init__(
        self,
        device: str,
        rooms: Collection[str] = (),
        but: Collection[str] = (),
    ) -> None:
        self.device = device
        self.machine = Machine(device)
        self.folders: dict[str, Path] = {}
        self._hang_s = HANG_S * 5 if self.machine.kind == "cuda" else HANG_S
        wanted, left_out = set(rooms), set(but)
        chosen = {"--rooms": ",".join(rooms), "--but": ",".join(but)}
        self._options = "".join(f" {key} {value}" for key, value in chosen.items() if value)
        self.steps = [
            each
            for each in STEPS
            if (not wanted or each.room in wanted) and each.run.__name__ not in left_out
        ]
        self._asked = wanted & set(ASKED)
        self._threads = _Threads()
        self._world: World | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    # Programs.

    def plan(self, world: World) -> list[list[Planned]]:
        """Draw the steps of a program in phases. Threads wait for each other between them."""
        draw = random.Random(f"{world.seed}/plan")
        usual = [each for each in ROOMS if each not in ASKED]
        rooms = {each for each in usual if each in ALWAYS or draw.random() < 0.3} | self._asked
        drawn = [each for each in self.steps if each.room in rooms] or self.steps
        phases: list[list[Planned]] = []
        number = 0
        while number < world.steps:
            alone = world.threads == 1 or draw.random() < 0.5
            steps = [each for each in drawn if alone or not each.alone]
            if not steps:
                alone, steps = True, drawn
            weights = [each.weight for each in steps]
            hands = [draw.randrange(world.threads)] if alone else range(world.threads)
            length = draw.randint(1, 8 if alone else 4)
            phase = []
            for hand in hands:
                for each in draw.choices(steps, weights, k=length):
                    phase.append(Planned(number, hand, each, alone))
                    number += 1
            phases.append(phase)
        return phases

    def run(self, seed: int, wanted: set[int] | None = None, most: int = 0) -> World:
        """Run one program, or some of its steps; raises what it finds."""
        world = World(self.machine, seed, self.folders, most)
        self._world = world
        faulthandler.dump_traceback_later(20 * self._hang_s, exit=True)
        try:
            with self.machine.few_blocks(seed):
                self._run(world, wanted)
        except BaseException as error:
            error.world = world
            world.give_up()
            raise
        finally:
            self._world = None
            faulthandler.cancel_dump_traceback_later()
        return world

    def _run(self, world: World, wanted: set[int] | None) -> None:
        world.open()
        for turn, phase in enumerate(self.plan(world)):
            chosen = [each for each in phase if wanted is None or each.number in wanted]
            if chosen:
                self._phase(world, turn, chosen)
        world.close()

    def _phase(self, world: World, turn: int, phase: list[Planned]) -> None:
        jobs: dict[int, Callable[[], None]] = {}
        for number in {each.hand for each in phase}:
            hand = world.hands[number]
            hand.alone, hand.turn = phase[0].alone, turn
            mine = [each for each in phase if each.hand == number]
            jobs[number] = lambda hand=hand, mine=mine: _do(hand, mine)
        if world.threads == 1:
            jobs[0]()
        else:
            self._threads.run(jobs)

    # What fails.

    def explain(self, seed: int, error: BaseException) -> str:
        """Shrink a program that fails, and write it for people."""
        world: World = error.world
        wanted = {each.number for phase in self.plan(world) for each in phase}
        most = 0
        size = len(wanted) // 2
        deadline = time.monotonic() + SHRINK_S
        while size and time.monotonic() < deadline:
            steps = sorted(wanted)
            for at in range(0, len(steps), size):
                fewer = wanted - set(steps[at : at + size])
                late = fewer == wanted or time.monotonic() > deadline
                failed = None if late else self._fails(seed, fewer, most)
                if failed is not None:
                    wanted, error = fewer, failed
            size //= 2
        for fewer_rows in (1, 2, 4):
            failed = self._fails(seed, wanted, fewer_rows)
            if failed is not None:
                most, error = fewer_rows, failed
                break
        world = error.world
        text = io.StringIO()
        chosen = ",".join(map(str, sorted(wanted)))
        print(f"WRONG: program {seed} on {self.device}", file=text)
        print("\n".join(world.each_line()), file=text)
        print(f"  -> {_said(error)}", file=text)
        rows = f" --most {most}" if most else ""
        print(
            f"replay: PYTHONPATH=tests python -m oracle --device {self.device}{self._options} "
            f"--replay {seed} --steps {chosen}{rows}",
            file=text,
        )
        return text.getvalue()

    def _fails(self, seed: int, wanted: set[int], most: int) -> BaseException | None:
        for _ in range(TRIES if self.device != "cpu" else 2):
            try:
                self.run(seed, wanted, most)
            except Exception as error:
                return error
        return None

    def _watch(self) -> None:
        seen: tuple[World | None, int] = None, 0
        since = time.monotonic()
        while True:
            time.sleep(1)
            world = self._world
            now = world, 0 if world is None else len(world.lines)
            if world is None or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._hang_s:
                print(f"HANG: program {world.seed} on {self.device}", flush=True)
                print("\n".join(world.each_line()), flush=True)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(4)


def _do(hand: Hand, steps: list[Planned]) -> None:
    for each in steps:
        hand.random.seed(f"{hand.world.seed}/{each.number}")
        with hand.machine.on_a_stream(each.number):
            each.step.run(hand)


def _said(error: BaseException) -> str:
    from oracle.model import Wrong

    if isinstance(error, Wrong):
        return str(error)
    return "".join(traceback.format_exception(error)[-8:])


def run_programs(
    runner: Runner,
    first: int,
    *,
    calls: int,
    seconds: float,
    programs: int = 1 << 62,
    failures_max: int = 3,
    shrink: bool = True,
    note: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Run programs from a seed on, until a budget is used up or some have failed."""
    warnings.simplefilter("ignore")
    outcome = Outcome(first=first)
    end = time.monotonic() + seconds
    seed = first
    modules = 0
    while (
        outcome.calls < calls
        and outcome.programs < programs
        and time.monotonic() < end
        and len(outcome.failures) < failures_max
    ):
        note(seed)
        try:
            world = runner.run(seed)
        except Exception as error:
            world = error.world
            text = f"WRONG: program {seed}: {error!r}"
            print(text, flush=True)
            if shrink:
                text = runner.explain(seed, error)
                print(text, flush=True)
            outcome.failures.append(text)
        outcome.programs += 1
        outcome.calls += world.calls
        outcome.checks += world.checks
        outcome.last = seed
        seed += 1
        if outcome.programs % 200 == 0 or len(sys.modules) > modules:
            gc.collect()
        if len(sys.modules) > modules:
            # The million objects of imported modules: collections among the steps skip them.
            gc.freeze()
            modules = len(sys.modules)
    return outcome


def main_of_child(runner: Runner, **budget: Any) -> int:
    """Run programs in a process of its own; the last line says what they have come to."""
    logging.disable(logging.WARNING)  # which programs cause on purpose
    outcome = run_programs(runner, **budget)
    print(
        f"DONE {outcome.programs} {outcome.calls} {outcome.checks} {outcome.last} "
        f"{len(outcome.failures)}",
        flush=True,
    )
    sys.stdout.flush()
    return 0
