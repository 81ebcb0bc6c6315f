"""Examples run as a user starts them, on the CPU device and on a GPU, and check their results."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# numba of today asks numpy for a name that numpy 2.5 has dropped.
SHIM = "import numpy\nif not hasattr(numpy, 'row_stack'):\n    numpy.row_stack = numpy.vstack\n"

ON_THE_CPU = [
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
]
ON_A_GPU = [
    ("kernel.py", None, ["cuda"]),
    ("torch_custom_op.py", "torch", ["cuda"]),
    ("two_tower.py", "torch", ["cuda"]),
    ("graphsage.py", "torch", ["cuda"]),
    ("sort_file.py", "torch", ["--device=cuda"]),
    ("matmul_files.py", "torch", ["--device=cuda"]),
    ("decode_loop.py", "torch", ["--compare"]),
    ("numba_kernel.py", "numba_cuda", []),
    ("cupy_raw_module.py", "cupy", []),
]


@pytest.mark.parametrize(
    ("name", "needs", "arguments"),
    [*ON_THE_CPU, *(pytest.param(*each, marks=pytest.mark.gpu) for each in ON_A_GPU)],
)
def test_example_runs(name: str, needs: str | None, arguments: list[str], tmp_path: Path) -> None:
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(SHIM if needs == "numba_cuda" else "")
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))

    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        # Threads of torch that wait for each other by spinning take minutes where others run too.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        check=False,
        timeout=100,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    if (name, needs, arguments) in ON_THE_CPU:
        assert result.stdout.startswith("cpu: ")
        assert not list(tmp_path.glob("tmp*")), "what it made is gone"
