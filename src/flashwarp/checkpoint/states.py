"""States that a user has protected: modules, optimizers and others with a state dict, or the dict.

A state becomes one region for each tensor, and one of JSON for the rest, as `nested` encodes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from flashwarp.checkpoint.capture import Bytes, describe, region_of
from flashwarp.checkpoint.nested import Decoder, Encoder, check_rows, torch_dtype
from flashwarp.checkpoint.region import Region
from flashwarp.device import Device
from flashwarp.errors import ArgumentError, CheckpointError


class State:
    """A protected state: something with `state_dict` and `load_state_dict`, or a state dict."""

    def __init__(self, name: str, source: Any, device: Device) -> None:
        self.name = name
        self._source = source
        self._device = device
        if isinstance(source, Mapping) and not isinstance(source, MutableMapping):
            raise ArgumentError(f"the state dict {name!r} cannot be changed: protect a dict")
        self._encoded()  # raises for what cannot be saved

    def _present(self) -> Any:
        return self._source if isinstance(self._source, Mapping) else self._source.state_dict()

    def _encoded(self) -> tuple[Any, dict[str, torch.Tensor]]:
        encoder = Encoder(f"{self.name}/", f"{self.name}/")
        state = self._present()
        text = encoder.text(state)
        check_rows(state, f"{self.name}/")
        return text, encoder.tensors

    def collect(self) -> list[Bytes]:
        """Return the present bytes of its regions."""
        text, tensors = self._encoded()
        return [
            describe(name, array, self._device)
            for name, array in {self.name: text, **tensors}.items()
        ]

    def targets(self, stored: Iterable[Region]) -> dict[str, Any]:
        """Return arrays for the stored regions: its tensors that fit, and new ones for the rest."""
        found = {each.name: each for each in stored if self.owns(each.name)}
        described = found.get(self.name)
        if described is None or described.dtype != "|u1":
            raise CheckpointError(
                f"region {self.name!r} was stored as an array, not as a state: protect an array"
            )
        tensors = self._encoded()[1]
        if isinstance(self._source, torch.nn.Module):
            self._check_names(set(tensors), set(found) - {self.name})
            return {self.name: np.empty(described.shape, np.uint8), **tensors}
        return {
            name: tensors[name]
            if name in tensors and region_of(name, tensors[name], self._device) == region
            else self._new(region)
            for name, region in found.items()
        }

    def _check_names(self, here: set[str], stored: set[str]) -> None:
        if here != stored:
            raise CheckpointError(
                f"the module {self.name!r} is not the one that was stored: it lacks "
                f"{_some(stored - here)}, and the version lacks {_some(here - stored)}; nothing "
                "was changed"
            )

    def _new(self, region: Region) -> Any:
        if region.name == self.name:
            return np.empty(region.shape, np.uint8)
        return torch.empty(region.shape, dtype=torch_dtype(region.dtype))

    def owns(self, name: str) -> bool:
        """Return whether a region is one of this state."""
        return name == self.name or name.startswith(f"{self.name}/")

    def load(self, filled: Mapping[str, Any]) -> Any:
        """Give the state what was restored; returns the module, the optimizer, or the dict."""
        try:
            found = Decoder(filled.__getitem__).state(filled[self.name].tobytes())
        except ValueError as error:
            raise CheckpointError(f"region {self.name!r} holds no state: {error}") from error
        if isinstance(self._source, MutableMapping):
            _assign(self._source, found)
            return self._source
        metadata = getattr(self._present(), "_metadata", None)
        if metadata is not None:  # of modules, which load by the versions in it
            found = OrderedDict(found)
            setattr(found, "_metadata", metadata)  # noqa: B010 - mypy knows no such attribute
        try:
            self._source.load_state_dict(found)
        except Exception as error:
            error.add_note(
                f"{self.name!r} has refused the state that was restored; its tensors, and the "
                "regions before it, are filled"
            )
            raise
        return self._source


def _some(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return (", ".join(map(repr, listed[:5])) or "nothing") + more


def _assign(target: MutableMapping[Any, Any], found: Mapping[Any, Any]) -> None:
    """Make a dict what was found, and the dicts inside of it; arrays of numpy stay such."""
    for key in [key for key in target if key not in found]:
        del target[key]
    for key, value in found.items():
        old = target.get(key)
        if isinstance(old, MutableMapping) and isinstance(value, Mapping):
            _assign(old, value)
        elif isinstance(old, np.ndarray) and isinstance(value, torch.Tensor):
            target[key] = value.numpy()
        else:
            target[key] = value
