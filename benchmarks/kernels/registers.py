"""Registers per thread of three kernels, through arrays and on plain memory: AGILE's Figure 12.

Needs no GPU: kernels are compiled, not run. What a kernel calls on a miss takes as many registers
as it is allowed, so the figure is the smallest allowance at which the kernel itself spills nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from benchmarks.base import Record, listed
from flashwarp._jit.compiler import KernelResources, Source, compile_source

__all__ = ["KERNELS", "run"]

KERNELS = Path(__file__).with_name("registers.cu")

# Blocks of 256 threads on a multiprocessor of 65536 registers: 64, 48, 40 and 32 registers each.
_RESIDENT = (4, 5, 6, 8)
_MORE_MAX = 20
_NAMES = {"mean": "vector mean", "bfs": "BFS", "spmv": "SpMV"}
_WAYS = {"by_element": "a[i]", "by_line": "cursor"}
_PAPER = {
    "mean": "BaM 1.04 x AGILE (AGILE Fig. 12)",
    "bfs": "BaM 1.22 x AGILE (AGILE Fig. 12)",
    "spmv": "BaM 1.32 x AGILE (AGILE Fig. 12)",
}


def run(
    arch: Annotated[str, "Architectures, with commas."] = "sm_80,sm_90,sm_100",
) -> Record:
    """Compile for every architecture, and compare."""
    report = Record(
        title="Registers per thread",
        device="none: compiled only",
        settings={"arch": arch, "target": f"at most {_MORE_MAX} more than on plain memory"},
        seeds={},
    )
    for one in listed("arch", arch):
        least = _least_without_spills(one)
        for kernel, name in _NAMES.items():
            plain = least[f"{kernel}_plain"].registers or 0
            for way, spelled in _WAYS.items():
                found = least[f"{kernel}_{way}"]
                more = (found.registers or 0) - plain
                spills = (found.spill_store_bytes or 0) + (found.spill_load_bytes or 0)
                verdict = "" if more <= _MORE_MAX and not spills else ": over the target"
                report.row(
                    f"{one}: {name}, {spelled}",
                    float(found.registers or 0),
                    "registers",
                    "plain memory",
                    float(plain),
                    paper=_PAPER[kernel],
                    note=f"{more:+d} registers, {spills} bytes of spills{verdict}",
                )
    return report


def _least_without_spills(arch: str) -> dict[str, KernelResources]:
    """Each kernel with the fewest registers at which it keeps all in them, or with the most."""
    source, least = Source.read(KERNELS), {}
    for resident in _RESIDENT:
        options = (f"-DFW_BENCH_RESIDENT={resident}",)
        for symbol, found in compile_source(arch, source, options=options).kernels.items():
            if symbol not in least or not (found.spill_store_bytes or found.spill_load_bytes):
                least[symbol] = found
    return least
