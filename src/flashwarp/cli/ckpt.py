"""`flashwarp ckpt`: list, verify, show, prune and copy checkpoints in folders and remote stores."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from flashwarp.cli.parser import Parser, amount

if TYPE_CHECKING:
    from flashwarp.checkpoint.directory import Directory, Finding, RemoteDirectory

_PLACE = "A folder, or a URL of a remote store as s3://bucket/run."


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` the subcommands and their options."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    what = "List the versions that there are."
    listing = commands.add_parser("list", help=what, description=what)
    listing.set_defaults(run=_list)

    what = "Read versions and check every byte; exit with 1 if any is damaged."
    verify = commands.add_parser("verify", help=what, description=what)
    verify.set_defaults(run=_verify)
    verify.add_argument("--version", type=amount(int), help="This one; default all.")

    what = "Show what a version holds."
    show = commands.add_parser("show", help=what, description=what)
    show.set_defaults(run=_show)

    what = "Remove old versions."
    prune = commands.add_parser("prune", help=what, description=what)
    prune.set_defaults(run=_prune)
    prune.add_argument(
        "--keep-last",
        type=amount(int, 1),
        required=True,
        help="Keep so many of the newest versions; damaged ones do not count.",
    )
    prune.add_argument(
        "--keep-every", type=amount(int, 1), help="Also keep versions that are multiples of this."
    )
    prune.add_argument("--dry-run", action="store_true", help="Only list what would be removed.")

    what = "Copy versions to another place, and check every byte on the way."
    copy = commands.add_parser("copy", help=what, description=what)
    copy.set_defaults(run=_copy)
    copy.add_argument("--version", type=amount(int), help="This one; default all.")

    for each in (listing, verify, show, prune, copy):
        each.add_argument("place", help=_PLACE)
    copy.add_argument("target", help="Where copies go: a folder, which is made, or a URL.")
    for each in (listing, verify, copy):
        each.add_argument("name", nargs="?", help="The checkpoint; default all.")
    for each in (show, prune):
        each.add_argument("name", nargs="?", default="default", help="Default: default.")
    show.add_argument("version", type=amount(int), help="Which version of it.")
    for each in (listing, verify, prune, copy):
        each.add_argument("--rank", type=amount(int), help="Of this rank; default of all.")
    show.add_argument("--rank", type=amount(int), default=0, help="The rank that wrote it.")


def _place(place: str, rank: int = 0, writable: bool = False) -> Directory | RemoteDirectory:
    from flashwarp.checkpoint.directory import Directory, RemoteDirectory

    if "://" in place:
        return RemoteDirectory(place, rank)
    return Directory(place, rank, writable=writable)


def _chosen(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Yield the names and ranks that the options choose; an error if there are none."""
    from flashwarp.errors import MissingVersionError

    found = False
    with _place(options.place) as place:
        for name in [options.name] if options.name else place.names():
            for rank in place.ranks(name):
                if options.rank in (None, rank):
                    found = True
                    yield name, rank
    if not found:
        what = f"checkpoint {options.name}" if options.name else "checkpoints"
        whose = "" if options.rank is None else f" of rank {options.rank}"
        raise MissingVersionError(f"{options.place} has no {what}{whose}")


def _list(options: argparse.Namespace) -> None:
    with _place(options.place) as place:
        for name, rank in _chosen(options):
            for found in place.examine(name, rank=rank):
                _print(name, rank, found, "complete")


def _verify(options: argparse.Namespace) -> None:
    from flashwarp.errors import MissingVersionError

    looked = damaged = 0
    with _place(options.place) as place:
        for name, rank in _chosen(options):
            if options.version is None:
                findings = place.examine(name, verify=True, rank=rank)
            elif options.version in place.versions(name, rank):
                findings = _verified(place, name, options.version, rank)
            else:
                continue
            for found in findings:
                _print(name, rank, found, "verified")
                looked += 1
                damaged += bool(found.problem)
    if not looked and options.version is not None:
        raise MissingVersionError(f"{options.place} has no version {options.version}")
    if damaged:
        print(f"{damaged} of {looked} versions are damaged", file=sys.stderr)
        sys.exit(1)


def _verified(
    place: Directory | RemoteDirectory, name: str, version: int, rank: int
) -> Iterator[Finding]:
    from flashwarp.checkpoint.directory import Finding
    from flashwarp.errors import DamagedVersionError, StorageError

    nbytes = 0
    try:
        with place.open(name, version, rank=rank) as reader:
            nbytes = reader.nbytes
            reader.verify()
    except (DamagedVersionError, StorageError) as error:
        yield Finding(version, nbytes, str(error))
    else:
        yield Finding(version, nbytes, "")


def _print(name: str, rank: int, found: Finding, good: str) -> None:
    size = f"{found.nbytes / 2**20:12,.1f} MiB"
    state = f"DAMAGED: {found.problem}" if found.problem else good
    print(f"{name}  rank {rank:<5d} version {found.version:<12d} {size}  {state}", flush=True)


def _show(options: argparse.Namespace) -> None:
    import json

    with (
        _place(options.place) as place,
        place.open(options.name, options.version, rank=options.rank) as reader,
    ):
        record = reader.manifest
        print(f"checkpoint  {record.name}, version {record.version}, rank {record.rank}")
        print(f"written     {record.written} by the writer's clock")
        print(f"data        {record.data}, {record.data_bytes:,} bytes")
        print(f"checksums   CRC-32C of each {record.chunk_bytes:,} bytes")
        if record.metadata:
            print(f"metadata    {json.dumps(dict(record.metadata))}")
        print(f"regions     {len(record.regions)}, {reader.nbytes:,} bytes")
        for each in record.regions:
            region = each.region
            shape = "x".join(map(str, region.shape)) or "scalar"
            print(
                f"  {region.name}  {region.dtype} {shape}  {region.nbytes:,} bytes "
                f"from byte {each.offset:,}"
            )


def _prune(options: argparse.Namespace) -> None:
    keep = int(options.keep_last), None if options.keep_every is None else int(options.keep_every)
    for name, rank in list(_chosen(options)):
        with _place(options.place, rank, writable=not options.dry_run) as place:
            gone = place.prune(name, *keep, dry_run=options.dry_run)
            verb = "would be removed" if options.dry_run else "removed"
            left = len(place.versions(name)) - (len(gone) if options.dry_run else 0)
            numbers = ", ".join(map(str, gone)) or "none"
            print(f"{name}  rank {rank:<5d} {verb}: {numbers}; {left} left")


def _copy(options: argparse.Namespace) -> None:
    from flashwarp.checkpoint.directory import copy_versions
    from flashwarp.errors import MissingVersionError

    damaged = copied = 0
    for name, rank in list(_chosen(options)):
        with ExitStack() as held:
            source = _place(options.place, rank)
            held.callback(source.close)
            target = _place(options.target, rank, writable=True)
            held.callback(target.close)
            versions = source.versions(name)
            if options.version is not None:
                versions = [version for version in versions if version == options.version]
            done = copy_versions(source, target, name, versions)
        print(
            f"{name}  rank {rank:<5d} {len(done.copied)} versions copied "
            f"({done.nbytes / 2**20:,.1f} MiB), {len(done.there)} were there"
        )
        others = dict.fromkeys(done.others, "the target has another one of this number")
        left = {**done.damaged, **others}
        for version, problem in left.items():
            print(f"version {version} was not copied: {problem}", file=sys.stderr)
        damaged += len(left)
        copied += len(done.copied) + len(done.there) + len(left)
    if options.version is not None and not copied:
        raise MissingVersionError(f"{options.place} has no version {options.version}")
    if damaged:
        sys.exit(1)
