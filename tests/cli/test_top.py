"""`flashwarp top`: programs that run, die, stop, and belong to others."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import observing
from flashwarp.array.stats import Stats
from flashwarp.cli.main import run
from flashwarp.errors import SharedCacheError
from flashwarp.probe import ceilings, running
from flashwarp.sharing import messages, names
from support.program import stop

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


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(0, "0"), (2040, "2.04 kB/s"), (999_499, "999 kB/s"), (1e6, "0.001 GB/s"), (5e10, "50 GB/s")],
)
def test_rates_are_told_in_units_that_fit(bytes_per_s: float, text: str) -> None:
    assert running.rate(bytes_per_s) == text


def test_nobody_there_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    run(["top", "--once", "--interval", "0"])

    assert "no process of yours has arrays open" in capsys.readouterr().out


def test_a_program_that_is_stopped_is_said_not_to_answer(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_ANSWER_S", 0.2)
    program = start()
    stop(program)

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


@contextlib.contextmanager
def pretender(answer: bytes | None, greeting: dict[str, Any] | None = None) -> Iterator[None]:
    """A process of this version, of number 1, that says what it should not; None: it ends."""
    server = names.listen(names.of_process(1))

    def serve() -> None:
        with server, contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                with client, contextlib.suppress(OSError):
                    client.recv(1 << 16)
                    messages.send(client, messages.hello() if greeting is None else greeting)
                    while answer is not None and client.recv(1 << 16):
                        socket.send_fds(client, [answer], [0])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        names.remove(names.of_process(1))
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def as_message(said: object) -> bytes:
    text = json.dumps(said).encode()
    return len(text).to_bytes(4, "little") + text


def twisted(counters: dict[str, Any], seed: int) -> dict[str, Any]:
    """Counters of which one value, key or entry is another."""
    rng = random.Random(seed)
    strange = [None, -1, 1 << 70, 1e400, float("nan"), True, "\x1b[2J", "\ud800", [], {}, [[]], "3"]
    made: dict[str, Any] = copy.deepcopy(counters)
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        keys = part if isinstance(part, dict) else range(len(part))
        for key in keys:
            if (part is made and key == "pid") or (key in Stats.__dataclass_fields__ and seed % 3):
                continue
            places.append((part, key))
            if isinstance(part[key], dict | list):
                walk(part[key])

    walk(made)
    part, key = rng.choice(places)
    part[key] = rng.choice(strange)
    return made


@pytest.mark.parametrize("seed", range(60))
def test_a_program_that_answers_nonsense_is_one_line(
    capsys: pytest.CaptureFixture[str], seed: int, folder: Path
) -> None:
    with fw.create(folder / "y.npy", "f4", (9, 9), device="cpu"):
        counters = observing.counters()
    counters["sums"] *= 2
    counters["pinned"] = {"pages of files": 3}

    with pretender(as_message(twisted(counters, seed))):
        run(["top", "--once", "--interval", "0"])
        text = capsys.readouterr().out
        run(["top", "--json", "--interval", "0"])
        (shown,) = (each for each in json.loads(capsys.readouterr().out) if each["pid"] == 1)

    lines = [line for line in text.splitlines() if line.startswith("process 1: ")]
    assert len(lines) == bool(shown["failed"])
    assert all(line.isprintable() for line in text.splitlines())
    if shown["failed"]:
        assert "no counters" in lines[0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"abc", "3 bytes"),
        (b"", None),
        (b"\xff\0\0\0{}", "255 bytes"),
        (as_message([]), "no object"),
        (as_message({}), "no counters"),
        (b"\4\0\0\0\xff\xfe{]", "no JSON"),
        (as_message({"x": "y" * 70000}), "too long"),
        (as_message({"error": 3}), "error=3"),
        (as_message({"error": "OSError", "message": "broken"}), "broken"),
        (None, None),
    ],
)
def test_garbage_is_said_of_its_program_and_others_are_shown(
    capsys: pytest.CaptureFixture[str], start: Start, answer: bytes | None, said: str | None
) -> None:
    program = start()
    descriptors = len(os.listdir("/proc/self/fd"))

    with pretender(answer):
        run(["top", "--once", "--interval", "0"])

    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith(str(program.pid)) for line in told)
    of_it = [line for line in told if line.startswith("process 1: ")]
    assert len(of_it) == (said is not None)
    assert said is None or said in of_it[0]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_greetings_and_files_that_are_none_are_said(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    with pretender(b"", {"flashwarp": [], "messages": {}}):
        assert "run the same version" in seen(capsys)[0]["failed"]
    with names._opened(create=True) as place:
        other = socket.socket(socket.AF_UNIX)
        other.bind(f"{place}/{names.of_process(2)}.sock")
        other.listen()
        Path(place, f"{names.of_process(3)}.sock").write_text("garbage")
    with other:
        (shown,) = seen(capsys)
    assert (shown["pid"], shown["failed"][:16]) == (2, "cannot be asked:")


def test_many_who_wait_for_a_stopped_program_do_not_stop_top(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start()
    stop(program)
    monkeypatch.setattr(running, "_ANSWER_S", 0.0001)

    with closing(running.Processes()) as processes:
        said = {processes.look()[0].failed for _ in range(2 * names._BACKLOG)}
    program.send_signal(signal.SIGCONT)
    monkeypatch.setattr(running, "_ANSWER_S", 5.0)

    assert any("many wait" in each for each in said)
    assert seen(capsys)[0]["failed"] == ""


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


@pytest.mark.parametrize(
    "text",
    ["", "[", "[" * 100_000, "[]", '{"8:0": true, "8:1": NaN, "8:2": -1, "8:3": "x"}', "\xff"],
)
def test_ceilings_that_cannot_be_are_none(folder: Path, text: str) -> None:
    ceilings.keep("8:0", 2e9)
    (kept,) = folder.rglob("ceilings.json")
    kept.write_text(text, "latin-1")

    assert ceilings.kept() == {}


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

    # What markup would be, if cells were not plain text.
    program = start("# [/no] [red\n" + PROGRAM)

    async def look() -> list[str]:
        view = View(processes, 0.1)
        async with view.run_test(size=(140, 12)) as pilot:
            end = time.monotonic() + 60
            # On a busy machine the screen is late, and so is its first row.
            while not any(table.row_count for table in view.query(DataTable)):
                assert time.monotonic() < end, "no row"
                await pilot.pause(0.1)
            return [str(cell) for cell in view.query_one(DataTable).get_row_at(0)]

    with closing(running.Processes()) as processes:
        shown = asyncio.run(look())
    assert shown[0] == str(program.pid)
    assert "[/no] [red" in shown[1]
