"""Reopening: arrays that came by a pickle or a fork open their path again, when first used.

Until then an array has only what was pickled, its recipe and its format.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flashwarp import endings
from flashwarp.array import handles
from flashwarp.array.attachment import Attachment
from flashwarp.errors import ClosedError, ForkError

_opening = endings.Lock()
"""One pickled or inherited array opens at a time."""

_of_parent: list[Attachment] = []
"""What arrays of a forked child were attached to: it stays, because its end is the parent's."""


class Recipe(Protocol):
    """How to open an array again. Pickling an array pickles its recipe."""

    def open(self) -> Any:
        """Open the array."""

    def of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Recipe:
        """Return the recipe for exactly this array; raises CopyError if it cannot be pickled."""


@dataclass(frozen=True)
class _Inherited:
    """How a forked child opens an array of its parent: as if it had come by a pickle."""

    recipe: Recipe

    def open(self) -> Any:
        try:
            own: Recipe = pickle.loads(pickle.dumps(self.recipe))
        except Exception as error:
            raise ForkError(
                f"this forked child cannot open the array by itself: {error}; open it there"
            ) from error
        return own.open()

    def of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Recipe:
        return self.recipe.of(shape, dtype)


def why_not(attachment: Attachment, recipe: Recipe | None) -> str:
    """Return why a forked child cannot open the array by itself, and what to do; or nothing."""
    if attachment.writable:
        return (
            "for storing, and two processes must not store to one file: flush it, and open it "
            "there with mode='r'"
        )
    if attachment.device.kind != "cpu":
        return (
            "on a GPU, which a forked child cannot use: start children with 'spawn', or open "
            "it with device='cpu' for them"
        )
    if recipe is None:
        return "from a storage, which belongs to that process: open it there from a path"
    return ""


def reopen(array: Any) -> None:
    """Open an array that has only its recipe, unless another thread has opened it meanwhile."""
    with _opening:
        if "_attachment" in array.__dict__:
            return
        recipe: Recipe | None = array.__dict__.get("_recipe")
        if recipe is None:
            raise ClosedError("the array is closed")
        opened = recipe.open()
        array.__dict__.update(opened.__dict__)
        opened.__dict__.clear()
        handles.point_to(array._handle, array)


def _leave_to_parent(array: Any) -> None:
    """Let an array open anew on first use, in a forked child."""
    attachment: Attachment | None = array.__dict__.get("_attachment")
    if attachment is None or attachment.closed or why_not(attachment, array._recipe):
        return
    _of_parent.append(attachment)
    del array._attachment, array._turns
    array._recipe = _Inherited(array._recipe.of(array.shape, array.dtype))


def _after_fork() -> None:
    global _opening
    _opening = endings.Lock()  # another thread of the parent may have held it
    for array in handles.arrays():
        _leave_to_parent(array)


os.register_at_fork(after_in_child=_after_fork)
