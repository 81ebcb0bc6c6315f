"""Where a restart puts each region: an array of the caller's, a protected one, or a new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashwarp.checkpoint.capture import Bytes, RegionSet, check_target, names_of, new_array
from flashwarp.checkpoint.region import Region
from flashwarp.checkpoint.tier import Entry
from flashwarp.device import Device


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
        known = [each for each in wanted if each in into or protected.get(each)]
        wanted = known or wanted
    for region in [*wanted, *into]:
        if region not in stored:
            entry.region_named(region)  # raises
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
    """Return the arrays that were filled; regions that are callables get theirs."""
    result: dict[str, Any] = {}
    for target, new in targets:
        result[target.region.name] = target.owner
        found = protected.get(target.region.name)
        if new and found is not None and found.restore is not None:
            found.restore(target.owner)
    return result
