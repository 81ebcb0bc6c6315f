"""Run a command in a guest: `PYTHONPATH=tests .venv/bin/python -m qemu [options] -- COMMAND...`."""

from __future__ import annotations

import argparse
import sys

from qemu.image import Unavailable, guest_image
from qemu.machine import Drive, Machine, Namespace


def main() -> int:
    """Boot, run, print what the command printed, and return its exit status; 124 if it hung."""
    parser = argparse.ArgumentParser(prog="python -m qemu", description=__doc__)
    parser.add_argument("--drives", type=int, default=1)
    parser.add_argument("--controllers", type=int, default=1, help="of each drive")
    parser.add_argument("--lba", type=int, default=512, help="bytes of a logical block")
    parser.add_argument("--mib", type=int, default=64, help="size of each namespace")
    parser.add_argument("--null", action="store_true", help="drives that store nothing")
    parser.add_argument("--mdts", type=int, default=7)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--modules", default="nvme", help="to load first, separated by commas")
    parser.add_argument("--seconds", type=float, default=120, help="limit of the whole run")
    parser.add_argument("--console", action="store_true", help="print what the kernel said, too")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    namespace = Namespace(options.mib << 20, options.lba, stores=not options.null)
    drive = Drive((namespace,), options.controllers, options.mdts)
    machine = Machine(
        (drive,) * options.drives,
        cores=options.cores,
        modules=tuple(name for name in options.modules.split(",") if name),
    )
    try:
        image = guest_image()
    except Unavailable as error:
        print(f"no guest can be made here: {error}", file=sys.stderr)
        return 77
    outcome = machine.run(image, options.command, options.seconds)
    print(outcome.output, end="")
    if options.console or outcome.status is None:
        print(outcome.console, file=sys.stderr)
    print(f"{outcome.seconds:.1f} s, status {outcome.status}", file=sys.stderr)
    return 124 if outcome.status is None else outcome.status


if __name__ == "__main__":
    sys.exit(main())
