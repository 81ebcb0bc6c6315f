"""What `flashwarp doctor` has measured of disks and links, kept for what stands beside it later."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from flashwarp._jit.artifact_cache import default_directory
from flashwarp.storage import files

_NAME = "ceilings.json"
_MAX = 1e18


def kept() -> dict[str, float]:
    """Return bytes per second by disk, as "259:0", and by device, as "cuda:0"; {} if unknown."""
    folder = default_directory()
    try:
        found = json.loads((folder / _NAME).read_text()) if folder else {}
    except (OSError, ValueError, RecursionError):
        return {}
    found = found if isinstance(found, dict) else {}
    rates = {name: rate for name, rate in found.items() if type(rate) in (int, float)}
    return {name: rate for name, rate in rates.items() if 0 < rate < _MAX}


def keep(name: str, bytes_per_s: float) -> None:
    """Keep what was measured last; without a folder for it, forget it."""
    folder = default_directory()
    if folder is None or not bytes_per_s:
        return
    with contextlib.suppress(OSError):
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.replacing(folder / _NAME) as file:
            file.write(json.dumps({**kept(), name: bytes_per_s}).encode())


def of_route(kept_rates: dict[str, float], disks: str, device: str) -> float | None:
    """Return what bounds a route: its disks together, else the link of its GPU; None if unknown."""
    rates = [kept_rates.get(each) for each in (disks.split("+") if disks else [device])]
    return None if None in rates else sum(rate for rate in rates if rate)
