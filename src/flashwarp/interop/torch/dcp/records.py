"""One item of a checkpoint as the bytes that torch reads back, without copying a tensor's data.

torch stores a tensor as a small archive around the bytes of its storage. torch itself writes that
archive here, once for each shape, without the data (`torch.serialization.skip_data`); the data is
then written from where it lies.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Of the archives that are remembered; an archive takes about 2 KiB.
_TEMPLATES_MAX = 4096
_DATA = "data/0"


@dataclass
class Record:
    """The bytes of an item: before the data, the data, and behind it."""

    # Before the data, and behind it.
    head: bytes
    tail: bytes
    data_bytes: int  # how long the data is
    data: Callable[[], memoryview]  # returns the data; may copy it from a GPU

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return len(self.head) + self.data_bytes + len(self.tail)


class Records:
    """Makes records, and remembers the archives of shapes. One thread."""

    def __init__(self) -> None:
        self._templates: dict[Any, tuple[bytes, bytes]] = {}

    def of(self, thing: torch.Tensor | io.BytesIO) -> Record:
        """Describe what a planner has resolved: a tensor, or an object that is pickled already."""
        if isinstance(thing, io.BytesIO):
            view = thing.getbuffer()
            return Record(b"", b"", view.nbytes, lambda: view)
        tensor = thing.detach()
        dense = tensor.layout == torch.strided and not tensor.is_quantized
        if dense and not tensor.is_contiguous() and not _fills_storage(tensor):
            # A part of another tensor: only the part is stored.
            tensor = tensor.clone()
        if not _is_plain(tensor):
            stream = io.BytesIO()
            torch.save(tensor.cpu().clone(), stream)
            return self.of(stream)
        head, tail = self._template(tensor)
        return Record(head, tail, tensor.nbytes, lambda: _data_of(tensor))

    def _template(self, tensor: torch.Tensor) -> tuple[bytes, bytes]:
        key = (tensor.dtype, tensor.shape, tensor.stride())
        found = self._templates.get(key)
        if found is None:
            # Memory that is not touched is not allocated either.
            found = _archive(torch.empty_strided(*key[1:], dtype=key[0]))
            if len(self._templates) < _TEMPLATES_MAX:
                self._templates[key] = found
        return found


def _fills_storage(tensor: torch.Tensor) -> bool:
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is made of its bytes, dtype and strides, and of nothing else."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.device.type in ("cpu", "cuda")
    )


def _archive(tensor: torch.Tensor) -> tuple[bytes, bytes]:
    """Return what torch writes before and behind the data of a tensor that fills its storage."""
    descriptor = os.memfd_create("flashwarp", os.MFD_CLOEXEC)
    try:
        name = f"/proc/self/fd/{descriptor}"
        with torch.serialization.skip_data():
            torch.save(tensor, name)
        size = os.fstat(descriptor).st_size
        begin = int(torch._C.PyTorchFileReader(name).get_record_offset(_DATA))
        end = begin + tensor.nbytes
        return os.pread(descriptor, begin, 0), os.pread(descriptor, size - end, end)
    finally:
        os.close(descriptor)


def _data_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes that a tensor has, or that its storage has if it lies there in other order.

    A contiguous tensor may be a part of a larger storage, as staged ones are.
    """
    here = tensor.cpu()
    if not here.nbytes:
        return memoryview(b"")
    if here.is_contiguous():
        # A single element counts as contiguous whatever its strides are, and `view` minds them.
        flat = here.as_strided((here.numel(),), (1,))
        return memoryview(flat.view(torch.uint8).numpy())
    flat = torch.empty(0, dtype=torch.uint8).set_(here.untyped_storage())
    return memoryview(flat.numpy())
