"""Examples run as a user starts them, on a GPU, and check their own results."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[2] / "examples"

# numba of today asks numpy for a name that numpy 2.5 has dropped.
SHIM = "import numpy\nif not hasattr(numpy, 'row_stack'):\n    numpy.row_stack = numpy.vstack\n"


@pytest.mark.parametrize(
    ("name", "needs", "arguments"),
    [
        ("kernel.py", None, ["cuda"]),
        ("torch_custom_op.py", "torch", ["cuda"]),
        ("two_tower.py", "torch", ["cuda"]),
        ("graphsage.py", "torch", ["cuda"]),
        ("torch_custom_op.py", "torch", ["cpu"]),
        ("decode_loop.py", "torch", ["--compare"]),
        ("numba_kernel.py", "numba_cuda", []),
        ("cupy_raw_module.py", "cupy", []),
    ],
)
def test_example_runs(name: str, needs: str | None, arguments: list[str], tmp_path: Path) -> None:
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    (tmp_path / "sitecustomize.py").write_text(SHIM if needs == "numba_cuda" else "")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))

    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        timeout=100,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
