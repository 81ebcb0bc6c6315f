"""Regions that are torch tensors: dtypes that numpy has not, parameters, and freed storage."""

from __future__ import annotations

import pytest

from checkpoint.faults import Opener
from flashwarp.errors import ArgumentError, CheckpointError, DtypeError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"],
)
def test_tensors_come_back_with_their_bits(opened: Opener, dtype: str) -> None:
    checkpointer = opened()
    bits = torch.randint(0, 2, (64, 8), dtype=torch.uint8)
    state = bits.view(getattr(torch, dtype)) if dtype != "bool" else bits.bool()
    before = state.clone()
    checkpointer.protect("state", state)
    checkpointer.checkpoint(0)
    checkpointer.wait(0)
    state.zero_()

    checkpointer.restart(0)

    assert torch.equal(state.view(torch.uint8), before.view(torch.uint8))
    assert checkpointer.regions(0)[0].shape == tuple(before.shape)


def test_a_parameter_is_restored_in_place(opened: Opener) -> None:
    checkpointer = opened()
    layer = torch.nn.Linear(16, 16)
    checkpointer.protect("weight", layer.weight)
    checkpointer.checkpoint(0)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1)

    checkpointer.restart(0)

    assert torch.equal(layer.weight, before)
    assert layer.weight.requires_grad


def test_freed_storage_is_found(opened: Opener) -> None:
    # Sharded data parallelism frees the storage of a parameter and keeps the tensor.
    checkpointer = opened()
    state = torch.ones(100)
    checkpointer.protect("state", state)
    checkpointer.checkpoint(0)
    state.untyped_storage().resize_(0)

    with pytest.raises(CheckpointError, match="memory of region 'state' was freed"):
        checkpointer.checkpoint(1)
    with pytest.raises(CheckpointError, match="was freed"):
        checkpointer.restart(0)


def test_a_tensor_whose_storage_moved_is_followed(opened: Opener) -> None:
    checkpointer = opened()
    state = torch.zeros(100)
    checkpointer.protect("state", state)
    state.data = torch.ones(100)

    checkpointer.checkpoint(0)
    state.zero_()
    checkpointer.restart(0)

    assert bool((state == 1).all())


def test_a_tensor_that_is_not_dense_is_refused(opened: Opener) -> None:
    checkpointer = opened()
    with pytest.raises(ArgumentError, match="not contiguous"):
        checkpointer.protect("view", torch.zeros(10, 10).t())
    with pytest.raises(ArgumentError, match="dense"):
        checkpointer.protect("sparse", torch.eye(3).to_sparse())


def test_a_dtype_that_differs_only_for_torch_is_found(opened: Opener) -> None:
    checkpointer = opened()
    checkpointer.protect("state", torch.zeros(10, dtype=torch.bfloat16))
    checkpointer.checkpoint(0)

    with pytest.raises(DtypeError, match=r"stored as bfloat16, .* has dtype <f2"):
        checkpointer.restart(0, into={"state": torch.zeros(10, dtype=torch.float16)})
    checkpointer.unprotect("state")
    with pytest.raises(DtypeError, match="bfloat16, which numpy has not"):
        checkpointer.restart(0)
