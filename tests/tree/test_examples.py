"""Examples run as a user starts them, on the CPU device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "needs", "arguments"),
    [
        ("kernel.py", None, ["cpu"]),
        ("smooth_rows.py", None, ["--device=cpu"]),
        ("torch_custom_op.py", "torch", ["cpu"]),
        ("two_tower.py", "torch", ["cpu"]),
        ("graphsage.py", "torch", ["cpu"]),
        ("sort_file.py", "torch", ["--device=cpu", "--keys=100000", "--run-keys=30000"]),
        ("matmul_files.py", "torch", ["--device=cpu", "--side=200", "--panel=64", "--slab=48"]),
        ("decode_loop.py", "torch", ["--device=cpu", "--rows=4096", "--width=64", "--tokens=20"]),
        ("adjoint_wave.py", "torch", ["--device=cpu", "--cells=40", "--steps=60"]),
        ("offload_ngram.py", "torch", ["--device=cpu", "--rows=4096", "--tokens=20"]),
    ],
)
def test_example_runs(name: str, needs: str | None, arguments: list[str], tmp_path: Path) -> None:
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")

    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
        timeout=100,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cpu: ")
    assert not list(tmp_path.glob("tmp*")), "what it made is gone"
