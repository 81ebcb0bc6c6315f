"""Where a restart puts each region: an array of the caller's, a protected one, or a new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flashwarp.checkpoint.capture import Bytes, check_target, give_back, new_array
from flashwarp.checkpoint.protected import RegionSet, names_of
from flashwarp.checkpoint.region import Region
from flashwarp.checkpoint.tier import Entry
from flashwarp.device import Device
from flashwarp.errors import ArgumentError


def targets_of(
    entry: Entry,
    only: Iterable[str] | None,
    into: dict[str, object],
    protected: RegionSet,
    device: Device,
) -> list[tuple[Bytes, bool]]:
    """Return where each region goes, and whether that is a new array; all are checked."""
    stored = {region.name: region for region in entry.regions}
    wanted = list(stored) if only is None else names_of(only)
    if only is None:
        known = [each for each in wanted if each in into or protected.has(each)]
        wanted = known or wanted
    for region in [*wanted, *into]:
        if region not in stored:
            entry.region_named(region)  # raises
    for state in protected.states():
        if state.name in into:
            raise ArgumentError(f"{state.name!r} is a state, and into= takes arrays: unprotect it")
        if state.name in wanted:
            parts = state.targets(entry.regions)
            into = {**parts, **into}
            wanted = list(dict.fromkeys([*wanted, *parts]))
    return [_target(stored[region], into, protected, device) for region in wanted]


def _target(
    region: Region, into: dict[str, object], protected: RegionSet, device: Device
) -> tuple[Bytes, bool]:
    if region.name in into:
        return check_target(region, into[region.name], device), False
    found = protected.target(region)
    if found is not None:
        return found, False
    return check_target(region, new_array(region, device), device), True


def give(targets: list[tuple[Bytes, bool]], protected: RegionSet) -> dict[str, Any]:
    """Return what was filled; callables and states get theirs."""
    result: dict[str, Any] = {}
    for target, new in targets:
        result[target.region.name] = give_back(target)
        found = protected.get(target.region.name)
        if new and found is not None and found.restore is not None:
            found.restore(target.owner)
    for state in protected.states():
        if isinstance(result.get(state.name), np.ndarray):
            parts = {name: result.pop(name) for name in list(result) if state.owns(name)}
            result[state.name] = state.load(parts)
    return result
