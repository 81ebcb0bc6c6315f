"""An out-of-core product of matrices: panels of rows stay, slabs of the other matrix stream by.

A panel of `a` and its panel of the product are on the device at a time. The rows of `b` pass by
once for each panel, in slabs, each of which adds to the whole panel of the product. All reads and
writes are of whole rows, front to back.
"""

from __future__ import annotations

import importlib
from itertools import chain, islice, repeat
from typing import Any

import flashwarp as fw
from flashwarp.array.array import Array
from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError

__all__ = ["cut", "multiply"]


def multiply(a: Array, b: Array, product: Array, panel_rows: int, slab_rows: int) -> None:
    """Store the product of two matrices.

    Parameters
    ----------
    a, b : Array
        Of two axes and one dtype, float32 or float64.
    product : Array
        Of ``(len(a), b.shape[1])`` and this dtype, writable; durable when the call returns.
    panel_rows : int
        Rows of `a` and of the product that are on the device at a time. `b` is read once for each
        panel: the more rows, the less is read.
    slab_rows : int
        Rows of `b` that are multiplied at a time.

    Raises
    ------
    ArgumentError
        If the arrays do not fit each other.
    StorageError, ReadOnlyError
        As `flashwarp.Pipeline` raises them.

    Examples
    --------
    >>> import numpy as np, flashwarp as fw
    >>> from flashwarp.apps import gemm
    >>> x = np.eye(64, dtype=np.float32) * 3
    >>> made = np.zeros_like(x)
    >>> def opened(data, mode="r"):
    ...     memory = fw.storage.Memory(data)
    ...     return fw.open(memory, mode, data.dtype, data.shape, device="cpu")
    >>> with opened(x) as a, opened(x.copy()) as b, opened(made, "r+") as product:
    ...     gemm.multiply(a, b, product, panel_rows=32, slab_rows=16)
    >>> bool((made == x @ x).all())
    True
    """
    panel_rows = integer("panel_rows", panel_rows, 1, SIZE_MAX)
    slab_rows = integer("slab_rows", slab_rows, 1, SIZE_MAX)
    if not a.ndim == b.ndim == product.ndim == 2 or (a.shape[1], len(a), b.shape[1]) != (
        len(b), *product.shape,
    ):  # fmt: skip
        raise ArgumentError(f"{a.shape} times {b.shape} is not {product.shape}")
    if not a.dtype == b.dtype == product.dtype or a.dtype.kind != "f":
        raise ArgumentError(f"dtypes {a.dtype}, {b.dtype} and {product.dtype}: give one, of floats")
    torch: Any = importlib.import_module("torch")
    panels, slabs = cut(len(a), panel_rows), cut(len(b), slab_rows)
    with (
        fw.Pipeline(a, panel_rows, library="torch") as of_a,
        fw.Pipeline(b, slab_rows, library="torch") as of_b,
        fw.Pipeline(product, panel_rows, library="torch") as sums,
    ):
        every_slab = of_b.iterate(chain.from_iterable(repeat(slabs, len(panels))))
        for panel, rows in of_a.iterate(panels):
            total = torch.zeros((len(rows), b.shape[1]), dtype=panel.dtype, device=panel.device)
            for slab, columns in islice(every_slab, len(slabs)):
                total.addmm_(panel[:, columns.start : columns.stop], slab)
            sums.write_back(rows, total)
        sums.flush()


def cut(rows: int, at_a_time: int) -> list[range]:
    """Cut rows into ranges."""
    return [range(k, min(k + at_a_time, rows)) for k in range(0, rows, at_a_time)]
