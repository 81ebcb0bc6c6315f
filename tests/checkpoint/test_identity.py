"""Versions that are discarded and written again: no copy of the old one passes for the new one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.directory import Directory
from flashwarp.errors import (
    CheckpointError,
    DamagedVersionError,
    DtypeError,
    ExistingVersionError,
    MissingVersionError,
    PathError,
)

WAIT_S = 60.0
CONFIG: dict[str, Any] = {"retry_s": 0.01, "timeout_s": WAIT_S}


@contextlib.contextmanager
def opened(path: Path, *, remote: Path | None = None, **config: Any) -> Iterator[Checkpointer]:
    with Checkpointer(
        path / "local", "cpu", "64 KiB", "1 MiB", remote, 0, {**CONFIG, **config}
    ) as found:
        yield found


def save(checkpointer: Checkpointer, version: int, value: object) -> None:
    checkpointer.protect("s", np.asarray(value))
    checkpointer.checkpoint(version).result(WAIT_S)


def files_of(path: Path) -> list[Path]:
    return sorted((path / "default" / "rank-00000").glob("*"))


def forget(path: Path) -> None:
    """Lose the disk."""
    for each in files_of(path / "local"):
        each.unlink()


class Refusing:
    """Makes a remote folder refuse all changes for a while."""

    def __init__(self, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.active = True
        self.refused = 0
        remote = checkpointer._system.remote
        for name in ("begin", "discard_all"):
            monkeypatch.setattr(remote, name, self._refuse(getattr(remote, name)))

    def _refuse(self, act: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.active:
                self.refused += 1
                raise PathError(1, "the remote store refuses", "remote")
            return act(*arguments, **options)

        return call


def rewrite_while_the_remote_refuses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(
        path / "local", "cpu", "64 KiB", "1 MiB", path / "remote", 0, CONFIG
    )
    save(checkpointer, 7, [1.0])
    checkpointer.wait(7, tier="remote")
    Refusing(checkpointer, monkeypatch)
    with pytest.raises(PathError):
        checkpointer.discard(7)
    save(checkpointer, 7, [2.0])
    with pytest.raises(PathError):
        checkpointer.close()


def test_a_remote_store_that_refused_for_a_while_never_gives_an_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = tmp_path / "remote"
    rewrite_while_the_remote_refuses(tmp_path, monkeypatch)

    with opened(tmp_path, remote=remote) as checkpointer:
        checkpointer.wait(7, tier="remote")
    forget(tmp_path)

    with opened(tmp_path, remote=remote) as checkpointer:
        assert checkpointer.restart(7)["s"] == [2.0]


def test_an_old_copy_does_not_take_the_place_of_a_damaged_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = tmp_path / "remote"
    rewrite_while_the_remote_refuses(tmp_path, monkeypatch)
    (manifest,) = (each for each in files_of(tmp_path / "local") if each.suffix == ".manifest")
    manifest.write_bytes(manifest.read_bytes()[:-9])

    with opened(tmp_path, remote=remote) as checkpointer:
        with pytest.raises(DamagedVersionError):
            checkpointer.restart(7)
        assert checkpointer.test() is None


def test_its_own_copy_takes_the_place_of_a_version_whose_manifest_is_damaged(
    tmp_path: Path,
) -> None:
    remote = tmp_path / "remote"
    with opened(tmp_path, remote=remote) as checkpointer:
        save(checkpointer, 7, [1.0])
        checkpointer.wait(7, tier="remote")
    (manifest,) = (each for each in files_of(tmp_path / "local") if each.suffix == ".manifest")
    manifest.write_bytes(manifest.read_bytes()[:-9])

    with opened(tmp_path, remote=remote) as checkpointer:
        assert checkpointer.test() == 7
        assert checkpointer.restart(7)["s"] == [1.0]


def test_a_discard_that_the_remote_store_refused_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote=tmp_path / "remote") as checkpointer:
        save(checkpointer, 7, [1.0])
        checkpointer.wait(7, tier="remote")
        refusing = Refusing(checkpointer, monkeypatch)
        with pytest.raises(PathError):
            checkpointer.discard(7)
        assert checkpointer.versions() == []
        while refusing.refused < 3:
            time.sleep(0.01)
        refusing.active = False
        with contextlib.suppress(MissingVersionError):  # it is asked in the background, too
            checkpointer.discard(7)

        clock = time.monotonic()
        while files_of(tmp_path / "remote"):
            assert time.monotonic() - clock < WAIT_S
            time.sleep(0.01)
        with pytest.raises(MissingVersionError):
            checkpointer.discard(7)


def test_a_discarded_version_does_not_come_back_from_a_store_that_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote=tmp_path / "remote") as checkpointer:
        save(checkpointer, 7, [1.0])
        checkpointer.wait(7, tier="remote")
        Refusing(checkpointer, monkeypatch)
        with pytest.raises(PathError):
            checkpointer.discard(7)

    with opened(tmp_path, remote=tmp_path / "remote") as checkpointer:
        assert checkpointer.versions() == []
        with pytest.raises(MissingVersionError):
            checkpointer.restart(7)
        clock = time.monotonic()
        while files_of(tmp_path / "remote"):
            assert time.monotonic() - clock < WAIT_S
            time.sleep(0.01)
    assert files_of(tmp_path / "local") == [], "the note of it is gone, too"


def test_a_version_that_is_discarded_as_its_upload_ends_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote=tmp_path / "remote") as checkpointer:
        directory = checkpointer._system.directory
        forget = directory.forget_discarded

        def discard_first(name: str, version: int) -> None:
            monkeypatch.undo()
            checkpointer._system.discard_key((name, version))
            forget(name, version)

        monkeypatch.setattr(directory, "forget_discarded", discard_first)
        save(checkpointer, 7, [1.0])
        with contextlib.suppress(MissingVersionError):
            checkpointer.wait(7, tier="remote")

    assert files_of(tmp_path / "remote") == []
    assert files_of(tmp_path / "local") == []


def test_a_version_whose_upload_lost_its_answer_is_discarded_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote=tmp_path / "remote", retry_s=WAIT_S) as checkpointer:
        assert checkpointer.versions() == []
        upload = checkpointer._system.remote.upload

        def stored_without_an_answer(*arguments: Any, **options: Any) -> None:
            upload(*arguments, **options)
            raise PathError(5, "the answer is lost", "remote")

        monkeypatch.setattr(checkpointer._system.remote, "upload", stored_without_an_answer)
        save(checkpointer, 7, [1.0])
        clock = time.monotonic()
        while not checkpointer._core.remote_failures:
            assert time.monotonic() - clock < WAIT_S
            time.sleep(0.01)
        checkpointer.discard(7)
        assert files_of(tmp_path / "remote") == []
    assert files_of(tmp_path / "local") == []


def test_a_discard_during_an_upload_is_noted_before_the_folder_loses_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote=tmp_path / "remote") as checkpointer:
        assert checkpointer.versions() == []
        upload = checkpointer._system.remote.upload
        stored, ended = threading.Event(), threading.Event()

        def slow(*arguments: Any, **options: Any) -> object:
            found = upload(*arguments, **options)
            stored.set()
            assert ended.wait(WAIT_S)
            return found

        monkeypatch.setattr(checkpointer._system.remote, "upload", slow)
        save(checkpointer, 7, [1.0])
        assert stored.wait(WAIT_S)
        checkpointer.discard(7)

        # What the next run finds if this one is killed now.
        directory = checkpointer._system.directory
        there, noted = directory.versions("default"), directory.discarded("default")
        ended.set()
        assert (there, noted) == ([], {7})
    assert files_of(tmp_path / "remote") == []
    assert files_of(tmp_path / "local") == []


def test_waiting_for_the_remote_store_stores_versions_of_earlier_runs(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        for version in range(3):
            save(checkpointer, version, [version])

    with opened(tmp_path, remote=tmp_path / "remote") as checkpointer:
        checkpointer.wait(1, tier="remote")
        with Directory(tmp_path / "remote", writable=False) as remote:
            assert remote.versions("default") == [1]
            checkpointer.wait(tier="remote")
            assert remote.versions("default") == [0, 1, 2]


def test_waiting_for_the_remote_store_compares_what_it_has(tmp_path: Path) -> None:
    with opened(tmp_path, remote=tmp_path / "remote") as checkpointer:
        save(checkpointer, 0, [0.0])
        checkpointer.wait(0, tier="remote")
    with opened(tmp_path) as checkpointer:  # a run without the remote store
        checkpointer.discard(0)
        save(checkpointer, 0, [5.0])

    with opened(tmp_path, remote=tmp_path / "remote") as checkpointer:
        checkpointer.wait(tier="remote")
        with (
            Directory(tmp_path / "remote", writable=False) as remote,
            remote.open("default", 0) as reader,
        ):
            assert reader.load("s") == [5.0]


def test_a_reader_gives_a_rewritten_version_its_own_dtype_and_bytes(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path, read_only=True) as reader:
        save(writer, 5, np.arange(8.0))
        assert reader.restart(5)["s"].dtype == "f8"
        writer.discard(5)
        with pytest.raises(MissingVersionError):
            reader.restart(5)
        save(writer, 5, np.arange(16))

        assert reader.regions(5)[0].shape == (16,)
        assert np.array_equal(reader.restart(5)["s"], np.arange(16))


def test_a_readers_cached_copy_of_a_rewritten_version_is_not_used(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path, read_only=True) as reader:
        save(writer, 6, np.full(8, 1.0))
        reader.prefetch_enqueue(6)
        reader.prefetch_start()
        clock = time.monotonic()
        while not reader.stats.prefetches["gpu"]:
            assert time.monotonic() - clock < WAIT_S
            time.sleep(0.01)
        writer.discard(6)
        save(writer, 6, np.full(8, 2.0))

        assert reader.restart(6)["s"][0] == 2.0
        writer.discard(6)
        assert reader.versions() == []


@pytest.mark.parametrize("slow", [False, True], ids=["", "slow removal"])
def test_a_checkpoint_beside_a_discard_of_its_number_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    with opened(tmp_path) as checkpointer:
        save(checkpointer, 5, [0])
        directory = checkpointer._system.directory
        real = directory.discard_all

        def discard(*arguments: Any) -> list[int]:
            time.sleep(0.3)  # long enough for a flush
            return real(*arguments)

        if slow:
            monkeypatch.setattr(directory, "discard_all", discard)
        for _ in range(2 if slow else 60):
            thread = threading.Thread(target=checkpointer.discard, args=(5,))
            thread.start()
            while True:
                with contextlib.suppress(ExistingVersionError):
                    saved = checkpointer.checkpoint(5)
                    break
            thread.join(WAIT_S)

            assert saved.result(WAIT_S) == 5


def test_a_version_that_is_discarded_while_it_is_listed_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as checkpointer:
        save(checkpointer, 5, [0])
    with opened(tmp_path) as checkpointer:
        directory = checkpointer._system.directory
        real, listed, go_on = directory.versions, threading.Event(), threading.Event()

        def slow(*arguments: Any, **options: Any) -> list[int]:
            found = real(*arguments, **options)
            if threading.current_thread() is thread:
                listed.set()
                assert go_on.wait(WAIT_S)
            return found

        monkeypatch.setattr(directory, "versions", slow)
        thread = threading.Thread(target=checkpointer.versions)
        thread.start()
        assert listed.wait(WAIT_S)
        checkpointer.discard(5)
        go_on.set()
        thread.join(WAIT_S)

        assert checkpointer.versions() == []


def test_a_version_that_is_discarded_before_it_is_staged_fails_no_wait(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, "cpu", 0, 0, config=CONFIG) as checkpointer:
        go_on = threading.Event()
        real = checkpointer._core.mover.store_arrays

        def slow(*arguments: Any) -> None:
            assert go_on.wait(WAIT_S)
            real(*arguments)

        checkpointer._core.mover.store_arrays = slow  # type: ignore[method-assign]
        checkpointer.protect("s", np.zeros(5))
        saved = checkpointer.checkpoint(1, overlap=True)
        checkpointer.discard(1)
        go_on.set()

        checkpointer.wait_staged(WAIT_S)
        with pytest.raises(CheckpointError, match="was discarded"):
            saved.result(WAIT_S)
        assert checkpointer.versions() == []


def test_a_damaged_version_can_be_discarded(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        save(checkpointer, 1, [1])
    for each in files_of(tmp_path / "local"):
        each.write_bytes(b"")

    with opened(tmp_path) as checkpointer:
        checkpointer.discard(1)
        assert checkpointer.versions() == []
    assert files_of(tmp_path / "local") == []


# Records.

RECORD = np.dtype([("a", "<i4"), ("b", "<f4", (2,)), ("c", [("x", "<u2")])])


def test_a_record_is_restored_into_its_own_fields_alone(tmp_path: Path) -> None:
    array = np.zeros(3, RECORD)
    array["a"], array["b"] = [1, 2, 3], 0.5
    with opened(tmp_path) as checkpointer:
        checkpointer.protect("s", array)
        checkpointer.checkpoint(0).result(WAIT_S)
        other = np.zeros(3, [("x", "<f4"), *[(f"y{i}", "<i2") for i in range(5)]])
        assert other.dtype.itemsize == RECORD.itemsize

        with pytest.raises(DtypeError, match="was stored as"):
            checkpointer.restart(0, into={"s": other})
        assert not other.tobytes().strip(b"\0")
        restored = checkpointer.restart(0, into={"s": np.zeros(3, RECORD)})["s"]
        assert np.array_equal(restored, array)
    with (
        Directory(tmp_path / "local", writable=False) as directory,
        directory.open("default", 0) as reader,
    ):
        assert np.array_equal(reader.load("s"), array)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]}),
        np.dtype([("a", "O")]),
    ],
    ids=["fields that overlap", "objects"],
)
def test_a_record_that_no_text_describes_is_refused(tmp_path: Path, dtype: Any) -> None:
    with opened(tmp_path) as checkpointer, pytest.raises(DtypeError):
        checkpointer.protect("s", np.zeros(3, dtype))


# Damage.


def flip(path: Path, place: int) -> None:
    (data,) = (each for each in files_of(path) if each.suffix == ".data")
    content = bytearray(data.read_bytes())
    content[place] ^= 1
    data.write_bytes(content)


def test_a_flipped_byte_is_noticed_before_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        save(checkpointer, 1, np.arange(1000))
    flip(tmp_path / "local", 77)

    with opened(tmp_path) as checkpointer:
        assert checkpointer.test() is None
        assert checkpointer.test(verify=False) == 1


def test_a_restart_that_fails_says_which_arrays_it_has_filled(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        checkpointer.protect("first", np.arange(10))
        checkpointer.protect("second", np.arange(10))
        checkpointer.checkpoint(1).result(WAIT_S)
    flip(tmp_path / "local", 4096)

    first, second = np.zeros(10, int), np.zeros(10, int)
    with opened(tmp_path) as checkpointer, pytest.raises(DamagedVersionError) as caught:
        checkpointer.restart(1, into={"first": first, "second": second})

    (note,) = caught.value.__notes__
    assert "'first' are filled" in note
    assert note.endswith("'second' are undefined")
    assert np.array_equal(first, np.arange(10))
