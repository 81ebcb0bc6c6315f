"""`create` never destroys: it makes a whole file or none, and replaces only what it was told to."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import (
    ArgumentError,
    ExistingFileError,
    FlashwarpError,
    LockedError,
    MissingFileError,
    PathError,
    RouteError,
    StorageError,
)
from flashwarp.storage import Memory, Striped
from flashwarp.table.making import create_table

OLD = np.arange(4096.0)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "data.npy"
    np.save(path, OLD)
    return path


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {each.name: (each.stat().st_ino, each.read_bytes()) for each in folder.iterdir()}


def create(path: Any, *args: Any, **options: Any) -> fw.Array:
    return fw.create(path, *(args or ("f8", 100)), **{"device": "cpu", **options})


@contextlib.contextmanager
def as_somebody() -> Iterator[Path]:
    """Act as a user who may not write a folder: root as somebody else, others as they are."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


# What was there.


def test_existing_file_is_refused(old: Path) -> None:
    before = contents(old.parent)

    with pytest.raises(ExistingFileError, match="overwrite=True") as caught:
        create(old)

    assert isinstance(caught.value, FileExistsError)
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(old))
    assert contents(old.parent) == before


def test_overwrite_replaces(old: Path) -> None:
    old.chmod(0o640)

    with create(old, "i4", (3, 2), overwrite=True) as x:
        x[1] = 7
        x.flush()
        assert x._attachment.storage.path == str(old)
        assert x.explain().facts["storage"]["path"] == str(old)

    np.testing.assert_array_equal(np.load(old), [[0, 0], [7, 7], [0, 0]])
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert os.listdir(old.parent) == [old.name]


def closed_cache() -> fw.Cache:
    cache = fw.Cache(65536, 4096, device=fw.device.resolve("cpu"))
    cache.close()
    return cache


BAD_CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("O", 100), {}),
    (("no such type", 100), {}),
    (([("a" * 5000, "f4")], 100), {}),
    (("f8", -1), {}),
    ((100, "f8"), {}),
    (("f8", 2**62), {}),
    ((), {"device": "cuda:99"}),
    ((), {"device": "abacus"}),
    ((), {"cache": "17 bytes"}),
    ((), {"cache": "nonsense"}),
    ((), {"cache": 1}),
    ((), {"cache": closed_cache}),
    ((), {"line": 1000}),
    ((), {"line": "4 elephants"}),
    ((), {"strict": "fast"}),
    ((), {"strict": "bounce"}),
    ((), {"line": 512, "cache": lambda: fw.Cache("1 MiB")}),
    ((), {"controller": lambda: [fw.nvme.SoftwareController()]}),
    ((), {"overwrite": "yes"}),
    ((), {"lock": None}),
]


@pytest.mark.parametrize(
    ("args", "options"), BAD_CALLS, ids=lambda value: str(value).partition(" at 0x")[0]
)
@pytest.mark.parametrize("exists", [False, True])
def test_call_that_fails_leaves_everything_as_it_was(
    old: Path, args: tuple[Any, ...], options: dict[str, Any], exists: bool
) -> None:
    if not exists:
        old.unlink()
    before = contents(old.parent)
    made = {key: value() if callable(value) else value for key, value in options.items()}

    with pytest.raises(FlashwarpError):
        create(old, *args, **{"overwrite": True, **made})

    assert contents(old.parent) == before


@pytest.mark.parametrize("name", ["mode", "offset", "immutable", "chache"])
def test_create_takes_no_other_options(old: Path, name: str) -> None:
    before = contents(old.parent)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        create(old, overwrite=True, **{name: None})
    assert contents(old.parent) == before


def test_create_makes_one_file(old: Path) -> None:
    before = contents(old.parent)
    for several in (Memory(4096), Striped([old]), [old, old]):
        with pytest.raises(ArgumentError, match="is not a path"):
            create(several, overwrite=True)  # type: ignore[arg-type]
    assert contents(old.parent) == before


def test_route_is_checked_before_the_file_appears(old: Path) -> None:
    with pytest.raises(RouteError):
        create(old, strict="bounce", overwrite=True)
    np.testing.assert_array_equal(np.load(old), OLD)


@pytest.mark.parametrize("step", ["fsync", "ftruncate", "link", "replace"])
def test_failure_of_any_step_leaves_everything_as_it_was(
    old: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "link":
        old.unlink()
        # Without hard links a file is renamed: let that fail, too.
        monkeypatch.setattr(os, "rename", fail)
    monkeypatch.setattr(os, step, fail)
    before = contents(old.parent)

    with pytest.raises(PathError, match=f"{old.parent} is full") as caught:
        create(old, overwrite=step != "link")

    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(old))
    assert contents(old.parent) == before
    assert not any("/.flashwarp-" in os.readlink(each) for each in links_of_descriptors())


def links_of_descriptors() -> list[Path]:
    return [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


def test_interrupt_leaves_everything_as_it_was(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    before = contents(old.parent)

    with pytest.raises(KeyboardInterrupt):
        create(old, overwrite=True)

    assert contents(old.parent) == before


@pytest.mark.parametrize("step", ["ftruncate", "fsync", "replace", "link"])
def test_death_of_the_process_leaves_the_old_file_or_nothing(old: Path, step: str) -> None:
    if step == "link":
        old.unlink()
    script = f"""
import os, signal, sys
import flashwarp as fw
os.{step} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
fw.create(sys.argv[1], "f8", 100, device="cpu", overwrite={step != "link"})
"""
    done = subprocess.run([sys.executable, "-c", script, str(old)], check=False, timeout=60)

    assert done.returncode == -signal.SIGKILL
    if step == "link":
        assert not old.exists()
    else:
        np.testing.assert_array_equal(np.load(old), OLD)


def test_two_that_create_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npy"
    link = os.link

    def late(source: str, target: str) -> None:
        Path(target).write_bytes(b"faster")
        link(source, target)

    monkeypatch.setattr(os, "link", late)

    with pytest.raises(ExistingFileError, match="in the meantime"):
        create(path)

    assert contents(tmp_path).keys() == {"x.npy"}
    assert path.read_bytes() == b"faster"


def test_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)

    create(tmp_path / "x.npy").close()

    assert os.listdir(tmp_path) == ["x.npy"]
    assert np.load(tmp_path / "x.npy").shape == (100,)


# Ways to name a file.


def test_link_is_followed_and_stays(old: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link = folder / "link.npy"
    link.symlink_to(old)
    with pytest.raises(ExistingFileError):
        create(link)

    create(link, overwrite=True).close()

    assert link.is_symlink()
    assert np.load(old).shape == (100,)
    assert os.listdir(folder) == ["link.npy"]


def test_link_to_nothing_makes_what_it_names(tmp_path: Path) -> None:
    link = tmp_path / "link.npy"
    link.symlink_to(tmp_path / "real.npy")

    create(link).close()

    assert link.is_symlink()
    assert np.load(tmp_path / "real.npy").shape == (100,)


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for overwrite in (False, True):
        with pytest.raises((PathError, ExistingFileError)):
            create(tmp_path / "a", overwrite=overwrite)
    assert {each.name for each in tmp_path.iterdir()} == {"a", "b"}


def test_other_hard_link_keeps_the_old_file(old: Path) -> None:
    other = old.with_name("other.npy")
    os.link(old, other)

    create(old, overwrite=True).close()

    np.testing.assert_array_equal(np.load(other), OLD)


def test_reader_of_the_old_file_keeps_it(old: Path) -> None:
    with fw.open(old, device="cpu", cache=16384) as reader:
        create(old, overwrite=True).close()
        np.testing.assert_array_equal(reader[...], OLD)
        with pytest.raises(fw.errors.StorageError, match="replaced") as caught:
            reader.refresh()
        assert caught.value.errno == errno.ESTALE


def test_file_that_is_written_is_not_replaced(old: Path) -> None:
    x = fw.open(old, "r+", device="cpu")
    x[0] = 5.0
    with pytest.raises(LockedError, match="this process") as caught:
        create(old, overwrite=True)
    assert caught.value.holder == os.getpid()

    create(old, overwrite=True, lock=False).close()

    with pytest.raises(StorageError, match="another file has its name"):
        x.close()
    assert np.load(old).shape == (100,)


def test_new_file_is_locked(tmp_path: Path) -> None:
    with create(tmp_path / "x.npy") as x:
        assert x.explain().facts["storage"]["lock"] == "held"
        with pytest.raises(LockedError):
            fw.open(tmp_path / "x.npy", "r+", device="cpu")
    fw.open(tmp_path / "x.npy", "r+", device="cpu").close()


@pytest.mark.parametrize("shape", [0, (0, 5), ()])
def test_array_of_nothing_or_of_one(tmp_path: Path, shape: Any) -> None:
    create(tmp_path / "x.npy", "f4", shape).close()
    assert np.load(tmp_path / "x.npy").shape == ((0,) if shape == 0 else shape)


def test_longest_name_and_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    create("n" * 255).close()
    create(os.fsencode("bytes.npy")).close()
    assert np.load("n" * 255).shape == np.load("bytes.npy").shape == (100,)
    with pytest.raises(PathError, match="too long"):
        create("n" * 256)


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("absent/x.npy", MissingFileError, "folder .*absent does not exist"),
        ("data.npy/x.npy", FlashwarpError, "folder"),
        ("x.npy/", ArgumentError, "slash"),
        ("", ArgumentError, "empty"),
        ("a\0b", ArgumentError, "null byte"),
        (".", PathError, "directory"),
        ("/dev/null", PathError, "regular file"),
        (3, ArgumentError, "file descriptor"),
        (None, ArgumentError, "not a path"),
        (io.BytesIO(), ArgumentError, "Memory"),
        (io.StringIO(), ArgumentError, "open file"),
        ("\udcff", PathError, "UTF-8"),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_what_names_no_file(
    old: Path, monkeypatch: pytest.MonkeyPatch, path: Any, kind: type[Exception], words: str
) -> None:
    monkeypatch.chdir(old.parent)
    before = contents(old.parent)

    with pytest.raises(kind, match=words) as caught:
        create(path, overwrite=True)

    assert isinstance(caught.value, FlashwarpError)
    assert contents(old.parent) == before


def test_folder_that_may_not_be_written() -> None:
    with as_somebody() as folder:
        with pytest.raises(PathError, match=f"folder {folder} is not writable") as caught:
            create(folder / "x.npy")
        assert caught.value.errno == errno.EACCES


def test_file_that_is_write_protected(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old.chmod(0o444)
    if os.geteuid() == 0:  # root may write everything: ask as somebody else would be answered
        monkeypatch.setattr(os, "access", lambda _, how: how != os.W_OK)
    with pytest.raises(PathError, match="write-protected"):
        create(old, overwrite=True)
    np.testing.assert_array_equal(np.load(old), OLD)


def test_limit_of_file_sizes(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(PathError, match="ulimit -f") as caught:
            create(tmp_path / "x.npy", "f8", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []


def test_new_file_is_sparse(tmp_path: Path) -> None:
    create(tmp_path / "x.npy", "u1", (1 << 30,)).close()
    status = (tmp_path / "x.npy").stat()
    assert status.st_size == 4096 + (1 << 30)
    assert status.st_blocks * 512 < 1 << 20


def test_file_that_the_disk_has_no_room_for_warns_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"x.npy has 8796 GB, .* has room for") as caught:
        create(tmp_path / "x.npy", "u1", (1 << 43,)).close()
    with pytest.warns(UserWarning, match="the file is sparse"):
        create_table(tmp_path / "t.npy", 2 << 30, 1024, optimizer="sgd", init="zeros")
    assert len(caught) == 1


def test_mount_that_is_read_only_is_named(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(old)
    mounted = (*status[:8], status.f_flag | os.ST_RDONLY, *status[9:])
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(mounted))
    monkeypatch.setattr(os, "access", lambda _, how: how != os.W_OK)

    with pytest.raises(PathError, match="mounted read-only: open it with mode") as opening:
        fw.open(old, "r+", device="cpu")
    with pytest.raises(PathError, match="mounted read-only: choose another") as making:
        create(old, overwrite=True)
    assert opening.value.errno == making.value.errno == errno.EROFS


def test_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        create(tmp_path / "x.npy").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.npy").stat().st_mode) == 0o640
