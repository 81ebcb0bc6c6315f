"""Completion of command lines by bash, zsh and fish, with argcomplete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


def completed(line: str, folder: Path, shell: str = "bash") -> set[str]:
    """What the program answers a shell that completes a line."""
    given = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": shell, "_ARGCOMPLETE_IFS": "\n"}
    place = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    output = folder / "answer"
    environment = {**os.environ, **given, **place, "_ARGCOMPLETE_STDOUT_FILENAME": str(output)}
    command = [sys.executable, "-m", "flashwarp"]
    subprocess.run(command, env=environment, cwd=folder, check=True, timeout=60)
    answer = output.read_text(encoding="utf-8").split("\n")
    return {each.split("\t")[0].split(":")[0].strip() for each in answer if each}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_and_options_are_completed(tmp_path: Path, shell: str) -> None:
    (tmp_path / "place").mkdir()

    assert completed("flashwarp gr", tmp_path, shell) == {"graph"}
    assert {"list", "verify", "prune"} <= completed("flashwarp ckpt ", tmp_path, shell)
    assert completed("flashwarp ckpt prune --keep-", tmp_path, shell) == {
        "--keep-last",
        "--keep-every",
    }
    assert completed("flashwarp ckpt list pl", tmp_path, shell) <= {"place/", "place"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_take_the_registration(shell: str) -> None:
    program = shutil.which(shell)
    register = Path(sys.executable).with_name("register-python-argcomplete")
    if program is None or not register.exists():
        pytest.skip(f"no {shell}, or no {register}")
    kind = ["--shell", "fish"] if shell == "fish" else []
    script = subprocess.check_output([register, *kind, "flashwarp"], text=True)
    check = "" if shell == "fish" else "autoload -U compinit && compinit -D\n" * (shell == "zsh")

    done = subprocess.run([program, "-c", check + script], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


def test_help_says_how() -> None:
    text = subprocess.check_output([sys.executable, "-m", "flashwarp", "--help"], text=True)

    assert "register-python-argcomplete --shell fish flashwarp | source" in text
