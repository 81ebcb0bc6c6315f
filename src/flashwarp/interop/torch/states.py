"""`save` and `load`: state dicts in a directory of checkpoints, without pickle.

The tensors are regions of a version, under their names. A region of JSON says how they are nested
and holds what is no tensor; so loading a file runs no code of it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from flashwarp.checkpoint.directory import Directory, VersionReader
from flashwarp.checkpoint.region import REGION_NAME_BYTES_MAX, Region
from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError, DamagedVersionError, DtypeError, MissingVersionError

_NAME = "state"
_STRUCTURE = "structure"
_TENSOR = "tensor/"
_FORMAT = 1
_DEPTH_MAX = 100


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
    states = _Writer()
    structure = states.encode(state_dict, "", 0)
    text = np.frombuffer(json.dumps([_FORMAT, structure], allow_nan=False).encode(), np.uint8)
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


# Structure: JSON in which every value is a list of its kind and what it holds.


class _Writer:
    """Encodes a state, and collects its tensors by the names of their regions."""

    def __init__(self) -> None:
        # As they were given, and kept: the address of a tensor that is gone comes again.
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[Any, str] = {}

    def encode(self, thing: Any, name: str, depth: int) -> list[Any]:
        if depth > _DEPTH_MAX:
            raise ArgumentError(f"{name!r} is nested deeper than {_DEPTH_MAX} levels")
        if isinstance(thing, torch.Tensor):
            return ["tensor", self._tensor(thing, name)]
        if isinstance(thing, np.ndarray | np.generic):
            return ["tensor", self._tensor(_of_numpy(thing, name), name)]
        if isinstance(thing, torch.Size):
            return ["size", list(thing)]
        if isinstance(thing, list | tuple) and type(thing) in (list, tuple):
            kind = "list" if isinstance(thing, list) else "tuple"
            return [
                kind,
                [self.encode(each, _below(name, i), depth + 1) for i, each in enumerate(thing)],
            ]
        if isinstance(thing, Mapping):
            return ["dict", [self._item(key, thing[key], name, depth) for key in thing]]
        return _encode_leaf(thing, name)

    def _item(self, key: Any, value: Any, name: str, depth: int) -> list[Any]:
        below = _below(name, key)
        return [_encode_leaf(key, below), self.encode(value, below, depth + 1)]

    def _tensor(self, tensor: torch.Tensor, name: str) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise DtypeError(
                f"{name!r} is a {type(tensor).__name__}: save full_tensor() of a DTensor, or "
                "shards with flashwarp.dcp"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise DtypeError(f"{name!r} is no dense tensor with data: {tensor.layout}")
        given = tensor.detach()
        key = (
            *(given.data_ptr(), given.dtype, given.shape, given.stride(), given.device),
            *(given.is_conj(), given.is_neg()),
        )
        if not given.nbytes or key not in self._known:
            self._known[key] = self._region_name(name)
            self.tensors[self._known[key]] = given
        return self._known[key]

    def _region_name(self, name: str) -> str:
        wanted = _TENSOR + name
        if len(wanted.encode(errors="replace")) > REGION_NAME_BYTES_MAX or wanted in self.tensors:
            wanted = f"{_TENSOR}{len(self.tensors)}"
            while wanted in self.tensors:
                wanted += "+"
        return wanted


def _of_numpy(thing: Any, name: str) -> torch.Tensor:
    if isinstance(thing, np.ma.MaskedArray):
        raise DtypeError(f"{name!r} is masked, and a tensor has no mask: save data and mask apart")
    try:
        return torch.from_numpy(np.array(thing))
    except (TypeError, ValueError) as error:
        raise DtypeError(f"{name!r} has dtype {thing.dtype}, which torch does not have") from error


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _encode_leaf(thing: Any, name: str) -> list[Any]:
    if thing is None or isinstance(thing, bool | str):
        return ["is", thing]
    if isinstance(thing, int) and type(thing) is int:
        return ["int", str(thing)]  # of any size
    if isinstance(thing, float) and type(thing) is float:
        return ["is", thing] if math.isfinite(thing) else ["float", repr(thing)]
    if isinstance(thing, torch.dtype | torch.device):
        kind = "dtype" if isinstance(thing, torch.dtype) else "device"
        return [kind, str(thing).removeprefix("torch.")]
    raise DtypeError(
        f"{name!r} is a {type(thing).__name__}, which only pickle could store: save what it "
        "is made of, such as its own state_dict()"
    )


class _Reader:
    """Decodes a state. What makes no sense was not written by `save`."""

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
            number, structure = json.loads(text)
            if number != _FORMAT:
                raise ValueError(f"the state has format {number}; this is format {_FORMAT}")
            return self._decode(structure, 0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, DamagedVersionError):
                raise
            raise DamagedVersionError(self._path, f"it is no state of save ({error})") from error

    def _decode(self, found: Any, depth: int) -> Any:
        kind, value = found
        if depth > _DEPTH_MAX:
            raise ValueError("it is nested too deep")
        if kind == "dict":
            return {self._decode(k, depth + 1): self._decode(v, depth + 1) for k, v in value}
        if kind in ("list", "tuple"):
            inside = [self._decode(each, depth + 1) for each in value]
            return inside if kind == "list" else tuple(inside)
        if kind == "tensor":
            return self._tensor(value)
        leaves: dict[str, Callable[[Any], Any]] = {
            "is": lambda each: each,
            "int": int,
            "float": float,
            "size": torch.Size,
            "device": torch.device,
            "dtype": _torch_dtype,
        }
        return leaves[kind](value)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._made:
            region = self._reader.region(name)
            tensor = torch.empty(region.shape, dtype=_torch_dtype(region.dtype))
            if tensor.nbytes != region.nbytes:
                raise ValueError(f"{name} has {region.nbytes} bytes, not {tensor.nbytes}")
            if region.nbytes:
                self._reader.read_into(name, 0, _bytes(tensor))
            self._made[name] = tensor if self._device is None else tensor.to(self._device)
        return self._made[name]


def _region(name: str, tensor: torch.Tensor) -> Region:
    text = str(tensor.dtype).removeprefix("torch.")
    return Region(name, text, tuple(tensor.shape), tensor.nbytes)


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.view(-1) if tensor.ndim else tensor.view(1)
    return memoryview(flat.view(torch.uint8).numpy())
