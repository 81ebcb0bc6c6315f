"""Graph files that lie: each is refused by its name, before anything is read past its end."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashwarp import graphs, trace
from flashwarp.errors import (
    ExistingFileError,
    FileFormatError,
    FlashwarpError,
    MissingFileError,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ring of 64 vertices."""
    ring = np.arange(64)
    (tmp_path / "ring.txt").write_text(
        "".join(f"{a} {b} 1.5\n" for a, b in zip(ring, np.roll(ring, 1), strict=True))
    )
    graphs.load(tmp_path / "ring.txt", tmp_path / "ring", by_degree=True)
    return tmp_path / "ring"


def change(path: Path, place: int, value: int) -> None:
    values = np.load(path)
    values[place] = value
    np.save(path, values)


LIES: dict[str, Callable[[Path], object]] = {
    "an offset is negative": lambda f: change(f / "offsets.npy", 5, -1),
    "an offset is beyond the lists": lambda f: change(f / "offsets.npy", 5, 1 << 40),
    "the last offset is early": lambda f: change(f / "offsets.npy", -1, 127),
    "the last offset is late": lambda f: change(f / "offsets.npy", -1, 129),
    "offsets begin late": lambda f: change(f / "offsets.npy", 0, 1),
    "no offsets": lambda f: np.save(f / "offsets.npy", np.zeros(0, "i8")),
    "short offsets": lambda f: np.save(f / "offsets.npy", np.zeros(65, "i4")),
    "offsets of another byte order": lambda f: np.save(f / "offsets.npy", np.zeros(65, ">i8")),
    "offsets of two axes": lambda f: np.save(f / "offsets.npy", np.zeros((65, 1), "i8")),
    "lists cut short": lambda f: os.truncate(f / "neighbours.npy", 400),
    "lists of longer numbers": lambda f: np.save(f / "neighbours.npy", np.zeros(128, "i8")),
    "lists of two axes": lambda f: np.save(f / "neighbours.npy", np.zeros((2, 64), "u4")),
    "a neighbour is no vertex": lambda f: change(f / "neighbours.npy", 77, 64),
    "a neighbour is far away": lambda f: change(f / "neighbours.npy", 0, 0xFFFFFFFF),
    "weights of another type": lambda f: np.save(f / "weights.npy", np.zeros(128)),
    "a weight is missing": lambda f: np.save(f / "weights.npy", np.zeros(127, "f4")),
    "a label twice": lambda f: change(f / "labels.npy", 3, 4),
    "a label of nobody": lambda f: change(f / "labels.npy", 3, 64),
    "labels of longer numbers": lambda f: np.save(f / "labels.npy", np.arange(64)),
    "labels that are short": lambda f: np.save(f / "labels.npy", np.zeros(3, "u4")),
    "another version": lambda f: (f / "graph.json").write_text('{"version": 3}'),
    "a version of nonsense": lambda f: (f / "graph.json").write_bytes(bytes(range(256))),
    "a version nested deeply": lambda f: (f / "graph.json").write_text("[" * 4000),
    "a version without end": lambda f: replace_by_link(f / "graph.json", "/dev/zero"),
    "no version": lambda f: (f / "graph.json").unlink(),
    "offsets in a folder": lambda f: replace_by_folder(f / "offsets.npy"),
    "lists from a pipe": lambda f: replace_by_pipe(f / "neighbours.npy"),
    "offsets without end": lambda f: replace_by_link(f / "offsets.npy", "/dev/zero"),
}


def replace_by_link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("lie", LIES)
def test_folder_that_lies_does_not_load(folder: Path, lie: str) -> None:
    LIES[lie](folder)

    with pytest.raises(FileFormatError):
        graphs.load(folder, folder.parent / "other")


@pytest.mark.parametrize("use", ["in_memory", "matrix", "check"])
def test_whoever_reads_the_lists_checks_them(folder: Path, use: str) -> None:
    if use == "matrix":
        pytest.importorskip("scipy")
    change(folder / "neighbours.npy", 77, 64)
    graph = graphs.CsrGraph.open(folder)

    with pytest.raises(FileFormatError, match="entry 77 is 64, and there are 64 vertices"):
        getattr(graph, use)()


def test_numbering_anew_checks_the_lists(folder: Path) -> None:
    change(folder / "neighbours.npy", 77, 64)

    with pytest.raises(FileFormatError, match="entry 77 is 64"):
        graphs.by_degree(graphs.CsrGraph.open(folder), folder.parent / "anew")


def save_npz(path: Path, **changed: object) -> None:
    parts: dict[str, object] = {
        "format": b"csr",
        "shape": (3, 3),
        "data": np.ones(3),
        "indptr": np.array([0, 1, 2, 3]),
        "indices": np.array([1, 2, 0]),
    }
    np.savez(path, **(parts | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": 3},
        {"shape": (3, 4)},
        {"shape": (0, 0)},
        {"format": "bsr"},
        {"indptr": np.array([0, 2, 1, 3])},
        {"indptr": np.array([0, 1, 2, 2])},
        {"data": np.zeros(2)},
        {"data": np.ones(3, complex)},
        {"data": np.array([None] * 3)},
        {"indices": np.array([1, 2, 3])},
        {"indices": np.array([1, 2, -1])},
        {"indices": np.ones(3)},
        {"shape": (3.5, 3.5)},
        {"shape": (np.nan, np.nan)},
        {"indptr": np.array(0)},
        {"indptr": np.array([0, 1 << 63, 2, 3], "u8")},
        {"indices": np.array(1)},
        {"indices": np.ones((3, 2), int)},
        {"data": np.array(1.0)},
        {"data": np.ones((3, 2))},
        {"data": np.array(["a", "b", "c"])},
        {"format": np.array([b"csr", b"csr"])},
        {"format": 7},
    ],
    ids=lambda changed: " ".join(f"{k}={v!r}"[:40] for k, v in changed.items()),
)
def test_archive_that_lies(tmp_path: Path, changed: dict[str, object]) -> None:
    save_npz(tmp_path / "m.npz", **changed)

    with pytest.raises(FileFormatError):
        graphs.load(tmp_path / "m.npz", tmp_path / "graph")


def test_archive_of_unsigned_row_starts_loads(tmp_path: Path) -> None:
    save_npz(tmp_path / "m.npz", indptr=np.array([0, 1, 2, 3], "u8"))

    found = graphs.load(tmp_path / "m.npz", tmp_path / "graph", symmetric=True)

    assert found.entries == 6


def test_archive_that_claims_all_memory(tmp_path: Path) -> None:
    save_npz(tmp_path / "whole.npz")
    claims = b"\x93NUMPY\x01\x00\x76\x00" + (
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (1125899906842624,), }".ljust(117)
        + b"\n"
    )
    with (
        zipfile.ZipFile(tmp_path / "whole.npz") as whole,
        zipfile.ZipFile(tmp_path / "m.npz", "w") as lying,
    ):
        for name in whole.namelist():
            lying.writestr(name, claims if name == "data.npy" else whole.read(name))

    with pytest.raises(FileFormatError):
        graphs.load(tmp_path / "m.npz", tmp_path / "graph")


def test_one_far_vertex_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flashwarp.graphs.build.CpuDevice.memory_info",
        lambda _: type("Info", (), {"free_bytes": 1 << 34}),
    )
    (tmp_path / "far.txt").write_text(f"0 {(1 << 32) - 1}\n")

    with pytest.raises(FileFormatError, match="4294967296 vertices need 68719476752 bytes"):
        graphs.load(tmp_path / "far.txt", tmp_path / "graph")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["pipe.txt", "pipe.npz", "pipe.mtx", "pipe.txt.gz"])
def test_pipe_is_no_graph(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)

    with pytest.raises(FileFormatError, match="neither a regular file nor a folder"):
        graphs.load(tmp_path / name, tmp_path / "graph")


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="kron:SCALE"):
        graphs.load(tmp_path / "absent", tmp_path / "graph")


# Files of others, under names that a graph has.


@pytest.mark.parametrize("by_degree", [False, True])
@pytest.mark.parametrize("names", [["labels.npy"], ["offsets.npy", "weights.npy"], ["graph.json"]])
def test_files_that_are_no_graph_stay(tmp_path: Path, names: list[str], by_degree: bool) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"mine")

    with pytest.raises(ExistingFileError, match=", ".join(names)) as caught:
        graphs.load("kron:4", tmp_path, by_degree=by_degree)

    assert "name another folder, or remove these files" in str(caught.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == names
    assert {(tmp_path / name).read_bytes() for name in names} == {b"mine"}


def test_weights_of_something_else_beside_a_graph_stay(tmp_path: Path) -> None:
    graphs.load("kron:4", tmp_path)
    np.save(tmp_path / "weights.npy", np.ones(7, "f4"))

    with pytest.raises(ExistingFileError, match="not one weight for each neighbour"):
        graphs.load("kron:5", tmp_path)

    assert len(np.load(tmp_path / "weights.npy")) == 7
    assert len(np.load(tmp_path / "offsets.npy")) == 17


def test_a_graph_replaces_a_graph_beside_other_files(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")

    graphs.load("kron:4", folder)

    assert graphs.CsrGraph.open(folder).labels is None
    assert (folder / "notes.txt").read_text() == "mine"


# Paths.


def test_a_path_is_what_it_is_elsewhere(folder: Path) -> None:
    ring, again = os.fsencode(folder), os.fsencode(folder.parent / "again")

    assert graphs.CsrGraph.open(ring).vertices == 64
    assert graphs.load(os.fsencode(folder.parent / "ring.txt"), again).vertices == 64


@pytest.mark.parametrize("given", [None, 7, "a\0b", "x" * 40_000_000, b"\x93" * 40_000_000])
def test_what_is_no_path_is_refused_in_few_words(tmp_path: Path, given: object) -> None:
    for attempt in (
        lambda: graphs.load("kron:4", given),  # type: ignore[arg-type]
        lambda: graphs.load(given, tmp_path),
        lambda: graphs.CsrGraph.open(given),  # type: ignore[arg-type]
        lambda: trace.Trace.load(given),  # type: ignore[arg-type]
    ):
        with pytest.raises(FlashwarpError) as caught:
            attempt()
        assert len(str(caught.value)) < 1000
