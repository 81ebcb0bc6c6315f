"""Programs of the oracle on a GPU, with tensors and streams of torch where there is torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

CALLS = int(os.environ.get("FLASHWARP_ORACLE_CALLS", "5000"))
SEED = int(os.environ.get("FLASHWARP_ORACLE_SEED") or "1")


@pytest.mark.timeout(300)
def test_programs() -> None:
    options = {"--device": "cuda:0", "--calls": CALLS, "--seconds": 120, "--seed": SEED}

    # In front of where the library may be installed.
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, "-m", "oracle", *[str(word) for pair in options.items() for word in pair]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    assert ran.returncode == 0, ran.stdout
