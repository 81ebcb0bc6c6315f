"""Suites in guests with drives; skipped, with the reason, where no guest can be made.

Each run takes a part of one suite, another one on each day. All of them take five to seven minutes.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from qemu.compiled import compile_for_guests
from qemu.image import GuestImage, Unavailable, guest_image
from qemu.machine import Machine
from support.daily import part_of_today

SUITES = Path(__file__).with_name("suites")

# FLASHWARP_QEMU=all, as `make qemu-test` sets it, runs all suites.
ALL = os.environ.get("FLASHWARP_QEMU") == "all"

# In how many parts, of half a minute each, the suites of a machine are run: by the first of them.
PARTS = {
    "test_commands": 7,
    "test_doctor": 2,
    "test_shared": 4,
    "test_vfio_drive": 5,
    "test_vfio_rings": 1,
    "test_vfio_service": 2,
}

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


def runs() -> list[tuple[list[str], str]]:
    """Suites to run in a guest, and which part of them: all, or what today takes."""
    if ALL:
        return [(names, "0/1") for names in suites_of_machines()]
    parts = [
        (names, f"{i}/{PARTS[names[0]]}")
        for names in suites_of_machines()
        for i in range(PARTS[names[0]])
    ]
    return part_of_today(parts, len(parts))


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    ("names", "part"), [pytest.param(*each, id=f"{'+'.join(each[0])}-{each[1]}") for each in runs()]
)
def test_suites(image: GuestImage, names: list[str], part: str) -> None:
    compile_for_guests()
    machine = machine_of(names[0])
    machine = replace(machine, environment={**machine.environment, "FLASHWARP_QEMU_PART": part})
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--durations=5", "--confcutdir", str(SUITES)]

    outcome = machine.run(image, command + [str(SUITES / f"{name}.py") for name in names], LIMIT_S)

    said = f"{outcome.output}\n{outcome.console}"
    assert outcome.status is not None, f"not finished after {LIMIT_S} s\n{said}"
    assert outcome.status == 0, said
    print(f"{outcome.seconds:.0f} s: {outcome.output.splitlines()[-1]}")
