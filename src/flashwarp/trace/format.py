"""`Trace`: line numbers in the order of their accesses, and the file that keeps them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError, FileFormatError
from flashwarp.storage import containers, files

_VERSION = 1
_MAKE = "make one with flashwarp.trace.record, or with `flashwarp trace record`"
# Line numbers that device code can have: see `tag::kLineBits`.
_LINES_MAX = 1 << 38


@dataclass(frozen=True)
class Trace:
    """Accesses to lines of one array, in order.

    Attributes
    ----------
    lines : numpy.ndarray of int64
        The line of each access, counted from the start of the array.
    line_bytes : int
        Bytes of a line.
    name : str
        For people.

    Examples
    --------
    >>> import numpy as np
    >>> from flashwarp.trace import Trace
    >>> Trace(np.array([3, 1, 3]), 4096, "three").footprint
    2
    """

    lines: npt.NDArray[np.int64]
    line_bytes: int
    name: str

    def __post_init__(self) -> None:
        lines = np.asarray(self.lines)
        if lines.ndim != 1 or not np.issubdtype(lines.dtype, np.integer):
            raise ArgumentError(
                f"a trace is one axis of line numbers, not {lines.dtype} of shape {lines.shape}"
            )
        if lines.size and (lines.min() < 0 or lines.max() >= _LINES_MAX):
            raise ArgumentError(
                f"line numbers from {lines.min()} to {lines.max()} leave 0 to {_LINES_MAX - 1}"
            )
        integer("line_bytes", self.line_bytes, 1, SIZE_MAX)
        object.__setattr__(self, "lines", np.ascontiguousarray(lines, np.int64))

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def footprint(self) -> int:
        """Number of different lines that it touches."""
        return len(np.unique(self.lines))

    def numbered_densely(self) -> Trace:
        """Number the lines that occur from 0 on, in their order.

        Neighbours stay in neighbouring sets, and the array that a replay needs is no larger than
        what the trace touches.
        """
        return Trace(np.unique(self.lines, return_inverse=True)[1], self.line_bytes, self.name)

    def save(self, path: files.PathLike) -> None:
        """Write it to an ``.npz`` file, which appears whole or not at all."""
        with files.replacing(path) as file:
            np.savez_compressed(file, version=_VERSION, **vars(self))

    @classmethod
    def load(cls, path: files.PathLike) -> Trace:
        """Read what `save` wrote.

        Raises
        ------
        MissingFileError, PathError
            When there is no such file, or it cannot be opened.
        FileFormatError
            When it is something else, damaged, or of another version.
        """
        name = files.check_name(path)
        with files.open_for_reading(name) as opened:
            head, nbytes = opened.read(containers.HEAD_BYTES), opened.seek(0, os.SEEK_END)
            if not is_trace(head):
                found = containers.told(head, nbytes)
                raise FileFormatError(f"{name} is {found}, not a trace: {_MAKE}")
            opened.seek(0)
            # The readers of zip files, of compressed data and of headers raise a dozen kinds, also
            # MemoryError for a size that is not that of the file.
            try:
                with np.load(opened, allow_pickle=False) as file:
                    version = int(file["version"])
                    if version == _VERSION:
                        return cls(file["lines"], file["line_bytes"].item(), str(file["name"]))
            except ArgumentError as error:
                raise FileFormatError(f"{name} holds no trace ({error}): {_MAKE}") from error
            except Exception as error:
                raise FileFormatError(
                    f"{name} is a trace that is cut short or damaged, or another archive: {_MAKE}"
                ) from error
        raise FileFormatError(
            f"{name} is a trace of version {version}, and this flashwarp reads version {_VERSION}: "
            f"{_MAKE}"
        )


def is_trace(head: bytes) -> bool:
    """Whether a file that begins so may be a trace: it is an archive."""
    return head.startswith(b"PK")
