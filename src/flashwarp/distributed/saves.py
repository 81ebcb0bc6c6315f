"""What lies in the folders of a sharded array: a manifest, and a file for each shard.

A *save* is a manifest and its shards. Each save has an id, which its shards carry in their names
and behind their rows. A new save is prepared beside the present one: all ranks write their shards
and ``sharded.next.json``. Then rank 0 gives its manifest the name ``sharded.json``: this rename
commits the save for all ranks. The others follow, now or when they open the folder the next time.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flashwarp.config import integer
from flashwarp.distributed.dealing import DEALS, Deal, Dealing
from flashwarp.dtypes import check_dtype, check_shape
from flashwarp.errors import ExistingFileError, FileFormatError, MissingFileError
from flashwarp.storage import files, npy
from flashwarp.table.checkpoint import copy_bytes

_FORMAT = 1
_PRESENT, _NEXT = "sharded.json", "sharded.next.json"
# Tables that are trained have records beside them.
_SHARD = re.compile(r"shard-[0-9]{5}-of-[0-9]{5}\.([0-9a-f]{32})\.npy(\.training\.json)?")
_ID = re.compile("[0-9a-f]{32}")
RANKS_MAX = 99999


@dataclass(frozen=True)
class Save:
    """One save of a sharded array. All ranks have the same.

    Attributes
    ----------
    id : str
        Of 32 hexadecimal digits; no other save has it.
    array : str
        The id of the array's first save.
    deal : {"range", "hash"}
    shape : tuple of int
        Of the whole array.
    dtype : str
        As the header of a ``.npy`` file describes it.
    ranks : int
        How many shards there are.
    """

    id: str
    array: str
    deal: Deal
    shape: tuple[int, ...]
    dtype: str
    ranks: int

    @cached_property
    def dealing(self) -> Dealing:
        """Which rank has which row."""
        return Dealing(self.deal, self.shape[0], self.ranks)

    @cached_property
    def kind(self) -> np.dtype[Any]:
        """The dtype, checked."""
        return check_dtype(np.lib.format.descr_to_dtype(ast.literal_eval(self.dtype)))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.kind.itemsize

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard."""
        first, last = self.dealing.starts[rank : rank + 2]
        return last - first, *self.shape[1:]

    def path(self, folder: Path, rank: int) -> str:
        """Return where a shard lies in a folder."""
        return str(folder / f"shard-{rank:05d}-of-{self.ranks:05d}.{self.id}.npy")

    def text(self) -> str:
        """Return the text of its manifest."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    # Shards.

    def _mark(self, rank: int) -> bytes:
        """What stands behind the rows of a shard, where readers of .npy files do not look."""
        return f"flashwarp shard {rank:05d} of {self.ranks:05d}, save {self.id}\n".encode()

    @contextlib.contextmanager
    def new_shard(
        self, folder: Path, rank: int, source: str | None = None
    ) -> Iterator[tuple[int, int]]:
        """Make a shard of zeros, which gets its name, durably, at the end of the statement.

        If `source` names the file of a shard of this shape and dtype, it has the rows of that.

        Yields its descriptor and the offset of its rows.
        """
        layout = npy.empty_layout(self.shard_shape(rank), self.kind)
        target = files.check_new(self.path(folder, rank), True)
        with files.Draft(target, overwrite=True, lock=False) as draft:
            with files.writing(target):
                npy.write_empty(draft.descriptor, layout)
                draft.warn_of_room(layout.nbytes)
                if source is not None:
                    with files.open_for_reading(source) as old:
                        copy_bytes(old.fileno(), draft.descriptor)
                os.pwrite(draft.descriptor, self._mark(rank), layout.offset + layout.nbytes)
                yield draft.descriptor, layout.offset
                os.fsync(draft.descriptor)
            draft.publish()

    def check_shard(self, folder: Path, rank: int) -> npy.Layout:
        """Return the layout of a shard's file; raises FileFormatError if it is not this one."""
        path = self.path(folder, rank)
        layout = npy.read_layout(path)
        with files.open_for_reading(path) as file:
            file.seek(layout.offset + layout.nbytes)
            mark = file.read(len(self._mark(rank)) + 1)
        if mark != self._mark(rank):
            raise FileFormatError(
                f"{path} is not shard {rank} of save {self.id}: it was replaced, or is of another "
                "save"
            )
        wanted = self.shard_shape(rank), self.kind
        if (layout.shape, layout.dtype) != wanted:
            raise FileFormatError(
                f"{path} has shape {layout.shape} of {layout.dtype}, and the shard {wanted[0]} of "
                f"{wanted[1]}"
            )
        return layout


def read(text: str, path: str) -> Save:
    """Return what a manifest says; raises FileFormatError if flashwarp has not written it."""
    try:
        found = json.loads(text)
        if found.pop("format") != _FORMAT:
            raise ValueError("its format is of another version of flashwarp")
        save = Save(**{**found, "shape": tuple(found["shape"])})
        if not (_ID.fullmatch(save.id) and _ID.fullmatch(save.array)):
            raise ValueError(f"its ids are {save.id} and {save.array}")
        if save.deal not in DEALS or not 1 <= integer("ranks", save.ranks) <= RANKS_MAX:
            raise ValueError(f"it is dealt by {save.deal} to {save.ranks} ranks")
        if not check_shape(save.shape, save.kind.itemsize):
            raise ValueError("its shape has no axis")
        return save
    except Exception as error:  # of a text that anybody may have written
        raise FileFormatError(f"{path} is no manifest of a sharded array: {error}") from error


class Folder:
    """A rank's folder, which other ranks may share."""

    def __init__(self, path: files.PathLike) -> None:
        self.path = Path(files.check_name(path)).absolute()

    def look(self) -> dict[str, str | None]:
        """Return the texts of the present and the prepared manifest, None where there is none."""
        return {"present": self._text(_PRESENT), "next": self._text(_NEXT)}

    def _text(self, name: str) -> str | None:
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{path} is no manifest of a sharded array: {error}") from error
        except OSError as error:
            raise files.path_error(error, str(path), writable=False) from error

    def check_new(self) -> None:
        """Raise ExistingFileError if the folder holds a sharded array."""
        if self.look()["present"] is not None:
            raise ExistingFileError(
                errno.EEXIST, "holds a sharded array: open it, or name another", str(self.path)
            )

    def prepare(self, save: Save) -> None:
        """Write the manifest of a save that may become the present one. Durable."""
        self._write(_NEXT, save)

    def switch(self, save: Save) -> None:
        """Make a save the present one, durably."""
        self._write(_PRESENT, save)

    def _write(self, name: str, save: Save) -> None:
        # Not renamed from one to the other: several ranks may do this in one folder.
        with files.replacing(self.path / name) as file:
            file.write(save.text().encode())

    def follow(self, save: Save) -> None:
        """Make a committed save the present one, and end what killed programs have left."""
        if self.look()["present"] != save.text():
            self.switch(save)
        for name in os.listdir(self.path):
            match = _SHARD.fullmatch(name)
            if name == _NEXT or (match and match[1] != save.id):
                with contextlib.suppress(FileNotFoundError):  # of another rank in this folder
                    os.unlink(self.path / name)


def chosen(found: list[dict[str, str | None]], path: str) -> Save:
    """Return the save that all ranks have, from what their folders hold, in the order of ranks.

    Raises MissingFileError or FileFormatError.
    """
    text = found[0]["present"]
    if text is None:
        prepared = "; what was prepared there was never committed" if found[0]["next"] else ""
        raise MissingFileError(
            2, f"rank 0 has no sharded array there: create it{prepared}", f"{path}/{_PRESENT}"
        )
    save = read(text, _PRESENT)
    for rank, each in list(enumerate(found))[1 : save.ranks]:
        if text not in each.values():
            there = each["present"]
            said = "nothing" if there is None else f"save {read(there, _PRESENT).id}"
            raise FileFormatError(
                f"the folders hold a mix of saves: rank 0 has save {save.id}, rank {rank} has "
                f"{said}: name the folders of one save"
            )
    return save
