"""What pages for users promise: errors are explained, and messages are quoted as they are."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import re
from pathlib import Path

import pytest

from benchmarks import overview
from flashwarp import errors

ROOT = Path(__file__).parents[2]
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CHOICES = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize(("door", "name"), re.findall(r"`(fwt?)\.([\w.]+)", CHOICES))
def test_calls_of_the_choice_exist(door: str, name: str) -> None:
    if door == "fwt":
        pytest.importorskip("torch", reason="torch is an extra")
    module = importlib.import_module({"fw": "flashwarp", "fwt": "flashwarp.torch"}[door])

    assert operator.attrgetter(name)(module)


def test_picture_is_that_of_the_stored_records() -> None:
    assert overview.PICTURE.read_text() == overview.draw(), "run python -m benchmarks.overview"


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


INTERFACE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
MEMBERS = re.findall(r"^\.\. autoclass:: (\S+)\n   :members: (.+)$", INTERFACE, re.MULTILINE)


@pytest.mark.parametrize(("name", "listed"), MEMBERS, ids=[name for name, _ in MEMBERS])
def test_members_of_the_interface_exist(name: str, listed: str) -> None:
    module, _, thing = name.rpartition(".")
    if module.endswith((".torch", ".pyg", ".dcp", ".distributed")):
        pytest.importorskip("torch", reason="torch is an extra")
    if module.endswith(".pyg"):
        pytest.importorskip("torch_geometric", reason="torch_geometric is an extra")
    documented = getattr(importlib.import_module(module), thing)
    annotated = {
        each for kind in documented.__mro__ for each in vars(kind).get("__annotations__", {})
    }

    missing = {m for m in listed.split(", ") if not hasattr(documented, m)} - annotated
    assert missing == set()
