"""The steps that programs are made of, by weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """A kind of step: a thread draws its operands and makes the call.

    Attributes
    ----------
    weight : float
        How often it is drawn, beside the others.
    alone : bool
        Whether other threads wait meanwhile.
    room : str
        What it tests: the module that has it.
    """

    run: Callable[[Any], None]
    weight: float
    alone: bool
    room: str


STEPS: list[Step] = []


def step(
    weight: float, *, alone: bool = False, room: str = ""
) -> Callable[[Callable[[Any], None]], Any]:
    """Make a function a step of programs, in the room of its module or in another one."""

    def note(run: Callable[[Any], None]) -> Callable[[Any], None]:
        STEPS.append(Step(run, weight, alone, room or run.__module__.rpartition(".")[2]))
        return run

    return note
