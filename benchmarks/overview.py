"""The picture of the README: stored records as shares of what their machine gives.

    python -m benchmarks.overview

writes `results/overview.svg`. Every number is a row of a record in `results/`; a test draws the
picture again and compares. Colours are such that they can be read on white and on black.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent.parent / "results"
PICTURE = RESULTS / "overview.svg"

_OURS, _OTHERS, _TEXT, _LIMIT = "#0d9488", "#9aa4b2", "#768089", "#c2701c"
_WIDTH, _LEFT, _SPAN, _TOP, _STEP, _BAR = 880, 16, 600, 62, 64, 17
_FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class _Source:
    """Ours and an alternative by the name of their row, and the ceiling of the same run."""

    title: str
    record: str
    name: str
    other: str
    shown: str
    """What the alternative is, in a few words."""
    ceiling: str
    """What limits both, in a few words."""
    unit: str
    limit: str
    """The reference or the row that is the ceiling."""


_SOURCES = (
    _Source(
        "65,536 rows of 4 KiB to the GPU, in the page cache",
        "first_light_h200",
        "page cache: 65,536 cold 4 KiB rows",
        "torch.index_select to pinned memory, then a copy",
        "torch.index_select, and a copy",
        "the link",
        "GB/s",
        "UVA gather, 4096 B",
    ),
    _Source(
        "Train GraphSAGE, features in a file",
        "pipelines_gnn_h200",
        "GraphSAGE, 128 features, page cache: pipelined, default",
        "POSIX baseline",
        "12 threads that pread, and copies",
        "reading alone",
        "steps/s",
        "the longer of computing and reading",
    ),
    _Source(
        "Look up 16 rows a step, with 256 MiB for a table of 2 GiB",
        "tables_h200",
        "steps with 16 rows, ours, a cache of 256 MiB, bounce",
        "steps with 16 rows, 32 threads that gather from a memory map, and a copy",
        "32 threads that read a memory map, and a copy",
        "all of it in GPU memory",
        "steps/s",
        "steps with 16 rows, the table in the device's memory",
    ),
    _Source(
        "Load a checkpoint of 8 GB, in the page cache",
        "load_h200",
        "warm, fw.load",
        "torch.load(mmap=True)",
        "torch.load(mmap=True)",
        "the copy engine",
        "GB/s",
        "copy engine",
    ),
    _Source(
        "Save a state into spare GPU memory: until training goes on",
        "checkpoints_states_h200",
        "a state saved, with room in the GPU cache",
        "dcp.async_save, a process and pinned memory",
        "torch's dcp.async_save, pinned memory",
        "a copy inside the GPU",
        "GB/s",
        "a plain copy inside the device",
    ),
    _Source(
        "32,768 rows of 160 B that lie on a drive",
        "tables_h200",
        "32768 rows that nothing has read, O_DIRECT",
        "32 threads that gather from a memory map",
        "32 threads that read a memory map",
        "the drive",
        "k rows/s",
        "the disk's random reads of 4096 bytes (Linux AIO)",
    ),
)


@dataclass(frozen=True)
class Comparison:
    """Figures of one run: ours, an alternative, and what limits both."""

    title: str
    ours: float
    other: float
    limit: float
    unit: str
    other_is: str
    limit_is: str


class _Record:
    def __init__(self, name: str) -> None:
        found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
        self.machine: dict[str, Any] = found["machine"]
        self._rows: list[dict[str, Any]] = found["rows"]

    def __getitem__(self, name: str) -> float:
        return next(float(row["value"]) for row in self._rows if row["name"] == name)

    def beside(self, ours: str, name: str) -> float:
        """Return the figure of this name: the one beside ours, before those of other rows."""
        rows = sorted(self._rows, key=lambda row: row["name"] != ours)
        found = [row["reference"] for row in rows if row["reference_name"] == name]
        return float(found[0]) if found else self[name]


def machine() -> str:
    """Name the one machine of all records."""
    machines = [_Record(each.record).machine for each in _SOURCES]
    ((gpu, cores),) = {
        (each["device"].split("(")[1].split(",")[0], each["cores"]) for each in machines
    }
    return f"One {gpu}, {cores} host cores"


def comparisons() -> list[Comparison]:
    """Read what the picture shows."""
    found = []
    for each in _SOURCES:
        record = _Record(each.record)
        other, limit = (record.beside(each.name, name) for name in (each.other, each.limit))
        figures = record[each.name], other, limit
        found.append(Comparison(each.title, *figures, each.unit, each.shown, each.ceiling))
    return found


def draw() -> str:
    """Return the picture."""
    lines, where = comparisons(), machine()
    height = _TOP + _STEP * len(lines) + 26
    end = _TOP + _STEP * len(lines) - 8
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' {_FONT}>",
        f"<title>flashwarp beside alternatives. {where}</title>",
        _text(_LEFT, 24, "How much of what the machine gives", _TEXT, 17, "600"),
        _swatch(_LEFT, 38, _OURS, "flashwarp"),
        _swatch(_LEFT + 96, 38, _OTHERS, "the alternative"),
        _text(_LEFT + _SPAN, 48, "100 %", _LIMIT, 12, "600", "middle"),
        f"<line x1='{_LEFT + _SPAN}' y1='{_TOP - 6}' x2='{_LEFT + _SPAN}' y2='{end}' "
        f"stroke='{_LIMIT}' stroke-width='1.5' stroke-dasharray='4 3'/>",
    ]
    for number, line in enumerate(lines):
        parts += _bars(line, _TOP + number * _STEP)
    source = f"{where}. Figures of stored records; data checked in each run."
    parts += [_text(_LEFT, height - 10, source, _TEXT, 12), "</svg>"]
    return "\n".join(parts) + "\n"


def _bars(line: Comparison, top: int) -> list[str]:
    ours, other = (f"{figure(value)} {line.unit}" for value in (line.ours, line.other))
    most = f"{line.limit_is}: {figure(line.limit)} {line.unit}"
    return [
        _text(_LEFT, top + 10, line.title, _TEXT, 13, "600"),
        _text(_LEFT + _SPAN + 10, top + 10, most, _LIMIT, 12),
        *_bar(line.ours / line.limit, top + 15, _OURS, ours),
        *_bar(line.other / line.limit, top + 34, _OTHERS, f"{other}, {line.other_is}"),
    ]


def figure(value: float) -> str:
    """Write a figure with three digits or more."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _bar(share: float, top: int, colour: str, text: str) -> list[str]:
    width = max(2.0, share * _SPAN)
    bar = (
        f"<rect x='{_LEFT}' y='{top}' width='{width:.1f}' height='{_BAR}' rx='2' fill='{colour}'/>"
    )
    if share > 0.6:
        ink = "#ffffff" if colour == _OURS else "#1f2328"
        return [bar, _text(_LEFT + 8, top + 13, text, ink, 12, "600")]
    return [bar, _text(_LEFT + width + 8, top + 13, text, _TEXT, 12)]


def _swatch(x: int, y: int, colour: str, text: str) -> str:
    box = f"<rect x='{x}' y='{y}' width='11' height='11' rx='2' fill='{colour}'/>"
    return box + _text(x + 17, y + 10, text, _TEXT, 12)


def _text(
    x: float, y: float, text: str, colour: str, size: int, weight: str = "400", anchor: str = ""
) -> str:
    place = f" text-anchor='{anchor}'" if anchor else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}' font-size='{size}' "
        f"font-weight='{weight}'{place}>{escape(text)}</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
