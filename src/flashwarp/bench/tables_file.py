"""Tables of random FP8 in safetensors files, written as fast as files are.

Rows are slices of one random block, each from a byte of it at which no other row begins. So a table
of any size costs little more than its bytes cost to write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

__all__ = ["DATA_OFFSET", "write_table"]

DATA_OFFSET = 4096
"""Where the rows begin in each file: spaces fill its header up."""

_CODES = 0x7F
"""Codes of FP8 (E4M3) from 0 to the largest number; the next one is NaN."""


def write_table(files: Mapping[str, Path], rows: int, width: int, seed: int) -> None:
    """Write the rows of a table as tensors of equal length, each in a file.

    Parameters
    ----------
    files : mapping of str to Path
        The file of each tensor, by its name: at most `width`, and a divisor of `rows`.
    rows, width : int
        Of the whole table.
    seed : int
        Of the random block.
    """
    each = rows // len(files)
    # A part of a file begins one byte later in the block than the one before.
    part = math.ceil(each / (width // len(files)))
    rng = np.random.default_rng(seed)
    block = rng.integers(0, _CODES, (part + 1) * width, np.uint8)
    begin = 0
    for name, path in files.items():
        entry = {"dtype": "F8_E4M3", "shape": [each, width], "data_offsets": [0, each * width]}
        text = json.dumps({name: entry}).encode().ljust(DATA_OFFSET - 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for first in range(0, each, part):
                nbytes = min(part, each - first) * width
                file.write(block[begin : begin + nbytes].data)
                begin += 1
