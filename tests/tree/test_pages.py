"""What pages for users promise: errors are explained, and messages are quoted as they are."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from flashwarp import errors

ROOT = Path(__file__).parents[2]
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ERRORS = [
    name
    for name, thing in vars(errors).items()
    if inspect.isclass(thing) and thing.__module__ == errors.__name__
]


def texts() -> str:
    """All text in our sources, as parts of it are joined."""
    python = (ROOT / "src" / "flashwarp").rglob("*.py")
    found = [
        node.value
        for path in python
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    native = (path.read_text(encoding="utf-8") for path in (ROOT / "native").rglob("*.cpp"))
    return "\n".join([*found, *(re.sub(r'"\s*"', "", text) for text in native)])


@pytest.mark.parametrize("name", sorted(set(ERRORS) - {"FlashwarpError"}))
def test_error_is_explained(name: str) -> None:
    assert f"`{name}`" in TROUBLES, "docs/troubleshooting.md leaves it out"


def test_messages_are_quoted_as_they_are() -> None:
    rows = [line for line in TROUBLES.splitlines() if line.startswith("|")]
    quoted = [text for row in rows for text in re.findall(r'"([^"`]+)"', row.split("|")[1])]
    ours = texts()

    assert len(quoted) > 15
    assert [text for text in quoted if text not in ours] == []


# Maps: tables whose last column names files and folders.

PACKAGE = ROOT / "src" / "flashwarp"
BASES = [ROOT, PACKAGE, PACKAGE / "include" / "flashwarp"]
MAPS = [
    ("README.md", "## Where things are"),
    ("CONTRIBUTING.md", "## What to touch"),
    ("docs/architecture.md", "## The rooms"),
]


def rows_of(page: str, heading: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition(heading)[2], flags=re.MULTILINE)[0]
    return [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]


MAPPED = [(page, cell) for page, heading in MAPS for cell in rows_of(page, heading)]


@pytest.mark.parametrize(("page", "cell"), MAPPED)
def test_places_of_a_map_exist(page: str, cell: str) -> None:
    found = re.findall(r"`([\w./]+)`", cell)
    names = [name for name in found if re.search(r"[/.]", name) and "NAME" not in name]
    # A file may be named without its folder behind a name that has it.
    folders = [base / f"{name}x".rpartition("/")[0] for name in names for base in BASES]

    missing = [
        name for name in names if not any((base / name).exists() for base in [*BASES, *folders])
    ]

    assert "`" in cell
    assert missing == []
