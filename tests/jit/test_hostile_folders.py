"""The folder of compiled code: what others may have put there is never loaded, and nothing is lost.

Users other than this one are stood in for by another effective uid, or by owners and modes that
only root can give.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flashwarp._jit import artifact_cache, private_folder
from flashwarp._jit.artifact_cache import ArtifactCache, Entry, default_directory
from flashwarp.errors import CompileError
from simulator import simulate

CODE = Entry(b"code", "log")
OTHER_USER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in memory, and nothing was said yet."""
    monkeypatch.setattr(artifact_cache, "_memory", artifact_cache._Memory(1 << 20))
    monkeypatch.setattr(artifact_cache, "_warned", {})


def published(folder: Path) -> ArtifactCache:
    """A cache with an entry, as its user made it."""
    cache = ArtifactCache(folder)
    assert cache.publish("key", CODE)
    return cache


# Folders.


def test_folder_is_made_for_its_user_alone_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        published(tmp_path / "a" / "b")
    finally:
        os.umask(before)

    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")]
    assert modes == [0o700, 0o700]
    assert (tmp_path / "a" / "b" / "key.fwcubin").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702, 0o755, 0o750, 0o701])
def test_folder_that_others_reach_is_not_used(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = published(tmp_path / "cache")
    (tmp_path / "cache").chmod(mode)
    caplog.set_level(logging.WARNING)

    assert cache.load("key") is None
    assert not cache.publish("other", CODE)
    assert cache.load("other") == CODE

    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["key.fwcubin"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"the folder {tmp_path / 'cache'} is not used" in said
    assert f"chmod 700 {tmp_path / 'cache'}" in said
    assert "FLASHWARP_CACHE_DIR" in said
    assert f"{mode:04o}" in said


@pytest.mark.parametrize("mode", [0o777, 0o773, 0o702])
def test_folder_below_one_that_others_may_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    cache = published(tmp_path / "above" / "cache")
    (tmp_path / "above").chmod(mode)

    assert cache.load("key") is None
    assert not cache.publish("key", CODE)


def test_folder_below_a_sticky_one_is_used(tmp_path: Path) -> None:
    cache = published(tmp_path / "above" / "cache")
    (tmp_path / "above").chmod(0o1777)

    assert cache.load("key") == CODE


@needs_root
@pytest.mark.parametrize("place", ["cache", "above"])
def test_folder_of_another_user_is_not_used(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = published(tmp_path / "above" / "cache")
    owned = {"cache": tmp_path / "above" / "cache", "above": tmp_path / "above"}[place]
    os.chown(owned, OTHER_USER, -1)

    assert cache.load("key") is None
    assert not cache.publish("key", CODE)
    assert f"user {OTHER_USER}" in caplog.text


@needs_root
def test_user_without_rights_above_the_folder_uses_it(tmp_path: Path) -> None:
    """A home's parent may be passed, and not listed: mode 0711 is usual."""
    home = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    home.chmod(0o711)
    (home / "mine").mkdir(0o700)
    os.chown(home / "mine", OTHER_USER, OTHER_USER)

    status = as_other_user(f"published(Path({str(home / 'mine')!r}) / 'cache')")

    assert status == 0


@needs_root
def test_file_that_another_user_left_is_not_loaded(tmp_path: Path) -> None:
    """A folder that was open to all once, and is private now, keeps what was put there."""
    cache = published(tmp_path)
    os.chown(tmp_path / "key.fwcubin", OTHER_USER, -1)

    assert cache.load("key") is None


def as_other_user(statement: str) -> int:
    """Run a statement of this file in a process of another user; returns its status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            exec(statement, globals())
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_link_to_a_folder_is_as_good_as_the_folder(tmp_path: Path) -> None:
    published(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    cache = ArtifactCache(tmp_path / "link")

    assert cache.load("key") == CODE
    (tmp_path / "real").chmod(0o777)
    assert cache.load("key") is None


def test_folder_exchanged_for_a_link_after_its_name_was_resolved_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(tmp_path / "theirs")
    published(tmp_path / "mine")
    resolved = os.path.realpath(tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "moved")
    (tmp_path / "mine").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(private_folder.os.path, "realpath", lambda path: resolved)

    with pytest.raises(OSError), private_folder.opened(tmp_path / "mine", create=False):
        pass


def test_relative_folder_is_that_of_the_time_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = published(Path("cache"))
    monkeypatch.chdir("/")

    assert cache.load("key") == CODE


# Entries.


def replace_entry(path: Path, kind: str) -> None:
    content = path.read_bytes()
    path.unlink()
    match kind:
        case "link":
            path.with_name("elsewhere").write_bytes(content)
            path.symlink_to(path.with_name("elsewhere"))
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
                server.bind(path.name)
        case "folder":
            path.mkdir()
        case "writable":
            path.write_bytes(content)
            path.chmod(0o622)


@pytest.mark.parametrize("kind", ["link", "fifo", "socket", "writable"])
def test_what_is_no_file_of_ours_is_replaced(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = published(tmp_path)
    replace_entry(tmp_path / "key.fwcubin", kind)

    assert cache.load("key") is None
    assert "key.fwcubin" in caplog.text
    assert cache.publish("key", CODE)
    assert cache.load("key") == CODE


def test_entry_that_cannot_be_replaced_is_kept_in_memory(tmp_path: Path) -> None:
    cache = published(tmp_path)
    replace_entry(tmp_path / "key.fwcubin", "folder")

    assert cache.load("key") is None
    assert not cache.publish("key", CODE)
    assert cache.load("key") == CODE


# No folder at all.


@pytest.mark.parametrize("chosen", ["/dev/null/cache", "/proc/cache"])
def test_folder_that_cannot_be_made_means_memory(chosen: str) -> None:
    cache = ArtifactCache(Path(chosen))

    assert not cache.publish("key", CODE)
    assert cache.load("key") == CODE


def test_full_disk_means_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact_cache, "_write", full)
    cache = ArtifactCache(tmp_path)

    assert not cache.publish("key", CODE)
    assert cache.load("key") == CODE


def test_memory_has_a_limit_and_forgets_what_was_used_longest_ago() -> None:
    memory = artifact_cache._Memory(2500)
    for key in "ab":
        memory.put(key, Entry(bytes(1000), ""))
    memory.get("a")

    memory.put("c", Entry(bytes(1000), ""))

    assert [key for key in "abc" if memory.get(key)] == ["a", "c"]


COMPILE_TWICE = """
import ctypes, logging, numpy as np, os, sys
{before}
import flashwarp as fw
from flashwarp._jit import artifact_cache
text = '#include "flashwarp/array.cuh"\\nFW_KERNEL one(int* p) {{ *p = 1; }}'
out = np.zeros(1, np.int32)
with fw.device.CpuDevice(1) as device:
    first = fw.compile(text, device)
with fw.device.CpuDevice(1) as device:
    second = fw.compile(text, device)
    second["one"](out)
print(out[0], first.from_cache, second.from_cache)
"""


def in_a_new_process(
    before: str = "", **environment: str | None
) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    for name, value in environment.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    return subprocess.run(
        [sys.executable, "-c", COMPILE_TWICE.format(before=before)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


NO_ENTRY = """
import pwd
def getpwuid(uid): raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = getpwuid
"""


@pytest.mark.parametrize(
    ("before", "home"), [(NO_ENTRY, None), ("", "/proc/nonexistent"), ("", "not/absolute")]
)
def test_without_a_home_programs_are_compiled_once_and_run(before: str, home: str | None) -> None:
    done = in_a_new_process(before, HOME=home)

    assert done.stdout.split() == ["1", "False", "True"], done.stderr
    assert done.stderr.count("compiled code is kept in memory") == 1
    assert "FLASHWARP_CACHE_DIR" in done.stderr


def test_user_without_a_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FLASHWARP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", none)

    assert default_directory() is None
    state = ArtifactCache().state()
    assert not state.used
    assert "HOME is not set" in state.why_not


def test_state_says_what_would_happen_and_makes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "cache"

    assert ArtifactCache(folder).state().used
    assert not (tmp_path / "a").exists()
    folder.mkdir(parents=True, mode=0o700)
    assert ArtifactCache(folder).state().used
    folder.chmod(0o777)
    assert "chmod 700" in ArtifactCache(folder).state().advice
    tmp_path.chmod(0o777)
    assert not ArtifactCache(tmp_path / "other").state().used


# Where it is compiled.


def test_code_is_compiled_in_a_folder_that_nobody_else_can_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile, ours = tmp_path / "hostile", tmp_path / "ours"
    hostile.mkdir()
    hostile.chmod(0o777)
    ours.mkdir()
    monkeypatch.setattr(private_folder, "_BUILD_PLACES", (str(ours),))
    monkeypatch.setenv("TMPDIR", str(hostile))

    with private_folder.build_folder() as folder:
        assert folder.parent == ours
    assert list(hostile.iterdir()) == list(ours.iterdir()) == []

    monkeypatch.setattr(private_folder, "_BUILD_PLACES", ())
    with (
        pytest.raises(CompileError, match=rf"{hostile}.*others may write.*TMPDIR"),
        private_folder.build_folder(),
    ):
        pass


def test_full_temporary_folder_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "free").mkdir()
    monkeypatch.setattr(private_folder, "_BUILD_PLACES", (str(tmp_path / "free"),))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    real = private_folder._check_room

    def room(folder: int) -> None:
        if "/full/" in os.readlink(f"/proc/self/fd/{folder}"):
            raise OSError(28, "0 MiB are free")
        real(folder)

    monkeypatch.setattr(private_folder, "_check_room", room)

    with private_folder.build_folder() as folder:
        assert folder.parent == tmp_path / "free"


# Simulators are built and run, so they lie in folders of the same kind.


def test_simulators_are_not_run_from_a_folder_that_others_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_CACHE_DIR", str(tmp_path))
    assert simulate._directory() == tmp_path / "simulator"

    (tmp_path / "simulator").chmod(0o777)
    instead = simulate._directory()

    assert instead.parent != tmp_path
    assert instead.stat().st_mode & 0o777 == 0o700
    assert simulate._directory() == instead
