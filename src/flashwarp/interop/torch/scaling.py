"""The scales of quantised tables: where they lie, what they are, and which weights share one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from flashwarp.array.array import Array
from flashwarp.config import integer, number
from flashwarp.device.foreign import torch_dtype
from flashwarp.errors import ArgumentError, DtypeError
from flashwarp.interop.torch.lookups import SCALES
from flashwarp.interop.torch.operators import check_plain, torch_device
from flashwarp.storage import files
from flashwarp.table.lookup import Number, Scales

ScalesLike: TypeAlias = Array | files.PathLike | torch.Tensor

# Of a float32.
_FACTOR_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Scaling:
    """How a caller says that a table is scaled; see `flashwarp.torch.Embedding`."""

    block: tuple[int, int] | None = None
    stored: torch.dtype | None = None
    whole: object = None
    divisor: object = None

    def check_unused(self) -> None:
        """Raise ArgumentError if any of this is given for a table without scales."""
        given = {
            "scale_block": self.block,
            "stored_scales": self.stored,
            "global_scale": self.whole,
            "global_divisor": self.divisor,
        }
        for name, value in given.items():
            if value is not None:
                raise ArgumentError(f"{name}= is for tables with scales: give scales= too")

    def scales(
        self, scales: Array | torch.Tensor, array: Array, rows: int, dim: int, stored: Number
    ) -> Scales:
        """Return the scales of a table as lookups take them.

        A tensor must be contiguous, and outlive the lookups. `array` is that of the table, which
        has so many `rows` of `dim` weights, `stored` as these numbers.
        """
        if isinstance(scales, Array):
            dtype: torch.dtype = torch_dtype(torch, scales.dtype)
            if dtype == torch.uint16:  # numpy has no bfloat16, and no scale is an integer
                dtype = torch.bfloat16
            device: Any = scales.device.name
            here = scales.device is array.device
        else:
            check_plain(scales=scales)
            dtype, device = scales.dtype, scales.device
            here = device == torch_device(array.device)
        if not here:
            raise ArgumentError(
                f"the scales are on {device}, and the table on {array.device.name!r}: both must be "
                "on one device"
            )
        dtype = self._dtype(dtype)
        shape = tuple(scales.shape)
        blocks, columns, row_shift = self._blocks(shape, rows, dim)
        if blocks > 1 and columns * stored.bits % 8:
            raise ArgumentError(
                f"{columns} weights with one scale are no whole bytes of {stored.name}"
            )
        whole, divides = self._whole()
        return Scales(
            number=SCALES[dtype],
            blocks=blocks,
            columns=columns,
            array=scales if isinstance(scales, Array) else None,
            address=0 if isinstance(scales, Array) else scales.data_ptr(),
            owner=scales,
            row_shift=row_shift,
            whole=whole,
            divides=divides,
        )

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        found = dtype if self.stored is None else self.stored
        if not isinstance(found, torch.dtype) or found not in SCALES:
            names = ", ".join(str(each).removeprefix("torch.") for each in SCALES)
            raise DtypeError(
                f"scales of dtype {found}: use one of {names}; stored_scales= says what integers "
                "of as many bytes are"
            )
        if found != dtype and (
            (dtype.is_floating_point and dtype != torch.bfloat16)
            or found.itemsize != dtype.itemsize
        ):
            raise DtypeError(f"stored_scales={found} for scales of {dtype}: give those as integers")
        return found

    def _blocks(self, shape: tuple[int, ...], rows: int, dim: int) -> tuple[int, int, int]:
        """Return scales of a row, weights that share one, and the logarithm of rows that do."""
        if self.block is not None:
            return self._in_blocks(shape, rows, dim)
        if shape in ((), (1,), (1, 1)) and (rows != 1 or shape == ()):
            return 0, dim, 0
        if len(shape) in (1, 2) and shape[0] == rows:
            blocks = shape[1] if len(shape) == 2 else 1
            if blocks and dim % blocks == 0:
                return blocks, dim // blocks, 0
        raise ArgumentError(
            f"scales of shape {shape} for a table of {rows} rows of {dim}: give one, one for each "
            f"row as ({rows},), or ({rows}, blocks), where blocks divides {dim}; scale_block= says "
            "how many rows and columns share one otherwise"
        )

    def _in_blocks(self, shape: tuple[int, ...], rows: int, dim: int) -> tuple[int, int, int]:
        block: Any = self.block
        if not isinstance(block, tuple | list) or len(block) != 2:
            raise ArgumentError(f"scale_block={block!r}: give (rows, columns) that share a scale")
        high = integer("scale_block", block[0], 1, 1 << 31)
        wide = integer("scale_block", block[1], 1, 1 << 31)
        if high & (high - 1):
            raise ArgumentError(f"scale_block={block!r}: the rows must be a power of two")
        wanted = (-(-rows // high), -(-dim // wide))
        if shape != wanted:
            raise ArgumentError(
                f"scales of shape {shape} for a table of {rows} rows of {dim}: blocks of "
                f"{high} x {wide} need {wanted}"
            )
        return wanted[1], wide, high.bit_length() - 1

    def _whole(self) -> tuple[float, bool]:
        """Return the factor of the whole table, and whether scales are divided by it."""
        if self.whole is not None and self.divisor is not None:
            raise ArgumentError("global_scale= and global_divisor= are two names of one: give one")
        name = "global_scale" if self.divisor is None else "global_divisor"
        given: Any = self.whole if self.divisor is None else self.divisor
        if given is None:
            return 1.0, False
        if isinstance(given, torch.Tensor):
            check_plain(**{name: given})
            if given.numel() != 1 or given.device.type == "meta" or given.is_complex():
                raise ArgumentError(f"{name} has shape {tuple(given.shape)}: give one number")
            given = given.item()
        factor = number(name, given, -_FACTOR_MAX, _FACTOR_MAX)
        if self.divisor is not None and math.copysign(1, factor) * factor == 0:
            raise ArgumentError("global_divisor=0: the scales are divided by it")
        return factor, self.divisor is not None
