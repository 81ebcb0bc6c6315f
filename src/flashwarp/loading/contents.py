"""What a checkpoint or .npy file holds: names, dtypes, shapes, and places in files."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashwarp.errors import ArgumentError, FileFormatError
from flashwarp.storage import containers, files, npy, safetensors
from flashwarp.storage.safetensors import Checkpoint, shown


@dataclass(frozen=True)
class Content:
    """One tensor in a file."""

    name: str
    path: str
    dtype: str | np.dtype[Any]
    """As safetensors spells it, or a .npy file's own."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stamp: files.Stamp
    """The file when its header was read."""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.dtype} {list(self.shape)} in {self.path})"


def contents(given: Checkpoint) -> dict[str, Content]:
    """Return what files hold, by name; reads headers and the index alone.

    A .npy file holds one array, named as the file without its suffix.

    Raises
    ------
    FileFormatError, MissingFileError, PathError, ArgumentError, DtypeError
    """
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        names = [files.check_name(each) for each in given]
        if not names:
            raise ArgumentError("path is an empty sequence: name one file at least")
    else:
        names = [files.check_name(given)]
    arrays = [_array(name) for name in names if name.endswith(".npy")]
    others = [name for name in names if not name.endswith(".npy")]
    found = {} if not others else _tensors(others[0] if len(names) == 1 else others)
    for each in arrays:
        other = found.setdefault(each.name, each)
        if other is not each:
            raise FileFormatError(
                f"{each.name!r} is in {other.path} and in {each.path}: name one of them"
            )
    return found


def _tensors(given: Checkpoint) -> dict[str, Content]:
    return {
        name: Content(name, t.path, t.dtype, t.shape, t.offset, t.nbytes, t.stamp)
        for name, t in safetensors.read_checkpoint(given).items()
    }


def _array(path: str) -> Content:
    with files.open_for_reading(path) as file:
        stamp = files.stamp(file.fileno())
        head = file.read(containers.HEAD_BYTES)
    containers.refuse_container(path, head, stamp.nbytes, None, "a .npy file")
    layout = npy.read_layout(path)
    name = os.path.basename(path).removesuffix(".npy")
    # Fortran order means something for several axes only, and `read_layout` refuses these.
    nbytes = math.prod(layout.shape) * layout.dtype.itemsize
    return Content(name, path, layout.dtype, layout.shape, layout.offset, nbytes, stamp)


def chosen(found: Mapping[str, Content], only: str | Sequence[str] | None) -> dict[str, Content]:
    """Return those whose names match one of the patterns; each pattern must match a name."""
    if only is None:
        return dict(found)
    if not isinstance(only, str | Sequence):
        raise ArgumentError(f"only={only!r} is neither a name or pattern nor a list of these")
    patterns = [only] if isinstance(only, str) else only
    kept: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentError(f"only={only!r}: {pattern!r} is no name or pattern")
        # A name is itself before it is a pattern: names may have brackets.
        matches = [pattern] if pattern in found else fnmatch.filter(found, pattern)
        if not matches:
            raise ArgumentError(
                f"only={only!r}: no tensor matches {pattern!r}; there are {shown(found)}"
            )
        kept.update(matches)
    return {name: each for name, each in found.items() if name in kept}
