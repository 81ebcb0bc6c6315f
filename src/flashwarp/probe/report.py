"""Results of a benchmark: rows with their ceiling and target, as a table and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashwarp import config
from flashwarp.probe.text import aligned

__all__ = ["Report", "Row", "machine_facts"]


@dataclass(frozen=True)
class Row:
    """One measurement; `reference` is the ceiling or the alternative of the same run."""

    name: str
    value: float
    unit: str
    reference_name: str = ""
    reference: float = 0.0
    target: float = 0.0
    """Least ratio that we ask of ourselves; 0: none."""
    checked: bool | None = None
    """Whether the data was what it must be; None where there is none to compare."""
    paper: str = ""
    """The figure of the paper that this one stands beside, with its place."""
    note: str = ""
    """What a reader must know to read the figure right."""

    @property
    def ratio(self) -> float:
        """Value over reference; 0 without one."""
        return self.value / self.reference if self.reference else 0.0


@dataclass
class Report:
    """Rows of one run, with the machine they were measured on."""

    title: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Append a row and print it."""
        self.rows.append(row)
        ratio = f" = {row.ratio:.2f} of {row.reference_name}" if row.reference else ""
        print(f"{row.name}: {row.value:.4g} {row.unit}{ratio}", flush=True)

    @property
    def wrong(self) -> list[str]:
        """Names of the rows whose data was not what it must be."""
        return [row.name for row in self.rows if row.checked is False]

    def show(self) -> None:
        """Print all rows as a table, and their notes below it."""
        headings = ["measurement", "value", "against", "ratio", "target", "checked"]
        papers = any(row.paper for row in self.rows)
        cells = [headings + ["paper"] * papers]
        for row in self.rows:
            cells.append(
                [
                    row.name,
                    f"{row.value:.4g} {row.unit}",
                    f"{row.reference_name} {row.reference:.4g}" if row.reference else "",
                    f"{row.ratio:.2f}" if row.reference else "",
                    f"{row.target:g}" if row.target else "",
                    {None: "", True: "yes", False: "WRONG"}[row.checked],
                    *[row.paper] * papers,
                ]
            )
        print(f"\n{self.title}\n{aligned(cells)}")
        for row in self.rows:
            if row.note:
                print(f"{row.name}: {row.note}")

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        content = {
            "title": self.title,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": self.machine,
            "settings": self.settings,
            "rows": [{**asdict(row), "ratio": row.ratio} for row in self.rows],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


def machine_facts(device: str) -> dict[str, Any]:
    """Describe where a benchmark ran, without naming the host."""
    with Path("/proc/cpuinfo").open() as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    packages = {}
    for name in ("flashwarp", "numpy", "torch", "cuda-bindings", "nvidia-cuda-nvrtc"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": device,
        "cpu": models[0] if models else platform.machine(),
        "cores": config.cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "packages": packages,
    }
