"""The data file of a version, opened for reading."""

from __future__ import annotations

from pathlib import Path

from flashwarp import _native
from flashwarp.errors import DamagedVersionError
from flashwarp.storage import File, files
from flashwarp.storage.file_access import Choice


class FileSource:
    """A data file that must have `nbytes`; raises MissingFileError or DamagedVersionError."""

    def __init__(self, path: Path, nbytes: int, o_direct: bool | None) -> None:
        self.path = str(path)
        size = files.check(self.path, writable=False).st_size
        if size != nbytes:
            raise DamagedVersionError(self.path, f"it has {size} bytes, and {nbytes} were written")
        self.o_direct = o_direct
        self._file = File(path, o_direct=choose_o_direct(path, o_direct).o_direct, lock=False)

    @property
    def descriptor(self) -> int:
        """The open file."""
        return self._file.native.fd

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a buffer from byte `offset` on, or raise; thread-safe."""
        self._file.read_into(offset, view)

    def close(self) -> None:
        """Release it; may be called twice."""
        self._file.close()


def choose_o_direct(path: Path, o_direct: bool | None) -> Choice:
    """Return whether a file is read and written past the page cache: as asked, or if it can be.

    The bytes of a version are written once and, with luck, never read: in the page cache they
    would push out what others need, and the kernel's write-back is slower than direct writes.
    """
    if o_direct is not None:
        return Choice(o_direct, f"o_direct={o_direct} was given")
    found = _native.direct_io_alignment(str(path))
    if isinstance(found, tuple):
        return Choice(True, "the file system has O_DIRECT")
    return Choice(False, f"through the page cache, O_DIRECT cannot: {found}")
