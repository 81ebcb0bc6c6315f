"""The record beside a table's file: its optimizer, its dimensions and its last checkpoint.

A record is replaced whole and durably: after a crash it is the old one or the new one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwarp.errors import FileFormatError
from flashwarp.storage import files

_FORMAT = 1
_SUFFIX = ".training.json"


def record_path(table: str | os.PathLike[str]) -> str:
    """Return where the record of a table's file lies."""
    return os.path.realpath(table) + _SUFFIX


@dataclass(frozen=True)
class Record:
    """What is known of a table that is trained.

    Attributes
    ----------
    optimizer : str
        Name of the rule whose state the rows hold.
    rows, dim, width : int
        Rows of the table, weights of a row, elements of a row.
    step : int
        Steps of the optimizer at the last checkpoint.
    changing : bool
        Whether steps may have followed: then some rows may be newer than that checkpoint.
    """

    optimizer: str
    rows: int
    dim: int
    width: int
    step: int = 0
    changing: bool = False

    @staticmethod
    def read(table: str | os.PathLike[str]) -> Record | None:
        """Read the record of a table, or return None if it has none.

        Raises FileFormatError if there is one that flashwarp has not written.
        """
        path = record_path(table)
        try:
            text = Path(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise files.path_error(error, path, writable=False) from error
        try:
            found = json.loads(text)
            return _parse(found)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FileFormatError(
                f"{path} is no record of a table ({error}): restore the table from a checkpoint"
            ) from error

    def write(self, table: str | os.PathLike[str]) -> None:
        """Replace the record of a table, durably. Blocks for two fsyncs."""
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)
        with files.replacing(record_path(table)) as file:
            file.write(text.encode() + b"\n")


def _parse(found: dict[str, Any]) -> Record:
    if found.pop("format") != _FORMAT:
        raise ValueError("its format is of another version of flashwarp")
    record = Record(**found)
    for field in dataclasses.fields(Record):
        value = getattr(record, field.name)
        wanted = {"optimizer": str, "changing": bool}.get(field.name, int)
        if type(value) is not wanted:
            raise TypeError(f"{field.name} is {value!r}")
    return record
