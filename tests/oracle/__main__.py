"""Run random programs over the public calls, beside a model of what they must give.

    PYTHONPATH=tests python -m oracle --device cuda:0 --calls 2000000 --seed 1 --processes 4
    PYTHONPATH=tests python -m oracle --device cpu --replay SEED --steps 3,17

The last line counts programs, calls and checks, and says how many programs were wrong or hung. A
program that is wrong is shrunk, and printed with its seed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_PROGRESS = "progress"
"""The file in which a process says which program it runs."""

_STRIDE = 10_000_000
"""Between the seeds of two processes."""


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="oracle", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, fake or cuda:N")
    parser.add_argument("--calls", type=int, default=1 << 62, help="of all processes together")
    parser.add_argument("--programs", type=int, default=1 << 62, help="of each process")
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--seconds", type=float, default=60, help="after which no program begins")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--failures", type=int, default=3, help="of a process, which then ends")
    parser.add_argument("--rooms", default="", help="only steps of these modules, by commas")
    parser.add_argument("--but", default="", help="no steps of these names, by commas")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--mutant", default="", help="take a mend out first, see mutants.py")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--steps", help="of a replay: their numbers")
    parser.add_argument("--most", type=int, default=0, help="of a replay: rows of a call")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "fake" and "FAKE_CUDA" not in os.environ:
        from support import fake_cuda

        with tempfile.TemporaryDirectory(prefix="oracle-fake-") as folder:
            os.environ["FAKE_CUDA"] = fake_cuda.build(Path(folder))["FAKE_CUDA"]
            return _with_driver(given)
    return _with_driver(given)


def _with_driver(given: argparse.Namespace) -> int:
    if given.child is None and given.replay is None:
        return _parent(given)
    from oracle import mutants

    mutants.take_out(given.mutant)  # before anything imports the library
    from oracle.folders import folders
    from oracle.machine import use_fake
    from oracle.runner import Runner, main_of_child

    if given.device == "fake":
        use_fake(os.environ["FAKE_CUDA"])
    rooms = [each for each in given.rooms.split(",") if each]
    but = given.but.split(",")
    runner = Runner(given.device, rooms, but)
    if given.replay is not None:
        with folders() as runner.folders:
            return _replay(runner, given)
    runner.folders = dict(zip(("memory", "disk"), given.child, strict=True))
    progress = os.open(given.child[0] / _PROGRESS, os.O_WRONLY | os.O_CREAT)
    return main_of_child(
        runner,
        first=given.seed,
        calls=given.calls,
        seconds=given.seconds,
        programs=given.programs,
        failures_max=given.failures,
        shrink=not given.no_shrink,
        note=lambda seed: os.pwrite(progress, f"{seed:020}".encode(), 0),
    )


def _replay(runner: Any, given: argparse.Namespace) -> int:
    steps = {int(n) for n in given.steps.split(",") if n} if given.steps is not None else None
    for _ in range(20):
        try:
            runner.run(given.replay, steps, given.most)
        except Exception as error:
            world = error.world
            print("\n".join(world.each_line()))
            print(f"  -> {error}")
            import traceback

            traceback.print_exception(error)
            return 1
    print("no failure in 20 tries")
    return 0


def _parent(given: argparse.Namespace) -> int:
    from oracle.folders import folders

    start = time.monotonic()
    totals = dict.fromkeys(("programs", "calls", "checks", "wrong", "hangs", "crashes"), 0)
    lasts: list[str] = []
    lock = threading.Lock()
    with folders() as places:

        def supervise(number: int) -> None:
            seed = first = given.seed + number * _STRIDE
            calls = given.calls // given.processes
            failures = 0
            while failures < given.failures:
                left = given.seconds - (time.monotonic() - start)
                if left <= 0 or calls <= 0:
                    break
                own = [place / str(number) for place in places.values()]
                for place in own:
                    place.mkdir()
                code, done = _run_child(given, number, seed, calls, left, own)
                seed = _read(own[0] / _PROGRESS, seed)
                for place in own:
                    shutil.rmtree(place)
                with lock:
                    for key, count in zip(totals, done, strict=False):
                        totals[key] += count
                    if code == 4:
                        totals["hangs"] += 1
                    elif code != 0:
                        totals["crashes"] += 1
                        print(f"CRASH: program {seed}: status {code}", flush=True)
                calls -= done[1]
                seed += 1
                if code == 0:
                    break
                failures += 1
            lasts.append(f"{first}..{seed - 1}")

        threads = [
            threading.Thread(target=supervise, args=(number,)) for number in range(given.processes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seconds = time.monotonic() - start
    print(
        f"oracle on {given.device}: {totals['programs']} programs, {totals['calls']} calls, "
        f"{totals['checks']} checks, seeds {', '.join(sorted(lasts))}, {totals['wrong']} wrong, "
        f"{totals['hangs']} hangs, {totals['crashes']} crashes, {seconds:.0f} s "
        f"({totals['calls'] / seconds:.0f} calls/s)"
    )
    return 1 if totals["wrong"] or totals["hangs"] or totals["crashes"] else 0


def _run_child(
    given: argparse.Namespace, number: int, seed: int, calls: int, seconds: float, own: list[Path]
) -> tuple[int, list[int]]:
    """Run a process; returns its status, and its programs, calls, checks and failures."""
    options = {
        "--device": given.device,
        "--calls": calls,
        "--programs": given.programs,
        "--seed": seed,
        "--seconds": seconds,
        "--failures": given.failures,
        "--rooms": given.rooms,
        "--but": given.but,
        "--mutant": given.mutant,
    }
    command = [sys.executable, "-X", "faulthandler", "-m", "oracle"]
    command += [str(part) for pair in options.items() for part in pair]
    command += ["--child", *map(str, own)]
    if given.no_shrink:
        command.append("--no-shrink")
    tests = str(Path(__file__).parents[1])
    paths = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    done = [0, 0, 0, 0]
    for line in child.stdout:
        if line.startswith("DONE "):
            numbers = [int(word) for word in line.split()[1:]]
            done = [*numbers[:3], numbers[4]]
        else:
            prefix = f"[{number}] " if given.processes > 1 else ""
            print(prefix + line, end="", flush=True)
    return child.wait(), done


def _read(progress: Path, otherwise: int) -> int:
    try:
        return int(progress.read_text())
    except (OSError, ValueError):
        return otherwise


if __name__ == "__main__":
    sys.exit(main())
