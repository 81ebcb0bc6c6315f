"""Arrays of jax: saved by DLPack, and restored into new arrays, since they never change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from checkpoint.faults import Opener
from flashwarp.errors import ArgumentError

jax = pytest.importorskip("jax", reason="jax is an extra")


def test_arrays_of_jax_are_saved_and_restored(opened: Opener) -> None:
    state: dict[str, Any] = {"x": jax.numpy.arange(1000, dtype=np.float32)}
    checkpointer = opened()
    checkpointer.protect(
        "x",
        lambda: state["x"],
        restore=lambda array: state.update(x=jax.dlpack.from_dlpack(array)),
    )
    for version in range(10):
        checkpointer.checkpoint(version)
        state["x"] = state["x"] * 2
    checkpointer.wait()

    for version in reversed(range(10)):
        checkpointer.restart(version)
        assert isinstance(state["x"], jax.Array)
        assert (np.asarray(state["x"]) == np.arange(1000, dtype=np.float32) * 2**version).all()


def test_an_array_of_jax_is_not_restored_in_place(opened: Opener) -> None:
    checkpointer = opened()
    array = jax.numpy.arange(1000, dtype=np.float32)
    checkpointer.protect("x", array)
    checkpointer.checkpoint(0)

    with pytest.raises(ArgumentError, match="read-only, as those of jax are"):
        checkpointer.restart(0)
    found = checkpointer.restart(0, into={"x": np.zeros(1000, np.float32)})["x"]
    assert (found == np.asarray(array)).all()
