"""docs/comparison.md, features of the papers: each row names what exists and what shows it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import flashwarp as fw
from benchmarks import BENCHES
from simulator.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"
PART = "## Features of the papers"
HEADERS = ROOT / "src" / "flashwarp" / "include" / "flashwarp"
SCENARIOS = ROOT / "tests" / "simulator" / "scenarios"

SOURCES = [
    *HEADERS.rglob("*.cuh"),
    *(ROOT / "src" / "flashwarp").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
]

NOT_YET = "not yet"


def rows() -> list[tuple[str, str, str]]:
    """What the papers have, what flashwarp has, and by what that is shown."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").partition(PART)[2].splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, line
        if cells[2] not in ("shown by", "---"):
            found.append((cells[0], cells[1], cells[2]))
    return found


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@functools.cache
def scenarios() -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in SCENARIOS.glob("*.cpp"))
    return set(re.findall(r"FW_SCENARIO\(\s*(\w+)", text))


def is_bench(name: str) -> bool:
    name, _, part = name.partition(" ")
    return (part or name) in BENCHES.get(name, ())


def exists(proof: str) -> bool:
    kind, _, name = proof.partition(" ")
    if kind == "bench":
        return is_bench(name)
    if kind == "scenario":
        return name in scenarios()
    if kind == "mutant":
        return name in MUTANTS
    file, _, function = proof.partition("::")
    path = ROOT / "tests" / file
    return path.is_file() and function in functions_of(path)


def test_page_has_all_papers() -> None:
    assert len(rows()) > 50
    papers = {"### BaM", "### AGILE", "### CAM", "### Score and VELOC", "### GeminiFS"}
    assert papers <= set(PAGE.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(("feature", "ours", "shown"), rows(), ids=lambda cell: cell[:30])
def test_row_names_what_shows_it(feature: str, ours: str, shown: str) -> None:
    proofs = names(shown)

    assert re.sub(r"`[^`]+`", "", shown).strip() == "", "only names in backticks"
    assert bool(proofs) == (ours != NOT_YET), f"{feature}: shown by something, or not yet"
    assert [proof for proof in proofs if not exists(proof)] == []


@pytest.mark.parametrize(
    "name", sorted({name for _, ours, _ in rows() for name in names(ours)}), ids=str
)
def test_name_of_ours_exists(name: str) -> None:
    if name.startswith("fw."):
        assert hasattr(fw, name.removeprefix("fw."))
    elif name.startswith("Array."):
        assert hasattr(fw.Array, name.removeprefix("Array."))
    elif name.endswith(".cuh"):
        assert list(HEADERS.rglob(name))
    elif name.startswith("bench "):
        assert is_bench(name.removeprefix("bench "))
    else:
        # An expression of a kernel's or of Python: its last function or class is in our sources.
        word = re.findall(r"[A-Za-z_]\w{2,}", name)
        assert not word or any(
            re.search(rf"\b{word[0]}\b", path.read_text(encoding="utf-8")) for path in SOURCES
        )
