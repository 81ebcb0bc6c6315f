"""The models of the queue pair and of the page cache, searched exhaustively by spin.

A model must hold as it stands, and must fail when a step of the protocol is left out: otherwise it
would say nothing. `make models` adds sizes that take minutes and gigabytes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "models"
CODE = [
    *ROOT.glob("src/flashwarp/include/**/*.cuh"),
    *ROOT.glob("src/flashwarp/kernels/*.cuh"),
    *ROOT.glob("native/nvme/**/*.[ch]*"),
]

LARGE = os.environ.get("FLASHWARP_LARGE_MODELS") == "1"

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None,
    reason="the models need spin and gcc: sudo apt-get install spin gcc",
)

# What pan says when it has not seen everything.
TRUNCATED = ("max search depth too small", "out of memory")


class Search(NamedTuple):
    errors: int
    states: int
    report: str


def search(folder: Path, model: str, settings: str, cycles: bool = False) -> Search:
    """Visits every state of a model; `cycles` looks for ways to go on for ever instead."""
    defines = [f"-D{setting}" for setting in settings.split()]
    run = {"cwd": folder, "capture_output": True, "text": True, "check": True}
    subprocess.run(["spin", "-a", *defines, MODELS / f"{model}.pml"], **run)
    what = "-DNP" if cycles else "-DSAFETY"
    flags = ["-O1", "-w", "-DNOFAIR", "-DCOLLAPSE", what]
    subprocess.run(["gcc", *flags, "-o", "pan", "pan.c"], **run)
    # Depth to spare: the longest path of the largest model has under a thousand steps.
    options = ["-m100000", "-w20", *(["-l"] if cycles else [])]
    report = subprocess.run([folder / "pan", *options], **run).stdout
    assert not any(text in report for text in TRUNCATED), report
    found = re.search(r"errors: (\d+)\s+(\d+) states, stored", report)
    assert found, report
    return Search(int(found[1]), int(found[2]), report)


HOLDS = [
    ("queue_pair", "SUBMITTERS=2 COMMANDS=4", 100_000),
    ("queue_pair", "SUBMITTERS=3 COMMANDS=1", 100_000),
    ("line_cache", "WAYS=1 LINES=2 STORES=2 READERS=2", 100_000),
    ("line_cache", "WAYS=1 LINES=2 STORES=1 READERS=2 FAILURES=2", 100_000),
    ("line_cache", "WAYS=2 LINES=3 STORES=1 READERS=1", 100_000),
    ("line_cache", "WAYS=2 LINES=3 STORES=1 READERS=1 FAILURES=1", 100_000),
]
HOLDS_LARGE = [
    ("line_cache", "WAYS=2 LINES=3 STORES=2 READERS=1 FAILURES=1", 1_000_000),
    ("queue_pair", "SUBMITTERS=3 COMMANDS=2", 10_000_000),
    ("queue_pair", "SUBMITTERS=2 COMMANDS=2 DEPTH=4", 10_000_000),
    ("line_cache", "WAYS=2 LINES=3 STORES=1 READERS=2", 1_000_000),
    ("line_cache", "WAYS=1 LINES=2 STORES=1 READERS=3", 1_000_000),
]


@needs_spin
@pytest.mark.parametrize(("model", "settings", "states_min"), HOLDS)
def test_model_holds(tmp_path: Path, model: str, settings: str, states_min: int) -> None:
    result = search(tmp_path, model, settings)

    assert result.errors == 0, result.report
    assert result.states > states_min, "the search ended early: the model has no choices left"


@needs_spin
@pytest.mark.skipif(not LARGE, reason="takes minutes and gigabytes: make models")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("model", "settings", "states_min"), HOLDS_LARGE)
def test_large_model_holds(tmp_path: Path, model: str, settings: str, states_min: int) -> None:
    test_model_holds(tmp_path, model, settings, states_min)


@needs_spin
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("queue_pair", "SUBMITTERS=2 COMMANDS=3"),
        ("line_cache", "WAYS=1 LINES=2 STORES=1 READERS=2 FAILURES=1"),
        ("line_cache", "WAYS=2 LINES=2 STORES=1 READERS=1"),
    ],
)
def test_model_always_ends(tmp_path: Path, model: str, settings: str) -> None:
    result = search(tmp_path, model, settings, cycles=True)

    assert result.errors == 0, result.report


QUEUE_PAIR = "SUBMITTERS=2 COMMANDS=2"
PAGE_CACHE = "WAYS=1 LINES=2 STORES=2 READERS=2"

BROKEN = [
    # Nobody looks again after unlocking: an entry written meanwhile is never published.
    ("queue_pair", "NO_SECOND_LOOK", "invalid end state"),
    # The tail runs over entries that the controller has not fetched.
    ("queue_pair", "NO_SPACE_CHECK", "assertion violated"),
    # Room in the ring is learned by the drainer, which tells no publisher.
    ("queue_pair", "NO_PUBLISH_AFTER_DRAIN", "invalid end state"),
    # Detached commands hold every slot, and who waits for one does not drain.
    ("queue_pair", "NO_HELP", "invalid end state"),
    # A slot is taken out of turn.
    ("queue_pair", "NO_TURN", "assertion violated"),
    # An entry of the last pass counts as a completion.
    ("queue_pair", "NO_PHASE", "assertion violated"),
    # Two drain one completion.
    ("queue_pair", "NO_DRAIN_LOCK", "assertion violated"),
    # The slot is given up before its buffer was read.
    ("queue_pair", "EARLY_RELEASE", "assertion violated"),
    # Readers do not look at the tag again after their load.
    ("line_cache", "NO_RECHECK", "assertion violated"),
    # The same line is in the frame before and after, but not at the load.
    ("line_cache", "NO_GENERATION", "assertion violated"),
    # Victims are taken while somebody stores to them, while dirty, while being written.
    ("line_cache", "IGNORE=PIN_MASK", None),
    ("line_cache", "IGNORE=DIRTY", "assertion violated"),
    ("line_cache", "IGNORE=WRITING", "assertion violated"),
    # A store during the write-back is forgotten at its end.
    ("line_cache", "CLEAN_AT_END", "assertion violated"),
    # One line gets two frames.
    ("line_cache", "NO_SET_LOCK", "assertion violated"),
    # The tag is VALID before the data is there.
    ("line_cache", "PUBLISH_EARLY", "assertion violated"),
]


@needs_spin
@pytest.mark.parametrize(("model", "defect", "symptom"), BROKEN)
def test_broken_model_is_caught(
    tmp_path: Path, model: str, defect: str, symptom: str | None
) -> None:
    size = QUEUE_PAIR if model == "queue_pair" else PAGE_CACHE

    result = search(tmp_path, model, f"{size} {defect}")

    assert result.errors == 1
    assert symptom is None or symptom in result.report


@pytest.mark.parametrize("model", ["queue_pair", "line_cache"])
def test_every_defect_of_a_model_is_tested(model: str) -> None:
    text = (MODELS / f"{model}.pml").read_text()
    switches = set(re.findall(r"^#ifn?def (\w+)", text, re.MULTILINE))
    sizes = {"SUBMITTERS", "COMMANDS", "DEPTH", "WAYS", "LINES", "STORES", "READERS", "FAILURES"}

    tested = {defect.split("=")[0] for name, defect, _ in BROKEN if name == model}

    assert switches - sizes == tested


@pytest.mark.parametrize("model", ["queue_pair", "line_cache"])
def test_model_names_functions_that_exist(model: str) -> None:
    text = (MODELS / f"{model}.pml").read_text()
    comments = re.findall(r"/\*\s*((?:\w+,\s*)*\w+)\s*\*/", text)
    named = {name for comment in comments for name in re.split(r",\s*", comment)}
    code = "\n".join(re.sub(r"//.*", "", path.read_text()) for path in CODE)

    missing = {name for name in named if not re.search(rf"\b{name}\b", code)}

    assert len(named) > 15
    assert missing == set(), "renamed in the code: look whether the model still says what it does"


def test_page_names_functions_that_exist() -> None:
    page = (ROOT / "docs" / "correctness.md").read_text()
    steps = re.findall(r"^\| (`[^|]*?) \|", page, re.MULTILINE)
    # Members as `Class::name`; what is written with a star or a path names no single function.
    named = {
        name.split("::")[-1]
        for step in steps
        for name in re.findall(r"`([\w:]+)`", step)
        if not name.startswith("gpu")
    }
    code = "\n".join(re.sub(r"//.*", "", path.read_text()) for path in CODE)

    missing = {name for name in named if not re.search(rf"\b{name}\b", code)}

    assert len(named) > 30
    assert missing == set(), "renamed in the code: look whether the argument still holds"


def test_page_names_every_defect_of_the_models() -> None:
    page = (ROOT / "docs" / "correctness.md").read_text()

    missing = {defect for _, defect, _ in BROKEN if defect.split("=")[0] not in page}

    assert missing == set()
