"""Sources: which bytes of which files or storages an array takes, as which elements.

`look` reads the headers of files and opens nothing for the array; `file_access.reach` does that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp.dtypes import check_dtype, check_shape
from flashwarp.errors import ArgumentError, DtypeError, FileFormatError
from flashwarp.storage import containers, files, npy, safetensors
from flashwarp.storage.base import Namespace
from flashwarp.storage.composite import Composite, Concatenated, Extent, Replicated

Shape = int | Sequence[int]


@dataclass(frozen=True)
class FilePart:
    """The bytes of a file that an array takes."""

    path: str
    layout: npy.Layout
    shown: str = ""  # what messages call the file; its path by default


@dataclass(frozen=True)
class Source:
    """What an array is opened on."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None  # none: one axis over all of the storage
    parts: tuple[FilePart | Namespace, ...]
    composite: Composite | None = None  # how several parts are one storage; None: there is one part

    def shape_on(self, storage: Namespace) -> tuple[int, ...]:
        """Return the shape of the array, which must fit the storage."""
        if self.shape is None:
            return (storage.nbytes // self.dtype.itemsize,)
        nbytes = npy.Layout(self.dtype, self.shape, 0).nbytes
        if storage.nbytes < nbytes:
            raise ArgumentError(
                f"shape {self.shape} of {self.dtype} needs {nbytes} bytes, the storage has "
                f"{storage.nbytes}"
            )
        return self.shape


def names_files(given: object) -> bool:
    """Whether a path, or a composite with paths among its members, was given."""
    return bool(given.paths) if isinstance(given, Composite) else not isinstance(given, Namespace)


def look(
    given: object,
    dtype: npt.DTypeLike | None,
    shape: Shape | None,
    offset: int | None,
    writable: bool,
    tensor: str | None = None,
) -> Source:
    """Find the bytes of an array; arguments as those of `flashwarp.open`.

    Raises ArgumentError for what is neither a path nor a storage, and for a dtype, shape or offset
    that is missing or cannot be; FileFormatError if contents, dtype and shape do not fit together;
    MissingFileError; PathError.
    """
    kind = None if dtype is None else check_dtype(dtype)
    if tensor is not None:
        return _look_at_tensor(given, tensor, kind, shape, offset, writable)
    if isinstance(given, Composite) and given.paths:
        for path in given.paths:
            files.check(path, writable)
        return _look_at_members(given, kind, shape, offset)
    if isinstance(given, Namespace):
        if kind is None:
            raise ArgumentError("a storage holds raw data: give its dtype")
        return Source(kind, _shape(shape, kind), (given,))
    if isinstance(given, list | tuple):
        raise ArgumentError(
            "several files or storages make one array as storage.Striped([...]), "
            "storage.Concatenated([...]) or storage.Replicated([...]): give one of these"
        )
    path = files.check_name(given)
    files.check(path, writable)
    layout = _layout_of(path, kind, shape, offset)
    return Source(layout.dtype, layout.shape, (FilePart(path, layout),))


def _look_at_tensor(
    given: object,
    tensor: str,
    kind: np.dtype[Any] | None,
    shape: Shape | None,
    offset: int | None,
    writable: bool,
) -> Source:
    if isinstance(given, Namespace | list | tuple):
        raise ArgumentError(
            f"tensor={tensor!r} is for the path of a safetensors file, its index, or its folder"
        )
    if offset is not None:
        raise ArgumentError(f"the header says where tensor={tensor!r} begins: leave offset= out")
    found = safetensors.find(files.check_name(given), tensor)
    files.check(found.path, writable)
    if found.dtype not in safetensors.NUMPY:
        raise DtypeError(f"{found}: its elements are parts of bytes, and no dtype of numpy")
    own = np.dtype(safetensors.NUMPY[found.dtype])
    if kind not in (None, own):
        raise FileFormatError(f"{found}, which opens as {own}, not {kind}")
    if _shape(shape, own) not in (None, found.shape):
        raise FileFormatError(f"{found} has shape {found.shape}, not {shape}")
    identity = (found.stamp.device, found.stamp.inode)
    layout = npy.Layout(own, found.shape, found.offset, identity)
    return Source(own, found.shape, (FilePart(found.path, layout),))


def _look_at_members(
    given: Composite, kind: np.dtype[Any] | None, shape: Shape | None, offset: int | None
) -> Source:
    if isinstance(given, Concatenated):
        return _look_at_extents(given, kind, shape, offset)
    if not isinstance(given, Replicated):
        if kind is None:
            raise ArgumentError("stripes are raw data: give the dtype of the array")
        layouts = {path: _stripes_of(path, kind, offset) for path in given.paths}
        lengths = _shape(shape, kind)
    else:
        layouts = {path: _layout_of(path, kind, shape, offset) for path in given.paths}
        first_path, first = next(iter(layouts.items()))
        for path, other in layouts.items():
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise FileFormatError(
                    f"{path} holds {other.shape} of {other.dtype}, "
                    f"{first_path} {first.shape} of {first.dtype}: they are no replicas"
                )
        if first.nbytes == 0:
            raise ArgumentError("an empty array has nothing to replicate: open one of its files")
        kind, lengths = first.dtype, first.shape
    parts = tuple(
        part if isinstance(part, Namespace) else FilePart(str(part), layouts[str(part)])
        for part in given.parts
    )
    return Source(kind, lengths, parts, given)


def _look_at_extents(
    given: Concatenated, kind: np.dtype[Any] | None, shape: Shape | None, offset: int | None
) -> Source:
    if kind is None:
        raise ArgumentError("what is concatenated is raw data: give the dtype of the array")
    if offset is not None:
        raise ArgumentError(
            "offset= is not for storage.Concatenated: give (path, offset, nbytes) as a member"
        )
    parts = tuple(
        part if isinstance(part, Namespace) else _extent_of(part, kind) for part in given.parts
    )
    return Source(kind, _shape(shape, kind), parts, given)


def _extent_of(part: str | Extent, kind: np.dtype[Any]) -> FilePart:
    """Return the bytes of a file, which must be no container if all of it was given."""
    path, offset, nbytes = (part, None, None) if isinstance(part, str) else part
    name = files.check_name(path)
    found = _Head.of(name, kind, offset)
    if found.is_npy:
        raise FileFormatError(
            f"{name} is a .npy file, whose header would be data: give (path, offset, nbytes)"
        )
    layout = found.raw_layout(np.dtype(np.uint8), nbytes, offset or 0)
    if layout.nbytes == 0:
        raise ArgumentError(f"{name} is empty: leave it out")
    return FilePart(name, layout)


def _shape(shape: Shape | None, dtype: np.dtype[Any]) -> tuple[int, ...] | None:
    return None if shape is None else check_shape(shape, dtype.itemsize)


@dataclass(frozen=True)
class _Head:
    """What the beginning of a file shows."""

    path: str
    nbytes: int
    identity: tuple[int, int]
    is_npy: bool

    @classmethod
    def of(cls, path: str, kind: np.dtype[Any] | None, offset: int | None) -> _Head:
        """Read it; a file whose data begins nowhere else must be no container."""
        with files.open_for_reading(path) as file:
            status = os.fstat(file.fileno())
            head, nbytes = file.read(containers.HEAD_BYTES), file.seek(0, os.SEEK_END)
        if offset is None:
            containers.refuse_container(path, head, nbytes, kind)
        is_npy = offset is None and head.startswith(containers.NPY_MAGIC)
        return cls(path, nbytes, (status.st_dev, status.st_ino), is_npy)

    def raw_layout(self, kind: np.dtype[Any], shape: Shape | None, start: int) -> npy.Layout:
        """Return the layout of numbers that begin at `start`; without a shape, all of them."""
        room = self.nbytes - start
        if room < 0:
            raise ArgumentError(
                f"offset={start} is beyond the end of {self.path}, which has {self.nbytes} bytes"
            )
        origin = f" from byte {start} on" if start else ""
        if shape is None and room % kind.itemsize:
            raise FileFormatError(
                f"{self.path} has {room} bytes{origin}, no multiple of the {kind.itemsize} of "
                f"{kind}: give a shape, or another dtype"
            )
        count = room // kind.itemsize
        lengths = (count,) if shape is None else check_shape(shape, kind.itemsize)
        layout = npy.Layout(kind, lengths, start, self.identity)
        if layout.nbytes > room:
            raise FileFormatError(
                f"shape {layout.shape} of {kind} needs {layout.nbytes} bytes, {self.path} has "
                f"{room}{origin}"
            )
        return layout


def _layout_of(
    path: str, kind: np.dtype[Any] | None, shape: Shape | None, offset: int | None
) -> npy.Layout:
    if offset is not None and kind is None:
        raise ArgumentError("offset= is where raw data begins: give its dtype")
    found = _Head.of(path, kind, offset)
    if found.is_npy or (path.endswith(".npy") and kind is None):
        return _npy_layout(path, kind, shape)
    if kind is None:
        if not found.nbytes:
            raise FileFormatError(f"{path} is empty")
        containers.refuse_unmarked(path)
    return found.raw_layout(kind, shape, offset or 0)


def _npy_layout(path: str, kind: np.dtype[Any] | None, shape: Shape | None) -> npy.Layout:
    """Read the layout of a .npy file, which must be what the caller says."""
    layout = npy.read_layout(path)
    if kind is not None and kind != layout.dtype:
        raise FileFormatError(f"{path} holds {layout.dtype}, not {kind}")
    if _shape(shape, layout.dtype) not in (None, layout.shape):
        raise FileFormatError(f"{path} has shape {layout.shape}, not {shape}")
    return layout


def _stripes_of(path: str, kind: np.dtype[Any], offset: int | None) -> npy.Layout:
    """All bytes of a file of stripes, from `offset` on."""
    found = _Head.of(path, kind, offset)
    if found.is_npy:
        raise FileFormatError(
            f"{path} is a .npy file, and stripes are raw files, in which its header would be "
            "data: say where the data begins in each file, as offset=128"
        )
    return found.raw_layout(np.dtype(np.uint8), None, offset or 0)
