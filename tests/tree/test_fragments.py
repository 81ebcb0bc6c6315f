"""Fragments that pages show run in the program that they are parts of, or say why they cannot.

Whole programs are marked `python`, and run as they stand (`test_readme.py`). Fragments are marked
`py`, `cpp`, `cuda` or `c++`. Here each has what stands before it, by its first line.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import flashwarp as fw

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(py|cpp|cuda|c\+\+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

_ROWS = """
import numpy as np
import flashwarp as fw
np.save("x.npy", np.arange(4000, dtype="f4").reshape(1000, 4))
x = fw.open("x.npy", "r+", device="cpu", cache="64 KiB")
"""
_SAMPLED = """
import numpy as np
import torch
import flashwarp as fw
import flashwarp.torch
from flashwarp import graphs
graph = graphs.load("kron:8", "graph")
np.save("features.npy", np.random.rand(graph.vertices, 8).astype("f4"))
sampler = fw.torch.NeighborSampler(graph, fanouts=(3, 2), device="cpu", cache="64 KiB")
features = fw.open("features.npy", device="cpu", cache="64 KiB")
seeds = torch.arange(graph.vertices)
batches = seeds.split(64)
trained = []
def train(sample, rows):
    assert torch.equal(torch.as_tensor(rows), fw.torch.gather(features, sample.nodes))
    trained.append(sample)
"""
_ALL_TRAINED = "assert trained\nfeatures.close()\nsampler.close()\n"
_TRAINED = re.search(
    r"^```python\n(import torch\nimport flashwarp.torch as fwt\n\nfwt.create_table.*?)^```",
    (ROOT / "docs" / "tables.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
assert _TRAINED is not None

# By the first line of a fragment: what stands before it, and behind.
PROGRAMS: dict[str, tuple[str, str]] = {
    "import h5py": (
        """
import flashwarp as fw
import h5py
import numpy as np
with h5py.File("data.h5", "w") as file:
    file["rows"] = np.arange(12.0).reshape(6, 2)
""",
        "assert x[5].tolist() == [10, 11]\nx.close()\n",
    ),
    'with Directory("checkpoints", writable=False) as directory:': (
        """
import numpy as np
import flashwarp as fw
from flashwarp.checkpoint.directory import Directory
with fw.Checkpointer("checkpoints", "cpu", "1 MiB", "1 MiB") as checkpointer:
    checkpointer.protect("state", np.zeros(9))
    checkpointer.checkpoint(0, "train")
""",
        "assert version == 0\n",
    ),
    "x.scatter(ids, rows, stream=side)  # returns at once": (
        _ROWS + "ids, side = np.arange(10, 20), None\nrows = np.ones((10, 4), 'f4')\n",
        "assert (x[10:20] == 1).all()\nx.close()\n",
    ),
    "with fw.Pipeline(features, batch_rows=sampler.nodes_max(256)) as pipeline:": (
        _SAMPLED,
        _ALL_TRAINED,
    ),
    "rows = x.gather(slice(first, last), out=buffer, stream=stream)": (
        _ROWS + "first, last, stream = 5, 25, None\nbuffer = np.empty((20, 4), 'f4')\n",
        "assert rows is buffer and rows[0, 0] == 20\nx.close()\n",
    ),
    'fwt.restore_table("checkpoints/step-000000000010/0-items.npy", "items.npy", overwrite=True)': (
        _TRAINED[1],
        "",
    ),
}
# Why no test runs these, and which runs what they show.
NOT_HERE = {
    'with fw.file.MappedFile("/data/table.bin", writable=True, allow_raw_writes=True) as blocks:': (
        "writes to a device, which takes root: file/test_mapped_file.py"
    ),
    "pipeline.prefetch(ids), pipeline.take()  # allocates, and loads the kernels": (
        "a graph of CUDA: gpu/test_pipeline.py"
    ),
    "DataLoader(loader, batch_size=None, num_workers=4, pin_memory=True)": (
        "pinned memory needs a GPU: interop/test_loader.py"
    ),
    '#include "simulator/elements.h"': "a scenario of the simulator: simulator/scenarios",
    "fw::graph::cached lists(neighbours);": "a part of a kernel: examples/connected_components.py",
}
# Kernels: what stands behind their first line.
KERNELS = {'#include "flashwarp/batch.cuh"': "FW_DEVICE void compute(const float*) {}\n"}


def fragments() -> list[tuple[str, str, str]]:
    found = []
    for page in PAGES:
        for _, kind, code in FENCE.findall(page.read_text(encoding="utf-8")):
            found.append((f"{page.name}: {code.splitlines()[0].strip()}", kind, code))
    return found


@pytest.mark.parametrize(
    ("kind", "code"), [pytest.param(kind, code, id=name) for name, kind, code in fragments()]
)
def test_fragment_runs(
    kind: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = textwrap.dedent(code)
    first, _, rest = code.partition("\n")
    if first in NOT_HERE:
        pytest.skip(NOT_HERE[first])
    monkeypatch.chdir(tmp_path)
    if kind != "py":
        fw.compile(f"{first}\n{KERNELS[first]}{rest}", "cpu")
        return
    before, behind = PROGRAMS[first]
    for library in ("torch", "h5py"):
        if f"import {library}" in before:
            pytest.importorskip(library, reason=f"{library} is an extra")
    # `...` is the reader's code: here, the end of a loop that would go on.
    program = before + code.replace("...", "break") + behind

    exec(compile(program, "fragment", "exec"), {"__name__": "fragment"})
