"""A CUDA driver without a GPU for tests: `fake_cuda.c`, in processes of their own.

A check is a function that runs in a process of its own, forked before any driver was loaded, which
finds the fake where it looks for the driver. `build` makes the fake, `run` runs a check; the rest
is for checks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashwarp.device import Device
from support import compiled
from support.forks import server

ILLEGAL_ADDRESS = 700
LAUNCH_FAILED = 719
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
OUT_OF_MEMORY = 2


@functools.cache
def fake() -> Any:
    """The library, whose functions `fake_*` tell and set what the driver does."""
    return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def failing(call: str, code: int) -> Any:
    fake().fake_fail(call.encode(), code)
    yield
    fake().fake_fail(call.encode(), 0)


def report(device: Device, address: int) -> tuple[int, ...]:
    """What a launch left where its first parameter points: grid, block, stream, value."""
    return struct.unpack("4Q", device.download(address, 32))


def build(folder: Path) -> dict[str, str]:
    """Give the environment of checks, which has the fake; `folder` is for what they compile."""
    made = compiled.library(Path(__file__).with_suffix(".c"), "libcuda.so.1")
    return {"FAKE_CUDA": str(made), "FLASHWARP_CACHE_DIR": str(folder / "cache")}


def test_of(module: dict[str, Any]) -> Callable[..., None]:
    """Make the test that runs each function of a module that is named check_*."""
    found = [function for name, function in module.items() if name.startswith("check_")]

    @pytest.mark.parametrize("check", found, ids=lambda each: each.__name__.removeprefix("check_"))
    def test(check: Callable[[], None], environment: dict[str, str]) -> None:
        run(check, environment)

    return test


def run(check: Callable[[], None], environment: dict[str, str]) -> None:
    """Run a check in its own process, and fail with its traceback."""
    receive, send = server().Pipe(duplex=False)
    process = server().Process(target=_run_here, args=(check, {**os.environ, **environment}, send))

    process.start()
    send.close()
    try:
        problem = receive.recv()
    except EOFError:
        problem = "the process died"
    process.join()

    assert not problem, problem
    assert process.exitcode == 0


def _run_here(check: Callable[[], None], environment: dict[str, str], answer: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # Whoever asks for libcuda.so.1 from here on gets this one.
    ctypes.CDLL(environment["FAKE_CUDA"], ctypes.RTLD_GLOBAL)
    try:
        check()
        answer.send("")
    except BaseException:
        answer.send(traceback.format_exc())
    # A process that was forked ends without this.
    atexit._run_exitfuncs()
