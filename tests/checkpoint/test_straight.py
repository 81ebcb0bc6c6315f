"""Restores that the loader's threads read: every byte is checked, whatever the sizes."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwarp.checkpoint import straight
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.directory import Directory
from flashwarp.checkpoint.region import Region
from flashwarp.errors import CheckpointError, DamagedVersionError, StorageError
from flashwarp.loading import moving
from flashwarp.probe import disk

SHAPES = {
    "large": ((3 << 20) + 777,),
    "small": (5,),
    "none": (0,),
    "of one chunk": (1 << 20,),
    "odd": (999_983,),
    "last": (2 << 20,),
}


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loader read restores of any size, in chunks that cut regions."""
    monkeypatch.setattr(straight, "LEAST_BYTES", 0)
    monkeypatch.setattr(moving, "_CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(moving, "_FIRST_BYTES", 256 << 10)


def state() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {name: rng.integers(0, 256, shape, np.uint8) for name, shape in SHAPES.items()}


def stored(folder: Path, chunk_bytes: int, arrays: dict[str, Any]) -> Path:
    """Write a version by hand, and return its data file."""
    with Directory(folder, 0, chunk_bytes=chunk_bytes) as directory:
        regions = [Region(name, "|u1", each.shape, each.nbytes) for name, each in arrays.items()]
        with directory.begin("default", 1, regions) as writer:
            for region, each in zip(regions, arrays.values(), strict=True):
                writer.write(region, 0, each)
            writer.commit()
    return max(folder.rglob("*.data"), key=lambda path: path.stat().st_size)


def restored(folder: Path, only: list[str] | None = None) -> dict[str, Any]:
    found = {name: np.full(shape, 7, np.uint8) for name, shape in SHAPES.items()}
    with Checkpointer(folder, "cpu", 0, 0) as checkpointer:
        for name, each in found.items():
            checkpointer.protect(name, each)
        checkpointer.restart(1, only=only)
    return found


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("chunk_bytes", [4096, 64 << 10, 1 << 20, 4 << 20])
def test_every_byte_comes(tmp_path: Path, chunk_bytes: int, cold: bool) -> None:
    arrays = state()
    path = stored(tmp_path, chunk_bytes, arrays)
    (disk.drop_page_cache if cold else disk.fill_page_cache)(path)

    found = restored(tmp_path)

    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_only_what_is_named_is_filled(tmp_path: Path) -> None:
    arrays = state()
    stored(tmp_path, 1 << 20, arrays)

    found = restored(tmp_path, ["odd", "small"])

    assert all(np.array_equal(found[name], arrays[name]) for name in ("odd", "small"))
    assert all((found[name] == 7).all() for name in set(arrays) - {"odd", "small"})


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20, 4 << 20])
@pytest.mark.parametrize("name", ["large", "small", "of one chunk", "odd", "last"])
def test_a_byte_that_is_another_is_found(
    tmp_path: Path, name: str, chunk_bytes: int, cold: bool
) -> None:
    arrays = state()
    path = stored(tmp_path, chunk_bytes, arrays)
    with Directory(tmp_path, 0, writable=False) as directory, directory.open("default", 1) as one:
        begin = one.place(name)
    for at in (0, arrays[name].nbytes // 2, arrays[name].nbytes - 1):
        with path.open("r+b") as file:
            file.seek(begin + at)
            byte = file.read(1)
            file.seek(begin + at)
            file.write(bytes([byte[0] ^ 1]))
        (disk.drop_page_cache if cold else disk.fill_page_cache)(path)
        with pytest.raises(DamagedVersionError, match=f"of region '{name}'") as caught:
            restored(tmp_path)
        assert "the contents of those of" in str(caught.value.__notes__)
        with path.open("r+b") as file:
            file.seek(begin + at)
            file.write(byte)
    restored(tmp_path)


def test_a_file_that_was_cut_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, 1 << 20, state())

    def move(*arguments: Any, **options: Any) -> Any:
        with path.open("r+b") as file:
            file.truncate(1 << 20)
        return moving.move(*arguments, **options)

    monkeypatch.setattr(straight, "move", move)
    with pytest.raises(DamagedVersionError, match="cut short"):
        restored(tmp_path)


def test_a_version_that_is_removed_meanwhile_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = state()
    path = stored(tmp_path, 1 << 20, arrays)

    def move(*arguments: Any, **options: Any) -> Any:
        path.unlink()
        return moving.move(*arguments, **options)

    monkeypatch.setattr(straight, "move", move)
    found = restored(tmp_path)

    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_a_read_that_does_not_end_breaks_the_checkpointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, 1 << 20, state())

    def move(*_: Any, **__: Any) -> Any:
        raise StorageError(errno.ETIMEDOUT, "no bytes have arrived", "x")

    monkeypatch.setattr(straight, "move", move)
    target = np.zeros(SHAPES["large"], np.uint8)
    checkpointer = Checkpointer(tmp_path, "cpu", 0, 0)
    checkpointer.protect("large", target)
    with pytest.raises(StorageError, match="no bytes have arrived"):
        checkpointer.restart(1)
    with pytest.raises(CheckpointError, match="has failed"):
        checkpointer.checkpoint(2)
    with contextlib.suppress(CheckpointError):
        checkpointer.close(drain=False)
