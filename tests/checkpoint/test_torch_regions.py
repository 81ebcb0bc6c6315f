"""Regions that are torch tensors: dtypes that numpy has not, parameters, and freed storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.faults import Opener
from flashwarp.errors import ArgumentError, CheckpointError, CopyError, DtypeError

torch = pytest.importorskip("torch")
fwt = pytest.importorskip("flashwarp.torch")


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
        checkpointer.protect("view", torch.zeros(10, 10)[:, :5])
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


# Axes in another order.


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(6, 6).t(),
        lambda: torch.randn(4, dtype=torch.complex64).conj(),
        lambda: np.asfortranarray(np.random.default_rng(0).random((3, 5))),
    ],
)
def test_what_is_dense_in_another_order_has_its_values(opened: Opener, make: Any) -> None:
    checkpointer = opened()
    state = make()
    plain = torch.as_tensor(state).resolve_conj().clone(memory_format=torch.contiguous_format)
    strides = state.strides if isinstance(state, np.ndarray) else state.stride()
    checkpointer.protect("state", state)
    checkpointer.checkpoint(0)
    state *= 0

    assert checkpointer.restart(0)["state"] is state
    assert torch.equal(torch.as_tensor(state).resolve_conj(), plain)
    assert (state.strides if isinstance(state, np.ndarray) else state.stride()) == strides
    other = torch.zeros_like(plain)
    checkpointer.restart(0, into={"state": other})
    assert torch.equal(other, plain)


# States.


def trained(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(5),
    )
    inputs = torch.randn(8, 3, 6, 6)
    model(inputs)
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50)
    found = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "inputs": inputs}
    for _ in range(steps):
        train(found)
    return found


def train(run: dict[str, Any]) -> float:
    run["optimizer"].zero_grad()
    loss = run["model"](run["inputs"]).square().mean()
    loss.backward()
    run["optimizer"].step()
    run["scheduler"].step()
    return loss.item()


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
def test_a_training_that_is_restored_goes_on_as_it_would_have(opened: Opener, steps: int) -> None:
    run = trained(0, 3)
    extra = {"step": 3, "best": {"loss": 0.5}, "rows": np.arange(4), "gone": None}
    checkpointer = opened()
    for name in ("model", "optimizer", "scheduler"):
        checkpointer.protect(name, run[name])
    checkpointer.protect("extra", extra)
    checkpointer.checkpoint(0)
    checkpointer.wait(0)
    expected = [train(run) for _ in range(3)]
    checkpointer.close()

    other, rows = trained(1, steps), np.zeros(4, np.int64)
    other["inputs"] = run["inputs"]
    found: dict[str, Any] = {"step": 0, "best": {"loss": 9.0}, "rows": rows, "later": 1}
    again = opened()
    for name in ("model", "optimizer", "scheduler"):
        again.protect(name, other[name])
    again.protect("extra", found)
    weight = other["model"][0].weight
    restored = again.restart(0)

    assert restored == {**{name: other[name] for name in list(run)[:3]}, "extra": found}
    assert found.pop("rows").tolist() == rows.tolist() == [0, 1, 2, 3], "in place"
    assert found == {"step": 3, "best": {"loss": 0.5}, "gone": None}
    assert other["model"][0].weight is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert [train(other) for _ in range(3)] == expected


def test_the_regions_of_a_state_have_names(opened: Opener) -> None:
    checkpointer = opened()
    checkpointer.protect("model", torch.nn.Linear(3, 2))
    checkpointer.checkpoint(0)

    assert [each.name for each in checkpointer.regions(0)] == [
        "model",
        "model/weight",
        "model/bias",
    ]
    checkpointer.protect("model/bias", np.zeros(2))
    with pytest.raises(ArgumentError, match="two protected things have a region 'model/bias'"):
        checkpointer.checkpoint(1)


def test_what_a_state_cannot_save_is_named_at_once(opened: Opener) -> None:
    checkpointer = opened()
    model = torch.nn.Linear(3, 2)
    with pytest.raises(DtypeError, match=r"'s/a.b' is a object, which only pickle"):
        checkpointer.protect("s", {"a": {"b": object()}})
    with pytest.raises(DtypeError, match=r"region 'd': Generator .*with state_dict and load_stat"):
        checkpointer.protect("d", torch.Generator())
    with pytest.raises(DtypeError, match=r"'m/weight' is no dense tensor with data"):
        checkpointer.protect("m", torch.nn.Linear(3, 2, device="meta"))
    with pytest.raises(ArgumentError, match="restore= takes a callable"):
        checkpointer.protect("m", model, restore=model.load_state_dict)


def test_a_module_that_differs_is_left_as_it_is(opened: Opener) -> None:
    checkpointer = opened()
    checkpointer.protect("model", torch.nn.Linear(3, 2))
    checkpointer.checkpoint(0)

    for other, match in [
        (torch.nn.Linear(3, 2, bias=False), "lacks 'model/bias', and the version lacks nothing"),
        (torch.nn.Linear(2, 2), "'model/weight' was stored with shape"),
    ]:
        before = {name: each.clone() for name, each in other.state_dict().items()}
        checkpointer.protect("model", other)
        with pytest.raises(CheckpointError, match=match):
            checkpointer.restart(0)
        assert all(torch.equal(each, before[name]) for name, each in other.state_dict().items())


def test_a_state_that_is_refused_says_what_is_filled(opened: Opener) -> None:
    checkpointer = opened()
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    checkpointer.protect("optimizer", torch.optim.Adam(weights))
    checkpointer.checkpoint(0)

    checkpointer.protect("optimizer", torch.optim.Adam(weights[:1]))
    with pytest.raises(ValueError, match="size") as caught:
        checkpointer.restart(0)
    assert "'optimizer' has refused" in caught.value.__notes__[0]
    with pytest.raises(ArgumentError, match="into= takes arrays"):
        checkpointer.restart(0, into={"optimizer": np.zeros(3, np.uint8)})


def test_a_state_without_the_rows_of_a_trained_table_is_refused(
    opened: Opener, tmp_path: Path
) -> None:
    """A restart brought the dense part back, and not the rows."""
    checkpointer = opened()
    fwt.create_table(tmp_path / "t.npy", 8, 4, optimizer="adam")
    with fwt.Embedding(tmp_path / "t.npy", mode="r+", dim=4, device="cpu") as table:
        dense = torch.nn.Linear(4, 1)
        model = torch.nn.ModuleDict({"dense": dense, "sparse": torch.nn.Sequential(table)})
        optimizer = fwt.Adam(table)
        for source, path in [
            (model, "m/sparse.0"),
            (table, "m"),
            (optimizer, "m"),
            (model.state_dict(), "m/sparse.0"),
            ({"all": [{"model": model.state_dict()}]}, "m/all.0.model.sparse.0"),
            ({"optimizer": optimizer.state_dict()}, "m/optimizer"),
        ]:
            with pytest.raises(CopyError, match=rf"'{path}' belongs to a table in training.*dense"):
                checkpointer.protect("m", source)

        checkpointer.protect("dense", dense)
        table.requires_grad_(False)
        checkpointer.protect("frozen", model)
        checkpointer.checkpoint(0)
        table.requires_grad_()
        with pytest.raises(CopyError, match=r"'frozen/sparse.0' belongs"):
            checkpointer.checkpoint(1)
    with fwt.Embedding(tmp_path / "t.npy", dim=4, device="cpu") as table:
        checkpointer.protect("read", torch.nn.Sequential(table))
