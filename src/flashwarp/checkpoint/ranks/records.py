"""Which versions all ranks have published: a small file for each, which stays."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from flashwarp.checkpoint.directory.names import check_name, listed
from flashwarp.checkpoint.ranks.sessions import read_json, write_json
from flashwarp.storage import files

FOLDER = "ranks"
_COMPLETE_FOLDER = "complete"
_COMPLETE = re.compile(r"[0-9]{19}")


class Records:
    """Records of complete versions in a folder."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._path = path
        self.ranks = ranks

    def folder(self, name: str) -> Path:
        """Return where ranks note what they know of the versions of a name."""
        return self._path / check_name(name) / FOLDER

    def make_folder(self, name: str) -> Path:
        """Make this folder, and return it; raises PathError."""
        folder = self.folder(name)
        try:
            (folder / _COMPLETE_FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise files.write_error(error, str(folder)) from error
        return folder

    def recorded(self, name: str) -> set[int]:
        """Return the versions that have a record."""
        found = listed(self.folder(name) / _COMPLETE_FOLDER)
        return {int(each) for each in found if _COMPLETE.fullmatch(each)}

    def record(self, name: str, version: int) -> Path:
        """Return the file that says that a version is complete."""
        return self.folder(name) / _COMPLETE_FOLDER / f"{version:019d}"

    def write_record(self, name: str, version: int) -> None:
        """Note, durably, that a version is complete."""
        write_json(str(self.record(name, version)), {"ranks": self.ranks})

    def ranks_of(self, name: str, version: int) -> int:
        """Return how many ranks have written a complete version."""
        found = read_json(self.record(name, version))
        return self.ranks if found is None else int(str(found["ranks"]))

    def forget(self, name: str, version: int) -> None:
        """Remove the record that a version is complete."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.record(name, version))
