"""What a call whose misses are split queues on its stream, by the CUDA driver's own account.

Kernels do nothing in the fake driver, and its waits end at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp._jit import compiler, precompiled
from flashwarp._jit.compiler import Artifact, KernelResources
from flashwarp.array import splitting
from flashwarp.array.rows import MaintenanceParams, RowParams, SubmitParams
from flashwarp.device import CudaDevice
from flashwarp.errors import DeviceError
from flashwarp.nvme import software
from support import fake_cuda
from support.fake_cuda import OUT_OF_MEMORY, failing, fake

OTHER = 1  # the legacy default stream of the fake
ROWS = 4096


def gpu() -> CudaDevice:
    """A GPU whose kernels nobody had to compile."""
    sizes = dict.fromkeys(
        ("gather_rows", "scatter_rows", "prefetch_rows"), ctypes.sizeof(RowParams)
    )
    sizes["check_indices"] = ctypes.sizeof(RowParams)
    sizes["submit_rows"] = ctypes.sizeof(SubmitParams)
    maintenance = ("flush_lines", "submit_command", "quiesce", "land_lines")
    sizes |= dict.fromkeys(maintenance, ctypes.sizeof(MaintenanceParams))
    symbols = {f"_Z{len(name) + 3}fw_{name}y": nbytes for name, nbytes in sizes.items()}
    kernels = {
        symbol: KernelResources(symbol, nbytes, (nbytes,), 32, 0, 0, 0)
        for symbol, nbytes in symbols.items()
    }

    def compiled(arch: str, *_: Any, **__: Any) -> Artifact:
        return Artifact(arch, "built in", b"\x7fELF", "", kernels, from_cache=False)

    # For good: this process runs one check.
    compiler.compile_source = compiled
    precompiled.find = lambda *_: None
    os.environ["FLASHWARP_SPLIT_MISSES"] = "1"
    return CudaDevice(0)


@contextlib.contextmanager
def open_array(cache: str = "4 MiB", **options: Any) -> Iterator[fw.Array]:
    """Rows of 4 KiB through rings with buffers, so rounds of a quarter of the cache."""
    memory = fw.storage.Memory(np.zeros((ROWS, 512), np.int64))
    settings = fw.nvme.SoftwareController(route="bounce", queue_pairs=4, **options)
    with (
        gpu() as device,
        fw.open(
            memory, "r+", "i8", (ROWS, 512), device=device, cache=cache, controller=settings
        ) as x,
    ):
        yield x


def operands(x: fw.Array, count: int) -> tuple[Any, Any]:
    return x.device.empty_array((count,), "i8"), x.device.empty_array((count, 512), "i8")


@contextlib.contextmanager
def queued(expected: list[str]) -> Iterator[None]:
    """What is queued in the block on OTHER, and nowhere else."""
    queue = fake().fake_queued
    queue.restype = ctypes.c_char_p
    fake().fake_forget_queued()
    yield
    found = re.sub(r"_Z\d+(fw_\w+)y", r"\1", queue().decode()).splitlines()
    assert found == [f"{what} {OTHER:#x}" for what in expected]


SUBMIT, WAIT, LAND = "fw_submit_rows", "wait for 1", "fw_land_lines"
GATHER, SCATTER = "fw_gather_rows", "fw_scatter_rows"


def check_small_call_submits_waits_and_moves() -> None:
    with open_array() as x:
        index, out = operands(x, 32)
        assert x._attachment.launcher.splitting.rows == x.cache.lines // 4 // 16 * 16
        with queued([SUBMIT, WAIT, GATHER]):
            x.gather(index, out=out, stream=OTHER)


def check_rounds_overlap() -> None:
    with open_array() as x:
        index, out = operands(x, 600)
        round_of = [WAIT, GATHER]
        with queued([SUBMIT, SUBMIT, *round_of, SUBMIT, *round_of, *round_of]):
            x.gather(index, out=out, stream=OTHER)


def check_large_rounds_are_landed_by_few_blocks() -> None:
    with open_array(cache="32 MiB", depth=1024) as x:
        assert x._attachment.launcher.splitting.rows > 1024
        index, out = operands(x, 1024)
        with queued([SUBMIT, WAIT, LAND, GATHER]):
            x.gather(index, out=out, stream=OTHER)


def check_rows_beyond_the_last_round_move_at_once() -> None:
    splitting.ROUNDS_MAX = 2
    with open_array() as x:
        index, out = operands(x, 600)
        with queued([SUBMIT, SUBMIT, WAIT, GATHER, WAIT, GATHER, GATHER]):
            x.gather(index, out=out, stream=OTHER)


def check_scatter_checks_first() -> None:
    with open_array() as x:
        index, values = operands(x, 32)
        with queued(["fw_check_indices", SUBMIT, WAIT, SCATTER]):
            x.scatter(index, values, stream=OTHER)


def check_prefetch_is_as_before() -> None:
    with open_array() as x:
        index, _ = operands(x, 32)
        with queued(["fw_prefetch_rows"]):
            x.prefetch(index, stream=OTHER)


def check_streams_have_their_own_words() -> None:
    with open_array() as x:
        index, out = operands(x, 32)
        word = fake().fake_last_word
        word.restype = ctypes.c_void_p
        words = []
        beside = x.device.create_stream()
        for stream in (OTHER, beside.handle, OTHER):
            x.gather(index, out=out, stream=stream)
            words.append(word())
        assert words[0] == words[2] != words[1]


def check_captured_call_waits_in_the_graph() -> None:
    with open_array() as x:
        index, out = operands(x, 600)
        x.gather(index, out=out, stream=OTHER)
        word = fake().fake_last_word
        word.restype = ctypes.c_void_p
        before = word()
        fake().fake_capture_begin(OTHER)
        x.gather(index, out=out, stream=OTHER)
        assert fake().fake_capture_end(), "the capture broke"

        assert fake().fake_value_nodes() == 3
        assert fake().fake_host_nodes() == 1, "one wakes the controller for all rounds"
        assert word() != before, "a replay may run beside the stream"
        fake().fake_destroy_graphs()


def check_future_ends_with_the_last_round() -> None:
    with open_array() as x:
        index, out = operands(x, 600)
        recorded = fake().fake_count(b"cuEventRecord")
        launched = fake().fake_count(b"cuLaunchKernel")
        read = x.gather_async(index, out=out, stream=x.device.create_stream())
        assert fake().fake_count(b"cuLaunchKernel") == launched + 6
        assert fake().fake_count(b"cuEventRecord") == recorded + 2, "behind the last of them"
        assert read.result() is out


def check_waits_that_are_refused_are_errors() -> None:
    with open_array() as x:
        index, out = operands(x, 32)
        with (
            failing("cuStreamWaitValue32", OUT_OF_MEMORY),
            pytest.raises(DeviceError, match="OUT_OF_MEMORY"),
        ):
            x.gather(index, out=out, stream=OTHER)
        x.gather(index, out=out, stream=OTHER)


def check_calls_that_find_no_batch_move_at_once() -> None:
    software._BATCHES = 2
    with open_array() as x:
        index, out = operands(x, 32)
        x.gather(index, out=out)  # the library's own stream takes the only two
        with queued([GATHER]):
            x.gather(index, out=out, stream=OTHER)


def check_in_place_nothing_waits() -> None:
    memory = fw.storage.Memory(np.zeros((ROWS, 512), np.int64))
    with (
        gpu() as device,
        fw.open(memory, "r+", "i8", (ROWS, 512), device=device, cache="4 MiB") as x,
    ):
        index, out = operands(x, 32)
        assert x.service.batches is None
        with queued([GATHER]):
            x.gather(index, out=out, stream=OTHER)


def check_off_by_default() -> None:
    device = gpu()
    del os.environ["FLASHWARP_SPLIT_MISSES"]
    memory = fw.storage.Memory(np.zeros((ROWS, 512), np.int64))
    settings = fw.nvme.SoftwareController(route="bounce")
    with (
        device,
        fw.open(
            memory, "r+", "i8", (ROWS, 512), device=device, cache="4 MiB", controller=settings
        ) as x,
    ):
        index, out = operands(x, 32)
        assert x.service.batches is None
        assert x.service.queues.batches is None  # type: ignore[attr-defined]
        with queued([GATHER]):
            x.gather(index, out=out, stream=OTHER)


# Running them.


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake_cuda.build(tmp_path_factory.mktemp("fake_cuda"))


@fake_cuda.checks(globals())
def test_cuda(check: Callable[[], None], environment: dict[str, str]) -> None:
    fake_cuda.run(check, environment)
