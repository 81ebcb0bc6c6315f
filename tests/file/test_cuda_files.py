"""Files on a GPU: what kernels wait for never needs the interpreter, which others may keep."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from support import fake_cuda, host_kernels

BYTES, PART = 30_000, 5_000


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    # A kernel that waits for the interpreter gives up soon.
    return {
        **fake_cuda.build(tmp_path),
        "FLASHWARP_TIMEOUT_S": "8",
        "FOLDER": str(tmp_path),
    }


def an_image(device: Any, preallocate: bool) -> Any:
    path = Path(os.environ["FOLDER"]) / f"{preallocate}.gvdk"
    return fw.File.create(
        path, BYTES, format="gvdk", preallocate=preallocate, device=device, cache="16 KiB",
        line=4096,
    )  # fmt: skip


def stores(device: Any, file: Any, value: int) -> list[Any]:
    """Store all bytes by kernels, which evict, and so write the image, where marks are missing."""
    futures = []
    for begin in range(0, BYTES, PART):
        rows = device.empty_array((PART,), "u1")
        device.upload(rows.address, np.full(PART, value, "u1"))
        futures.append(file.array.scatter_async(slice(begin, begin + PART), rows))
    return futures


def wait_with_the_interpreter(device: Any) -> None:
    with device.context:
        assert ctypes.PyDLL("libcuda.so.1").cuCtxSynchronize() == 0


def check_stores_end_while_another_library_keeps_the_interpreter() -> None:
    device = host_kernels.gpu(delay_us=2000)
    for preallocate in (True, False):
        with an_image(device, preallocate) as file:
            for value in range(1, 4):
                futures = stores(device, file, value)
                wait_with_the_interpreter(device)
                for future in futures:
                    future.result()
                assert file.read(0, BYTES) == bytes([value]) * BYTES
                file.flush()


def check_syncs_beside_a_library_that_keeps_the_interpreter() -> None:
    device = host_kernels.gpu(delay_us=2000)
    with an_image(device, False) as file:
        stop = threading.Event()
        failures: list[BaseException] = []

        def sync() -> None:
            try:
                while not stop.is_set():
                    file.flush()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=sync)
        thread.start()
        end = time.monotonic() + 3
        while time.monotonic() < end and not failures:
            futures = stores(device, file, 7)
            wait_with_the_interpreter(device)
            for future in futures:
                future.result()
        stop.set()
        thread.join()
        assert not failures, failures


def check_the_collector_runs_in_no_thread_that_serves() -> None:
    device = host_kernels.gpu(delay_us=2000)
    gc.set_threshold(5)
    with an_image(device, False) as file:
        for value in range(1, 6):
            futures = stores(device, file, value)
            for _ in range(20):  # whose end waits for all kernels
                cycle: list[Any] = [device.empty_array((64,), "u1")]
                cycle.append(cycle)
            for future in futures:
                future.result()
            file.flush()


test_checks = fake_cuda.test_of(globals())
