"""Each suite in a guest with drives; skipped, with the reason, where no guest can be made."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from qemu.image import GuestImage, Unavailable, guest_image
from qemu.machine import Machine

SUITES = Path(__file__).with_name("suites")

# What every run of the tests can afford. FLASHWARP_QEMU=all, as `make qemu-test` sets it: all.
SMOKE = {"test_kernel_driver"}

# Modules of pytest and of the suites, read by a processor that is emulated, take their time.
LIMIT_S = 240


@pytest.fixture(scope="session")
def image() -> GuestImage:
    try:
        return guest_image()
    except Unavailable as error:
        pytest.skip(str(error))


def run_suite(image: GuestImage, name: str) -> None:
    """Boot the suite's machine and run pytest in it."""
    machine: Machine = importlib.import_module(f"qemu.suites.{name}").MACHINE
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--confcutdir", str(SUITES), str(SUITES / f"{name}.py")]

    outcome = machine.run(image, command, LIMIT_S)

    said = f"{outcome.output}\n{outcome.console}"
    assert outcome.status is not None, f"not finished after {LIMIT_S} s\n{said}"
    assert outcome.status == 0, said
    print(f"{outcome.seconds:.0f} s: {outcome.output.splitlines()[-1]}")


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("name", sorted(path.stem for path in SUITES.glob("test_*.py")))
def test_suite(image: GuestImage, name: str) -> None:
    if name not in SMOKE and os.environ.get("FLASHWARP_QEMU") != "all":
        pytest.skip("`make qemu-test` runs it")
    run_suite(image, name)
