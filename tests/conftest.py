"""What all tests share: `gpu` tests are skipped, with the reason, where no GPU works."""

from __future__ import annotations

import functools
import gc
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from flashwarp._jit import cuda_api
from flashwarp.errors import DeviceError
from simulator import budget
from support import fake_cuda
from support.samples import EVERYTHING

# The same examples in each run, on a machine of any speed; `make test-all` draws new ones.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=not EVERYTHING,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

# In the background of a shell, and below nohup, these are ignored; programs that tests start and
# interrupt would inherit that.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@functools.cache
def _no_gpu_reason() -> str:
    try:
        return "" if cuda_api.device_count() > 0 else "the CUDA driver sees no GPU"
    except DeviceError as error:
        return str(error)


def pytest_report_header() -> str:
    return (
        f"simulator: FLASHWARP_SIMULATE_SEED={budget.FIRST_SEED}, "
        f"{budget.SEEDS} seeds for each test that explores"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What compiles for minutes comes first, so that no process waits for it in the end.
    items.sort(key=lambda item: item.path.name != "test_simulator.py")
    for item in items:
        if item.get_closest_marker("gpu") and _no_gpu_reason():
            item.add_marker(pytest.mark.skip(reason=_no_gpu_reason()))


def pytest_collection_finish() -> None:
    # What thousands of tests are made of stays: no later collection has to look through it.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of checks that find a driver without a GPU; see `support.fake_cuda`."""
    return fake_cuda.build(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.strip()}")
    yield folder
    # Lazily: Linux gives up the files of an io_uring a moment later.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Take back the handlers that a test's command line leaves: forked workers inherit them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
