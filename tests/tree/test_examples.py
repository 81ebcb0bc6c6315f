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

# What each needs, and options besides `--device`, which all have.
EXAMPLES_OF_BOTH = [
    ("bfs.py", None, []),
    ("connected_components.py", None, []),
    ("spmv.py", None, []),
    ("vector_add.py", None, []),
    ("kernel.py", None, []),
    ("smooth_rows.py", None, []),
    ("torch_custom_op.py", "torch", []),
    ("two_tower.py", "torch", []),
    ("graphsage.py", "torch", []),
    ("sort_file.py", "torch", ["--keys=100000", "--run-keys=30000"]),
    ("matmul_files.py", "torch", ["--side=200", "--panel=64", "--slab=48"]),
    ("decode_loop.py", "torch", ["--rows=4096", "--width=64", "--tokens=20"]),
    ("adjoint_wave.py", "torch", ["--cells=40", "--steps=60"]),
    ("offload_ngram.py", "torch", ["--rows=4096", "--tokens=20"]),
]
FOR_CPUS = [("sharded_two_tower.py", "torch", ["--then=1"])]
FOR_GPUS = [
    ("numba_kernel.py", "numba_cuda", []),
    ("bfs_numba.py", "numba_cuda", []),
    ("cupy_raw_module.py", "cupy", []),
]
ON_THE_CPU = [
    (name, needs, ["--device=cpu", *more]) for name, needs, more in [*EXAMPLES_OF_BOTH, *FOR_CPUS]
]
ON_A_GPU = [
    *((name, needs, ["--device=cuda"]) for name, needs, _ in [*EXAMPLES_OF_BOTH, *FOR_GPUS]),
    ("decode_loop.py", "torch", ["--compare"]),
]


def run_example(name: str, arguments: list[str], path: str, folder: Path) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        # Threads of torch that wait for each other by spinning take minutes where others run too.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(folder)},
        check=False,
        timeout=100,
    )
    return result.returncode, result.stdout, result.stderr


def test_every_example_is_in_a_list() -> None:
    listed = {name for name, _, _ in [*EXAMPLES_OF_BOTH, *FOR_CPUS, *FOR_GPUS]}

    assert {path.name for path in EXAMPLES.glob("*.py")} == listed


@pytest.mark.parametrize(("name", "needs"), [each[:2] for each in FOR_GPUS])
def test_example_for_gpus_says_so(name: str, needs: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    (tmp_path / "sitecustomize.py").write_text(SHIM)

    status, _, said = run_example(name, ["--device=cpu"], str(tmp_path), tmp_path)

    assert status == 2
    assert "for GPUs: " in said


@pytest.mark.parametrize(
    ("name", "needs", "arguments"),
    [*ON_THE_CPU, *(pytest.param(*each, marks=pytest.mark.gpu) for each in ON_A_GPU)],
)
def test_example_runs(
    name: str,
    needs: str | None,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(SHIM if needs == "numba_cuda" else "")
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))

    if needs is None:  # others warn
        monkeypatch.setenv("PYTHONWARNINGS", "error")
    status, printed, errors = run_example(name, arguments, path, tmp_path)

    assert status == 0, errors
    assert printed.strip()
    if (name, needs, arguments) in ON_THE_CPU:
        assert not list(tmp_path.glob("tmp*")), "what it made is gone"
