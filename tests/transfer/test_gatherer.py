"""Pieces gathered and scattered by host threads: every byte, every bound, every failure."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwarp import _native
from flashwarp.errors import ArgumentError, BoundsError, ClosedError, StorageError
from flashwarp.transfer import Gatherer


@pytest.fixture(scope="module")
def gatherer() -> Iterator[Gatherer]:
    with Gatherer(threads=3) as made:
        yield made


def data(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def expected(source: np.ndarray, offsets: np.ndarray, piece: int) -> np.ndarray:
    return source[offsets[:, None] + np.arange(piece)].reshape(-1)


drawn = given(piece=st.integers(1, 9000), count=st.integers(0, 700), seed=st.integers(0, 1 << 30))


@settings(max_examples=60, deadline=None)
@drawn
def test_every_piece_arrives_in_its_place(piece: int, count: int, seed: int) -> None:
    source = data(piece + 100_000, seed)
    offsets = np.random.default_rng(seed).integers(0, source.size - piece + 1, count)
    buffer = np.zeros(count * piece, np.uint8)

    with Gatherer(threads=2) as each:
        each.gather(buffer, source, offsets, piece)

    np.testing.assert_array_equal(buffer, expected(source, offsets, piece))


@pytest.mark.parametrize("piece", [1, 4096, (1 << 20) + 3])
def test_checksums_are_those_of_the_pieces(gatherer: Gatherer, piece: int) -> None:
    source = data(5 * piece)
    offsets = np.array([3, 0, 2]) * piece
    buffer, sums = np.zeros(3 * piece, np.uint8), np.zeros(4, np.uint32)

    gatherer.gather(buffer, source, offsets, piece, sums)

    np.testing.assert_array_equal(buffer, expected(source, offsets, piece))
    assert [_native.crc32c(buffer[k * piece :][:piece]) for k in range(3)] == sums[:3].tolist()
    assert sums[3] == 0


@pytest.mark.parametrize("sums", [np.zeros(2, np.uint32), np.zeros(3, np.int32)])
def test_checksums_without_room_are_refused(gatherer: Gatherer, sums: np.ndarray) -> None:
    with pytest.raises(BoundsError, match="give an array of uint32 with one for each"):
        gatherer.gather(np.zeros(12, np.uint8), data(40), [20, 0, 36], 4, sums)


@settings(max_examples=30, deadline=None)
@drawn
def test_a_file_gives_the_same(piece: int, count: int, seed: int) -> None:
    source = data(piece + 100_000, seed)
    random = np.random.default_rng(seed)
    offsets = random.integers(0, source.size - piece + 1, count)
    # Neighbours, which become one read.
    offsets[: count // 2] = np.arange(count // 2) * piece % (source.size - piece + 1)
    buffer = np.zeros(count * piece, np.uint8)

    fd = os.memfd_create("pieces")
    try:
        os.write(fd, source.tobytes())
        with Gatherer(threads=2) as each:
            each.read(buffer, fd, offsets, piece)
    finally:
        os.close(fd)

    np.testing.assert_array_equal(buffer, expected(source, offsets, piece))


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_both_engines_read_files(engine: str, tmp_path: Path, monkeypatch: object) -> None:
    assert isinstance(monkeypatch, pytest.MonkeyPatch)
    if engine == "threads":
        monkeypatch.setenv("FLASHWARP_IO_ENGINE", "threads")
    source, offsets = data(1 << 20), np.arange(256)[::-1] * 4096
    (tmp_path / "file").write_bytes(source.tobytes())
    buffer = np.zeros_like(source)

    with Gatherer(threads=2) as each, (tmp_path / "file").open("rb") as file:
        if engine == "threads":
            assert each.file_engine == "thread-pool: FLASHWARP_IO_ENGINE=threads"
        each.read(buffer, file.fileno(), offsets, 4096)

    np.testing.assert_array_equal(buffer, expected(source, offsets, 4096))


def test_a_file_that_ends_early_names_the_piece(gatherer: Gatherer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))

    with (
        (tmp_path / "file").open("rb") as file,
        pytest.raises(StorageError, match="piece 1 at byte 8192: the file ends") as caught,
    ):
        gatherer.read(np.zeros(3 * 4096, np.uint8), file.fileno(), [0, 8192, 1 << 40], 4096)

    assert caught.value.errno == errno.ENODATA
    assert caught.value.offset == 8192


def test_a_descriptor_that_is_not_open_names_the_error(gatherer: Gatherer) -> None:
    # Another thread might open one with the number of a file that was closed.
    never_open = 2**31 - 1

    with pytest.raises(StorageError, match="Bad file descriptor"):
        gatherer.read(np.zeros(4096, np.uint8), never_open, [0], 4096)


def test_a_page_that_is_gone_names_the_piece(gatherer: Gatherer, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(16 * 4096))
    with path.open("r+b") as file:
        source = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    os.truncate(path, 8 * 4096)

    with pytest.raises(StorageError, match="piece 2 at byte 40960: a page of the mapped file"):
        gatherer.gather(np.zeros(3 * 4096, np.uint8), source, [0, 4096, 10 * 4096], 4096)


@pytest.mark.parametrize(
    ("offsets", "error", "match"),
    [
        ([0, 97], BoundsError, "piece 1 begins at byte 97"),
        ([-1], BoundsError, "-1 is negative"),
        ([0.5], ArgumentError, "dtype float64"),
        ([[0]], ArgumentError, "shape .1, 1."),
        ([0] * 9, BoundsError, "9 pieces of 4 bytes do not fit"),
        (np.array([1 << 63], np.uint64), BoundsError, "beyond any file"),
    ],
)
def test_what_is_out_of_bounds_is_refused_before_anything_is_copied(
    gatherer: Gatherer, offsets: object, error: type, match: str
) -> None:
    buffer = np.full(32, 7, np.uint8)

    with pytest.raises(error, match=match):
        gatherer.gather(buffer, data(100), offsets, 4)  # type: ignore[arg-type]

    assert (buffer == 7).all()


def test_arrays_are_checked(gatherer: Gatherer) -> None:
    frozen = data(8)
    frozen.flags.writeable = False

    with pytest.raises(ArgumentError, match="buffer is read-only"):
        gatherer.gather(frozen, data(8), [0], 4)
    with pytest.raises(ArgumentError, match="source is not contiguous"):
        gatherer.gather(data(8), data(16)[::2], [0], 4)
    with pytest.raises(ArgumentError, match="buffer is a list, not a numpy array"):
        gatherer.gather([0], data(8), [0], 4)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="piece_bytes=0"):
        gatherer.gather(data(8), data(8), [0], 0)


def test_threads_share_the_pool(gatherer: Gatherer) -> None:
    source, wrong = data(1 << 22), []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        buffer = np.zeros(4096 * 500, np.uint8)
        for _ in range(20):
            offsets = random.integers(0, source.size - 4096, 500)
            gatherer.gather(buffer, source, offsets, 4096)
            if not (buffer == expected(source, offsets, 4096)).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_after_close_it_refuses() -> None:
    gatherer = Gatherer(threads=2)
    gatherer.close()
    gatherer.close()

    with pytest.raises(ClosedError, match="gatherer was closed"):
        gatherer.gather(data(8), data(8), [0], 4)
