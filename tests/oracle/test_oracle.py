"""Programs of the oracle beside its model: a few in each run of the tests, more by its command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CALLS = int(os.environ.get("FLASHWARP_ORACLE_CALLS", "2000"))
SEED = int(os.environ.get("FLASHWARP_ORACLE_SEED", "1"))


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """Run programs by the command line."""
    return subprocess.run(
        [sys.executable, "-m", "oracle", "--seed", str(SEED), *options],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_programs_on_the_cpu_device() -> None:
    ran = run("--device", "cpu", "--calls", str(CALLS), "--rooms", "arrays")

    assert ran.returncode == 0, ran.stdout
