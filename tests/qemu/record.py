"""Store what queue pairs of a drive do in a guest: run as `python -m qemu.record`, as `qemu` is.

Ten million reads and writes without a bad block, and the rate of one thread beside a plain loop in
C++ and fio. It takes ten minutes and two cores, and needs fio beside what `make qemu-test` needs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flashwarp.probe.report import Report, Row
from qemu.compiled import compile_for_guests
from qemu.image import Unavailable, guest_image
from qemu.machine import Drive, Machine, Namespace

MACHINE = Machine(
    (Drive((Namespace(32 << 20),)), Drive((Namespace(32 << 20, stores=False),))),
    modules=("nvme", "vfio-pci"),
)
_DRIVES = ("file", "no data")
_LIMIT_S = 3600
# Of fio in the same guest, and of the plain loop.
_TARGETS = {"fio, io_uring_cmd": 0.8, "fio, io_uring": 0.8, "plain loop": 1.0}


def report_of(measured: dict[str, Any], release: str, settings: dict[str, Any]) -> Report:
    """Put what the guest has measured beside what it is compared with."""
    qemu = subprocess.run(
        ["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]
    report = Report(
        title="Queue pairs of a drive that QEMU emulates, by VFIO",
        device=f"cpu of a guest: Linux {release}, {MACHINE.cores} emulated cores, {qemu}",
        settings={**settings, **measured},
        seeds={},
    )
    for each in measured["integrity"]:
        add_integrity(report, each)
    total = sum(each["commands"] for each in measured["integrity"])
    wrong = [row.checked for row in report.rows].count(False)
    report.add(Row("all shapes", total / 1e6, "M commands", checked=not wrong))
    for number, kind in enumerate(_DRIVES):
        rounds = [each for each in measured["rates"] if each["drive"] == number]
        add_rates(report, kind, rounds)
    return report


def add_integrity(report: Report, each: dict[str, Any]) -> None:
    """Report the commands of one shape of the rings."""
    bad = each["wrong"] + each["wrong_on_drive"]
    report.add(
        Row(
            f"{each['queue_pairs']} queue pairs of {each['depth']} entries",
            each["commands"] / each["seconds"] / 1e3,
            "k/s",
            checked=bad == 0 and each["failed"] == 0,
            note=f"{each['commands']} commands, {bad} bad blocks, {each['failed']} failed",
        )
    )


def add_rates(report: Report, kind: str, rounds: Sequence[dict[str, Any]]) -> None:
    """Report the medians of one drive: flashwarp's beside each of the others'."""

    def rate(way: str) -> float:
        per_s = [float(each[way]["commands"]) / each[way]["seconds"] for each in rounds]
        return float(median(per_s)) / 1e3

    for other, target in _TARGETS.items():
        report.add(
            Row(
                f"{kind}: random 4 KiB reads, one thread, 128 outstanding",
                rate("flashwarp"),
                "k/s",
                other,
                rate(other),
                target,
                note=f"median of {len(rounds)} rounds, one after the other",
            )
        )


def main() -> int:
    """Boot, measure, show, and store."""
    parser = argparse.ArgumentParser(prog="python -m qemu.record", description=__doc__)
    parser.add_argument("--commands", type=int, default=10_000_000, help="of all shapes")
    parser.add_argument("--rounds", type=int, default=7, help="of the rates")
    parser.add_argument("--seconds", type=float, default=3, help="of each run of fio")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    try:
        image = guest_image()
    except Unavailable as error:
        print(f"no guest can be made here: {error}", file=sys.stderr)
        return 77
    compile_for_guests()
    numbers = [str(each) for each in (options.commands, options.rounds, options.seconds)]
    outcome = MACHINE.run(image, ["python", "-m", "qemu.suites.record", *numbers], _LIMIT_S)
    if outcome.status != 0:
        print(outcome.output, outcome.console, file=sys.stderr)
        return 1
    settings = {"commands": options.commands, "fio_seconds": options.seconds}
    report = report_of(json.loads(outcome.output.splitlines()[-1]), image.release, settings)
    report.show()
    if options.json is not None:
        report.save(options.json)
        stored = json.loads(options.json.read_text())
        stored["command"] = shlex.join(["python", "-m", "qemu.record", *sys.argv[1:]])
        options.json.write_text(json.dumps(stored, indent=1) + "\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
