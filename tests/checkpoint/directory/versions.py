"""Versions whose bytes follow from their numbers, for the tests of directories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwarp.checkpoint.directory import Directory, VersionReader
from flashwarp.checkpoint.region import Region

CHUNK = 4096


def bytes_of(seed: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def regions_of(*sizes: int) -> list[Region]:
    return [Region(f"r{i}", "|u1", (nbytes,), nbytes) for i, nbytes in enumerate(sizes)]


def store(
    directory: Directory, version: int, *sizes: int, name: str = "run", **options: Any
) -> None:
    """Commit a version."""
    with directory.begin(name, version, regions_of(*sizes), **options) as writer:
        for i, nbytes in enumerate(sizes):
            writer.write(f"r{i}", 0, bytes_of(1000 * version + i, nbytes))
        writer.commit()


def check(reader: VersionReader, version: int) -> None:
    """Assert that a reader returns what `store` wrote."""
    for i, region in enumerate(reader.regions):
        assert np.array_equal(reader.load(region), bytes_of(1000 * version + i, region.nbytes))


def files_of(path: Path, name: str = "run", rank: int = 0) -> list[str]:
    folder = path / name / f"rank-{rank:05d}"
    return sorted(os.listdir(folder)) if folder.exists() else []
