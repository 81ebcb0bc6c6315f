"""Pruning and copies: what is kept can be used, and what arrives is what was there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from versions import CHUNK, check, files_of, regions_of, store

from flashwarp.checkpoint.directory import Directory, copy_versions
from flashwarp.checkpoint.directory.prune import superfluous
from flashwarp.errors import ArgumentError, MissingVersionError


def test_pruning_keeps_the_last_and_every_so_many() -> None:
    versions = list(range(20))

    def good(version: int) -> bool:
        return True

    assert superfluous(versions, good, 3) == list(range(17))
    assert superfluous(versions, good, 1, 5) == [v for v in range(19) if v % 5]
    assert superfluous(versions, good, 100) == []
    assert superfluous([], good, 1) == []
    for bad in (0, -1, 1.5):
        with pytest.raises(ArgumentError):
            superfluous(versions, good, bad)  # type: ignore[arg-type]


def test_damaged_versions_do_not_count_as_kept() -> None:
    looked = []

    def is_usable(version: int) -> bool:
        looked.append(version)
        return version in (1, 3)

    assert superfluous([0, 1, 2, 3, 4, 5], is_usable, 1) == [0, 1, 2]
    assert looked == [5, 4, 3]
    assert superfluous([0, 1, 2, 3, 4, 5], is_usable, 2) == [0]
    assert superfluous([4, 5], is_usable, 1) == []


def test_pruned_versions_and_their_data_are_gone(tmp_path: Path) -> None:
    with Directory(tmp_path) as directory:
        for version in range(6):
            store(directory, version, 100)

        assert directory.prune("run", 2, keep_every=3, dry_run=True) == [1, 2]
        assert directory.prune("run", 2, keep_every=3) == [1, 2]
        assert directory.versions("run") == [0, 3, 4, 5]
        assert len(files_of(tmp_path)) == 8
        assert directory.prune("run", 2, keep_every=3) == []


def damage(path: Path, version: int) -> None:
    file = next(path.glob(f"run/*/*{version}-*.data"))
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(content)


def test_copies_are_verified_and_equal(tmp_path: Path) -> None:
    big = (20 << 20) + 5
    with (
        Directory(tmp_path / "a", 2, chunk_bytes=CHUNK) as source,
        Directory(tmp_path / "b", 2, chunk_bytes="64 KiB") as target,
    ):
        for version in (1, 2, 3):
            store(source, version, 100, 0, 3 * CHUNK + 1, metadata={"version": version})
        store(source, 4, big)
        damage(source.path, 2)

        done = copy_versions(source, target, "run")

        assert (done.copied, done.there, list(done.damaged)) == ([1, 3, 4], [], [2])
        assert "checksum" in done.damaged[2]
        assert done.nbytes == 2 * (101 + 3 * CHUNK) + big
        assert target.versions("run") == [1, 3, 4]
        for version in (1, 3, 4):
            with target.open("run", version) as reader:
                check(reader, version)
        with target.open("run", 3) as reader:
            assert reader.metadata == {"version": 3}
        again = copy_versions(source, target, "run", [3, 1])
        assert (again.copied, again.there) == ([], [3, 1])
        with pytest.raises(MissingVersionError):
            copy_versions(source, target, "run", [77])
        for version in (1, 3, 4):
            assert target.identity("run", version) == source.identity("run", version)
        # Nothing is left of the copy that failed.
        assert len(files_of(target.path, rank=2)) == 6


def test_copy_of_another_rank_is_not_mixed_up(tmp_path: Path) -> None:
    for rank in (0, 1):
        with Directory(tmp_path / "a", rank) as source:
            store(source, rank + 5, 100)
    with (
        Directory(tmp_path / "a", writable=False) as source,
        Directory(tmp_path / "b", 1) as target,
    ):
        assert copy_versions(source, target, "run").copied == [6]
        assert np.array_equal(target.ranks("run"), [1])
        with target.open("run", 6) as reader:
            assert reader.regions == tuple(regions_of(100))
