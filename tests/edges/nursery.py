"""Run many small programs, each in a process of its own, for the price of one start of Python.

A nursery is a process that has imported flashwarp and opened nothing. It forks a child for each
program; the child runs it as `__main__`, and ends as every program does: by the last line of the
file, through the whole end of the interpreter. What the child leaves behind is looked at from
outside: its status, what it printed, processes, files, and the time it took.

Run as a script, this file is the nursery.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Program:
    """A program to run in a new folder, and the time after which it hangs."""

    name: str
    code: str
    limit_s: float = 20.0


@dataclass(frozen=True)
class Outcome:
    """How a program has ended."""

    name: str
    status: int  # exit code, or minus the signal
    out: str
    err: str
    seconds: float
    hung: bool
    left: int  # processes of its session that outlived it

    def __str__(self) -> str:
        how = "HUNG" if self.hung else f"status {self.status}"
        return (
            f"{self.name}: {how} after {self.seconds:.2f} s, {self.left} processes left\n"
            f"{self.out}{self.err}"
        )


def run(programs: Iterable[Program], folder: Path) -> Generator[Outcome, None, None]:
    """Run the programs one after the other, each in a folder of its own below `folder`."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONFAULTHANDLER": ""}
    nursery = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    with nursery:
        for program in programs:
            nursery.stdin.write(json.dumps(asdict(program)) + "\n")
            nursery.stdin.flush()
            line = nursery.stdout.readline()
            assert line, f"the nursery died before {program.name} had ended"
            yield Outcome(**json.loads(line))


Run = Callable[[Program], Outcome]


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Run]:
    """Yield a function that runs a program: all of them in one nursery."""
    programs: list[Program] = []
    # Each outcome takes the next program.
    outcomes = run(iter(programs.pop, None), folder)

    def run_one(program: Program) -> Outcome:
        programs.append(program)
        return next(outcomes)

    with contextlib.closing(outcomes):
        yield run_one


def _tend(folder: Path) -> dict[str, Any]:
    """Be the nursery; returns in each child, with the program that it is to run."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number, line in enumerate(sys.stdin):
        program: dict[str, Any] = json.loads(line)
        home = folder / str(number)
        home.mkdir()
        with open(home / ".out", "w+") as out, open(home / ".err", "w+") as err:
            start = time.monotonic()
            child = os.fork()
            if child == 0:
                os.setsid()
                os.chdir(home)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                return program
            status = _wait(child, start + program["limit_s"])
            hung = status is None
            if status is None:
                os.killpg(child, signal.SIGKILL)
                _, raw = os.waitpid(child, 0)
                status = os.waitstatus_to_exitcode(raw)
            outcome = Outcome(
                name=program["name"],
                status=status,
                seconds=time.monotonic() - start,
                hung=hung,
                left=_clear(child),
                out=(home / ".out").read_text(errors="replace"),
                err=(home / ".err").read_text(errors="replace"),
            )
        for name in (".out", ".err"):
            (home / name).unlink()
        print(json.dumps(asdict(outcome)), flush=True)
    os._exit(0)


def _wait(child: int, end: float) -> int | None:
    step = 0.001
    while time.monotonic() < end:
        done, raw = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(raw)
        time.sleep(step)
        step = min(step * 1.5, 0.02)
    return None


def _clear(session: int) -> int:
    """Kill and reap what a child has left of its session; returns how many lived."""
    alive = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # After the name, which may hold blanks: state, parent, group, session.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            alive += 1
            os.kill(int(entry.name), signal.SIGKILL)
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return alive
        except ChildProcessError:
            return alive


if __name__ == "__main__":
    import numpy as np  # noqa: F401 - for the programs

    import flashwarp as fw

    # Python's own, of version 3.12 and later, wherever a program forks.
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    # Each is imported when it is first used, which a child may not be able to.
    for name in fw.__all__:
        getattr(fw, name)

    PROGRAM = _tend(Path(sys.argv[1]))
    sys.argv = [PROGRAM["name"]]
    exec(compile(PROGRAM["code"], PROGRAM["name"], "exec"), globals())
