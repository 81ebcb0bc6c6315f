"""`flashwarp doctor`: what works on this machine, what does not, why, and what to do about it.

Each check returns a `Finding` and none raises for what a machine may lack. Measurements are brief
(ten seconds in all at most) and go through one temporary file that is never left behind: it has
no name from the moment it exists.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

import flashwarp
from flashwarp import config
from flashwarp._jit import driver
from flashwarp._jit.artifact_cache import ArtifactCache
from flashwarp.device import CudaDevice, resolve
from flashwarp.errors import FlashwarpError
from flashwarp.probe.disk import measure_ceiling, measure_writes
from flashwarp.probe.link import LINK_BYTES, measure_link

__all__ = ["Finding", "doctor", "examine"]

State = Literal["ok", "limited", "missing", "broken"]

_MARKS = {
    "ok": "[green]✓[/]",
    "limited": "[yellow]![/]",
    "missing": "[dim]-[/]",
    "broken": "[red]✗[/]",
}

# 256 MiB outlast the small write caches of drives, and take 0.1 s at 3 GB/s.
_FILE_BYTES = 256 << 20
_FILE_BYTES_MIN = 16 << 20
# Of a nearly full disk no more than this share of what is free.
_FREE_SHARE = 4
_READ_SECONDS = 1.0
_REPORT = "please report this with the output of `flashwarp doctor --json`"
# Capability number of IPC_LOCK in <linux/capability.h>: no limit on locked memory.
_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    name : str
        What was looked at.
    state : {"ok", "limited", "missing", "broken"}
        `missing` is a choice (no GPU), `broken` keeps flashwarp from working at all.
    detail : str
        What was found.
    advice : str
        What to do about it; empty where nothing needs doing.
    values : dict
        The figures, for programs.
    """

    name: str
    state: State
    detail: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def doctor(
    path: Annotated[
        Path, typer.Option(help="Directory, or a file, on the file system to look at.", exists=True)
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Tell what works on this machine, what does not, and why.

    Measures disk and link for a few seconds through a temporary file under --path, which it
    removes. Exits with 1 only where flashwarp cannot work at all.
    """
    console = Console(stderr=True)
    spinner = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True
    )
    with spinner:
        task = spinner.add_task("looking around")
        findings = []
        for name, finding in examine(path):
            spinner.update(task, description=name)
            if finding is not None:
                findings.append(finding)
    works = all(finding.state != "broken" for finding in findings)
    if as_json:
        report = {
            "flashwarp": version("flashwarp"),
            "works": works,
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        _print_table(findings, works)
    raise typer.Exit(0 if works else 1)


def examine(path: Path) -> Iterator[tuple[str, Finding | None]]:
    """Make every check; before each, its name is given alone, for a progress display."""
    directory = path if path.is_dir() else path.parent
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("machine", _check_machine),
        ("native part", _check_native),
        ("CPU device", lambda: _check_rows("cpu", directory)),
        ("GPU", lambda: _check_gpu(directory)),
        ("run-time compiler", _check_nvrtc),
        ("compiled code", _check_compiled_code),
        ("locked memory", _check_locked_memory),
        ("pinned memory", _check_pinned_memory),
        ("host-GPU link", _check_link),
        ("io_uring", _check_io_uring),
        ("file system", lambda: _check_file_system(directory)),
        ("direct I/O", lambda: _check_direct_io(path)),
        ("page cache view", lambda: _check_residency(directory)),
        ("disk", lambda: _check_disk(directory)),
        ("optional packages", _check_packages),
    ]
    for name, check in checks:
        yield name, None
        yield name, _caught(name, check)


def _caught(name: str, check: Callable[[], Finding]) -> Finding:
    # A report with one unexpected line in it helps; a traceback in place of a report does not.
    try:
        return check()
    except Exception as error:
        return Finding(name, "broken", f"{type(error).__name__}: {error}", _REPORT)


def _print_table(findings: list[Finding], works: bool) -> None:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        text = escape(finding.detail)
        if finding.advice:
            text += f"\n[cyan]→ {escape(finding.advice)}[/]"
        table.add_row(_MARKS[finding.state], finding.name, text)
    # A report is for reading and for pasting: no terminal means full lines, not 80 columns.
    console = Console(soft_wrap=not sys.stdout.isatty())
    if not sys.stdout.isatty():
        console.width = 200
    console.print(f"flashwarp {version('flashwarp')}", style="bold")
    console.print(table)
    console.print(
        "[green]flashwarp works here.[/]" if works else "[red]flashwarp does not work here.[/]"
    )


def _native() -> Any:
    return import_module("flashwarp._native")


# The library itself.


def _check_machine() -> Finding:
    cores = config.cores()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    detail = (
        f"Python {platform.python_version()}, Linux {platform.release()} {platform.machine()}, "
        f"{cores} cores, {_bytes(memory)} memory"
    )
    return Finding("machine", "ok", detail, values={"cores": cores, "memory_bytes": memory})


def _check_native() -> Finding:
    try:
        _native()
        resolve("cpu").built_in("gather_rows")
    except (FlashwarpError, ImportError) as error:
        return Finding(
            "native part",
            "broken",
            f"cannot be loaded: {error}",
            "install again: pip install --force-reinstall flashwarp",
        )
    return Finding("native part", "ok", "loaded, with its kernels for the CPU")


def _check_rows(device: str, directory: Path) -> Finding:
    """Write an array, gather rows of it through the rings and compare each byte."""
    name = "CPU device" if device == "cpu" else "GPU"
    failed: State = "broken" if device == "cpu" else "limited"
    advice = _REPORT if device == "cpu" else f"{_REPORT}; device='cpu' works meanwhile"
    try:
        rows = np.random.default_rng(0).integers(0, 1 << 30, (512, 1024), dtype=np.int32)
        wanted = np.random.default_rng(1).permutation(512)
        with tempfile.TemporaryDirectory(dir=_writable(directory), prefix=".flashwarp-") as scratch:
            file = Path(scratch, "rows.npy")
            np.save(file, rows)
            start = time.perf_counter()
            # A cache of an eighth of the file, so that most rows come through the rings.
            with flashwarp.open(file, device=device, cache="256 KiB") as array:
                got = np.asarray(array.gather(wanted))
            elapsed = time.perf_counter() - start
    except (FlashwarpError, ImportError, OSError) as error:
        return Finding(name, failed, f"reading an array failed: {error}", advice)
    if not np.array_equal(got, rows[wanted]):
        return Finding(name, failed, "wrong rows came back", advice)
    return Finding(
        name,
        "ok",
        f"512 rows of 4 KiB read from a file through NVMe rings, all right ({elapsed:.2f} s)",
        values={"seconds": elapsed},
    )


def _check_packages() -> Finding:
    found = {}
    for name in ("torch", "cupy", "numba", "scipy", "matplotlib", "pandas"):
        if importlib.util.find_spec(name) is not None:
            try:
                found[name] = version(name)
            except PackageNotFoundError:  # such as cupy, which is installed as cupy-cuda13x
                found[name] = ""
    detail = ", ".join(f"{name} {number}".strip() for name, number in found.items()) or "none"
    return Finding("optional packages", "ok", detail, values=found)


# The GPU.


def _check_gpu(directory: Path) -> Finding:
    try:
        count = driver.device_count()
        if count == 0:
            return Finding("GPU", "missing", "the driver sees no GPU (CUDA_VISIBLE_DEVICES?)")
        major, minor = driver.driver_version()
        with CudaDevice(0) as device:
            memory = device.memory_info()
            detail = (
                f"{count} x {device.context.model}, {device.arch}, CUDA {major}.{minor} driver, "
                f"{_bytes(memory.free_bytes)} of {_bytes(memory.total_bytes)} free"
            )
            values = {
                "count": count,
                "model": device.context.model,
                "arch": device.arch,
                "cuda_driver": f"{major}.{minor}",
                "free_bytes": memory.free_bytes,
                "total_bytes": memory.total_bytes,
                "registers_read_only": device.context.registers_read_only,
            }
    except FlashwarpError as error:
        return Finding("GPU", "missing", str(error), "without a GPU everything runs on the CPU")
    rows = _check_rows("cuda:0", directory)
    return Finding("GPU", rows.state, f"{detail}; {rows.detail}", rows.advice, values | rows.values)


def _check_nvrtc() -> Finding:
    name = "run-time compiler"
    try:
        major, minor = driver.nvrtc_version()
        architectures = driver.nvrtc_architectures()
    except FlashwarpError as error:
        return Finding(name, "missing", str(error), "only kernels on a GPU need it")
    detail = f"NVRTC {major}.{minor}, for sm_{architectures[0]} to sm_{architectures[-1]}"
    return Finding(name, "ok", detail, values={"architectures": list(architectures)})


def _check_compiled_code() -> Finding:
    name = "compiled code"
    state = ArtifactCache().state()
    values = {"folder": str(state.folder or ""), "used": state.used}
    if state.used:
        return Finding(name, "ok", f"kept in {state.folder}", values=values)
    where = f"{state.folder} is not used: " if state.folder else ""
    detail = f"kept in memory, for one process: {where}{state.why_not}"
    return Finding(name, "limited", detail, state.advice, values)


def _has_gpu() -> bool:
    try:
        return driver.device_count() > 0
    except FlashwarpError:
        return False


def _check_pinned_memory() -> Finding:
    name = "pinned memory"
    if not _has_gpu():
        return Finding(name, "missing", "not tried: no GPU")
    try:
        with CudaDevice(0) as device, device.allocate_host(LINK_BYTES) as memory:
            read_only = device.context.registers_read_only
            detail = f"{_bytes(memory.nbytes)} pinned"
    except FlashwarpError as error:
        advice = "raise the container's memory limit, or use a smaller cache"
        return Finding(name, "limited", str(error), advice)
    if read_only:
        return Finding(name, "ok", f"{detail}; read-only files can be mapped in place")
    return Finding(
        name,
        "limited",
        f"{detail}; read-only memory cannot be registered on this GPU",
        "files are read through buffers instead of in place",
    )


def _check_link() -> Finding:
    name = "host-GPU link"
    if not _has_gpu():
        return Finding(name, "missing", "not measured: no GPU")
    try:
        with CudaDevice(0) as device:
            rates = measure_link(device)
    except FlashwarpError as error:
        return Finding(name, "limited", f"not measured: {error}")
    return Finding(
        name,
        "ok",
        f"copy engine {rates.to_gpu / 1e9:.1f} GB/s to the GPU, "
        f"{rates.to_host / 1e9:.1f} GB/s to the host",
        values={"to_gpu_bytes_per_s": rates.to_gpu, "to_host_bytes_per_s": rates.to_host},
    )


# The host's memory and I/O.


def _check_locked_memory() -> Finding:
    name = "locked memory"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding(name, "ok", "no limit (RLIMIT_MEMLOCK)")
    values = {"limit_bytes": limit}
    if _effective_capabilities() >> _CAP_IPC_LOCK & 1:
        return Finding(name, "ok", "no limit (CAP_IPC_LOCK)", values=values)
    detail = f"limit of {_bytes(limit)} (RLIMIT_MEMLOCK)"
    if limit >= _FILE_BYTES:
        return Finding(name, "ok", detail, values=values)
    advice = "`ulimit -l unlimited` lets io_uring keep its buffers registered; a few percent faster"
    return Finding(name, "limited", detail, advice, values)


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _check_io_uring() -> Finding:
    try:
        available, reason = _native().io_uring_available()
    except ImportError as error:
        return Finding("io_uring", "missing", f"not tried: {error}")
    if available:
        return Finding("io_uring", "ok", "available")
    return Finding(
        "io_uring",
        "limited",
        reason,
        "threads do the I/O instead; in a container allow io_uring in the seccomp profile, "
        "on a host set `sysctl kernel.io_uring_disabled=0`",
    )


def _check_file_system(directory: Path) -> Finding:
    usage = shutil.disk_usage(directory)
    kind, source = _mount_of(directory)
    where = directory.resolve()
    detail = f"{where}: {kind} on {source}, {_bytes(usage.free)} of {_bytes(usage.total)} free"
    values = {"path": str(where), "kind": kind, "source": source, "free_bytes": usage.free}
    if kind == "tmpfs":
        advice = "this is memory, not a disk: name a directory on a disk with --path"
        return Finding("file system", "limited", detail, advice, values)
    if usage.free < _FILE_BYTES:
        advice = "too little room to work in: free some, or name another directory with --path"
        return Finding("file system", "limited", detail, advice, values)
    return Finding("file system", "ok", detail, values=values)


def _mount_of(directory: Path) -> tuple[str, str]:
    """Kind and source of the file system, from /proc/self/mountinfo; "?" where it is not listed."""
    here = directory.resolve()
    best, found = -1, ("?", "?")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # "36 35 98:0 /root /mount/point rw,noatime master:1 - ext4 /dev/root rw"
        left, _, right = line.partition(" - ")
        point = Path(left.split()[4].replace(r"\040", " "))
        if here.is_relative_to(point) and len(point.parts) >= best:
            kind, source = right.split()[:2]
            best, found = len(point.parts), (kind, source)
    return found


def _check_direct_io(path: Path) -> Finding:
    name = "direct I/O"
    try:
        if path.is_file():
            alignment = _native().direct_io_alignment(str(path))
        else:
            with _nameless_file(path) as (_, link):
                link.write_bytes(bytes(mmap.PAGESIZE))
                alignment = _native().direct_io_alignment(str(link))
    except (ImportError, OSError) as error:
        return Finding(name, "missing", f"not tried: {error}")
    if isinstance(alignment, str):
        advice = "files are read through the page cache; use another file system for data sets"
        return Finding(name, "limited", alignment, advice)
    memory, offset = alignment
    detail = f"O_DIRECT works, memory aligned to {memory} bytes, offsets to {offset}"
    return Finding(name, "ok", detail, values={"memory": memory, "offset": offset})


def _check_residency(directory: Path) -> Finding:
    name = "page cache view"
    try:
        with _nameless_file(directory) as (fd, _):
            os.write(fd, bytes(16 * mmap.PAGESIZE))
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapping:
                view = np.frombuffer(mapping, np.uint8)
                try:
                    part = _native().residency(view.ctypes.data, view.nbytes)
                finally:
                    del view  # a mapping with an exported buffer cannot be closed
    except (ImportError, OSError) as error:
        return Finding(
            name, "limited", f"not possible: {error}", "`cache` choices will be cautious"
        )
    if part < 1:
        detail = f"mincore tells {part:.0%} of a file just written"
        advice = "the choice between mapping and reading a file will be cautious"
        return Finding(name, "limited", detail, advice)
    return Finding(name, "ok", "mincore tells which parts of a file are in memory")


def _check_disk(directory: Path) -> Finding:
    size = min(_FILE_BYTES, shutil.disk_usage(directory).free // _FREE_SHARE)
    if size < _FILE_BYTES_MIN:
        return Finding("disk", "missing", "not measured: the file system is nearly full")
    try:
        with _nameless_file(directory) as (_, link):
            written, write_rate = measure_writes(link, size)
            ceiling = measure_ceiling(link, 4096, _READ_SECONDS)
    except OSError as error:
        return Finding("disk", "missing", f"not measured: {error}")
    values = {
        "file_bytes": written,
        "write_bytes_per_s": write_rate,
        "random_4k_reads_per_s": ceiling.random_reads_per_s,
        "sequential_read_bytes_per_s": ceiling.sequential_gb_per_s * 1e9,
    }
    wrote = f"a temporary file of {_bytes(written)} (removed) was written with {_rate(write_rate)}"
    if not ceiling.random_reads_per_s:
        return Finding("disk", "limited", f"reads {ceiling.note}; {wrote}", values=values)
    return Finding(
        "disk",
        "ok",
        f"4 KiB random {ceiling.random_reads_per_s:,.0f} reads/s, 1 MiB sequential "
        f"{ceiling.sequential_gb_per_s:.2f} GB/s, past the page cache; {wrote}",
        values=values,
    )


@contextmanager
def _nameless_file(directory: Path) -> Iterator[tuple[int, Path]]:
    """Give a new file without a name, as a descriptor and as a path that opens it again."""
    fd, name = tempfile.mkstemp(dir=_writable(directory), prefix=".flashwarp-")
    try:
        Path(name).unlink()
        yield fd, Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _writable(path: Path) -> Path:
    """Return the directory to write in: a read-only one says so in its own words."""
    directory = path if path.is_dir() else path.parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write in {directory.resolve()}; see --path")
    return directory


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
