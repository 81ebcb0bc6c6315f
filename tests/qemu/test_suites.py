"""Suites in guests with drives; skipped, with the reason, where no guest can be made.

They take five to seven minutes, which `make qemu-test` and `make test-all` spend.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from qemu.compiled import compile_for_guests
from qemu.image import GuestImage, Unavailable, guest_image
from qemu.machine import Machine
from support.samples import EVERYTHING

SUITES = Path(__file__).with_name("suites")

pytestmark = pytest.mark.skipif(
    not (EVERYTHING or os.environ.get("FLASHWARP_QEMU")), reason="`make qemu-test` runs guests"
)

# Modules of pytest and of the suites, read by a processor that is emulated, take their time.
LIMIT_S = 240


@pytest.fixture(scope="session")
def image() -> GuestImage:
    try:
        return guest_image()
    except Unavailable as error:
        pytest.skip(str(error))


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
    compile_for_guests()
    machine = machine_of(names[0])
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--durations=5", "--confcutdir", str(SUITES)]

    outcome = machine.run(image, command + [str(SUITES / f"{name}.py") for name in names], LIMIT_S)

    said = f"{outcome.output}\n{outcome.console}"
    assert outcome.status is not None, f"not finished after {LIMIT_S} s\n{said}"
    assert outcome.status == 0, said
    print(f"{outcome.seconds:.0f} s: {outcome.output.splitlines()[-1]}")
