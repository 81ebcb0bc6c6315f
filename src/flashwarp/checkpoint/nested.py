"""Nested states as regions: tensors under their names, and JSON for how they are nested.

The JSON also holds what is no tensor, so decoding a state runs no code of it. torch is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flashwarp.checkpoint.region import REGION_NAME_BYTES_MAX, numpy_dtype
from flashwarp.errors import ArgumentError, CopyError, DtypeError

_FORMAT = 1
_DEPTH_MAX = 100

# Structure: JSON in which every value is a list of its kind and what it holds.


class Encoder:
    """Encodes a state, and collects its tensors by the names of their regions.

    Parameters
    ----------
    prefix : str
        Of the names of regions.
    shown : str
        Of names in errors.
    """

    def __init__(self, prefix: str, shown: str = "") -> None:
        # As they were given, and kept: the address of a tensor that is gone comes again.
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[Any, str] = {}
        self._prefix = prefix
        self._shown = shown

    def text(self, state: Any) -> npt.NDArray[np.uint8]:
        """Encode a state, and return the bytes of its structure.

        Raises DtypeError, which names it, for what only pickle could store.
        """
        structure = [_FORMAT, self._encode(state, "", 0)]
        return np.frombuffer(json.dumps(structure, allow_nan=False).encode(), np.uint8)

    def _encode(self, thing: Any, name: str, depth: int) -> list[Any]:
        if depth > _DEPTH_MAX:
            raise ArgumentError(f"{self._shown + name!r} is nested deeper than {_DEPTH_MAX} levels")
        if isinstance(thing, torch.Tensor):
            return ["tensor", self._tensor(thing, name)]
        if isinstance(thing, np.ndarray | np.generic):
            return ["tensor", self._tensor(_of_numpy(thing, self._shown + name), name)]
        if isinstance(thing, torch.Size):
            return ["size", list(thing)]
        if isinstance(thing, list | tuple) and type(thing) in (list, tuple):
            kind = "list" if isinstance(thing, list) else "tuple"
            return [
                kind,
                [self._encode(each, _below(name, i), depth + 1) for i, each in enumerate(thing)],
            ]
        if isinstance(thing, Mapping):
            return ["dict", [self._item(key, thing[key], name, depth) for key in thing]]
        return _encode_leaf(thing, self._shown + name)

    def _item(self, key: Any, value: Any, name: str, depth: int) -> list[Any]:
        below = _below(name, key)
        return [_encode_leaf(key, self._shown + below), self._encode(value, below, depth + 1)]

    def _tensor(self, tensor: torch.Tensor, name: str) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise DtypeError(
                f"{self._shown + name!r} is a {type(tensor).__name__}: save full_tensor() of a "
                "DTensor, or shards with flashwarp.dcp"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise DtypeError(
                f"{self._shown + name!r} is no dense tensor with data: {tensor.layout}"
            )
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
        wanted = self._prefix + name
        if len(wanted.encode(errors="replace")) > REGION_NAME_BYTES_MAX or wanted in self.tensors:
            wanted = f"{self._prefix}{len(self.tensors)}"
            while wanted in self.tensors:
                wanted += "+"
        return wanted


def note_rows(metadata: dict[str, Any]) -> None:
    """Note, in the metadata of a part of a state dict, that its rows lie in a file of their own."""
    metadata["flashwarp_rows"] = True


def check_rows(state: object, shown: str, name: str = "") -> None:
    """Raise CopyError if a state, or one inside of it, lacks rows of a table in training.

    `shown` stands before names in the error, as in `Encoder`.
    """
    if not isinstance(state, Mapping | list | tuple):
        return
    for path, metadata in (getattr(state, "_metadata", None) or {}).items():
        if "flashwarp_rows" in metadata:
            where = shown + (_below(name, path) if path else name)
            raise CopyError(
                f"{where.removesuffix('/')!r} belongs to a table in training, whose "
                "rows lie in its own file and would not go back with this state: save the table by "
                "checkpoint(folder, extra=) of its optimizer, and restore both, or protect the "
                "dense parts of the model by themselves. A module whose rows stay as they are "
                "passes after requires_grad_(False)"
            )
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        check_rows(value, shown, _below(name, key))


def _of_numpy(thing: Any, name: str) -> torch.Tensor:
    if isinstance(thing, np.ma.MaskedArray):
        raise DtypeError(f"{name!r} is masked, and a tensor has no mask: save data and mask apart")
    shared = isinstance(thing, np.ndarray) and thing.flags.c_contiguous and thing.flags.writeable
    try:
        return torch.from_numpy(thing if shared else np.array(thing))
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


class Decoder:
    """Decodes a state; `tensor` returns that of a region. Raises ValueError for what is no state.

    A tensor that occurs twice is asked for twice.
    """

    def __init__(self, tensor: Callable[[str], Any]) -> None:
        self._leaves: dict[str, Callable[[Any], Any]] = {
            "is": lambda each: each,
            "int": int,
            "float": float,
            "size": torch.Size,
            "device": torch.device,
            "dtype": torch_dtype,
            "tensor": tensor,
        }

    def state(self, text: bytes) -> Any:
        """Return the state whose structure a text is."""
        try:
            number, structure = json.loads(text)
            if number != _FORMAT:
                raise ValueError(f"the state has format {number}; this is format {_FORMAT}")
            return self._decode(structure, 0)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(str(error)) from error

    def _decode(self, found: Any, depth: int) -> Any:
        kind, value = found
        if depth > _DEPTH_MAX:
            raise ValueError("it is nested too deep")
        if kind == "dict":
            return {self._decode(k, depth + 1): self._decode(v, depth + 1) for k, v in value}
        if kind in ("list", "tuple"):
            inside = [self._decode(each, depth + 1) for each in value]
            return inside if kind == "list" else tuple(inside)
        return self._leaves[kind](value)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of torch for a region's; raises ValueError if there is none."""
    known = numpy_dtype(name)
    found = getattr(torch, name if known is None else known.name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found
