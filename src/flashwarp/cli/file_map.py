"""`flashwarp file map`: where a file lies on its block device, and whether it can be used so."""

from __future__ import annotations

import argparse

from flashwarp.cli.parser import STDOUT, add_json, write_json
from flashwarp.errors import PathError

WHAT = "Show where the bytes of a file lie on its block device; exit with 1 if no map can be used."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options."""
    parser.set_defaults(run=_run)
    parser.add_argument("path", help="A file on ext4 or xfs.")
    parser.add_argument(
        "--disk",
        action="store_true",
        help="Count from the begin of the whole drive, as its own commands do.",
    )
    add_json(parser)


def _run(options: argparse.Namespace) -> None:
    from flashwarp.file.block_map import BlockMap

    found = BlockMap.of(options.path)
    if options.disk:
        found = found.on_disk()
    if options.json is not None:
        facts = {
            "path": found.path,
            "nbytes": found.nbytes,
            "file_system": found.file_system,
            "device": found.volume.path,
            "device_nbytes": found.volume.nbytes,
            "generation": found.state.generation,
            "extents": [extent._asdict() for extent in found.extents],
        }
        write_json(options.json, facts)
    if options.json == STDOUT:
        return
    print(f"{found.path}: {found.nbytes} bytes on {found.volume.path} ({found.file_system})")
    print(f"{'byte of the file':>20} {'byte of the device':>20} {'bytes':>16}")
    for extent in found.extents:
        print(f"{extent.logical:>20} {extent.physical:>20} {extent.nbytes:>16}")
    try:
        start = found.on_disk().extents[0].physical - found.extents[0].physical
        print(f"{found.volume.disk} has {found.volume.path} from byte {start} on")
    except PathError as error:
        print(f"no places on a drive: {error.strerror}")
