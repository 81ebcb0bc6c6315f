"""Each suite in a guest with drives; skipped, with the reason, where no guest can be made."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from qemu.compiled import compile_for_guests
from qemu.image import GuestImage, Unavailable, guest_image
from qemu.machine import Machine

SUITES = Path(__file__).with_name("suites")

# FLASHWARP_QEMU=all, as `make qemu-test` sets it, runs all suites.
SMOKE = "(TestBlockDevice or TestPassthrough) and not 4KiB or status_of"

# Modules of pytest and of the suites, read by a processor that is emulated, take their time.
LIMIT_S = 240


@pytest.fixture(scope="session")
def image() -> GuestImage:
    try:
        return guest_image()
    except Unavailable as error:
        pytest.skip(str(error))


def run_suites(image: GuestImage, names: list[str], *arguments: str) -> None:
    """Boot the machine of these suites, and run pytest on them."""
    machine = machine_of(names[0])
    compile_for_guests()
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--durations=5", "--confcutdir", str(SUITES), *arguments]

    outcome = machine.run(image, command + [str(SUITES / f"{name}.py") for name in names], LIMIT_S)

    said = f"{outcome.output}\n{outcome.console}"
    assert outcome.status is not None, f"not finished after {LIMIT_S} s\n{said}"
    assert outcome.status == 0, said
    print(f"{outcome.seconds:.0f} s: {outcome.output.splitlines()[-1]}")


def machine_of(name: str) -> Machine:
    machine: Machine = importlib.import_module(f"qemu.suites.{name}").MACHINE
    return machine


def suites_of_machines() -> list[list[str]]:
    """Suites that have equal machines share a guest."""
    found: list[list[str]] = []
    for name in sorted(path.stem for path in SUITES.glob("test_*.py")):
        beside = [each for each in found if machine_of(each[0]) == machine_of(name)]
        if beside:
            beside[0].append(name)
        else:
            found.append([name])
    return found


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("names", suites_of_machines(), ids="+".join)
def test_suites(image: GuestImage, names: list[str]) -> None:
    if os.environ.get("FLASHWARP_QEMU") != "all":
        pytest.skip("`make qemu-test` runs it")
    run_suites(image, names)


@pytest.mark.timeout(LIMIT_S + 30)
def test_smoke(image: GuestImage) -> None:
    """What every run of the tests can afford: both ways to the drive of the kernel's driver."""
    if os.environ.get("FLASHWARP_QEMU") == "all":
        pytest.skip("all suites run")
    run_suites(image, ["test_kernel_driver", "test_passthrough"], "-k", SMOKE)
