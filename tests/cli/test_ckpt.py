"""`flashwarp ckpt` lists, verifies, shows, prunes and copies what programs have committed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashwarp import Checkpointer
from flashwarp.checkpoint.directory import Directory
from flashwarp.checkpoint.region import Region
from flashwarp.cli import main as cli
from flashwarp.errors import LockedError, MissingFileError, MissingVersionError, PathError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for rank in (0, 1):
        with Directory(tmp_path / "run", rank) as directory:
            for version in range(1, 5):
                region = Region("weights", "<f4", (30, 10), 1200)
                with directory.begin("train", version, [region], metadata={"lr": 0.5}) as writer:
                    writer.write(region, 0, np.full((30, 10), version, "f4"))
                    writer.commit()
    return tmp_path / "run"


def damage(place: Path, version: int, rank: int = 0) -> None:
    file = next(place.glob(f"train/rank-{rank:05d}/*{version}-*.data"))
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)


def run(*arguments: object) -> int:
    """Run the command, and return its exit code."""
    try:
        cli.run(["ckpt", *map(str, arguments)])
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


def test_list_shows_every_version(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", place) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all(line.endswith("complete") for line in lines)

    assert run("list", place, "train", "--rank", 1) == 0
    assert [line.split()[4] for line in capsys.readouterr().out.splitlines()] == list("4321")


def test_verify_names_the_damage_and_ends_with_1(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", place) == 0
    damage(place, 3)
    capsys.readouterr()

    assert run("verify", place) == 1
    shown = capsys.readouterr()
    assert shown.out.count("verified") == 7
    assert "bytes [0, 1200) of region 'weights'" in shown.out
    assert "1 of 8 versions are damaged" in shown.err
    assert run("verify", place, "--version", 3, "--rank", 0) == 1
    assert run("verify", place, "--version", 3, "--rank", 1) == 0
    assert run("list", place) == 0


def test_show_describes_regions(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", place, "train", 2, "--rank", 1) == 0

    shown = capsys.readouterr().out
    assert "train, version 2, rank 1" in shown
    assert "weights  <f4 30x10  1,200 bytes from byte 0" in shown
    assert '{"lr": 0.5}' in shown


def test_prune_removes_what_the_dry_run_lists(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("prune", place, "train", "--keep-last", 1, "--keep-every", 2)
    assert run(*arguments, "--dry-run") == 0
    assert capsys.readouterr().out.count("would be removed: 1, 3; 2 left") == 2

    assert run(*arguments) == 0
    assert capsys.readouterr().out.count("removed: 1, 3; 2 left") == 2
    with Directory(place, writable=False) as directory:
        assert directory.versions("train") == [2, 4]


def test_prune_leaves_alone_what_a_process_writes(place: Path) -> None:
    with Directory(place, 1), pytest.raises(LockedError):
        run("prune", place, "train", "--keep-last", 1, "--rank", 1)


def test_copy_takes_all_that_is_whole(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(place, 3, rank=1)

    assert run("copy", place, tmp_path / "copy") == 1
    shown = capsys.readouterr()
    assert "4 versions copied" in shown.out
    assert "3 versions copied" in shown.out
    assert "version 3 was not copied" in shown.err
    assert run("verify", tmp_path / "copy") == 0
    assert run("copy", place, tmp_path / "copy", "train", "--version", 2) == 0


def test_copy_to_a_remote_store_and_back(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    remote = f"file://{tmp_path}/remote"

    assert run("copy", place, remote) == 0
    assert run("verify", remote) == 0
    assert run("prune", remote, "train", "--keep-last", 2) == 0
    assert run("copy", remote, tmp_path / "back", "train") == 0
    with Directory(tmp_path / "back", 1, writable=False) as directory:
        assert directory.versions("train") == [3, 4]


def test_what_is_missing_is_named(place: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        run("list", tmp_path / "absent")
    for arguments in (
        ("list", place, "other"),
        ("list", place, "--rank", 7),
        ("verify", place, "--version", 9),
        ("show", place, "train", 9),
        ("copy", place, tmp_path / "copy", "--version", 9),
    ):
        with pytest.raises(MissingVersionError):
            run(*arguments)
    assert run("prune", place, "train", "--keep-last", 0) == 2
    assert run("show", place, "train", "x") == 2


def test_the_name_that_checkpointers_have_by_default_need_not_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = np.arange(3)
    with Checkpointer(tmp_path, device="cpu") as checkpointer:
        checkpointer.protect("state", state)
        for version in (7, 8, 9):
            checkpointer.checkpoint(version).result(10)

    assert run("show", tmp_path, 7) == 0
    assert "state" in capsys.readouterr().out
    assert run("prune", tmp_path, "--keep-last", 1) == 0
    assert "removed: 7, 8; 1 left" in capsys.readouterr().out
    assert run("prune", tmp_path, "default", "--keep-last", 1) == 0


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))

    for command in (("list",), ("verify",), ("prune", "--keep-last", 1)):
        with pytest.raises(PathError, match=r"is a file: give the folder.*/file"):
            run(command[0], tmp_path / "file", *command[1:])
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PathError, match=r"is a file, and a folder is wanted.*/file"):
            Checkpointer(path, device="cpu")
