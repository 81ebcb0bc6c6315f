"""What texts tell users to install exists, and installs for those who have a checkout or a wheel.

Nothing of ours is on an index. `pip install 'flashwarp[extra]'` adds to a flashwarp that is there;
without an extra pip would look for flashwarp itself.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = (".py", ".md", ".toml", ".cuh", ".h", ".cpp")


def _lines() -> list[str]:
    command = ["git", "ls-files", ":!tests", ":!results"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split()]
    return [
        f"{path}: {line}"
        for path in paths
        if path.suffix in KINDS
        for line in path.read_text().splitlines()
    ]


def test_messages_name_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    named = re.findall(r"flashwarp\[([a-z0-9, ]+)\]", "\n".join(_lines()))

    extras = {each.strip() for several in named for each in several.split(",")}
    assert {"cuda", "numba", "torch", "pyg", "graphs", "remote", "plot", "prometheus"} <= extras
    assert extras <= set(project["optional-dependencies"])


def test_no_text_installs_flashwarp_from_an_index() -> None:
    found = [line for line in _lines() if re.search(r"pip install.* '?flashwarp(?![\[-])\b", line)]

    assert not found


def test_make_takes_the_python_that_is_named_or_none(tmp_path: Path) -> None:
    venv = tmp_path / "venv"

    command = ["make", f"{venv}/venv.stamp", f"VENV={venv}", "PYTHON=python3.0"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert made.returncode != 0
    assert "python3.0 >= 3.11 is missing" in made.stderr
    assert not venv.exists()
