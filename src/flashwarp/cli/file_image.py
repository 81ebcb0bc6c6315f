"""`flashwarp file create|info|verify|repair|export|import`: images in the GVDK format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashwarp.cli.parser import STDOUT, Parser, add_json, existing_path, write_json

if TYPE_CHECKING:
    from flashwarp.file.gvdk import Report

_KEY = "A file that holds the image's key: 16 bytes or more, all of which count."


def add_arguments(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the subcommands."""
    create = _command(commands, "create", _create, "Make an image of zeros (docs/files.md).")
    create.add_argument("path", help="The image.")
    create.add_argument("size", help="Bytes up to the end of its data, as 10 GiB.")
    info = _command(commands, "info", _info, "Show what the header of an image says.")
    add_json(info)
    verify = _command(
        commands,
        "verify",
        _verify,
        "Look at headers, tables and marks of an image; exit with 1 if something is wrong.",
    )
    repair = _command(
        commands,
        "repair",
        _repair,
        "Make what is left of an image usable, and say what is lost. Copy it before if it matters.",
    )
    export = _command(commands, "export", _export, "Write the data of an image to a plain file.")
    import_ = _command(commands, "import", _import, "Make an image of the bytes of a plain file.")
    import_.add_argument("source", type=existing_path, help="The plain file.")
    import_.add_argument("path", help="The image.")
    import_.add_argument(
        "--read-only", action="store_true", help="Nobody can open the image for writing."
    )
    for each in (info, verify, repair, export):
        each.add_argument("path", type=existing_path, help="The image.")
    export.add_argument("target", help="The plain file.")
    for each in (create, import_):
        each.add_argument("--block", default="4 KiB", help="Bytes of a block: a power of two.")
        each.add_argument("--capacity", help="Bytes up to which the data may grow; default none.")
        each.add_argument(
            "--preallocate",
            choices=("no", "yes", "zeros"),
            default="yes" if each is create else "no",
            help="Take all space now, with zeros written there or not; no: with the first writes.",
        )
    for each in (create, export, import_):
        each.add_argument("--overwrite", action="store_true", help="Replace an existing file.")
    for each in (create, info, verify, repair, export, import_):
        each.add_argument("--key-file", type=existing_path, help=_KEY)


def _command(
    commands: argparse._SubParsersAction[Parser], name: str, run: Any, what: str
) -> Parser:
    parser = commands.add_parser(name, help=what, description=what)
    parser.set_defaults(run=run)
    return parser


def _key(options: argparse.Namespace) -> bytes | None:
    path: Path | None = options.key_file
    return None if path is None else path.read_bytes()


def _shape(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "block": options.block,
        "capacity": options.capacity,
        "preallocate": {"no": False, "yes": True, "zeros": "zeros"}[options.preallocate],
        "overwrite": options.overwrite,
        "key": _key(options),
    }


def _create(options: argparse.Namespace) -> None:
    from flashwarp.file.gvdk import Gvdk

    Gvdk.create(options.path, options.size, **_shape(options)).close()


def _import(options: argparse.Namespace) -> None:
    from flashwarp.file.gvdk import Gvdk

    Gvdk.import_(options.source, options.path, read_only=options.read_only, **_shape(options))


def _export(options: argparse.Namespace) -> None:
    from flashwarp.file.gvdk import Gvdk

    with Gvdk(options.path, key=_key(options)) as image:
        image.export(options.target, overwrite=options.overwrite)


def _info(options: argparse.Namespace) -> None:
    from flashwarp.file.gvdk import Gvdk

    with Gvdk(options.path, key=_key(options)) as image:
        facts = {
            "path": image.path,
            "type": image.type,
            "size": image.size,
            "capacity": image.capacity,
            "block": image.block,
            "data_offset": image.data_offset,
            **{name: image.describe()[name] for name in ("generation", "identity", "checksums")},
            "written_since_sync": [
                list(each) for each in (image.recovered.ranges if image.recovered else ())
            ],
        }
    if options.json is not None:
        write_json(options.json, facts)
    if options.json == STDOUT:
        return
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):20} {value if value != [] else 'nothing'}")


def _verify(options: argparse.Namespace) -> None:
    from flashwarp.file.gvdk import Gvdk

    report = Gvdk.inspect(options.path, key=_key(options))
    _show(report, options.path)
    if not report.clean:
        sys.exit(1)


def _repair(options: argparse.Namespace) -> None:
    from flashwarp.file.gvdk import Gvdk

    report = Gvdk.repair(options.path, key=_key(options))
    _show(report, options.path)
    for begin, end in report.lost:
        print(f"lost, or of an earlier time: bytes [{begin}, {end})")


def _show(report: Report, path: Path) -> None:
    for problem in report.problems:
        print(problem)
    if report.clean:
        print(f"{path}: clean")
