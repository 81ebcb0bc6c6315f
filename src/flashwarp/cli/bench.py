"""`flashwarp bench`: names the command that each benchmark has become."""

from __future__ import annotations

from collections.abc import Sequence

from flashwarp.cli.parser import Parser

__all__ = ["add_arguments"]

_MOVED = {
    "asynchronous": "kernels asynchronous",
    "first_light": "arrays",
    "calls": "calls",
    "files": "files",
    "shared": "shared",
    "latency": "kernels latency",
    "defaults": "arrays defaults",
    "hits": "kernels hits",
    "scaling": "drives scaling",
    "bfs": "graphs bfs",
    "cc": "graphs cc",
    "spmv": "graphs spmv",
    "vectoradd": "arrays vectoradd",
    "ctc": "kernels ctc",
    "tables": "tables",
    "pipelines": "pipelines",
    "ngrams": "tables ngrams",
    "tiers": "drives tiers",
    "dlrm": "tables dlrm",
    "checkpoints": "checkpoints",
    "workers": "pipelines workers",
    "load": "load",
    "activations": "activations",
    "prices": "drives prices",
    "registers": "kernels registers",
}


def add_arguments(parser: Parser, arguments: Sequence[str]) -> None:
    """Refuse the names of benchmarks, which run from a checkout."""
    name = arguments[0] if arguments else ""
    now = f"python -m benchmarks {_MOVED.get(name, 'NAME')}"
    parser.error(f"benchmarks run from a checkout of flashwarp: `{now}`")
