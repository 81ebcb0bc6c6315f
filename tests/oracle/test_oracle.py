"""Programs of the oracle beside its model: a few in each run of the tests, more by its command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oracle.model import Rows, Wrong
from oracle.mutants import MUTANTS, NATIVE, Mutant
from support.samples import sample

CALLS = int(os.environ.get("FLASHWARP_ORACLE_CALLS", "2000"))
SEED = int(os.environ.get("FLASHWARP_ORACLE_SEED") or "1")
SECONDS = CALLS / 200
"""After which no program begins: a budget, for machines that are busy."""


def run(*options: object) -> subprocess.CompletedProcess[str]:
    """Run the oracle's command."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "oracle", *map(str, options)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_programs(device: str) -> None:
    if device == "fake":
        pytest.importorskip("cuda.bindings.driver")
        pytest.importorskip("cuda.bindings.nvrtc")

    ran = run("--device", device, "--calls", CALLS, "--seconds", SECONDS, "--seed", SEED)

    assert ran.returncode == 0, ran.stdout
    assert re.search(r"[1-9]\d* programs, [1-9]\d* calls, [1-9]\d* checks", ran.stdout), ran.stdout


def test_programs_on_shards() -> None:
    pytest.importorskip("torch", reason="torch is not installed")

    ran = run("--rooms", "shards", "--calls", CALLS // 10, "--seconds", SECONDS, "--seed", SEED)

    assert ran.returncode == 0, ran.stdout
    assert re.search(r"[1-9]\d* programs, [1-9]\d* calls, [1-9]\d* checks", ran.stdout), ran.stdout


@pytest.mark.parametrize("mutant", sample(MUTANTS, 4), ids=lambda each: each.name)
def test_a_mend_that_is_missing_is_found(mutant: Mutant) -> None:
    if mutant.rooms == "torches":
        pytest.importorskip("torch")
    options = {
        "--device": mutant.device,
        "--rooms": mutant.rooms,
        "--seed": mutant.seed,
        "--programs": mutant.programs,
        "--mutant": mutant.name,
        "--failures": 1,
        "--seconds": 60,
    }

    ran = run("--no-shrink", *[word for pair in options.items() for word in pair])

    assert ran.returncode == 1, ran.stdout
    assert "WRONG" in ran.stdout


@pytest.mark.parametrize("mutant", [*MUTANTS, *NATIVE], ids=lambda each: each.name)
def test_a_mend_is_where_its_list_says(mutant: Mutant) -> None:
    path = mutant.module
    if not path.startswith("native/"):
        path = f"src/{path.replace('.', '/')}.py"
    text = (Path(__file__).parents[2] / path).read_text()

    assert text.count(mutant.old) == 1


def test_a_wrong_program_is_told_in_few_lines_and_replayed() -> None:
    mutant = "two entries for one memory"
    ran = run("--rooms", "files", "--mutant", mutant, "--failures", 1)
    (told,) = re.findall(r"python -m oracle (--device .* --replay .*)", ran.stdout)

    replayed = run(*told.split(), "--mutant", mutant)

    lines = re.findall(r"(?m)^ +\d+ .*$", ran.stdout)
    assert len(lines) < 9
    assert "two entries were loaded into one memory" in replayed.stdout
    assert replayed.returncode == 1


# The model.


def rows() -> Rows:
    return Rows("x", np.arange(12).reshape(6, 2))


def test_a_read_sees_what_was_stored_before_it() -> None:
    model = rows()
    chosen = np.array([4, 1])
    before = model.read(chosen)
    model.store("line 1", np.array([1]), np.array([[7, 7]]))

    before.check(np.array([[8, 9], [2, 3]]))
    model.read(chosen).check(np.array([[8, 9], [7, 7]]))
    with pytest.raises(Wrong, match=r"row 1 has .*\n.*no store .*\n.*line 1"):
        model.read(chosen).check(np.array([[8, 9], [2, 3]]))


def test_a_read_in_flight_may_see_later_stores_in_part() -> None:
    model = rows()
    read = model.read_loosely(np.array([1, 2]))
    model.store("line 1", np.array([1]), np.array([[7, 7]]))
    model.store("line 2", np.array([1]), np.array([[8, 8]]))

    with pytest.raises(Wrong, match="row 2"):
        read.check(np.array([[7, 8], [4, 6]]))
    read = model.read_loosely(np.array([1, 2]))
    model.store("line 3", np.array([1]), np.array([[9, 9]]))
    read.check(np.array([[8, 9], [4, 5]]))
    assert not model.loose


def test_a_read_in_flight_may_be_settled_while_another_hears_of_a_store() -> None:
    model = rows()
    first, second = model.read_loosely(np.array([1])), model.read_loosely(np.array([1]))
    first.may = lambda _: first.check(np.array([[2, 3]]))  # type: ignore[method-assign]
    model.store("line 1", np.array([1]), np.array([[7, 7]]))

    second.check(np.array([[7, 7]]))


def test_only_known_rows_are_checked() -> None:
    read = rows().read(np.array([0, 1]))

    read.check(np.array([[5, 5], [2, 3]]), np.array([False, True]))
