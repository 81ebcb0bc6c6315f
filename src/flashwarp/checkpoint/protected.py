"""What a user has protected, by name: arrays, callables, and states of several regions.

An array may have been resized, freed or closed since it was protected. Nothing is read or written
before all arrays of a call have been checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashwarp.checkpoint.capture import Bytes, check_target, describe
from flashwarp.checkpoint.region import Region
from flashwarp.device import Device
from flashwarp.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from flashwarp.checkpoint.states import State


@dataclass(frozen=True)
class Protected:
    """What `Checkpointer.protect` was given."""

    source: object  # an array, a callable that returns one, or what has a state
    restore: Callable[[Any], object] | None  # takes the restored array of a callable region
    region: Region | None  # the array as it was when it was protected; else None
    state: State | None = None  # of several regions


def names_of(only: Iterable[str]) -> list[str]:
    """Return the names of regions that a caller has listed, each once; raises for a text."""
    if isinstance(only, str):
        raise ArgumentError(f"only={only!r} is a text: pass a list of names, [{only!r}]")
    return list(dict.fromkeys(only))


class RegionSet:
    """Protected regions, by name. Not thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._regions: dict[str, Protected] = {}

    def add(
        self, name: str, source: object, restore: Callable[[Any], object] | None = None
    ) -> None:
        """Protect an array, a callable or a state; a name that is protected gets the new one."""
        state = _state_of(name, source, self._device)
        called = state is None and callable(source) and not hasattr(source, "__array__")
        if restore is not None and not (called and callable(restore)):
            raise ArgumentError("restore= takes a callable, for a region that is a callable")
        region = None
        if called or state is not None:
            Region(name, "|u1", (0,), 0)  # checks the name
        else:
            region = describe(name, source, self._device).region
        self._regions[name] = Protected(source, restore, region, state)

    def remove(self, name: str) -> None:
        """Unprotect a region."""
        self._find(name)
        del self._regions[name]

    def names(self, only: Iterable[str] | None = None) -> list[str]:
        """Return the names of the regions, or of those in `only`; raises for unknown ones."""
        if only is None:
            return list(self._regions)
        names = names_of(only)
        for name in names:
            self._find(name)
        return names

    def get(self, name: str) -> Protected | None:
        """Return a protected region, or None."""
        return self._regions.get(name)

    def collect(self, only: Iterable[str] | None = None) -> list[Bytes]:
        """Return the present bytes of the regions; calls those that are callables."""
        names = self.names(only)
        if not names:
            raise CheckpointError("no region is protected: call protect() before checkpoint()")
        found = [each for name in names for each in self._collect(name, self._regions[name])]
        count = Counter(each.region.name for each in found)
        if len(count) < len(found):
            raise ArgumentError(
                f"two protected things have a region {count.most_common(1)[0][0]!r}: a state has "
                "regions NAME/..., so protect one of them under another name"
            )
        return found

    def states(self) -> list[State]:
        """Return the states that are protected."""
        return [each.state for each in self._regions.values() if each.state is not None]

    def has(self, name: str) -> bool:
        """Return whether a region is protected, by itself or as a part of a state."""
        return name in self._regions or any(state.owns(name) for state in self.states())

    def target(self, region: Region) -> Bytes | None:
        """Return where a stored region goes, as it was protected; None: a new array is needed."""
        found = self._regions.get(region.name)
        if found is None or found.region is None:
            return None
        self._check_present(region.name, found)
        return check_target(region, found.source, self._device)

    def _collect(self, name: str, found: Protected) -> list[Bytes]:
        if found.state is not None:
            return found.state.collect()
        if found.region is None:
            source = found.source
            assert callable(source)
            return [describe(name, source(), self._device)]
        return [self._check_present(name, found)]

    def _check_present(self, name: str, found: Protected) -> Bytes:
        present = describe(name, found.source, self._device, known=found.region)
        if present.region != found.region:
            assert found.region is not None
            raise CheckpointError(
                f"the array of region {name!r} was {_text(found.region)} when it was protected, "
                f"and is {_text(present.region)} now: protect it again after resizing it"
            )
        return present

    def _find(self, name: str) -> Protected:
        if name not in self._regions:
            raise ArgumentError(
                f"region {name!r} is not protected; protected are: "
                f"{', '.join(map(repr, self._regions)) or 'none'}"
            )
        return self._regions[name]


def _state_of(name: str, source: Any, device: Device) -> State | None:
    """Return the state that a source has; None if it is an array or a callable."""
    stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    if not isinstance(source, Mapping) and (not stateful or isinstance(source, type)):
        return None
    try:
        from flashwarp.checkpoint.states import State
    except ImportError as error:
        raise ArgumentError(
            f"region {name!r} is a state, which needs torch: install it, or protect its arrays"
        ) from error
    return State(name, source, device)


def _text(region: Region) -> str:
    return f"{region.dtype} {region.shape}"
