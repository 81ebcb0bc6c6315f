"""Examples run as a user starts them, on the CPU device, and check their own results."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(("name", "needs"), [("kernel.py", None), ("torch_custom_op.py", "torch")])
def test_example_runs(name: str, needs: str | None, tmp_path: Path) -> None:
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")

    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "cpu"],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
        timeout=100,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cpu: ")
    assert not list(tmp_path.glob("tmp*")), "what it made is gone"
