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
class _Line:
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


_LINES = (
    _Line(
        "65,536 rows of 4 KiB to the GPU, in the page cache",
        "first_light_h200",
        "page cache: 65,536 cold 4 KiB rows",
        "torch.index_select to pinned memory, then a copy",
        "torch.index_select, and a copy",
        "the link",
        "GB/s",
        "UVA gather, 4096 B",
    ),
    _Line(
        "Train GraphSAGE, features in a file",
        "pipelines_gnn_h200",
        "GraphSAGE, 128 features, page cache: pipelined, default",
        "POSIX baseline",
        "12 threads that pread, and copies",
        "reading alone",
        "steps/s",
        "the longer of computing and reading",
    ),
    _Line(
        "Look up 16 rows a step, with 256 MiB for a table of 2 GiB",
        "tables_h200",
        "steps with 16 rows, ours, a cache of 256 MiB, bounce",
        "steps with 16 rows, 32 threads that gather from a memory map, and a copy",
        "32 threads that read a memory map, and a copy",
        "all of it in GPU memory",
        "steps/s",
        "steps with 16 rows, the table in the device's memory",
    ),
    _Line(
        "Load a checkpoint of 8 GB, in the page cache",
        "load_h200",
        "warm, fw.load",
        "torch.load(mmap=True)",
        "torch.load(mmap=True)",
        "the copy engine",
        "GB/s",
        "copy engine",
    ),
    _Line(
        "Save a state: until training goes on",
        "checkpoints_states_h200",
        "a state saved, with room in the GPU cache",
        "dcp.async_save, a process and pinned memory",
        "torch's dcp.async_save, pinned memory",
        "a copy inside the GPU",
        "GB/s",
        "a plain copy inside the device",
    ),
    _Line(
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


def draw() -> str:
    """Return the picture."""
    records = {line.record: _Record(line.record) for line in _LINES}
    machines = {
        (each.machine["device"].split("(")[1].split(",")[0], each.machine["cores"])
        for each in records.values()
    }
    ((gpu, cores),) = machines
    height = _TOP + _STEP * len(_LINES) + 26
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' {_FONT}>",
        f"<title>flashwarp beside the best alternative, on one {gpu}</title>",
        _text(_LEFT, 24, "How much of what the machine gives", _TEXT, 17, "600"),
        _swatch(_LEFT, 38, _OURS, "flashwarp"),
        _swatch(_LEFT + 96, 38, _OTHERS, "the alternative"),
        _text(_LEFT + _SPAN, 48, "100 %", _LIMIT, 12, "600", "middle"),
    ]
    end = _TOP + _STEP * len(_LINES) - 8
    parts.append(
        f"<line x1='{_LEFT + _SPAN}' y1='{_TOP - 6}' x2='{_LEFT + _SPAN}' y2='{end}' "
        f"stroke='{_LIMIT}' stroke-width='1.5' stroke-dasharray='4 3'/>"
    )
    for number, line in enumerate(_LINES):
        parts += _bars(line, records[line.record], _TOP + number * _STEP)
    source = f"One {gpu}, {cores} host cores. Figures of stored records; data checked in each run."
    parts += [_text(_LEFT, height - 10, source, _TEXT, 12), "</svg>"]
    return "\n".join(parts) + "\n"


def _bars(line: _Line, record: _Record, top: int) -> list[str]:
    ours = record[line.name]
    other, limit = (record.beside(line.name, each) for each in (line.other, line.limit))
    most = f"{line.ceiling}: {_figure(limit)} {line.unit}"
    return [
        _text(_LEFT, top + 10, line.title, _TEXT, 13, "600"),
        _text(_LEFT + _SPAN + 10, top + 10, most, _LIMIT, 12),
        *_bar(ours / limit, top + 15, _OURS, f"{_figure(ours)} {line.unit}"),
        *_bar(other / limit, top + 34, _OTHERS, f"{_figure(other)} {line.unit}, {line.shown}"),
    ]


def _figure(value: float) -> str:
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
