"""`flashwarp top`: programs that run, die, stop, and belong to others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwarp.cli.main import run
from flashwarp.errors import SharedCacheError
from flashwarp.probe import ceilings, running
from flashwarp.sharing import names

PROGRAM = """
import sys, time
import flashwarp as fw
with fw.open(sys.argv[1], device="cpu") as x:
    x.gather([3, 9])
    print("open", flush=True)
    while True:
        x.gather([3])
        time.sleep(0.02)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHWARP_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("FLASHWARP_CACHE_DIR", str(tmp_path / "cache"))
    np.save(tmp_path / "x.npy", np.arange(4096.0).reshape(64, 64))
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(program: str = PROGRAM) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, str(folder / "x.npy")]
        made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(made)
        assert made.stdout is not None
        assert made.stdout.readline() == "open\n"
        return made

    yield begin
    for each in started:
        each.kill()
        each.wait()
        assert each.stdout is not None
        each.stdout.close()


def seen(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    run(["top", "--json", "--interval", "0.1"])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_programs_are_shown_until_they_die(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = start(), start()

    shown = seen(capsys)
    assert [each["pid"] for each in shown] == sorted((first.pid, second.pid))
    (row,) = shown[0]["routes"]
    assert (row["kind"], row["route"], row["open"]) == ("array", "direct", 1)
    assert row["counts"]["misses"] == 2
    assert row["hit_rate"] == 1.0  # in the interval; 2 of all accesses missed
    assert shown[0]["threads"] >= 2
    assert set(shown[0]["memory"]) == {"anonymous", "shared", "mapped files"}

    first.kill()
    first.wait()
    assert [each["pid"] for each in seen(capsys)] == [second.pid]
    assert len(names.processes()) == 1, "the socket of the one that was killed is still there"


def test_the_text_has_a_line_for_each_route(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    program = start()

    run(["top", "--once", "--interval", "0.1"])

    told = capsys.readouterr().out
    head, line = told.splitlines()
    assert head.split()[:4] == ["pid", "program", "kind", "route"]
    assert head.split()[-5:] == ["memory", "mapped", "files", "pinned", "threads"]
    assert len(re.findall(r"[\d.]+ [KMG]iB", line)) == 2
    assert line.startswith(str(program.pid))
    assert "direct, cpu" in line


def test_nobody_there_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    run(["top", "--once", "--interval", "0"])

    assert "no process of yours has arrays open" in capsys.readouterr().out


def test_a_program_that_is_stopped_is_said_not_to_answer(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_ANSWER_S", 0.2)
    program = start()
    program.send_signal(signal.SIGSTOP)

    (shown,) = seen(capsys)
    assert "does not answer" in shown["failed"]
    program.send_signal(signal.SIGCONT)
    monkeypatch.setattr(running, "_ANSWER_S", 5.0)
    assert seen(capsys)[0]["failed"] == ""


def test_a_live_view_sees_rates_and_ends_of_programs(start: Start) -> None:
    program = start()

    with closing(running.Processes()) as processes:
        processes.look()
        time.sleep(0.2)
        (row,) = processes.look()[0].rows({})
        assert row["counts"]["hits"] > 0
        program.kill()
        program.wait()
        assert processes.look() == []


def test_other_versions_are_named(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    hello = {"messages": 2, "flashwarp": "9.9"}
    monkeypatch.setattr("flashwarp.sharing.messages.hello", lambda: hello)

    (shown,) = seen(capsys)
    assert "run the same version in both" in shown["failed"]


def test_only_the_same_user_is_asked_and_answered(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    (name,) = names.processes()
    place = folder / "run" / f"{name}.sock"

    assert place.stat().st_mode & 0o077 == 0
    assert place.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr("flashwarp.sharing.messages.peer", lambda _: (1, os.geteuid() + 1))
    with closing(running.Processes()) as processes:
        assert processes.look() == []
    place.parent.chmod(0o755)
    with pytest.raises(SharedCacheError, match="0700"):
        running.Processes().look()


def test_a_program_can_refuse_to_be_seen(
    start: Start, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("FLASHWARP_PUBLISH", "0")
    start()

    assert names.processes() == []


def test_a_program_without_a_folder_for_its_socket_works(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_RUNTIME_DIR", "/proc/none")

    start()


def test_a_forked_child_is_a_program_of_its_own(start: Start) -> None:
    program = start(
        """
import os, sys, time
import flashwarp as fw
x = fw.open(sys.argv[1], device="cpu")
begun = os.pipe()
if not os.fork():
    fw.open(sys.argv[1], device="cpu")
    os.write(begun[1], b"1")
    time.sleep(60)
os.read(begun[0], 1)
print("open", flush=True)
os.kill(os.getpid(), 9)
"""
    )
    program.wait()

    with closing(running.Processes()) as processes:
        (child,) = processes.look()
    assert child.pid != program.pid
    os.kill(child.pid, signal.SIGKILL)


def test_the_next_program_removes_sockets_of_the_dead(start: Start) -> None:
    dead = start()
    dead.kill()
    dead.wait()

    alive = start()

    assert [name.rpartition("-")[2] for name in names.processes()] == [str(alive.pid)]


def test_ceilings_are_kept_and_stand_beside_rates() -> None:
    assert ceilings.kept() == {}
    ceilings.keep("8:0", 2e9)
    ceilings.keep("8:1", 1e9)

    assert ceilings.of_route(ceilings.kept(), "8:0+8:1", "cpu") == 3e9
    assert ceilings.of_route(ceilings.kept(), "8:0+8:2", "cpu") is None
    assert ceilings.of_route(ceilings.kept(), "", "cpu") is None


def test_the_view_shows_programs(start: Start) -> None:
    pytest.importorskip("textual", reason="textual is an extra")
    import asyncio

    from textual.widgets import DataTable

    from flashwarp.cli.top_view import View

    program = start()

    async def look() -> list[str]:
        view = View(processes, 0.1)
        async with view.run_test(size=(140, 12)) as pilot:
            await pilot.pause(0.3)
            return [str(cell) for cell in view.query_one(DataTable).get_row_at(0)]

    with closing(running.Processes()) as processes:
        assert asyncio.run(look())[0] == str(program.pid)
