"""`save` and `load`: state dicts in a directory of checkpoints, without pickle.

A state becomes regions as `flashwarp.checkpoint.nested` says, so loading a file runs no code of it.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from flashwarp.checkpoint.directory import Directory, VersionReader
from flashwarp.checkpoint.nested import Decoder, Encoder, torch_dtype
from flashwarp.checkpoint.region import Region
from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import DamagedVersionError, MissingVersionError

_NAME = "state"
_STRUCTURE = "structure"
_TENSOR = "tensor/"


def save(
    state_dict: Any,
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    rank: int = 0,
    replace: bool = False,
) -> int:
    """Save a state dict as a version in a directory of checkpoints; durable on return.

    Blocks. A crash at any time leaves the versions before as they were, and no part of this one.

    Parameters
    ----------
    state_dict : dict, list or tuple
        Tensors, numpy arrays, numbers, texts, None, torch dtypes, devices and sizes, nested in
        dicts, lists and tuples. A tensor that occurs twice is stored once, and shared on load.
        Gradients' histories are not stored.
    path : path-like
        The directory; made if it does not exist. ``flashwarp ckpt`` lists and checks it.
    version : int, optional
        Its number. Default: one more than the newest.
    rank : int
        Whose state it is; each rank has versions of its own.
    replace : bool
        Whether a version of this number may be replaced.

    Returns
    -------
    int
        The version.

    Raises
    ------
    DtypeError
        The state has an object that is none of these; pickling is what would store it.
    ExistingVersionError, LockedError, PathError, StorageError
        As `flashwarp.checkpoint.directory.Directory` raises them.

    Examples
    --------
    >>> import tempfile, torch
    >>> import flashwarp.torch
    >>> folder = tempfile.mkdtemp()
    >>> flashwarp.torch.save({"weight": torch.arange(3.0), "step": 7}, folder)
    0
    >>> flashwarp.torch.load(folder)
    {'weight': tensor([0., 1., 2.]), 'step': 7}
    """
    states = Encoder(_TENSOR)
    text = states.text(state_dict)
    regions = [Region(_STRUCTURE, "|u1", text.shape, text.nbytes)]
    regions += [_region(name, each) for name, each in states.tensors.items()]
    with Directory(path, rank) as directory:
        number = version
        if number is None:
            there = directory.versions(_NAME)
            number = there[-1] + 1 if there else 0
        integer("version", number, 0, SIZE_MAX)
        with directory.begin(_NAME, number, regions, replace=replace) as writer:
            writer.write(_STRUCTURE, 0, text)
            for name, tensor in states.tensors.items():
                if tensor.nbytes:
                    dense = tensor.resolve_conj().resolve_neg().contiguous()
                    writer.write(name, 0, _bytes(dense.cpu()))
            writer.commit()
    return number


def load(
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    rank: int = 0,
    device: torch.device | str | None = None,
) -> Any:
    """Load a state dict that `save` has stored; every byte is checked, and nothing is unpickled.

    Parameters
    ----------
    path : path-like
        The directory.
    version : int, optional
        Default: the newest that is complete. If it is damaged, that is an error: another one is
        loaded only if you name it.
    rank : int
        Whose state it is.
    device : torch.device or str, optional
        Where tensors go. Default: host memory.

    Returns
    -------
    dict, list or tuple
        As it was saved. Arrays of numpy have become tensors.

    Raises
    ------
    MissingVersionError, MissingFileError
        There is no such version, or no directory.
    DamagedVersionError
        A byte is not what was written.
    """
    with Directory(path, rank, writable=False) as directory:
        if version is None:
            there = directory.versions(_NAME)
            if not there:
                raise MissingVersionError(f"{directory.path} has no state of rank {rank}")
            version = there[-1]
        with directory.open(_NAME, version) as reader:
            return _Reader(reader, directory, device).state()


class _Reader:
    """Reads a state. What makes no sense was not written by `save`."""

    def __init__(
        self, reader: VersionReader, directory: Directory, device: torch.device | str | None
    ) -> None:
        self._reader = reader
        self._path = str(directory.path)
        self._device = device
        self._made: dict[str, torch.Tensor] = {}

    def state(self) -> Any:
        try:
            text = self._reader.load(_STRUCTURE).tobytes()
            return Decoder(self._tensor).state(text)
        except ValueError as error:
            if isinstance(error, DamagedVersionError):
                raise
            raise DamagedVersionError(self._path, f"it is no state of save ({error})") from error

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._made:
            region = self._reader.region(name)
            tensor = torch.empty(region.shape, dtype=torch_dtype(region.dtype))
            if tensor.nbytes != region.nbytes:
                raise ValueError(f"{name} has {region.nbytes} bytes, not {tensor.nbytes}")
            if region.nbytes:
                self._reader.read_into(name, 0, _bytes(tensor))
            self._made[name] = tensor if self._device is None else tensor.to(self._device)
        return self._made[name]


def _region(name: str, tensor: torch.Tensor) -> Region:
    text = str(tensor.dtype).removeprefix("torch.")
    return Region(name, text, tuple(tensor.shape), tensor.nbytes)


def _bytes(tensor: torch.Tensor) -> memoryview:
    # A single element counts as contiguous whatever its strides are, and `view` minds them.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())
