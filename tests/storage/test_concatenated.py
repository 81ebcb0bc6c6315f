"""Parts of files one behind another as one array: what is read, written, refused and pickled."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, FileFormatError, LockedError, StorageError
from flashwarp.storage import Concatenated, Memory

WIDTH = 40  # bytes of a row: no power of two, so rows straddle lines and parts lines


@pytest.fixture
def content():
    return np.random.default_rng(6).integers(0, 256, (900, WIDTH), np.uint8)


def parts_of(folder, content, cuts=(1, 300, 437), holes=(24, 0, 7, 1)):
    """Write the rows between cuts into files, each behind a hole; return what names them."""
    members = []
    for i, (rows, hole) in enumerate(zip(np.split(content, cuts), holes, strict=True)):
        path = folder / f"part{i}"
        path.write_bytes(b"\xee" * hole + rows.tobytes() + b"\xee" * 5)
        members.append((path, hole, rows.nbytes))
    return members


@pytest.mark.parametrize("o_direct", [None, False, True])
def test_rows_of_all_parts_are_one_array(tmp_path, content, o_direct):
    storage = Concatenated(parts_of(tmp_path, content))
    ids = np.random.default_rng(1).integers(-900, 900, 5000)

    with fw.open(storage, dtype="u1", shape=content.shape, device="cpu", line=512,
                 cache="16 KiB", o_direct=o_direct) as x:  # fmt: skip
        assert np.array_equal(x.gather(ids), content[ids])
        assert np.array_equal(x[:], content)
        assert "one controller for all 4 members" in str(x.explain())


@pytest.mark.parametrize("line", [512, 4096])
def test_memory_in_parts_is_read_in_place(content, line):
    """Lines that lie in one part, in two, and in many that are shorter than they are."""
    flat = content.reshape(-1)
    cuts = [8, 24, 512, 1000, 1008, 1016, 1024, 6000, 6001, 20_000]
    parts = [Memory(part.copy(), writable=False) for part in np.split(flat, cuts)]
    ids = np.random.default_rng(1).integers(-900, 900, 5000)

    with fw.open(Concatenated(parts), dtype="u1", shape=content.shape, device="cpu", line=line,
                 cache="16 KiB") as x:  # fmt: skip
        assert x.service.route == "in_place"
        assert x.in_place is None
        assert np.array_equal(x.gather(ids), content[ids])
        assert np.array_equal(x[:], content)
        x.prefetch(slice(0, 100))
        assert np.array_equal(x[:100], content[:100])
        assert x.stats.misses > 0
        assert x.stats.commands == 0


@pytest.mark.parametrize("how", ["written", "commands"])
def test_memory_in_parts_that_needs_commands_is_not_read_in_place(content, how):
    parts = [Memory(half.reshape(-1).copy()) for half in np.split(content, 2)]
    mode = "r+" if how == "written" else "r"
    settings = fw.nvme.SoftwareController(commands=how == "commands")

    with fw.open(Concatenated(parts), mode, "u1", content.shape, device="cpu", line=512,
                 cache="16 KiB", controller=settings) as x:  # fmt: skip
        assert x.service.route == "direct"
        assert np.array_equal(x[:], content)
        assert x.stats.commands > 0


def test_commands_in_parts_in_place_are_refused(content):
    parts = [Memory(half.reshape(-1).copy(), writable=False) for half in np.split(content, 2)]
    settings = fw.nvme.SoftwareController(commands=True, route="in_place")

    with pytest.raises(ArgumentError, match="one address for all of its members"):
        fw.open(Concatenated(parts), dtype="u1", device="cpu", controller=settings)


def test_stores_go_to_their_parts_and_nowhere_else(tmp_path, content):
    members = parts_of(tmp_path, content)
    with fw.open(Concatenated(members), "r+", "u1", content.shape, device="cpu") as x:
        x[295:440] = 9

    content[295:440] = 9
    held = [path.read_bytes() for path, _, _ in members]
    assert b"".join(h[o : o + n] for h, (_, o, n) in zip(held, members, strict=True)) == (
        content.tobytes()
    )
    assert all(h[-5:] == b"\xee" * 5 for h in held)


def test_ranges_of_one_file_in_another_order(tmp_path, content):
    content.tofile(tmp_path / "f")
    half = content.nbytes // 2
    storage = Concatenated([(tmp_path / "f", half, half), (tmp_path / "f", 0, half)])

    with fw.open(storage, dtype="u1", shape=content.shape, device="cpu") as x:
        assert np.array_equal(x[:], np.roll(content, 450, 0))


def test_one_file_may_not_be_written_in_two_places(tmp_path, content):
    content.tofile(tmp_path / "f")

    with pytest.raises(LockedError):
        fw.open(
            Concatenated([(tmp_path / "f", 0, 40), (tmp_path / "f", 40, 40)]),
            "r+", "u1", device="cpu",
        )  # fmt: skip


def test_members_may_be_whole_files_and_storages(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")

    with fw.open(Concatenated([tmp_path / "a", tmp_path / "a"]), dtype="u1", device="cpu") as x:
        assert bytes(x[:]) == b"abcabc"
    with fw.open(Concatenated([Memory(b"xy"), Memory(b"z")]), dtype="u1", device="cpu") as x:
        assert bytes(x[:]) == b"xyz"


def test_an_array_of_relative_paths_can_be_pickled(tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    members = [(p.name, o, n) for p, o, n in parts_of(tmp_path, content)]
    with fw.open(Concatenated(members), dtype="u1", shape=content.shape, device="cpu") as x:
        text = pickle.dumps(x)

    monkeypatch.chdir("/")
    with pickle.loads(text) as again:
        assert np.array_equal(again[:], content)


def test_a_part_that_is_cut_is_named(tmp_path, content):
    members = parts_of(tmp_path, content)
    with fw.open(
        Concatenated(members), dtype="u1", shape=content.shape, device="cpu", line=512
    ) as x:
        os.truncate(members[2][0], 10)
        assert np.array_equal(x[:280], content[:280])  # the lines before
        with pytest.raises(StorageError, match="part2"):
            x[300:437]


@pytest.mark.parametrize(
    "member",
    [("f", 0), ("f", 0, 0), ("f", -1, 4), ("f", 0, -4), ("f", 0, 4.0), (7, 0, 4), ("", 0, 4), 7],
)
def test_what_is_no_part_is_refused(member):
    with pytest.raises(ArgumentError):
        Concatenated([member])


def test_what_cannot_be_opened_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"12345678")
    (tmp_path / "empty").touch()
    np.save(tmp_path / "x.npy", np.zeros(4))

    def opened(member, **options):
        return fw.open(Concatenated([member]), device="cpu", **options)

    with pytest.raises(FileFormatError, match="needs 9 bytes"):
        opened((tmp_path / "f", 0, 9), dtype="u1")
    with pytest.raises(ArgumentError, match="beyond the end"):
        opened((tmp_path / "f", 9, 1), dtype="u1")
    with pytest.raises(ArgumentError, match="give the dtype"):
        opened((tmp_path / "f", 0, 8))
    with pytest.raises(ArgumentError, match="needs 16 bytes"):
        opened((tmp_path / "f", 0, 8), dtype="u1", shape=(2, 8))
    with pytest.raises(ArgumentError, match="offset= is not for"):
        opened((tmp_path / "f", 0, 8), dtype="u1", offset=4)
    with pytest.raises(ArgumentError, match="empty"):
        opened(tmp_path / "empty", dtype="u1")
    with pytest.raises(FileFormatError, match="npy"):
        opened(tmp_path / "x.npy", dtype="f8")
