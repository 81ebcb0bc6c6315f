"""`load` on a GPU: exact bytes, streams, targets in place, bounded pinned memory, and no room."""

from __future__ import annotations

import json

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, DeviceOutOfMemory

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

MIB = 1 << 20


def write(path, shapes, seed=0):
    """Write tensors of BF16 by name; return their bits as int16 of numpy."""
    random = np.random.default_rng(seed)
    held = {n: random.integers(-(1 << 15), 1 << 15, s, np.int16) for n, s in shapes.items()}
    header, at = {}, 0
    for name, bits in held.items():
        offsets = [at, at + bits.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": offsets}
        at += bits.nbytes
    text = json.dumps(header).encode()
    data = b"".join(bits.tobytes() for bits in held.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return held


SHAPES = {
    "large": (20, MIB), "odd": (1001, 77), "scalar": (), "none": (0, 5),
    **{f"small.{i}": (i, 3) for i in range(1, 400)},
}  # fmt: skip


def same(tensor, bits):
    return tuple(tensor.shape) == bits.shape and np.array_equal(
        tensor.view(torch.int16).cpu().numpy() if tensor.dim() else
        tensor.view(1).view(torch.int16).cpu().numpy()[0], bits
    )  # fmt: skip


@pytest.mark.parametrize("o_direct", [None, False, True])
def test_bytes_are_those_of_the_file(tmp_path, o_direct):
    held = write(tmp_path / "x.safetensors", SHAPES)

    found = fw.load(tmp_path / "x.safetensors", "cuda", o_direct=o_direct, host_memory="20 MiB")

    assert all(same(found[name], bits) for name, bits in held.items())
    assert all(t.is_cuda and t.dtype == torch.bfloat16 for t in found.values())
    assert all(t.data_ptr() % 256 == 0 for t in found.values() if t.numel())


def test_tensors_of_cupy_have_the_same_bytes(tmp_path):
    cupy = pytest.importorskip("cupy")
    array = np.random.default_rng(1).random((1000, 300))
    np.save(tmp_path / "x.npy", array)

    found = fw.load(tmp_path / "x.npy", "cuda:0", library="cupy")["x"]

    assert isinstance(found, cupy.ndarray)
    assert np.array_equal(found.get(), array)


def test_a_module_is_filled_after_the_work_that_still_writes_it(tmp_path):
    held = write(tmp_path / "x.safetensors", {"weight": (4096, 1024)})
    module = torch.nn.Linear(1024, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
    before = module.weight.data_ptr()
    with torch.no_grad():
        torch.cuda._sleep(100_000_000)  # 50 ms, after which the stream writes other values
        module.weight.fill_(1)

    fw.load(tmp_path / "x.safetensors", into=module)

    assert module.weight.data_ptr() == before
    assert same(module.weight.detach(), held["weight"])


def test_loaded_tensors_are_there_for_every_stream(tmp_path):
    held = write(tmp_path / "x.safetensors", {"x": (16, MIB)})
    for _ in range(5):
        found = fw.load(tmp_path / "x.safetensors", "cuda")["x"]
        with torch.cuda.stream(torch.cuda.Stream()):
            copied = found.clone()
        torch.cuda.synchronize()
        assert same(copied, held["x"])


def test_what_does_not_fit_the_gpu_is_refused_and_frees_all(tmp_path):
    # A sparse file of 1 TiB: only its header is ever read.
    header = {"x": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (1 << 40))
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()

    with pytest.raises(DeviceOutOfMemory, match="only="):
        fw.load(path, "cuda")

    assert torch.cuda.memory_allocated() == before


def test_tensors_of_a_gpu_and_of_the_host_are_not_one_target(tmp_path):
    write(tmp_path / "x.safetensors", {"a": (4,), "b": (4,)})
    kind = {"dtype": torch.bfloat16}
    mine = {"a": torch.zeros(4, device="cuda", **kind), "b": torch.zeros(4, **kind)}

    with pytest.raises(ArgumentError, match="several devices"):
        fw.load(tmp_path / "x.safetensors", into=mine)
