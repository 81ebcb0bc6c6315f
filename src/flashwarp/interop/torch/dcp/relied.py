"""What these modules rely on in torch and torch does not promise: tried once, on the torch at hand.

A torch that stored tensors otherwise, or read them without asking `Reader`, must be refused before
a checkpoint is written, whatever its number is.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from flashwarp.errors import ArgumentError
from flashwarp.interop.torch.dcp.records import Records


def check_torch() -> None:
    """Raise ArgumentError, which says what differs, if this torch lacks what is relied on."""
    problem = _problem()
    if problem:
        raise ArgumentError(
            f"torch {torch.__version__} cannot be used by flashwarp.dcp, because {problem}: save "
            "with torch's own FileSystemWriter, or install a torch that the page on checkpoints "
            "names"
        )


@functools.cache
def _problem() -> str:
    checks: list[tuple[str, Callable[[], bool]]] = [
        ("torch.save stores a tensor in another form", _records_are_read),
        ("its FileSystemReader reads items by other methods", _reader_asks_us),
        ("its metadata describes items in another way", _metadata_is_known),
    ]
    for problem, holds in checks:
        try:
            if not holds():
                return problem
        except Exception as error:  # of torch, which may raise anything
            return f"{problem} ({type(error).__name__}: {error})"
    return ""


def _records_are_read() -> bool:
    """Return whether torch reads a record that was made around a tensor's data."""
    for tensor in (torch.arange(6.0), torch.arange(6).view(2, 3).t(), torch.zeros(0)):
        record = Records().of(tensor)
        content = b"".join((record.head, record.data(), record.tail))
        if not torch.equal(torch.load(io.BytesIO(content), weights_only=True), tensor):
            return False
    return True


def _reader_asks_us() -> bool:
    """Return whether torch's reader slices each item by the method that `Reader` overrides."""
    read = filesystem.FileSystemReader
    return "_slice_file" in read.read_data.__code__.co_names and {"reset", "read_metadata"} <= {
        *vars(read)
    }


def _metadata_is_known() -> bool:
    info = filesystem._StorageInfo("name", 1, 2)
    filesystem._StoragePrefix("__0_")
    needed = {
        metadata.Metadata: {"storage_data", "storage_meta", "version"},
        metadata.StorageMeta: {"checkpoint_id", "save_id", "load_id"},
        planner.SavePlan: {"items", "storage_data"},
    }
    return (info.relative_path, info.offset, info.length) == ("name", 1, 2) and all(
        names <= {field.name for field in dataclasses.fields(kind)}
        for kind, names in needed.items()
    )
