"""`flashwarp file`: where files lie on their devices, and images in the GVDK format."""

from __future__ import annotations

from collections.abc import Sequence

from flashwarp.cli import file_image, file_map
from flashwarp.cli.parser import Parser


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` the subcommands and their options."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    file_map.add_arguments(
        commands.add_parser("map", help=file_map.WHAT, description=file_map.WHAT)
    )
    file_image.add_arguments(commands)
