"""What modules of tables check: the table, its options, ids, bags and streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from flashwarp.array.array import Array
from flashwarp.config import brief, integer
from flashwarp.device import Device, stream_handle
from flashwarp.errors import ArgumentError, DtypeError
from flashwarp.interop.torch.lookups import NUMBERS
from flashwarp.interop.torch.operators import check_plain
from flashwarp.storage import files
from flashwarp.table.lookup import Pooling
from flashwarp.table.record import Record

TableLike: TypeAlias = Array | files.PathLike | torch.Tensor | npt.NDArray[Any]

# What torch's modules offer and ours do not: the values that change nothing, and why not others.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "max_norm": ((None,), "a lookup reads rows and never stores them"),
    "norm_type": ((2.0,), "there is no max_norm"),
    "scale_grad_by_freq": ((False,), "divide the gradients in `pending` by your own counts"),
    "sparse": ((True,), "gradients are those of the rows that were looked up, never dense"),
    "_weight": ((None,), "from_pretrained takes weights"),
}


def check_table(module: str, table: object, sizes: Sequence[object]) -> TableLike:
    """Return the table; raises ArgumentError for what torch's modules take, sizes or weights."""
    if isinstance(table, Array | torch.Tensor | np.ndarray) or files.is_path(table):
        if sizes:
            raise ArgumentError(
                f"{', '.join(map(brief, sizes))} after the table: its file says how many rows it "
                "has, and how long they are; dim= takes fewer weights of each"
            )
        return table
    numbers = [each for each in (table, *sizes) if each is not None]
    if not all(isinstance(each, int) for each in numbers):
        raise ArgumentError(
            f"{module}({type(table).__name__}): the rows of a table lie in a file, by its path, or "
            f"in a flashwarp.Array; {module}.from_pretrained takes a tensor or a numpy array, too"
        )
    given = [brief(each) for each in numbers]
    rows, dim = (given + ["rows", "dim"][len(given) :])[:2]
    raise ArgumentError(
        f"{module}({', '.join(given)}): the rows of a table lie in a file, by its path or as a "
        f"flashwarp.Array. Make it once, by flashwarp.torch.create_table(path, {rows}, {dim}), and "
        f"then {module}(path, dim={dim})"
    )


def in_host_memory(table: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as numpy has it: as integers, if it has no such type."""
    check_plain(table=table)
    check_shape(tuple(table.shape))
    if table.device.type != "cpu":
        raise ArgumentError(
            f"a table on {table.device}: torch's own module takes it; here rows lie in host "
            "memory or a file, so give weights.cpu()"
        )
    held = table.detach().resolve_conj().resolve_neg().contiguous()
    kind = getattr(np, str(held.dtype).removeprefix("torch."), f"u{held.itemsize}")
    rows: npt.NDArray[Any] = held.view(torch.uint8).numpy().view(kind)
    return rows


def check_shape(shape: tuple[int, ...]) -> None:
    """Raise ArgumentError unless it is a table's."""
    if len(shape) != 2 or not shape[1]:
        raise ArgumentError(
            f"an array of shape {shape} is no table, which has two axes: rows, and the elements "
            "of a row"
        )


def check_refused(name: str, value: object) -> None:
    """Raise ArgumentError for what torch offers and tables in a storage do not."""
    harmless, why = REFUSED[name]
    plain = value is None or isinstance(value, bool | int | float)
    if not plain or value not in harmless:
        raise ArgumentError(f"{name}={value!r} does not work with tables in a storage: {why}")


def rows_of(rows: range | None, count: int) -> range:
    """Return which rows of an array are the table's."""
    if rows is None:
        return range(count)
    if not isinstance(rows, range) or rows.step != 1:
        raise ArgumentError(f"rows={rows!r}: give a range without gaps, such as range(0, {count})")
    if not 0 <= rows.start < rows.stop <= count:
        raise ArgumentError(f"rows={rows!r} of an array of {count} rows")
    return rows


def check_dim_is_given(dim: int | None, array: Array) -> None:
    """Raise ArgumentError where all of a row would pass for weights, and its record says less."""
    path = array._attachment.storage.path
    record = Record.read(path) if dim is None and path else None
    if record is not None and record.dim != array.shape[1]:
        raise ArgumentError(
            f"a row of {path} has {record.dim} weights, and behind them the state of "
            f"{record.optimizer!r} and zeros: give dim={record.dim}, or dim={array.shape[1]} to "
            "read all of it"
        )


def dim_of(dim: int | None, width: int) -> int:
    """Return how many weights a row has."""
    return width if dim is None else integer("dim", dim, 1, width)


def stored_of(array: Array, stored: torch.dtype | None) -> torch.dtype:
    """Return what the elements of a table are."""
    known = ", ".join(str(each).removeprefix("torch.") for each in NUMBERS)
    own: torch.dtype | None = getattr(torch, array.dtype.name, None)
    result = own if stored is None else stored
    if not isinstance(result, torch.dtype) or result not in NUMBERS or not array.dtype.isnative:
        raise DtypeError(
            f"rows of dtype {array.dtype if stored is None else stored} cannot be converted: a "
            f"table stores {known}; stored= names the type of elements that the array has as "
            "integers"
        )
    if result is not own and (
        array.dtype.kind not in "iuV" or result.itemsize != array.dtype.itemsize
    ):
        raise DtypeError(
            f"stored={stored} for an array of {array.dtype}: open its file with an integer dtype "
            f"of {result.itemsize} bytes"
        )
    return result


def padding_of(padding_idx: int | None, rows: int) -> int | None:
    """Return the id without a gradient, counted from the first."""
    if padding_idx is None:
        return None
    number = integer("padding_idx", padding_idx, -rows, rows - 1)
    return number + rows if number < 0 else number


def check_tensors(**given: object) -> None:
    """Raise ArgumentError for what is neither a plain tensor nor None, as arguments by name."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            check_plain(**{name: value})
        elif value is not None or name in ("input", "ids"):
            raise ArgumentError(
                f"{name} is of type {type(value).__name__}: give a tensor on the table's device"
            )


def check_stream(stream: object, device: Device) -> int | None:
    """Return the handle of a stream, or None for torch's current one; raises ArgumentError."""
    if stream is None:
        return None
    if device.kind == "cpu":
        raise ArgumentError(f"stream={stream!r}: the CPU device has no streams")
    return stream_handle(stream)


def check_bags(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    pooling: Pooling,
    axes: int,
) -> None:
    """Raise ArgumentError unless ids are divided into bags: by offsets, or with so many axes."""
    check_tensors(input=ids, offsets=offsets, per_sample_weights=weights)
    if offsets is None and ids.ndim != axes:
        raise ArgumentError(
            f"ids of shape {tuple(ids.shape)} and no offsets: without offsets they have {axes} "
            "axes, and the last is a bag"
        )
    if offsets is not None and (ids.ndim != 1 or offsets.ndim != 1):
        raise ArgumentError(
            f"ids of shape {tuple(ids.shape)} and offsets of shape {tuple(offsets.shape)}: with "
            "offsets both have one axis"
        )
    if weights is not None and pooling is not Pooling.SUM:
        raise ArgumentError(f'per_sample_weights are for mode="sum", not {pooling.name.lower()!r}')
