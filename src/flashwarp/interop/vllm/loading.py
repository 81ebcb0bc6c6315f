"""Leaves the rows of offloaded tables out of what vLLM's loader reads from a checkpoint.

vLLM's iterator over safetensors files asks a function of its own, before it reads a tensor, whether
to skip it. `leave` makes this function skip the rows of tables, and the iterator yield tensors of
the same shapes on the meta device in their place, so the model sees each tensor that it expects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from flashwarp.interop.torch.offloading.table import STORED
from flashwarp.storage.safetensors import Tensor

_Weights = Iterator[tuple[str, torch.Tensor]]


class Left:
    """The tensors that stay in their files."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], Tensor] = {}
        # Names of the files that iterators read now; two may do so at a time.
        self._now: list[frozenset[str]] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Leave tensors in their files from now on."""
        self._tensors |= {(os.path.realpath(each.path), each.name): each for each in tensors}

    def skips(self, name: str) -> bool:
        """Whether an iterator is not to read a tensor."""
        return any(name in names for names in self._now)

    def iterate(self, act: Callable[..., _Weights], files: list[str], more: Any) -> _Weights:
        """Yield what an iterator of vLLM yields, with tensors without memory for those left."""
        here = {os.path.realpath(file) for file in files}
        found = {name: each for (path, name), each in self._tensors.items() if path in here}
        for name, each in found.items():
            dtype = STORED[each.dtype][1]
            yield name, torch.empty(each.shape, dtype=dtype, device="meta")
        names = frozenset(found)
        self._now.append(names)
        try:
            yield from act(files, *more[0], **more[1])
        finally:
            self._now.remove(names)


def leave(left: Left, weight_utils: Any, default_loader: Any) -> None:
    """Let vLLM's modules of these names leave out what `left` has."""
    skips, iterate = weight_utils.should_skip_weight, weight_utils.safetensors_weights_iterator

    def should_skip_weight(weight_name: str, *more: Any) -> bool:
        return left.skips(weight_name) or bool(skips(weight_name, *more))

    def safetensors_weights_iterator(files: list[str], *more: Any, **options: Any) -> _Weights:
        return left.iterate(iterate, files, (more, options))

    weight_utils.should_skip_weight = should_skip_weight
    weight_utils.safetensors_weights_iterator = safetensors_weights_iterator
    default_loader.safetensors_weights_iterator = safetensors_weights_iterator
