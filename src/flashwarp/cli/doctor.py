"""`flashwarp doctor`: what works on this machine, what does not, why, and what to do about it.

Each check returns a `Finding`, and none raises for what a machine may lack. The measurements take
at most ten seconds in all. Their temporary file is never left behind: it has no name from the
moment it exists.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import flashwarp
from flashwarp import config
from flashwarp._jit import cuda_api, nvrtc
from flashwarp._jit.artifact_cache import ArtifactCache
from flashwarp._jit.host_compiler import find_compiler
from flashwarp.cli.doctor_nvme import Machine
from flashwarp.cli.finding import Finding, State
from flashwarp.cli.parser import STDOUT, add_json, existing_path, write_json
from flashwarp.device import CudaDevice, resolve
from flashwarp.errors import FlashwarpError
from flashwarp.observing.counting import disk_names
from flashwarp.probe import ceilings
from flashwarp.probe.disk import measure_ceiling, measure_writes, residency
from flashwarp.probe.link import LINK_BYTES, measure_link
from flashwarp.probe.text import binary
from flashwarp.transfer.pool import BOUNDS

if TYPE_CHECKING:
    from flashwarp.cli.parser import Parser

_MARKS = {"ok": "✓", "limited": "!", "missing": "-", "broken": "✗"}

# 256 MiB outlast the small write caches of drives, and take 0.1 s at 3 GB/s.
_FILE_BYTES = 256 << 20
_FILE_BYTES_MIN = 16 << 20
# On a nearly full disk, the file takes at most one part in so many of what is free.
_FREE_SHARE = 4
_READ_SECONDS = 1.0
_REPORT = "please report this with the output of `flashwarp doctor --json`"
# Capability number of IPC_LOCK in <linux/capability.h>: no limit on locked memory.
_CAP_IPC_LOCK = 14


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` the options of this command."""
    parser.description = (
        "Report what works on this machine, what does not, and why. Measures disk and link for a "
        "few seconds, through a temporary file that it removes. Exits with 1 only if flashwarp "
        "cannot work at all."
    )
    parser.add_argument(
        "--path",
        type=existing_path,
        default=Path(),
        help="A directory, or a file, on the file system to examine.",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    findings = []
    for name, finding in examine(options.path):
        if finding is None:
            _show_progress(f"{name} ...")
        else:
            findings.append(finding)
    _show_progress("")
    works = all(finding.state != "broken" for finding in findings)
    if options.json is not None:
        report = {
            "flashwarp": version("flashwarp"),
            "works": works,
            "findings": [{"name": each.name, **asdict(each)} for each in findings],
        }
        write_json(options.json, report)
    if options.json != STDOUT:
        _print_table(findings, works)
    sys.exit(0 if works else 1)


def _show_progress(text: str) -> None:
    """Replace the last line of a terminal; write nothing into a pipe."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def examine(path: Path) -> Iterator[tuple[str, Finding | None]]:
    """Make every check. Before each, yield its name alone, for a progress display."""
    directory = path if path.is_dir() else path.parent
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("machine", _check_machine),
        ("native part", _check_native),
        ("CPU device", lambda: _check_rows("cpu", directory)),
        ("GPU", lambda: _check_gpu(directory)),
        ("run-time compiler", _check_nvrtc),
        ("C++ compiler", _check_host_compiler),
        ("compiled code", _check_compiled_code),
        ("locked memory", _check_locked_memory),
        ("pinned memory", _check_pinned_memory),
        ("host-GPU link", _check_link),
        ("io_uring", _check_io_uring),
        ("file system", lambda: _check_file_system(directory)),
        ("direct I/O", lambda: _check_direct_io(path if path.is_file() else directory)),
        ("page cache view", lambda: _check_residency(directory)),
        ("disk", lambda: _check_disk(directory)),
        *((f"NVMe {name}", check) for name, check in Machine().checks()),
        ("optional packages", _check_packages),
    ]
    for name, check in checks:
        yield name, None
        try:
            finding = check()
        # A report with one unexpected line helps; a traceback in its place does not.
        except Exception as error:
            finding = Finding("broken", f"{type(error).__name__}: {error}", _REPORT)
        yield name, replace(finding, name=name)


def _print_table(findings: list[Finding], works: bool) -> None:
    width = max(len(finding.name) for finding in findings)
    print(f"flashwarp {version('flashwarp')}")
    for finding in findings:
        _print_indented(f"{_MARKS[finding.state]} {finding.name:{width}}  ", finding.detail)
        if finding.advice:
            _print_indented(" " * (width + 4), f"→ {finding.advice}")
    print("flashwarp works here." if works else "flashwarp does not work here.")


def _print_indented(indent: str, text: str) -> None:
    # A pipe gets whole lines, for pasting into a report.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    width = max(columns, len(indent) + 40)
    print(textwrap.fill(text, width, initial_indent=indent, subsequent_indent=" " * len(indent)))


def _native() -> Any:
    return import_module("flashwarp._native")


# The library itself.


def _check_machine() -> Finding:
    cores = config.cores()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    detail = (
        f"Python {platform.python_version()}, Linux {platform.release()} {platform.machine()}, "
        f"{cores} cores, {binary(memory)} memory"
    )
    return Finding("ok", detail, values={"cores": cores, "memory_bytes": memory})


def _check_native() -> Finding:
    try:
        _native()
        resolve("cpu").built_in("gather_rows")
    except (FlashwarpError, ImportError) as error:
        return Finding(
            "broken",
            f"cannot be loaded: {error}",
            "install it again from its checkout or wheel: pip install --force-reinstall PATH",
        )
    return Finding("ok", "loaded, with its kernels for the CPU")


def _check_rows(device: str, directory: Path) -> Finding:
    """Write an array, gather rows of it through the rings and compare each byte."""
    failed: State = "broken" if device == "cpu" else "limited"
    advice = _REPORT if device == "cpu" else f"{_REPORT}; until then use device='cpu'"
    try:
        rows = np.random.default_rng(0).integers(0, 1 << 30, (512, 1024), dtype=np.int32)
        wanted = np.random.default_rng(1).permutation(512)
        with tempfile.TemporaryDirectory(dir=_writable(directory), prefix=".flashwarp-") as scratch:
            file = Path(scratch, "rows.npy")
            np.save(file, rows)
            start = time.perf_counter()
            # The cache holds an eighth of the file, so that most rows come through the queues.
            with flashwarp.open(file, device=device, cache="256 KiB") as array:
                got = np.asarray(array.gather(wanted))
            elapsed = time.perf_counter() - start
    except (FlashwarpError, ImportError, OSError) as error:
        return Finding(failed, f"reading an array failed: {error}", advice)
    if not np.array_equal(got, rows[wanted]):
        return Finding(failed, "rows of a file were read wrong", advice)
    return Finding(
        "ok",
        f"512 rows of 4 KiB read from a file through NVMe queues, all correct ({elapsed:.2f} s)",
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
    return Finding("ok", detail, values=found)


# The GPU.


def _check_gpu(directory: Path) -> Finding:
    try:
        count = cuda_api.device_count()
        if count == 0:
            return Finding("missing", "the driver reports no GPU; is CUDA_VISIBLE_DEVICES set?")
        major, minor = cuda_api.driver_version()
        with CudaDevice(0) as device:
            memory = device.memory_info()
            detail = (
                f"{count} x {device.context.model}, {device.arch}, CUDA {major}.{minor} driver, "
                f"{binary(memory.free_bytes)} of {binary(memory.total_bytes)} free"
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
        return Finding(
            "missing",
            str(error),
            "without a GPU, flashwarp runs on the CPU, for development and tests",
        )
    rows = _check_rows("cuda:0", directory)
    return Finding(rows.state, f"{detail}; {rows.detail}", rows.advice, values | rows.values)


def _check_nvrtc() -> Finding:
    try:
        major, minor = nvrtc.version()
        architectures = nvrtc.architectures()
    except FlashwarpError as error:
        return Finding(
            "missing", str(error), "needed only for a GPU: pip install 'flashwarp[cuda]'"
        )
    detail = f"NVRTC {major}.{minor}, for sm_{architectures[0]} to sm_{architectures[-1]}"
    return Finding("ok", detail, values={"architectures": list(architectures)})


def _check_host_compiler() -> Finding:
    try:
        command = find_compiler()
    except FlashwarpError:
        advice = (
            "needed on the CPU device for your own kernels and policies, and samples of graphs: "
            "apt-get install g++, or name one by CXX"
        )
        return Finding("missing", "neither $CXX nor a compiler on the path", advice)
    return Finding("ok", " ".join(command))


def _check_compiled_code() -> Finding:
    state = ArtifactCache().state()
    values = {"folder": str(state.folder or ""), "used": state.used}
    if state.used:
        return Finding("ok", f"kept in {state.folder}", values=values)
    where = f"{state.folder} is not used: " if state.folder else ""
    detail = f"kept in memory, for one process: {where}{state.why_not}"
    return Finding("limited", detail, state.advice, values)


def _has_gpu() -> bool:
    try:
        return cuda_api.device_count() > 0
    except FlashwarpError:
        return False


def _check_pinned_memory() -> Finding:
    if not _has_gpu():
        return Finding("missing", "not tried: no GPU")
    try:
        with CudaDevice(0) as device, device.allocate_host(LINK_BYTES) as memory:
            read_only = device.context.registers_read_only
            detail = f"{binary(memory.nbytes)} pinned; {BOUNDS}"
    except FlashwarpError as error:
        advice = "raise the memory limit of the container, or use a smaller cache"
        return Finding("limited", str(error), advice)
    if read_only:
        return Finding("ok", f"{detail}; the GPU can read files of the page cache in place")
    return Finding(
        "limited",
        f"{detail}; this GPU cannot register read-only memory",
        "flashwarp reads files through buffers, not in place",
    )


def _check_link() -> Finding:
    if not _has_gpu():
        return Finding("missing", "not measured: no GPU")
    try:
        with CudaDevice(0) as device:
            rates = measure_link(device)
    except FlashwarpError as error:
        return Finding("limited", f"not measured: {error}")
    ceilings.keep("cuda:0", rates.to_gpu)
    return Finding(
        "ok",
        f"copy engine {rates.to_gpu / 1e9:.1f} GB/s to the GPU, "
        f"{rates.to_host / 1e9:.1f} GB/s to the host",
        values={"to_gpu_bytes_per_s": rates.to_gpu, "to_host_bytes_per_s": rates.to_host},
    )


# The host's memory and I/O.


def _check_locked_memory() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("ok", "no limit (RLIMIT_MEMLOCK)")
    values = {"limit_bytes": limit}
    held = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    if held and int(held[1], 16) >> _CAP_IPC_LOCK & 1:
        return Finding("ok", "no limit (CAP_IPC_LOCK)", values=values)
    detail = f"at most {binary(limit)} (RLIMIT_MEMLOCK)"
    if limit >= _FILE_BYTES:
        return Finding("ok", detail, values=values)
    advice = "`ulimit -l unlimited` lets io_uring keep its buffers registered: a few percent faster"
    return Finding("limited", detail, advice, values)


def _check_io_uring() -> Finding:
    try:
        available, reason = _native().io_uring_available()
    except ImportError as error:
        return Finding("missing", f"not tried: {error}")
    if available:
        return Finding("ok", "available")
    return Finding(
        "limited",
        reason,
        "threads do the I/O instead. In a container, allow io_uring in the seccomp profile; "
        "on a host, set `sysctl kernel.io_uring_disabled=0`",
    )


def _check_file_system(directory: Path) -> Finding:
    usage = shutil.disk_usage(directory)
    kind, source = _mount_of(directory)
    where = directory.resolve()
    detail = f"{where}: {kind} on {source}, {binary(usage.free)} of {binary(usage.total)} free"
    values = {"path": str(where), "kind": kind, "source": source, "free_bytes": usage.free}
    if kind == "tmpfs":
        advice = "this is memory, not a disk: choose a directory on a disk with --path"
        return Finding("limited", detail, advice, values)
    if usage.free < _FILE_BYTES:
        advice = "little room is left: free some, or choose another directory with --path"
        return Finding("limited", detail, advice, values)
    return Finding("ok", detail, values=values)


def _mount_of(directory: Path) -> tuple[str, str]:
    """Kind and source of the file system, from /proc/self/mountinfo; "?" if it is not listed."""
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
    try:
        if path.is_file():
            alignment = _native().direct_io_alignment(str(path))
        else:
            with _nameless_file(path) as link:
                link.write_bytes(bytes(mmap.PAGESIZE))
                alignment = _native().direct_io_alignment(str(link))
    except (ImportError, OSError) as error:
        return Finding("missing", f"not tried: {error}")
    if isinstance(alignment, str):
        advice = "files are read through the page cache; keep data sets on another file system"
        return Finding("limited", alignment, advice)
    memory, offset = alignment
    detail = f"O_DIRECT works; memory aligned to {memory} bytes, offsets to {offset}"
    return Finding("ok", detail, values={"memory": memory, "offset": offset})


def _check_residency(directory: Path) -> Finding:
    advice = "flashwarp then reads files through buffers unless you choose otherwise"
    try:
        with _nameless_file(directory) as link:
            link.write_bytes(bytes(16 * mmap.PAGESIZE))
            part, asked = residency(link)
    except (ImportError, OSError) as error:
        return Finding("missing", f"not tried: {error}")
    if part is None:
        return Finding(
            "limited", f"not possible: the system refuses to report it ({asked})", advice
        )
    if part < 1:
        detail = f"the system reports {part:.0%} of a file just written as in memory"
        return Finding("limited", detail, advice)
    return Finding("ok", f"the system reports which parts of a file are in memory, by {asked}")


def _check_disk(directory: Path) -> Finding:
    size = min(_FILE_BYTES, shutil.disk_usage(directory).free // _FREE_SHARE)
    if size < _FILE_BYTES_MIN:
        return Finding("missing", "not measured: the file system is nearly full")
    try:
        with _nameless_file(directory) as link:
            written, write_rate = measure_writes(link, size)
            ceiling = measure_ceiling(link, 4096, _READ_SECONDS)
    except OSError as error:
        return Finding("missing", f"not measured: {error}")
    values = {
        "file_bytes": written,
        "write_bytes_per_s": write_rate,
        "random_4k_reads_per_s": ceiling.random_reads_per_s,
        "sequential_read_bytes_per_s": ceiling.sequential_gb_per_s * 1e9,
    }
    wrote = (
        f"{write_rate / 1e9:.2f} GB/s in writes of a temporary file of {binary(written)} (removed)"
    )
    ceilings.keep(disk_names([directory.stat().st_dev]), values["sequential_read_bytes_per_s"])
    if not ceiling.random_reads_per_s:
        return Finding("limited", f"reads {ceiling.note}; {wrote}", values=values)
    return Finding(
        "ok",
        f"{ceiling.random_reads_per_s:,.0f} random reads/s of 4 KiB, "
        f"{ceiling.sequential_gb_per_s:.2f} GB/s in reads of 1 MiB in order, past the page cache; "
        f"{wrote}",
        values=values,
    )


@contextmanager
def _nameless_file(directory: Path) -> Iterator[Path]:
    """Yield a path that opens a new file without a name."""
    with tempfile.TemporaryFile(dir=_writable(directory)) as file:
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _writable(directory: Path) -> Path:
    """Return the directory to write in. Raises PermissionError if it is read-only."""
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write in {directory.resolve()}; see --path")
    return directory
