"""Tables of random FP8 in safetensors files, written as fast as files are.

Rows are slices of one random block, each from a byte of it at which no other row begins. So a table
of any size costs little more than its bytes cost to write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

__all__ = ["DATA_OFFSET", "write_table"]

DATA_OFFSET = 4096
"""Where the rows begin in each file: spaces fill its header up."""

_CODES = 0x7F
"""Codes of FP8 (E4M3) from 0 to the largest number; the next one is NaN."""


def write_table(files: Mapping[Path, Sequence[str]], rows: int, width: int, seed: int) -> None:
    """Write the rows of a table as tensors of equal length.

    Parameters
    ----------
    files : mapping of Path to sequence of str
        Names of the tensors of each file, whose rows follow one another. There are at most `width`
        tensors, and their number divides `rows`.
    rows, width : int
        Of the whole table.
    seed : int
        Of the random block.
    """
    tensors = sum(map(len, files.values()))
    each = rows // tensors
    # A part of a tensor begins one byte later in the block than the one before.
    part = math.ceil(each / (width // tensors))
    rng = np.random.default_rng(seed)
    block = rng.integers(0, _CODES, (part + 1) * width, np.uint8)
    begin = 0
    for path, names in files.items():
        entries = {
            name: {
                "dtype": "F8_E4M3",
                "shape": [each, width],
                "data_offsets": [i * each * width, (i + 1) * each * width],
            }
            for i, name in enumerate(names)
        }
        text = json.dumps(entries).encode().ljust(DATA_OFFSET - 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in names:
                for first in range(0, each, part):
                    nbytes = min(part, each - first) * width
                    file.write(block[begin : begin + nbytes].data)
                    begin += 1
