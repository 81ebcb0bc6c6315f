"""Writes the types of the C++ extension, `src/flashwarp/_native.pyi`, from its bindings."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
STUB = ROOT / "src" / "flashwarp" / "_native.pyi"
PATTERNS = ROOT / "native" / "bind" / "stub_patterns.txt"


def generate() -> str:
    """Ask nanobind, and write it as the formatter wants it."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / STUB.name
        options = ["-q", "-m", "flashwarp._native", "-p", PATTERNS, "-o", made]
        subprocess.run([sys.executable, "-m", "nanobind.stubgen", *options], check=True)
        text = made.read_text()
    fixed = formatted(formatted(text, "format"), "check", "--fix", "--exit-zero")
    return formatted(fixed, "format")


def formatted(text: str, *command: str) -> str:
    # By its own name, for the settings of that file.
    options = ["--quiet", "--stdin-filename", STUB, "-"]
    ruff = Path(sys.executable).parent / "ruff"
    return subprocess.run(
        [ruff, *command, *options], input=text, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


if __name__ == "__main__":
    STUB.write_text(generate())
