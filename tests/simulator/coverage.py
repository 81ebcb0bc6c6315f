"""Which lines of the device headers the simulator runs: `--coverage SECONDS`.

Builds the built-in scenarios with gcov's counters, runs them for a while at each width, and lists
what no schedule has reached.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from simulator.simulate import coverage_program

__all__ = ["print_uncovered", "uncovered"]


def uncovered(seconds: float, widths: tuple[int, ...] = (1, 4)) -> dict[str, dict[int, bool]]:
    """Run for `seconds` at each width; tell for each header which lines ran."""
    lines: dict[str, dict[int, bool]] = {}
    for width in widths:
        with tempfile.TemporaryDirectory() as folder:
            program = coverage_program(Path(folder), width)
            subprocess.run(
                [program, "--seeds", "0:1000000000", "--seconds", str(seconds)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            for data in sorted(Path(folder).glob("*.gcda")):
                done = subprocess.run(
                    ["gcov", "--json-format", "--stdout", str(data)],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                for report in map(json.loads, done.stdout.splitlines()):
                    _add(report, lines)
    return lines


def _add(report: dict[str, list[dict[str, object]]], lines: dict[str, dict[int, bool]]) -> None:
    for file in report["files"]:
        name = str(file["file"])
        if not name.endswith(".cuh") or "/simulator/" in name:
            continue
        seen = lines.setdefault(name.rpartition("/src/flashwarp/")[2], {})
        for line in file["lines"]:  # type: ignore[attr-defined]
            number = line["line_number"]
            seen[number] = seen.get(number, False) or line["count"] > 0


def print_uncovered(seconds: float) -> None:
    """Print a line for each header: covered, all, and the numbers of those that never ran."""
    for name, lines in sorted(uncovered(seconds).items()):
        missing = [number for number, ran in sorted(lines.items()) if not ran]
        print(f"{len(lines) - len(missing):4d}/{len(lines):<4d} {name} {missing or ''}")
