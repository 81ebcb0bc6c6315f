"""`flashwarp serve`: own a shared cache, so that it outlives the programs that use it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flashwarp.cli.parser import Parser

_LOOK_S = 1.0


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


def _run(options: argparse.Namespace) -> None:
    import time

    from flashwarp.cache.cache import Cache
    from flashwarp.errors import SharedCacheError
    from flashwarp.sharing import names

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
        print(f"{cache!r} in {names.folder_path()}; Ctrl-C ends it", flush=True)
        while True:  # until a signal raises
            time.sleep(_LOOK_S)
