"""A deliberate mistake in a device header, which the simulator has to find."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutant"]


@dataclass(frozen=True)
class Mutant:
    """One mistake, and where it shows.

    Attributes
    ----------
    name : str
        What `--mutant` calls it.
    old, new : str
        The passage, which occurs exactly once, and what takes its place.
    why : str
        What goes wrong, in a sentence.
    scenario, mode, width, strategy, policy
        Where the simulator finds it.
    header : str
        As it is included: ``flashwarp/cache/...``, or ``flashwarp/kernels/...``. The file that has
        the mutant says so once for all of them.
    """

    name: str
    old: str
    new: str
    why: str
    scenario: str
    mode: str = "sc"
    width: int = 1
    strategy: str = "any"
    policy: str = "clock"
    header: str = ""
