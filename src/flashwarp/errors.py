"""Every exception flashwarp raises.

Each is a `FlashwarpError` and also the built-in error a reader would expect, so that
``except IndexError`` keeps working. Messages name the value, the limit and the way out.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BoundsError",
    "CacheError",
    "ClosedError",
    "CompileError",
    "ControllerError",
    "ControllerTimeout",
    "CopyError",
    "DataPathError",
    "DeviceError",
    "DeviceOutOfMemory",
    "DeviceTimeout",
    "DtypeError",
    "ExistingFileError",
    "FileFormatError",
    "FlashwarpError",
    "ForkError",
    "IndexDtypeError",
    "LockedError",
    "MissingFileError",
    "PathError",
    "ReadOnlyError",
    "ShareError",
    "StorageError",
]


class FlashwarpError(Exception):
    """Base of all errors that flashwarp raises."""


class ArgumentError(FlashwarpError, ValueError):
    """An argument has a value that cannot work; the message says which values can."""


class DtypeError(FlashwarpError, TypeError):
    """A dtype or index type that flashwarp cannot store or index with."""


class BoundsError(FlashwarpError, IndexError):
    """An index outside the array; the message holds the index and the length."""


class DataPathError(FlashwarpError, RuntimeError):
    """`strict=` asked for a data path that this array cannot use."""


class FileFormatError(FlashwarpError, ValueError):
    """A file whose contents do not match what it claims or what the caller asked for."""


class ExistingFileError(FlashwarpError, FileExistsError):
    """`create` found something at the path, and was not told to replace it."""


class IndexDtypeError(DtypeError, IndexError):
    """An index that is not made of integers."""


class MissingFileError(FlashwarpError, FileNotFoundError):
    """The file or its folder does not exist."""


class PathError(FlashwarpError, OSError):
    """A file cannot be opened or created as asked: permission, kind, space, or file system."""


class LockedError(PathError):
    """Somebody writes the file or storage already, or this process reads what is to be written.

    Attributes
    ----------
    holder : int or None
        Process that has the file open, where the system says so; this process, if it is the one.
    """

    def __init__(self, errno: int, message: str, filename: str, holder: int | None = None) -> None:
        super().__init__(errno, message, filename)
        self.holder = holder


class StorageError(FlashwarpError, OSError):
    """A transfer failed in the storage; `errno`, `filename` and the byte offset are set.

    Attributes
    ----------
    offset : int or None
        Byte offset in the file of the first transfer that failed.
    status : int
        NVMe status field that the controller returned (status code type in bits 10:8).
    """

    def __init__(
        self,
        errno: int,
        message: str,
        filename: str | None = None,
        *,
        offset: int | None = None,
        status: int = 0,
    ) -> None:
        super().__init__(errno, message, filename)
        self.offset = offset
        self.status = status


class ReadOnlyError(FlashwarpError, ValueError):
    """A store to an array that was opened read-only."""


class ShareError(FlashwarpError, RuntimeError):
    """A kernel ended without releasing lines that it had acquired through a share table.

    Attributes
    ----------
    lines : tuple of int
        Their numbers in the cache.
    """

    def __init__(self, message: str, lines: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.lines = lines


class ClosedError(FlashwarpError, ValueError):
    """Use of an array, cache, controller or device after `close()`."""


class CopyError(FlashwarpError, TypeError):
    """An object that owns memory, threads or a file was to be copied or pickled."""


class CacheError(FlashwarpError, ValueError):
    """A page cache geometry that cannot work, or a cache too small for what is asked of it."""


class ControllerError(FlashwarpError, RuntimeError):
    """The controller refused or aborted a command, or it has been stopped."""


class ControllerTimeout(ControllerError, TimeoutError):
    """A command did not complete within the time limit; the message says what was waited for."""


class DeviceError(FlashwarpError, RuntimeError):
    """The device is absent or a driver call failed; the message names the call and its result."""


class DeviceTimeout(DeviceError, TimeoutError):
    """Work on the device did not finish within the time limit."""


class DeviceOutOfMemory(DeviceError, MemoryError):
    """The device, or host memory, has no room for an allocation of the size named."""


class CompileError(DeviceError):
    """Device code did not compile; `log` holds the compiler's own words."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class ForkError(FlashwarpError, RuntimeError):
    """An object that owns threads and device memory was used in a forked child process."""
