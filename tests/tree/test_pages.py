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
