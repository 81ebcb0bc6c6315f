"""The .npy format: where the data of a file begins, and files made so that it begins on a page."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from flashwarp.config import SIZE_MAX
from flashwarp.dtypes import check_dtype, check_shape
from flashwarp.errors import ArgumentError, DtypeError, FileFormatError
from flashwarp.storage import containers, files

DATA_OFFSET = 4096
"""Where `header` puts the data: page-aligned, so that O_DIRECT transfers need no shifting."""

# Records of 10,000 fields. numpy parses a header as Python text, which for the worst text of this
# length takes two seconds and 150 MB.
_HEADER_BYTES_MAX = 256 << 10


@dataclass(frozen=True)
class Layout:
    """What lies in a file, and from which byte on."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    identity: tuple[int, int] | None = field(default=None, compare=False)
    """Device and inode of the file that was looked at."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_layout(path: str) -> Layout:
    """Read the header of a .npy file.

    Raises FileFormatError when it is none, is Fortran-ordered, or has fewer bytes than its header
    promises; DtypeError when it holds Python objects; and what `files.open_for_reading` raises.
    """
    with files.open_for_reading(path) as file:
        status = os.fstat(file.fileno())
        try:
            shape, fortran, dtype = _read_header(file)
            if any(type(n) is not int or n < 0 for n in shape):
                raise ValueError(f"its shape is {shape}")
            check_shape(shape, dtype.itemsize)
            offset = file.tell()
        except OSError:
            raise
        # numpy parses the header as Python text, and does not catch what a tokenizer, a literal or
        # a malformed dtype raises, down to RecursionError.
        except Exception as error:
            raise FileFormatError(f"{path} is not a readable .npy file: {error}") from error
    dtype = check_dtype(dtype)
    if fortran and len(shape) > 1 and math.prod(shape) > 0:
        raise FileFormatError(
            f"{path} is in Fortran order, in which a row is scattered over the file: save it again "
            "with numpy.ascontiguousarray, or open its transpose, whose rows lie in one piece: "
            f"dtype={str(dtype)!r}, shape={shape[::-1]}, offset={offset}"
        )
    layout = Layout(dtype, tuple(shape), offset, (status.st_dev, status.st_ino))
    size = status.st_size
    if size < offset + layout.nbytes:
        raise FileFormatError(
            f"{path} is truncated: shape {shape} of {dtype} needs {offset + layout.nbytes} bytes, "
            f"the file has {size}"
        )
    return layout


def _read_header(file: BinaryIO) -> tuple[tuple[Any, ...], bool, np.dtype[Any]]:
    """Return shape, order and dtype; leaves the file where the data begins."""
    head = file.read(containers.HEAD_BYTES)
    if not head.startswith(containers.NPY_MAGIC):
        raise ValueError(f"it is {containers.told(head, len(head))}")
    file.seek(0)
    version = npy_format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version} of the format is unknown")
    nbytes = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if nbytes > _HEADER_BYTES_MAX:
        raise ValueError(
            f"its header has {nbytes} bytes, and at most {_HEADER_BYTES_MAX} are read. If you know "
            "where the data begins, give offset=, dtype= and shape="
        )
    text = file.read(nbytes)
    if len(text) < nbytes:
        raise ValueError("the file ends inside of its header")
    if version == (3, 0):
        # Version 3 is version 2 in UTF-8, for which numpy has no public reader. The text is a
        # literal, in which other letters than ASCII's stand inside of strings only: escape them.
        text = text.decode("utf-8").encode("ascii", "backslashreplace")
    prefixed = io.BytesIO(len(text).to_bytes(4, "little") + text)
    return npy_format.read_array_header_2_0(prefixed, max_header_size=len(text))


def header(shape: tuple[int, ...], dtype: npt.DTypeLike) -> bytes:
    """Make the first page of a .npy file, after which its data begins."""
    dtype = check_dtype(dtype)
    text = repr({"descr": _descr(dtype), "fortran_order": False, "shape": shape})
    # Version 2: its header length has four bytes, so padding to a page is as valid as any.
    prefix = npy_format.magic(2, 0)
    room = DATA_OFFSET - len(prefix) - 4
    if len(text) + 1 > room:
        raise DtypeError(f"the description of dtype {dtype} is longer than {room} characters")
    padded = text.encode("latin1") + b" " * (room - len(text) - 1) + b"\n"
    return prefix + len(padded).to_bytes(4, "little") + padded


def _descr(dtype: np.dtype[Any]) -> Any:
    """Describe a dtype as headers do, so that a reader makes the same of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            descr = npy_format.dtype_to_descr(dtype)
            again = npy_format.descr_to_dtype(descr)
    except Exception as error:  # numpy's own words for what it cannot describe are of many types
        raise DtypeError(f"the .npy format cannot describe dtype {dtype}: {error}") from error
    if again != dtype:
        raise DtypeError(f"the .npy format describes dtype {dtype} as {again}")
    return descr


def empty_layout(shape: int | Sequence[int], dtype: npt.DTypeLike) -> Layout:
    """Return the layout of a file that `write_empty` can make; raises ArgumentError, DtypeError."""
    kind = check_dtype(dtype)
    layout = Layout(kind, check_shape(shape, kind.itemsize), DATA_OFFSET)
    if layout.nbytes > SIZE_MAX - DATA_OFFSET:
        raise ArgumentError(
            f"shape {shape} of {kind} needs {layout.nbytes} bytes, a file has at most {SIZE_MAX}"
        )
    header(layout.shape, kind)
    return layout


def write_empty(descriptor: int, layout: Layout) -> None:
    """Make an empty file a .npy file of zeros, sparse where the file system can, and durable.

    Raises OSError when the file system has no room, or no files so large.
    """
    with open(descriptor, "wb", closefd=False) as file:
        file.write(header(layout.shape, layout.dtype))
    os.ftruncate(descriptor, layout.offset + layout.nbytes)
    os.fsync(descriptor)
