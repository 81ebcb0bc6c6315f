"""A directory of checkpoints: what is committed is there, whole and checked; the rest never was."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from versions import CHUNK, bytes_of, check, files_of, regions_of, store

from flashwarp.checkpoint.directory import Directory, names
from flashwarp.checkpoint.region import Region
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CheckpointError,
    ClosedError,
    DamagedVersionError,
    DtypeError,
    ExistingVersionError,
    ForkError,
    LockedError,
    MissingFileError,
    MissingVersionError,
    PathError,
    ReadOnlyError,
)


@pytest.fixture(params=[None, False], ids=["default", "page-cache"])
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    with Directory(tmp_path / "d", chunk_bytes=CHUNK, o_direct=request.param) as made:
        yield made


# What is written is read.


def test_versions_are_read_as_they_were_written(directory: Directory) -> None:
    sizes = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7, 300_000)
    for version in (3, 1, 2):
        store(directory, version, *sizes)

    assert directory.versions("run") == [1, 2, 3]
    assert directory.latest("run") == 3
    for version in (1, 2, 3):
        with directory.open("run", version) as reader:
            assert reader.regions == tuple(regions_of(*sizes))
            check(reader, version)
            reader.verify()


def test_parts_of_a_region_are_read_at_any_offset(directory: Directory) -> None:
    nbytes = 5 * CHUNK + 7
    store(directory, 1, nbytes)
    wanted = bytes_of(1000, nbytes)

    with directory.open("run", 1) as reader:
        for begin in (0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 5, nbytes - 1, nbytes):
            for end in (begin, begin + 1, begin + CHUNK, 3 * CHUNK, nbytes):
                if begin <= end <= nbytes:
                    found = np.zeros(end - begin, np.uint8)
                    reader.read_into("r0", begin, found)
                    assert np.array_equal(found, wanted[begin:end]), (begin, end)


def test_a_region_is_written_in_pieces_of_any_order_by_several_threads(
    directory: Directory,
) -> None:
    nbytes = 40 * CHUNK + 123
    wanted = bytes_of(7, nbytes)
    chooser = np.random.default_rng(1)
    cuts = sorted({0, nbytes, *chooser.integers(0, nbytes, 60).tolist()})
    pieces = list(itertools.pairwise(cuts))
    chooser.shuffle(pieces)
    with directory.begin("run", 1, regions_of(nbytes)) as writer:

        def write(mine: list[Any]) -> None:
            for begin, end in mine:
                writer.write("r0", int(begin), wanted[begin:end])

        threads = [threading.Thread(target=write, args=(pieces[i::4],)) for i in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        writer.commit()

    with directory.open("run", 1) as reader:
        assert np.array_equal(reader.load("r0"), wanted)
        reader.verify()


def test_large_writes_and_reads_take_the_threads(tmp_path: Path) -> None:
    nbytes = (20 << 20) + 12345
    wanted = bytes_of(9, nbytes)
    with Directory(tmp_path) as directory:
        with directory.begin("run", 1, regions_of(nbytes)) as writer:
            writer.write("r0", 0, wanted)
            writer.commit()
        with directory.open("run", 1) as reader:
            assert np.array_equal(reader.load("r0"), wanted)
            found = np.zeros(nbytes - 99, np.uint8)
            reader.read_into("r0", 50, found)
            assert np.array_equal(found, wanted[50:-49])


def test_dtype_shape_name_and_metadata_come_back(directory: Directory) -> None:
    regions = [
        Region("a/β weights", "<f4", (2, 3), 24),
        Region("b", "bfloat16", (4,), 8),
        Region("c", np.dtype("int16"), (), 2),
    ]
    with directory.begin("run", 1, regions, metadata={"world": 4, "of": [1, "x"]}) as writer:
        writer.write("a/β weights", 0, np.arange(6, dtype="f4"))
        writer.write(regions[1], 0, bytes(8))
        writer.write("c", 0, np.int16(-2).tobytes())
        writer.commit()

    with directory.open("run", 1) as reader:
        assert reader.regions == tuple(regions)
        assert reader.metadata == {"world": 4, "of": [1, "x"]}
        assert reader.load("a/β weights").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert reader.load("c") == -2
        assert (reader.nbytes, reader.rank, reader.version) == (34, 0, 1)
        with pytest.raises(DtypeError, match="bfloat16"):
            reader.load("b")


def test_writer_says_which_way_it_takes(tmp_path: Path) -> None:
    for asked in (None, True, False):
        with Directory(tmp_path, o_direct=asked) as directory:
            try:
                writer = directory.begin("run", 1, [])
            except PathError as error:
                assert asked, error  # noqa: PT017 (a file system without O_DIRECT)
                continue
            assert writer.o_direct is asked or asked is None
            assert ("O_DIRECT" if asked is None else "was given") in writer.o_direct_why


def test_version_without_regions_is_a_version(directory: Directory) -> None:
    with directory.begin("run", 0, []) as writer:
        writer.commit()

    with directory.open("run", 0) as reader:
        reader.verify()
        assert reader.regions == ()


# Nothing is seen before the commit, and nothing is left of what was aborted.


def test_uncommitted_version_is_invisible_and_leaves_nothing(directory: Directory) -> None:
    with directory.begin("run", 1, regions_of(100)) as writer:
        writer.write("r0", 0, bytes(100))

        assert directory.versions("run") == []
        assert directory.latest("run") is None

    assert files_of(directory.path) == []
    with pytest.raises(ClosedError, match="aborted"):
        writer.write("r0", 0, bytes(1))


def test_commit_wants_every_byte(directory: Directory) -> None:
    with directory.begin("run", 1, regions_of(100, 0)) as writer:
        for begin, end, missing in ((50, 60, "[0, 50)"), (0, 50, "[60, 100)")):
            writer.write("r0", begin, bytes(end - begin))
            with pytest.raises(CheckpointError, match="never written") as raised:
                writer.commit()
            assert missing in str(raised.value)
        writer.write("r0", 60, bytes(40))
        writer.commit()

    assert directory.versions("run") == [1]


def test_a_byte_is_written_once_and_inside_of_its_region(directory: Directory) -> None:
    with directory.begin("run", 1, regions_of(100)) as writer:
        writer.write("r0", 20, bytes(20))
        for offset, nbytes in ((39, 1), (20, 1), (10, 11), (0, 100)):
            with pytest.raises(ArgumentError, match="written before"):
                writer.write("r0", offset, bytes(nbytes))
        for offset, nbytes in ((99, 2), (-1, 1), (101, 0)):
            with pytest.raises(ArgumentError, match="which has 100"):
                writer.write("r0", offset, bytes(nbytes))
        with pytest.raises(ArgumentError, match="no region 'r1'"):
            writer.write("r1", 0, b"x")


# A version written twice.


def test_second_version_of_a_number_is_refused(directory: Directory) -> None:
    store(directory, 5, 100)

    with pytest.raises(ExistingVersionError, match="replace=True"):
        directory.begin("run", 5, regions_of(10))
    with directory.begin("run", 6, regions_of(10)), pytest.raises(ExistingVersionError):
        directory.begin("run", 6, regions_of(10))
    with directory.open("run", 5) as reader:
        check(reader, 5)


def test_replaced_version_changes_at_once_and_open_readers_keep_the_old(
    directory: Directory,
) -> None:
    store(directory, 5, 100)
    with directory.open("run", 5) as old:
        with directory.begin("run", 5, regions_of(50), replace=True) as writer:
            writer.write("r0", 0, bytes(50))
            with directory.open("run", 5) as reader:
                check(reader, 5)
            writer.commit()
        with directory.open("run", 5) as new:
            assert new.load("r0").tolist() == [0] * 50

        check(old, 5)
    assert len(files_of(directory.path)) == 2


# Ranks and processes.


def test_any_rank_reads_another(tmp_path: Path) -> None:
    for rank in (0, 1, 70):
        with Directory(tmp_path, rank) as directory:
            store(directory, rank + 1, 100)

    with Directory(tmp_path, 1, writable=False) as directory:
        assert directory.ranks("run") == [0, 1, 70]
        assert directory.names() == ["run"]
        assert directory.versions("run") == [2]
        assert directory.versions("run", rank=70) == [71]
        with directory.open("run", 71, rank=70) as reader:
            check(reader, 71)


def test_rank_has_one_writer(tmp_path: Path) -> None:
    with Directory(tmp_path, 3), Directory(tmp_path, 4):
        with pytest.raises(LockedError, match="this process") as raised:
            Directory(tmp_path, 3)
        assert raised.value.holder == os.getpid()
        script = (
            "import sys\n"
            "from flashwarp.checkpoint.directory import Directory\n"
            "from flashwarp.errors import LockedError\n"
            "Directory(sys.argv[1], 3, writable=False)\n"
            "try: Directory(sys.argv[1], 3)\n"
            "except LockedError as error: print(error.holder)\n"
        )
        found = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == str(os.getpid())
    Directory(tmp_path, 3).close()


def test_lock_of_a_dead_process_is_free_and_its_leftovers_go(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from flashwarp.checkpoint.directory import Directory\n"
        "from flashwarp.checkpoint.region import Region\n"
        "d = Directory(sys.argv[1])\n"
        "w = d.begin('run', 1, [Region('r', '|u1', (10,), 10)])\n"
        "w.write('r', 0, bytes(10))\n"
        "os._exit(7)\n"
    )
    dead = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert dead.returncode == 7
    assert len(files_of(tmp_path)) == 1
    folder = tmp_path / "run" / "rank-00000"
    (folder / ".flashwarp-0123").write_text("a manifest that was not published")
    (folder / "README").write_text("somebody else's")

    with Directory(tmp_path) as directory:
        assert directory.versions("run") == []

    assert files_of(tmp_path) == ["README"]


def test_readers_remove_nothing(tmp_path: Path) -> None:
    with Directory(tmp_path) as directory, directory.begin("run", 1, regions_of(10)) as writer:
        with Directory(tmp_path, writable=False) as reader, pytest.raises(ReadOnlyError):
            reader.begin("run", 2, [])
        writer.write("r0", 0, bytes(10))
        writer.commit()
        assert directory.versions("run") == [1]


def test_forked_child_has_no_part_in_it(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    writer = directory.begin("run", 1, regions_of(10))
    child = os.fork()
    if child == 0:
        try:
            directory.versions("run")
        except ForkError:
            writer.abort()
            directory.close()
            os._exit(0)
        os._exit(1)

    assert os.waitpid(child, 0)[1] == 0
    writer.write("r0", 0, bytes(10))
    writer.commit()
    directory.close()
    Directory(tmp_path).close()


# Removal.


def test_discarded_version_is_gone_and_open_readers_keep_it(directory: Directory) -> None:
    for version in (1, 2):
        store(directory, version, 100)
    with directory.open("run", 2) as reader:
        directory.discard("run", 2)

        check(reader, 2)
    assert directory.latest("run") == 1
    assert len(files_of(directory.path)) == 2
    with pytest.raises(MissingVersionError, match="no version 2"):
        directory.open("run", 2)
    with pytest.raises(MissingVersionError):
        directory.discard("run", 2)


def test_a_discard_does_not_list_the_folder(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A listing takes 15 ms if there are 10,000 versions.
    for version in (1, 2, 3):
        store(directory, version, 100)
    monkeypatch.setattr(names, "listed", lambda folder: pytest.fail(str(folder)))

    assert directory.discard_all("run", [1, 2, 7]) == [1, 2]
    assert len(files_of(directory.path)) == 2


def test_a_discarded_version_whose_manifest_is_damaged_leaves_no_data(directory: Directory) -> None:
    for version in (1, 2):
        store(directory, version, 100)
    folder = directory.path / "run" / "rank-00000"
    (folder / f"{2:019d}.manifest").write_bytes(b"damaged")

    directory.discard("run", 2)

    assert len(files_of(directory.path)) == 2


# Bad input.


@pytest.mark.parametrize("name", ["", ".x", "a/b", "..", "a" * 101, "ä", 7, "a\n"])
def test_bad_names_are_refused(tmp_path: Path, name: Any) -> None:
    with Directory(tmp_path) as directory, pytest.raises(ArgumentError, match="name"):
        directory.begin(name, 1, [])


@pytest.mark.parametrize("version", [-1, 1 << 63, 1.0, "1", True, None])
def test_bad_versions_are_refused(tmp_path: Path, version: Any) -> None:
    with Directory(tmp_path) as directory, pytest.raises(ArgumentError, match="version"):
        directory.begin("run", version, [])


def test_bad_regions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="has 24 bytes, not 23"):
        Region("a", "<f4", (2, 3), 23)
    for bad in ("O", "<f4,i4", object, "", 3):
        with pytest.raises(DtypeError):
            Region("a", bad, (1,), 1)  # type: ignore[arg-type]
    for name in ("", "x" * 1025, "\ud800", 3):
        with pytest.raises(ArgumentError):
            Region(name, "|u1", (1,), 1)  # type: ignore[arg-type]
    with Directory(tmp_path) as directory:
        with pytest.raises(ArgumentError, match="one name"):
            directory.begin("run", 1, [*regions_of(1), *regions_of(2)])
        for metadata in ([1], {"a": float("nan")}, {"a": object()}, {"a": "x" * (1 << 20)}):
            with pytest.raises(ArgumentError, match="metadata"):
                directory.begin("run", 1, [], metadata=metadata)  # type: ignore[arg-type]
        assert files_of(tmp_path) == []


def test_bad_reads_are_refused(directory: Directory) -> None:
    store(directory, 1, 100)
    with directory.open("run", 1) as reader:
        for offset, nbytes in ((-1, 1), (100, 1), (0, 101)):
            with pytest.raises(BoundsError):
                reader.read_into("r0", offset, bytearray(nbytes))
        with pytest.raises(ArgumentError, match="no region 'x'"):
            reader.read_into("x", 0, bytearray(1))
        with pytest.raises(ArgumentError, match="read-only"):
            reader.read_into("r0", 0, bytes(1))
        with pytest.raises(ArgumentError, match="not contiguous"):
            reader.read_into("r0", 0, np.zeros((2, 8), np.uint8)[:, ::2])
    with pytest.raises(ClosedError):
        reader.read_into("r0", 0, bytearray(1))


def test_folder_that_is_missing_or_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        Directory(tmp_path / "no", writable=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(PathError):
        Directory(tmp_path / "file")
    with pytest.raises(ArgumentError, match="chunk_bytes"):
        Directory(tmp_path, chunk_bytes=5000)


def test_huge_version_finds_no_room_and_leaves_nothing(tmp_path: Path) -> None:
    nbytes = 1 << 44
    with Directory(tmp_path) as directory:
        with pytest.raises(ArgumentError, match="take larger chunks"):
            directory.begin("run", 1, [Region("r", "|u1", (1 << 60,), 1 << 60)])
        with pytest.raises(PathError) as raised:
            directory.begin("run", 1, [Region("r", "|u1", (nbytes,), nbytes)])
        assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
        assert files_of(tmp_path) == []
        store(directory, 1, 10)


# Damage.


def test_damaged_version_is_named_and_the_one_before_offered(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2, 3):
        store(directory, version, 3 * CHUNK)
    folder = directory.path / "run" / "rank-00000"
    data = next(folder.glob("*3-*.data"))
    changed = bytearray(data.read_bytes())
    changed[CHUNK + 5] ^= 4
    data.write_bytes(changed)

    assert directory.latest("run") == 3
    assert directory.latest("run", verify=True) == 2
    assert f"bytes [{CHUNK}, {2 * CHUNK})" in caplog.text
    with directory.open("run", 3) as reader:
        reader.read_into("r0", 0, bytearray(CHUNK))  # does not touch the damaged chunk
        for offset, nbytes in ((CHUNK - 1, 2), (CHUNK, CHUNK), (0, 3 * CHUNK)):
            with pytest.raises(DamagedVersionError, match="checksum"):
                reader.read_into("r0", offset, bytearray(nbytes))


def test_missing_short_and_long_data_is_damage(directory: Directory) -> None:
    for version in (1, 2, 3, 4):
        store(directory, version, 3 * CHUNK)
    folder = directory.path / "run" / "rank-00000"
    next(folder.glob("*2-*.data")).unlink()
    os.truncate(next(folder.glob("*3-*.data")), 2 * CHUNK)
    os.truncate(next(folder.glob("*4-*.data")), 4 * CHUNK)

    problems = {each.version: each.problem for each in directory.examine("run")}

    assert problems[1] == ""
    assert "missing" in problems[2]
    assert f"it has {2 * CHUNK} bytes, and {3 * CHUNK} were written" in problems[3]
    assert "it has" in problems[4]
    assert directory.latest("run") == 1


def test_a_version_that_is_written_again_has_another_identity(directory: Directory) -> None:
    store(directory, 1, 100)
    first = directory.identity("run", 1)
    directory.discard("run", 1)
    assert directory.identity("run", 1) is None
    store(directory, 1, 100)

    assert first != directory.identity("run", 1)


def test_a_damaged_version_is_replaced_by_a_copy_of_itself(
    directory: Directory, tmp_path: Path
) -> None:
    store(directory, 1, 100)
    with Directory(tmp_path / "copy") as copy:
        with directory.open("run", 1) as reader:
            copy.upload(reader)
        with copy.open("run", 1) as reader, directory.open("run", 1) as before:
            assert not directory.upload(reader)
            with directory.begin(
                "run", 1, reader.regions, replace=True, identity=reader.identity
            ) as writer:
                writer.write("r0", 0, reader.load("r0"))
                writer.commit()
            check(before, 1)

        with directory.open("run", 1) as reader:
            check(reader, 1)
            assert reader.identity == copy.identity("run", 1)
    assert len(files_of(directory.path)) == 2


def test_a_discard_beside_a_commit_of_its_version_leaves_it_whole_or_missing(
    directory: Directory,
) -> None:
    def write() -> None:
        while True:
            with contextlib.suppress(ExistingVersionError):
                store(directory, 5, 4000, replace=True)
                return

    for _ in range(100):
        write()
        thread = threading.Thread(target=directory.discard_all, args=("run", [5]))
        thread.start()
        write()
        thread.join(60)

        with contextlib.suppress(MissingVersionError), directory.open("run", 5) as reader:
            check(reader, 5)
        assert len(files_of(directory.path)) in (0, 2)
