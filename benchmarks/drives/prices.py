"""What drives cost beside memory for their data and their reads: BaM's Table 2 with other prices.

A model, not a measurement: prices come from a file that names the date and source of each, rates of
drives from their models or their maker, and what flashwarp reaches over the modelled drives, as
well as the link's rate, from a stored run of `bench scaling`. A drive without a price is left out.
What holds the drives (slots, switches, a chassis), which BaM counts, is not counted: no price of it
was found.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import flashwarp as fw
from benchmarks.base import Record
from flashwarp.config import number
from flashwarp.errors import ArgumentError, PathError
from flashwarp.probe.report import Row
from flashwarp.probe.text import aligned, thousands

__all__ = ["Priced", "cells", "run"]

_PRICES = Path(__file__).with_name("prices.json")
_BLOCKS = (512, 4096)
_USD_MAX = 1e12
HEADINGS = ("", "price", "$/GB", "gain", "GB/s", "512 B reads/s", "4 KiB reads/s") + (
    "$ for 1000 reads/s",
    "drives for the link",
    "their price",
    "as much memory",
)


@dataclass(frozen=True)
class Priced:
    """A drive, or memory, with its price and its rates; what is not known is 0 or missing."""

    name: str
    usd: float
    nbytes: float
    date: str
    source: str
    note: str = ""
    paper: str = ""
    bytes_per_s: float = 0.0
    reads_per_s: dict[int, float] = field(default_factory=dict)
    """By block size: what flashwarp reached, or else what the drive's model or maker says."""
    rates_source: str = ""

    @property
    def usd_per_gb(self) -> float:
        """Dollars for 1e9 bytes."""
        return self.usd / (self.nbytes / 1e9)

    def drives_for(self, link_bytes_per_s: float, block_bytes: int) -> int:
        """How many of it fill the link with blocks of this size; 0 if its rate is not known."""
        per_s = self.reads_per_s.get(block_bytes, 0.0)
        return math.ceil(link_bytes_per_s / (per_s * block_bytes)) if per_s else 0


def run(
    prices: Annotated[
        str, "File of prices, each with date and source; default: the built-in."
    ] = "",
    measured: Annotated[
        str, "A stored run of `bench scaling`, for rates."
    ] = "results/scaling_h200.json",
) -> Record:
    """Set prices against rates."""
    table = _load(Path(prices) if prices else _PRICES)
    rates = _Measured(Path(measured))
    memory = _priced(table.get("memory", {}), "memory", rates)
    drives = [_priced(each, "drives", rates) for each in table.get("drives", [])]
    if not drives:
        raise ArgumentError(
            f"prices={prices!r} names no drives: give at least one, with its source"
        )
    report = Record(
        title="Prices of drives beside memory (a model, not a measurement)",
        device="none: computed from stored results",
        settings={"prices": table, "rates": rates.facts, "link_gb_s": rates.link / 1e9},
        seeds={},
    )
    shown = [list(HEADINGS), _memory_cells(memory)]
    shown += [cells(drive, memory, rates.link) for drive in drives]
    for priced in (memory, *drives):
        for row in _rows(priced, memory, rates.link):
            report.add(row)
    report.settings["table"] = shown
    print(f"\n{aligned(shown)}")
    return report


# Input.


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise PathError(
            error.errno or 0,
            f"{error.strerror}; `python -m benchmarks drives scaling --json FILE` makes a run to "
            "give as --measured",
            str(path),
        ) from error
    except ValueError as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{path} holds a {type(found).__name__}, not an object")
    return found


class _Measured:
    """Rates of a stored run of `bench scaling`."""

    def __init__(self, path: Path) -> None:
        stored = _load(path)
        self._rows: list[dict[str, Any]] = stored.get("rows", [])
        links = [
            row["reference"] * 1e6 * 4096
            for row in self._rows
            if row["reference_name"] == "link" and "4096 B random reads" in row["name"]
        ]
        if not links:
            raise ArgumentError(
                f"measured={str(path)!r} has no 4 KiB reads that the link limits: take a run of "
                "`python -m benchmarks drives scaling` with more drives"
            )
        self.link = max(links)
        self.facts = {
            "file": path.name,
            "date": stored.get("date"),
            "machine": stored.get("machine"),
        }

    def reads_per_s(self, model: str, block_bytes: int) -> float:
        """What flashwarp reached over one modelled drive of this kind; 0 if that is not stored."""
        begin = f"1 modelled drive {model}, {block_bytes} B random reads, "
        return max((r["value"] * 1e6 for r in self._rows if r["name"].startswith(begin)), default=0)


def _priced(given: dict[str, Any], where: str, rates: _Measured) -> Priced:
    """Check one entry of the file of prices, and find its rates."""
    name = str(given.get("name", ""))
    for key in ("name", "usd", "bytes", "date", "source"):
        if not given.get(key):
            raise ArgumentError(
                f"{where}: {name or given!r} has no {key!r}: a price needs its date and its source"
            )
    bytes_per_s, reads = float(given.get("bytes_per_s", 0)), {}
    for size, per_s in given.get("reads_per_s", {}).items():
        reads[int(size)] = number(f"{name}: reads_per_s", per_s, 1, 1e12)
    source = str(given.get("rates_source", ""))
    if (reads or bytes_per_s) and not source:
        raise ArgumentError(f"{where}: {name} has rates without a 'rates_source'")
    if "model" in given:
        model = fw.SSDModel.named(given["model"])
        bytes_per_s, source = model.read_bytes_per_s, model.source
        reads = {b: rates.reads_per_s(model.name, b) or model.iops(b) for b in _BLOCKS}
    return Priced(
        name=name,
        usd=number(f"{name}: usd", given["usd"], 0.01, _USD_MAX),
        nbytes=number(f"{name}: bytes", given["bytes"], 1, 1e18),
        date=str(given["date"]),
        source=str(given["source"]),
        note=str(given.get("note", "")),
        paper=str(given.get("paper", "")),
        bytes_per_s=bytes_per_s,
        reads_per_s=reads,
        rates_source=source,
    )


# Output.


def _rows(drive: Priced, memory: Priced, link: float) -> list[Row]:
    said = "; ".join(filter(None, [f"{drive.date}, {drive.source}", drive.note]))
    paper = f"{drive.paper} [BaM, Table 2]" if drive.paper else ""
    rows = [
        Row(f"{drive.name}: a GB", drive.usd_per_gb, "$", "memory", memory.usd_per_gb,
            paper=paper, note=said)
    ]  # fmt: skip
    for size, per_s in drive.reads_per_s.items():
        name = f"{drive.name}: 1000 reads/s of {size} bytes"
        rows.append(Row(name, drive.usd / per_s * 1e3, "$", note=f"rates: {drive.rates_source}"))
        count = drive.drives_for(link, size)
        name = f"{drive.name}: to fill the link with {size} bytes"
        rows.append(Row(name, float(count), "drives", note=f"{count * drive.usd:.0f} $"))
    return rows


def _memory_cells(memory: Priced) -> list[str]:
    price = f"{memory.usd:,.0f}"
    return [memory.name, price, f"{memory.usd_per_gb:.2f}", "1.0", *[""] * 7]


def cells(drive: Priced, memory: Priced, link: float) -> list[str]:
    """Return the line of the table for one drive; what is not known is empty."""

    def known(value: float, text: str) -> str:
        return text if value else ""

    reads = [drive.reads_per_s.get(size, 0.0) for size in _BLOCKS]
    counts = [drive.drives_for(link, size) for size in _BLOCKS]
    few = counts[-1]
    return [
        drive.name,
        f"{drive.usd:,.0f}",
        f"{drive.usd_per_gb:.2f}",
        f"{memory.usd_per_gb / drive.usd_per_gb:.1f}",
        known(drive.bytes_per_s, f"{drive.bytes_per_s / 1e9:.1f}"),
        *(known(per_s, thousands(per_s)) for per_s in reads),
        known(reads[-1], f"{drive.usd / (reads[-1] or 1) * 1e3:.2f}"),
        ", ".join(str(count) if count else "?" for count in counts) if few else "",
        known(few, f"{few * drive.usd:,.0f}"),
        known(few, f"{few * drive.nbytes / 1e9 * memory.usd_per_gb:,.0f}"),
    ]
