"""Writes the checkpoints' part of `docs/performance.md` from the stored records.

Each part that was run again has a record of its own, whose rows take the place of older ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RECORDS = tuple(
    ROOT / "results" / f"checkpoints{part}_{machine}.json"
    for part in ("", "_others", "_irregular", "_reverse", "_sequential", "_durable", "_states")
    + ("_sigmas", "_gpus")
    for machine in ("h200", "h100")
)
NODES = ROOT / "results" / "checkpoints_nodes.json"
_MACHINE = re.compile(r"\(NVIDIA (\w+)")
BLOCK = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)

PAPER = (
    (
        "Fig. 5: restores wait for flushes; uniform, all orders",
        "2 to 74 times UVM with hints",
        "restore, uniform reverse, 10 ms, durable first, hints: all",
    ),
    (
        "Fig. 6: restores at once; uniform, all orders",
        "1.8 to 3.6 times UVM with hints",
        "restore, uniform reverse, 10 ms, at once, hints: all",
    ),
    (
        "Fig. 6b: restores at once; variable, irregular",
        "38 times UVM with hints",
        "restore, variable (sigma 0.3) irregular, 10 ms, at once, hints: all",
    ),
    (
        "Fig. 8a: longer intervals; variable, irregular",
        "restores reach the rate of copies inside the GPU at 30 ms",
        "restore, variable (sigma 0.3) irregular, 30 ms, at once, hints: all",
    ),
    (
        "Fig. 8b: twice the cache; variable, irregular",
        "up to 2.6 times UVM",
        "restore, variable (sigma 0.3) irregular, 10 ms, caches x 2, at once, hints: all",
    ),
    (
        "Fig. 5, 6: ADIOS2, uniform",
        "the slowest",
        "restore by ADIOS2, uniform reverse, 10 ms",
    ),
    (
        "Fig. 5, 6: UVM with advice and prefetches, all hints",
        "the base of the ratios above",
        "restore from managed memory, uniform reverse, 10 ms, hints: all",
    ),
    (
        "Fig. 9a: a barrier in each step; variable, irregular",
        "stable for each process as GPUs are added",
        "restore, 2 GPUs, a barrier in each step, variable (sigma 0.3) irregular, 10 ms, at once, "
        "hints: all",
    ),
    (
        "Fig. 9b: no barrier; variable, irregular",
        "stable for each process as GPUs are added",
        "restore, 2 GPUs, no barrier, variable (sigma 0.3) irregular, 10 ms, at once, hints: all",
    ),
    (
        "section 5.4.2: flushes of one of eight ranks",
        "0.685 GB/s",
        "durable, 16 versions",
    ),
)
"""Place in the paper, what it says, and the row that stands beside it."""


def render() -> str:
    """Return what belongs between the marks of the page."""
    own: dict[str, dict[str, Any]] = {}
    for record in RECORDS:
        own |= _rows(record)
    parts = [_own(own), _paper(own), _nodes(_rows(NODES))]
    return "\n".join(part for part in parts if part)


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    machine = _MACHINE.search(record["machine"]["device"])
    on = machine[1] if machine else "CPU"
    return {row["name"]: {**row, "on": on} for row in record["rows"]}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _value(row: dict[str, Any]) -> str:
    return f"{_number(row['value'])} {row['unit']}"


def _against(row: dict[str, Any]) -> str:
    return f"{row['reference_name']}: {_number(row['reference'])}" if row["reference"] else ""


def _ratio(row: dict[str, Any]) -> str:
    return _number(row["ratio"]) if row["reference"] else ""


def _own(rows: dict[str, dict[str, Any]]) -> str:
    if not rows:
        return "No run on a GPU is stored yet.\n"
    lines = ["| what | on | flashwarp | against | ratio | wanted |", "|---|---|---|---|---|---|"]
    for row in rows.values():
        wanted = _number(row["target"]) if row["target"] else ""
        cells = [row["name"], row["on"], _value(row), _against(row), _ratio(row), wanted]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _paper(rows: dict[str, dict[str, Any]]) -> str:
    if not rows:
        return ""
    lines = ["| paper | says | here | |", "|---|---|---|---|"]
    for place, says, name in PAPER:
        row = rows.get(name)
        here = "not measured"
        if row is not None:
            here = f"{_value(row)}, {_ratio(row)} of {_against(row)} ({row['on']})"
        lines.append(f"| {place} | {says} | {name} | {here} |")
    return "\n".join(lines) + "\n"


def _nodes(rows: dict[str, dict[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [
        "This is a simulation from the links that were measured on one node; no network was used.",
        "",
        "| nodes | shots a second | against | ratio |",
        "|---|---|---|---|",
    ]
    for row in rows.values():
        if row["name"].startswith("simulated: "):
            name = row["name"].removeprefix("simulated: ")
            lines.append(f"| {name} | {_number(row['value'])} | {_against(row)} | {_ratio(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: render(), PAGE.read_text()))
