"""`docs/checkpoints.md`: its example runs, its table is the code's, its tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashwarp.checkpoint.life import TRANSITIONS, Fact, Transition
from support import checkpoint_figures

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "checkpoints.md"


def facts(held: Fact) -> str:
    return ", ".join(str(fact.name) for fact in Fact if fact in held)


def row(event: str, transition: Transition) -> str:
    cleared = facts(transition.clears) if transition.clears != ~Fact(0) else "all"
    needs = [facts(transition.needs)] if transition.needs else []
    if transition.needs_one:
        needs.append("one of " + facts(transition.needs_one))
    cells = [
        event,
        "; ".join(needs),
        facts(transition.forbids),
        facts(transition.sets),
        cleared,
        transition.why,
    ]
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    lines = ["| event | needs | forbids | sets | clears | meaning |", "|---|---|---|---|---|---|"]
    lines += [row(event.value, transition) for event, transition in TRANSITIONS.items()]
    return "\n".join(lines)


def test_the_table_of_transitions_is_that_of_the_code() -> None:
    found = re.search(
        r"<!-- transitions -->\n(.*?)\n?<!-- end of transitions -->", PAGE.read_text(), re.DOTALL
    )

    assert found is not None
    assert found[1] == table(), "copy the table from here"


def test_the_figures_are_those_of_the_stored_records() -> None:
    found = checkpoint_figures.BLOCK.search(checkpoint_figures.PAGE.read_text())

    assert found is not None
    assert found[0] == checkpoint_figures.render(), "run tests/support/checkpoint_figures.py"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None

    exec(compile(example[1], str(PAGE), "exec"), {})


def test_each_test_that_the_page_names_exists() -> None:
    rooms = [ROOT / "tests" / room for room in ("checkpoint", "interop")]
    tests = "\n".join(path.read_text() for room in rooms for path in room.rglob("test_*.py"))

    for name in re.findall(r"`(test_\w+)`", PAGE.read_text()):
        check = name.removeprefix("test_")
        assert f"def {name}(" in tests or f"def check_{check}(" in tests, name
