"""A table of a model whose rows stay in a checkpoint, and the arrays that read them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashwarp.array.array import Array
from flashwarp.array.opening import open as open_array
from flashwarp.storage.composite import Concatenated, Extent
from flashwarp.storage.files import open_for_reading
from flashwarp.storage.safetensors import Tensor

# numpy's dtype of the stored bytes, and torch's of the numbers.
STORED = {
    "F32": ("f4", torch.float32),
    "F16": ("f2", torch.float16),
    "BF16": ("u2", torch.bfloat16),
    "F8_E4M3": ("u1", torch.float8_e4m3fn),
    "F8_E5M2": ("u1", torch.float8_e5m2),
    "I8": ("i1", torch.int8),
    "U8": ("u1", torch.float4_e2m1fn_x2),
    "F4": ("u1", torch.float4_e2m1fn_x2),
}

PACKED = ("U8", "F4")
"""Those of which a byte has two numbers; as F4 the shape counts numbers, as U8 bytes."""

# The same of scales.
SCALES = {
    **{name: STORED[name] for name in ("F32", "F16", "BF16", "F8_E4M3")},
    "F8_E8M0": ("u1", torch.float8_e8m0fnu),
    "U8": ("u1", torch.float8_e8m0fnu),
}

_PAGE_BYTES = 4096


@dataclass
class ModelTable:
    """A table of the model, and where its rows lie."""

    names: list[str]
    """Of the modules that use it."""
    modules: list[torch.nn.Module]
    weight: torch.Tensor
    tensors: list[Tensor] = field(default_factory=list)
    """Whose rows follow one another."""
    scales: list[Tensor] = field(default_factory=list)
    """Those of `tensors`, if they have any."""
    scale_block: tuple[int, int] | None = None
    """Rows and columns that share a scale, if several rows do."""
    factors: dict[str, float] = field(default_factory=dict)
    """``global_scale`` or ``global_divisor`` of `Embedding`, if there is one."""

    @property
    def name(self) -> str:
        """That of the first module."""
        return self.names[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, without scales."""
        return self.tensors[0].nbytes // max(1, self.tensors[0].shape[0])

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pages that hold it, at most."""
        tensors = [*self.tensors, *self.scales]
        return sum(tensor.nbytes for tensor in tensors) + 2 * _PAGE_BYTES * len(tensors)

    @property
    def has_one_scale(self) -> bool:
        """Whether all rows are multiplied by one number."""
        return len(self.scales) == 1 and math.prod(self.scales[0].shape) == 1

    @property
    def array_count(self) -> int:
        """How many arrays it takes: one for the rows, and one for scales of rows."""
        return 2 if self.scales and not self.has_one_scale else 1

    def open(self, opened: contextlib.ExitStack, **options: Any) -> OpenedTable:
        """Open the rows, and the scales unless there is one."""
        rows = opened.enter_context(_open_rows(self.tensors, STORED, **options))
        if self.array_count == 1:
            return OpenedTable(rows, None)
        return OpenedTable(rows, opened.enter_context(_open_rows(self.scales, SCALES, **options)))

    def lookup_options(self, arrays: OpenedTable, device: torch.device) -> dict[str, Any]:
        """Return what `Embedding` needs to know of the rows."""
        options: dict[str, Any] = {"stored": STORED[self.tensors[0].dtype][1]}
        if self.scales:
            options["scales"] = self.scale(device) if self.has_one_scale else arrays.scales
            options["stored_scales"] = SCALES[self.scales[0].dtype][1]
            options |= {"scale_block": self.scale_block, **self.factors}
        return options

    def scale(self, device: torch.device) -> torch.Tensor:
        """Read the one scale."""
        (tensor,) = self.scales
        return read_number(tensor).to(device)


@dataclass(frozen=True)
class OpenedTable:
    """The arrays of a table."""

    rows: Array
    scales: Array | None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Both, or the rows alone."""
        return (self.rows,) if self.scales is None else (self.rows, self.scales)


def weight_name(module: str) -> str:
    """Return the name of the parameter of a module, in a checkpoint."""
    return f"{module}.weight" if module else "weight"


def read_number(tensor: Tensor) -> torch.Tensor:
    """Read a tensor of one number."""
    with open_for_reading(tensor.path) as file:
        file.seek(tensor.offset)
        data = bytearray(file.read(tensor.nbytes))
    return torch.frombuffer(data, dtype=SCALES[tensor.dtype][1])[0]


def _open_rows(
    tensors: Sequence[Tensor], stored: dict[str, tuple[str, torch.dtype]], **options: Any
) -> Array:
    """Open tensors, whose rows follow one another, as an array."""
    first = tensors[0]
    dtype = stored[first.dtype][0]
    width = first.nbytes // first.shape[0] // int(dtype[1])
    shape = (sum(tensor.shape[0] for tensor in tensors), *([width] if first.shape[1:] else []))
    options |= {"dtype": dtype, "shape": shape}
    extents = _joined([Extent(t.path, t.offset, t.nbytes) for t in tensors])
    if len(extents) == 1:
        return open_array(first.path, offset=first.offset, **options)
    return open_array(Concatenated(extents), **options)


def _joined(extents: Sequence[Extent]) -> list[Extent]:
    """Join ranges of a file that follow one another, so that fewer files are open."""
    joined = [extents[0]]
    for extent in extents[1:]:
        last = joined[-1]
        if extent.path == last.path and extent.offset == last.offset + last.nbytes:
            joined[-1] = last._replace(nbytes=last.nbytes + extent.nbytes)
        else:
            joined.append(extent)
    return joined
