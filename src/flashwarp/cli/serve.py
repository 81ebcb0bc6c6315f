"""`flashwarp serve`: own a shared cache, so that it outlives the programs that use it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from flashwarp.cli.parser import Parser, amount

_PORT_MAX = 65535
_HERE = "127.0.0.1"


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` its options."""
    parser.set_defaults(run=_run)
    parser.add_argument("name", help="Programs say fw.Cache(shared=NAME).")
    parser.add_argument("capacity", help="Bytes of the cache, such as '8 GiB'.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N. Default: cpu.")
    parser.add_argument("--line", default="4 KiB", help="Bytes of a line.")
    parser.add_argument("--ways", type=int, default=4, help="Frames of a set: 4, 8 or 16.")
    parser.add_argument("--policy", default="clock", help="As clock, lru or sieve.")
    parser.add_argument("--host-memory", help="Bytes of host memory below the frames.")
    parser.add_argument(
        "--every",
        type=amount(float),
        default=0.0,
        help="Print statistics, as of `flashwarp top`, each so many seconds; 0: never.",
    )
    parser.add_argument(
        "--metrics",
        type=amount(int),
        metavar="PORT",
        help="Serve metrics to a Prometheus of this machine; needs flashwarp[prometheus].",
    )


def _run(options: argparse.Namespace) -> None:
    from flashwarp.cache.cache import Cache
    from flashwarp.endings import sleep
    from flashwarp.errors import SharedCacheError
    from flashwarp.observing import counters
    from flashwarp.probe import ceilings
    from flashwarp.probe.running import Process, table
    from flashwarp.sharing import names

    metrics = "" if options.metrics is None else _serve_metrics(options.metrics)
    with Cache(
        options.capacity,
        options.line,
        options.ways,
        options.policy,
        options.device,
        options.host_memory,
        shared=options.name,
    ) as cache:
        if not cache.owned:
            raise SharedCacheError(
                f"process {names.holder(options.name) or 'unknown'} owns the shared cache "
                f"{options.name!r} already: end it, or take another name"
            )
        # Programs that start this one wait for the line.
        print(f"{cache!r} in {names.folder_path()}; Ctrl-C ends it{metrics}", flush=True)
        own = Process.own()
        while True:  # until a signal raises
            sleep(options.every or math.inf)
            if options.every:
                own.take(counters())
                told = f"{cache._owner.clients if cache._owner else 0} clients\n"
                print(told + table([own.as_dict(ceilings.kept())]), flush=True)


def _serve_metrics(port: int) -> str:
    """Answer a Prometheus of this machine; returns what says where."""
    from flashwarp.errors import ArgumentError
    from flashwarp.observing import register

    if port > _PORT_MAX:
        raise ArgumentError(f"--metrics {port} is no port: give one from 1 to {_PORT_MAX}, or 0")
    register()
    from prometheus_client import start_http_server

    server, _ = start_http_server(port, _HERE)
    return f"\nmetrics at http://{_HERE}:{server.server_port}/metrics"
