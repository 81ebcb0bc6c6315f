"""Interrupts at each line of the calls of an array, and at any time; see `interrupts`."""

from __future__ import annotations

import pytest

from edges import budget, nursery

OPERATIONS = (
    "open", "create", "Cache", "close", "gather", "scatter", "flush", "drop_cache", "__getitem__",
    "__setitem__", "gather_async", "scatter_async",
)  # fmt: skip
EACH_S = budget.SECONDS / len(OPERATIONS) / 2


def failures_of(run_program: nursery.Run, call: str, limit_s: float) -> tuple[list[str], str]:
    """Run a program of interrupts; returns what failed, and where it was when it ended."""
    code = f"from edges import interrupts\ninterrupts.main(lambda: interrupts.{call})\n"
    outcome = run_program(nursery.Program("interrupts", code, limit_s))
    lines = outcome.out.splitlines()
    wrong = [line for line in lines if line.startswith("WRONG")]
    if outcome.status == 0 and not outcome.hung:
        assert lines[-1].startswith("TRIED"), outcome
        return wrong, ""
    at = next((line for line in reversed(lines) if line.startswith("AT")), "AT the start")
    how = "hangs" if outcome.hung else f"status {outcome.status}"
    return [*wrong, f"{how} {at}: {outcome.err[-600:]}"], at


@pytest.mark.timeout(600 + 4 * budget.SECONDS)
@pytest.mark.parametrize("shared", [False, True], ids=["own cache", "shared cache"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_interrupt_at_any_line(run_program: nursery.Run, name: str, shared: bool) -> None:
    failures: list[str] = []
    first = 0
    for _ in range(20):
        call = f"at_lines({name!r}, {shared}, {budget.SEED}, {first}, {EACH_S})"
        found, at = failures_of(run_program, call, 60 + 2 * EACH_S)
        failures += found
        # Beyond a line at which it crashed or hung, as long as it is worth knowing more.
        if not at or len(failures) > 3 or not at.split()[1].isdecimal():
            break
        first = int(at.split()[1]) + 1

    assert not failures, f"seed {budget.SEED}:\n" + "\n".join(failures)


@pytest.mark.timeout(600 + 4 * budget.SECONDS)
def test_signal_at_any_time(run_program: nursery.Run) -> None:
    call = f"at_times({budget.SEED}, {budget.SECONDS / 2})"

    failures, _ = failures_of(run_program, call, 60 + 2 * budget.SECONDS)

    assert not failures, f"seed {budget.SEED}:\n" + "\n".join(failures)


@pytest.mark.timeout(600 + 10 * budget.INTERRUPTED_PROGRAMS)
@pytest.mark.parametrize("name", ["checkpointer", "pipeline", "loader", "file", "image", "shared"])
def test_signal_at_any_time_of_a_program(run_program: nursery.Run, name: str) -> None:
    if name == "loader":
        pytest.importorskip("torch")
    failures: list[str] = []
    for first in range(0, budget.INTERRUPTED_PROGRAMS, 50):
        count = min(50, budget.INTERRUPTED_PROGRAMS - first)
        call = f"programs({name!r}, {budget.SEED}, {first}, {count})"
        failures += failures_of(run_program, call, 120 + 10 * count)[0]

    assert not failures, f"seed {budget.SEED}:\n" + "\n".join(failures)
