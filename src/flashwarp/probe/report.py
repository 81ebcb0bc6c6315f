"""Results of a benchmark: rows with what they stand against, as a table and as JSON.

This is the one place that says how a figure came about. Each record names its command line, commit,
versions, machine, settings and seeds, and each row its footprint.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashwarp import config
from flashwarp._jit import cuda_api
from flashwarp.errors import FlashwarpError
from flashwarp.probe.text import aligned

COMMIT_VARIABLE = "FLASHWARP_COMMIT"
"""Names the commit that an installed package was built from, which it cannot find out itself."""

_PACKAGES = ("flashwarp", "numpy", "torch", "cuda-bindings", "nvidia-cuda-nvrtc")
_DRIVER = Path("/proc/driver/nvidia/version")

_kept: ContextVar[Path | None] = ContextVar("_kept", default=None)


@contextlib.contextmanager
def kept(path: Path | None) -> Iterator[None]:
    """Write each report that is made within to `path` with each of its rows.

    A run that is killed then loses no row that it had.
    """
    token = _kept.set(path)
    try:
        yield
    finally:
        _kept.reset(token)


@dataclass(frozen=True)
class Row:
    """One measurement; `reference` is the best alternative, or the ceiling, of the same run."""

    name: str
    value: float
    unit: str
    reference_name: str = ""
    reference: float = 0.0
    target: float = 0.0
    """The least ratio that this project accepts; 0: none."""
    checked: bool | None = None
    """Whether the data was right; None if the row moves no data."""
    paper: str = ""
    """The figure of a paper that this one stands beside, with its place."""
    note: str = ""
    """What a reader must know to read the figure."""
    footprint: int = 0
    """Bytes of the data that the measurement reaches; 0 if the row is no rate of data. Rates of
    small blocks over a link fall as the footprint grows."""

    @property
    def ratio(self) -> float:
        """Value over reference; 0 without one."""
        return self.value / self.reference if self.reference else 0.0


@dataclass
class Report:
    """Rows of one run, with what it takes to run it again."""

    title: str
    device: str
    """As `Device.describe` has it."""
    settings: dict[str, Any]
    seeds: dict[str, int]
    """What each seed is of; empty if nothing is drawn."""
    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Parts that raised, and what."""
    kept_at: Path | None = field(default_factory=_kept.get)

    def add(self, row: Row) -> None:
        """Append a row and print it."""
        self.rows.append(row)
        ratio = f" = {row.ratio:.2f} of {row.reference_name}" if row.reference else ""
        print(f"{row.name}: {row.value:.4g} {row.unit}{ratio}", flush=True)
        self._keep()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one part: if it fails, the record says so, and the parts behind it go on."""
        try:
            yield
        except Exception as error:  # other libraries raise what they like
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {error}"
            self._keep()

    @functools.cached_property
    def _provenance(self) -> dict[str, Any]:
        return provenance(self.device)

    def _keep(self) -> None:
        if self.kept_at is not None:
            self.save(self.kept_at, unfinished=True)

    @property
    def wrong(self) -> list[str]:
        """Names of the rows whose data was wrong."""
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
        full = [column for column in zip(*cells, strict=True) if any(column[1:])]
        print(f"\n{self.title}\n{aligned([*zip(*full, strict=True)])}")
        for row in self.rows:
            if row.note:
                print(f"{row.name}: {row.note}")

    def save(self, path: Path, *, unfinished: bool = False) -> None:
        """Write everything as JSON; a file is replaced whole, or stays as it was."""
        content: dict[str, Any] = {
            "title": self.title,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            **self._provenance,
            "settings": self.settings,
            "seeds": self.seeds,
            "rows": [{**asdict(row), "ratio": row.ratio} for row in self.rows],
        }
        if self.failed:
            content["failed"] = self.failed
        if unfinished:
            content["unfinished"] = True
        text = json.dumps(content, indent=1) + "\n"
        if path.is_symlink() or (path.exists() and not path.is_file()):  # such as /dev/stdout
            if not unfinished:
                path.write_text(text)
            return
        draft = path.with_name(f".{path.name}.draft")
        draft.write_text(text)
        draft.replace(path)


def provenance(device: str) -> dict[str, Any]:
    """Return the command line, commit, versions and machine of this process.

    The machine is described without the name of its host.
    """
    return {
        "command": _command(),
        "commit": _commit(),
        "versions": _versions(),
        "machine": _machine(device),
    }


def _command() -> str:
    program = Path(sys.argv[0])
    is_package = program.name == "__main__.py"
    start = ["python", "-m", program.parent.name] if is_package else [program.name]
    return shlex.join([*start, *sys.argv[1:]])


def _commit() -> str:
    """Return the commit of the sources, marked if they differ from it."""
    here = Path(__file__)
    # Only if git knows this file: an installed package may lie inside another project.
    tracked = _git(here.parent, "ls-files", "--error-unmatch", here.name)
    if tracked:
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return os.environ.get(COMMIT_VARIABLE) or f"unknown: {COMMIT_VARIABLE} is not set"


def _git(folder: Path, *words: str) -> str:
    """Return what git prints; nothing if it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _versions() -> dict[str, str | None]:
    """Return all versions that a figure may depend on; None for what is not installed."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "driver": None,
        "cuda": None,
    }
    for name in _PACKAGES:
        versions[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if _DRIVER.exists():
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1 ...": the first word with a point.
        versions["driver"] = next((w for w in _DRIVER.read_text().split() if "." in w), None)
    with contextlib.suppress(FlashwarpError):  # no GPU
        versions["cuda"] = "{}.{}".format(*cuda_api.driver_version())
    return versions


def _machine(device: str) -> dict[str, Any]:
    with Path("/proc/cpuinfo").open() as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {
        "device": device,
        "cpu": models[0] if models else platform.machine(),
        "cores": config.cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
    }
