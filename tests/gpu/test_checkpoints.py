"""Checkpoints of GPU state through all tiers, on a GPU, in the order of torch's streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashwarp as fw

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

COUNT = 1 << 20  # float32: 4 MiB


def opened(path: Path, **options: Any) -> fw.Checkpointer:
    return fw.Checkpointer(
        path, "cuda:0", **{"gpu_memory": "16 MiB", "host_memory": "64 MiB"} | options
    )


def test_copies_are_ordered_on_the_callers_stream(tmp_path: Path) -> None:
    # Kernels that take long, before and after each copy, on a stream of the user's.
    state = torch.zeros(COUNT, device="cuda")
    stream = torch.cuda.Stream()
    with opened(tmp_path) as checkpointer, torch.cuda.stream(stream):
        checkpointer.protect("state", state)
        for version in range(20):
            torch.cuda._sleep(2_000_000)
            state.fill_(version)
            checkpointer.checkpoint(version)
            state.fill_(-1)
        for version in reversed(range(20)):
            checkpointer.restart(version)
            kept = state.clone()
            state.fill_(-1)
            assert bool((kept == version).all())


def test_parameters_and_optimizer_state_come_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16)
    step = torch.zeros(1, dtype=torch.int64)  # in host memory
    with opened(tmp_path) as checkpointer:
        for name, parameter in model.named_parameters():
            checkpointer.protect(name, parameter)
        checkpointer.protect("step", step)
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        step.fill_(7)
        checkpointer.checkpoint(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        step.zero_()

        checkpointer.restart(7)

        assert int(step) == 7
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name])


def test_arrays_of_cupy_come_back(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    state = cupy.zeros(COUNT, cupy.float32)
    with opened(tmp_path) as checkpointer:
        checkpointer.protect("state", state)
        for version in range(12):
            state.fill(version)
            checkpointer.checkpoint(version)

        for version in reversed(range(12)):
            state.fill(-1)
            checkpointer.restart(version)
            assert bool((state == version).all())


def test_arrays_of_jax_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise jax takes three quarters of the GPU's memory.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    state: dict[str, Any] = {}
    found = torch.empty(COUNT, device="cuda")
    with opened(tmp_path) as checkpointer:
        checkpointer.protect("state", lambda: state["array"])
        for version in range(12):
            state["array"] = jax.numpy.full((COUNT,), version, "float32")
            checkpointer.checkpoint(version)

        for version in reversed(range(12)):
            checkpointer.restart(version, into={"state": found})
            assert bool((found == version).all())
