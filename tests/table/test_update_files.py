"""Files of tables: made, recorded, copied and restored."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import errors
from flashwarp.table import checkpoint
from flashwarp.table.checkpoint import Table, restore_table, save
from flashwarp.table.making import create_table
from flashwarp.table.record import Record, record_path


@pytest.mark.parametrize(
    ("optimizer", "width"), [("sgd", 12), ("adagrad", 20), ("rowwise_adagrad", 12), ("adam", 32)]
)
def test_rows_hold_weights_then_state(tmp_path, optimizer, width):
    """Rows of ten weights, in multiples of 16 bytes."""
    path = tmp_path / "t.npy"
    create_table(path, 1000, 10, optimizer=optimizer, init="uniform", scale=0.5, state=0.25)

    table = np.load(path)
    state = {"sgd": 0, "adagrad": 10, "rowwise_adagrad": 1, "adam": 20}[optimizer]
    assert table.shape == (1000, width)
    assert 0.49 < np.abs(table[:, :10]).max() < 0.5
    assert abs(table[:, :10].mean()) < 0.02
    assert (table[:, 10 : 10 + state] == 0.25).all()
    assert (table[:, 10 + state :] == 0).all()
    assert Record.read(path) == Record(optimizer, 1000, 10, width, 0, False)


def test_blocks_are_drawn_by_threads_and_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("flashwarp.table.making._BLOCK_BYTES", 4096)
    tables = []
    for threads, seed in ((1, 5), (4, 5), (4, 6)):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        create_table(tmp_path / "t.npy", 5000, 7, seed=seed, overwrite=True)
        tables.append(np.load(tmp_path / "t.npy")[:, :7])

    assert (tables[0] == tables[1]).all()
    assert (tables[0] != tables[2]).mean() > 0.99
    assert abs(tables[0].std() - 1) < 0.02
    assert len(np.unique(tables[0])) > 30_000


def test_weights_come_from_a_callable(tmp_path, monkeypatch):
    monkeypatch.setattr("flashwarp.table.making._BLOCK_BYTES", 4096)
    weights = np.random.default_rng(1).standard_normal((3000, 5), np.float32)
    create_table(tmp_path / "t.npy", 3000, 5, init=lambda first, n: weights[first : first + n])
    np.testing.assert_array_equal(np.load(tmp_path / "t.npy")[:, :5], weights)

    with pytest.raises(
        errors.ArgumentError, match=r"init gave shape \(7, 5\) of float32 for rows 0 to 3"
    ):
        create_table(tmp_path / "u.npy", 3, 5, init=lambda first, n: weights[:7])
    assert sorted(os.listdir(tmp_path)) == ["t.npy", "t.npy.training.json"]


def test_zeros_take_no_room(tmp_path):
    create_table(tmp_path / "t.npy", 1 << 22, 64, init="zeros")

    found = os.stat(tmp_path / "t.npy")
    assert found.st_size > 1 << 30
    assert found.st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0}, {"dim": 0}, {"dim": 2.5}, {"rows": True}, {"optimizer": "adamx"},
        {"init": "ones"}, {"seed": -1},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_are_refused(tmp_path, wrong):
    with pytest.raises(errors.ArgumentError):
        create_table(tmp_path / "t.npy", **{"rows": 10, "dim": 4, **wrong})
    assert os.listdir(tmp_path) == []


def test_a_table_in_training_is_not_replaced(tmp_path):
    path = tmp_path / "t.npy"
    create_table(path, 10, 4)
    with pytest.raises(errors.ExistingFileError):
        create_table(path, 10, 4)
    with fw.open(path, "r+", device="cpu"), pytest.raises(errors.LockedError):
        create_table(path, 10, 4, overwrite=True)
    create_table(path, 20, 4, overwrite=True)
    assert Record.read(path).rows == 20


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": 2}', "\xff", '{"format": 1, "a": 1}']
)
def test_damaged_records_are_refused(tmp_path, text):
    path = tmp_path / "t.npy"
    create_table(path, 10, 4)
    with open(record_path(path), "w", encoding="latin-1") as file:
        file.write(text)
    with pytest.raises(errors.FileFormatError, match="no record of a table"):
        Record.read(path)


def test_record_with_a_number_for_a_name_is_refused(tmp_path):
    path = tmp_path / "t.npy"
    create_table(path, 10, 4)
    found = json.loads(Path(record_path(path)).read_text())
    for name, value in {"step": "7", "changing": 1, "optimizer": 3}.items():
        with open(record_path(path), "w") as file:
            json.dump({**found, name: value}, file)
        with pytest.raises(errors.FileFormatError, match=name):
            Record.read(path)


@pytest.mark.parametrize("shares", [True, False])
def test_files_are_copied_whole(tmp_path, monkeypatch, shares):
    """With shared blocks, if the file system has them, and without; holes stay holes."""
    if not shares:
        refuse = lambda *_: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, ""))  # noqa: E731
        monkeypatch.setattr(fcntl, "ioctl", refuse)
    monkeypatch.setattr(checkpoint, "_PIECE_BYTES", 5000)
    content = np.random.default_rng(1).bytes(100_001)
    with open(tmp_path / "a", "wb") as file:
        file.write(content)
        file.seek(64 << 20)
        file.write(b"end")
        file.truncate(70 << 20)

    shared = checkpoint.copy_file(tmp_path / "a", tmp_path / "b")

    assert shares or not shared
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert os.stat(tmp_path / "b").st_blocks * 512 < 1 << 20


def test_checkpoint_appears_whole_or_not_at_all(tmp_path):
    paths = [tmp_path / name for name in ("a.npy", "b.npy")]
    for path in paths:
        create_table(path, 50, 4)
    tables = [Table(str(path), Record("rowwise_adagrad", 50, 4, 8, 9)) for path in paths]

    def fail(path):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(errors.PathError, match="full"):
        save(tmp_path / "c", 9, tables, fail)
    assert os.listdir(tmp_path / "c") == []

    made = save(tmp_path / "c", 9, tables)
    assert made.name == "step-000000000009"
    names = ["0-a.npy", "1-b.npy"]
    assert sorted(os.listdir(made)) == sorted(
        [*names, *(f"{name}.training.json" for name in names), "checkpoint.json"]
    )
    for name, path in zip(names, paths, strict=True):
        assert (made / name).read_bytes() == path.read_bytes()
    with pytest.raises(errors.ExistingFileError):
        save(tmp_path / "c", 9, tables)


def test_restored_table_has_its_record(tmp_path):
    create_table(tmp_path / "t.npy", 50, 4)
    made = save(tmp_path / "c", 9, [Table(str(tmp_path / "t.npy"),
                                          Record("rowwise_adagrad", 50, 4, 8, 9))])  # fmt: skip
    kept = (made / "0-t.npy").read_bytes()
    with fw.open(tmp_path / "t.npy", "r+", device="cpu") as x:
        x[...] = 5
        with pytest.raises(errors.LockedError):
            restore_table(made / "0-t.npy", tmp_path / "t.npy", overwrite=True)
    with pytest.raises(errors.ExistingFileError):
        restore_table(made / "0-t.npy", tmp_path / "t.npy")

    assert restore_table(made / "0-t.npy", tmp_path / "t.npy", overwrite=True) == 9
    assert (tmp_path / "t.npy").read_bytes() == kept
    assert Record.read(tmp_path / "t.npy").step == 9


def test_only_tables_of_checkpoints_are_restored(tmp_path):
    np.save(tmp_path / "n.npy", np.zeros(3))
    with pytest.raises(errors.CheckpointError, match="no record"):
        restore_table(tmp_path / "n.npy", tmp_path / "t.npy")
    create_table(tmp_path / "u.npy", 50, 4)
    Record("rowwise_adagrad", 50, 4, 8, 9, changing=True).write(tmp_path / "u.npy")
    with pytest.raises(errors.CheckpointError, match="trained"):
        restore_table(tmp_path / "u.npy", tmp_path / "t.npy")


@pytest.mark.parametrize("name", ["scale", "state"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1 percent", None])
def test_numbers_that_are_not_finite_are_refused(tmp_path, name, value):
    with pytest.raises(errors.ArgumentError, match=f"{name}="):
        create_table(tmp_path / "t.npy", 10, 4, **{name: value})

    assert not list(tmp_path.iterdir())


def test_a_record_that_is_nested_too_deeply_is_refused(tmp_path):
    create_table(tmp_path / "t.npy", 10, 4)
    Path(record_path(tmp_path / "t.npy")).write_text("[" * 100_000)

    with pytest.raises(errors.FileFormatError, match="is no record of a table"):
        Record.read(tmp_path / "t.npy")


def test_rows_are_written_page_by_page(tmp_path):
    """In folios that are longer than a page, ext4 takes 25 us to write a line back, and not 1."""
    before = calls_that_write()

    create_table(tmp_path / "t.npy", 5000, 5, optimizer="adagrad", init="uniform")

    assert calls_that_write() - before >= 5000 * 12 * 4 // 4096


def calls_that_write():
    """How often this process has asked the kernel to write."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("syscw:"):
            return int(line.split()[1])
    raise AssertionError("the kernel does not count calls")
