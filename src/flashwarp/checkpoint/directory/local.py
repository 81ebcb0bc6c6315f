"""The data file of a version, opened for reading."""

from __future__ import annotations

from pathlib import Path

from flashwarp import _native
from flashwarp.errors import DamagedVersionError
from flashwarp.storage import File, files

__all__ = ["FileSource", "direct_works"]


class FileSource:
    """A data file that must have `nbytes`; raises MissingFileError or DamagedVersionError."""

    def __init__(self, path: Path, nbytes: int, o_direct: bool | None) -> None:
        self.path = str(path)
        size = files.check(self.path, writable=False).st_size
        if size != nbytes:
            raise DamagedVersionError(self.path, f"it has {size} bytes, and {nbytes} were written")
        direct = direct_works(path) if o_direct is None else o_direct
        self._file = File(path, o_direct=direct, lock=False)

    @property
    def wants_pages(self) -> bool:
        """Whether memory that begins on a page is read faster."""
        return self._file.o_direct

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a buffer from byte `offset` on, or raise; thread-safe."""
        self._file.read_into(offset, view)

    def close(self) -> None:
        """Release it; may be called twice."""
        self._file.close()


def direct_works(path: Path) -> bool:
    """Return whether a file can be read and written with O_DIRECT."""
    return isinstance(_native.direct_io_alignment(str(path)), tuple)
