"""Every exception that flashwarp raises.

Each is a `FlashwarpError` and also the built-in error that a reader expects, so that
``except IndexError`` works. Messages name the value, the limit and the way out.
"""

from __future__ import annotations

from flashwarp import _names


class FlashwarpError(Exception):
    """Base of all errors that flashwarp raises."""


class ArgumentError(FlashwarpError, ValueError):
    """An argument has a value that cannot work; the message says which values work."""


class RenamedError(FlashwarpError, AttributeError, TypeError):
    """A name or argument of an earlier version; the message has the new name."""


class DtypeError(FlashwarpError, TypeError):
    """flashwarp cannot store this dtype, or index with it."""


class BoundsError(FlashwarpError, IndexError):
    """An index is out of bounds; the message has the index and the length."""


class RouteError(FlashwarpError, RuntimeError):
    """The array cannot use the route that `strict=` asked for."""


class FileFormatError(FlashwarpError, ValueError):
    """The contents of a file do not match its header, or what the caller asked for."""


class ExistingFileError(FlashwarpError, FileExistsError):
    """A file exists at the path of `create`, and `overwrite` is false."""


class IndexDtypeError(DtypeError, IndexError):
    """An index has elements that are not integers."""


class MissingFileError(FlashwarpError, FileNotFoundError):
    """The file or its folder does not exist."""


class PathError(FlashwarpError, OSError):
    """A file cannot be opened or created as asked: permission, kind, space, or file system."""


class LockedError(PathError):
    """Another writer has the file or storage, or this process reads what you open for writing.

    Attributes
    ----------
    holder : int or None
        Process that has the file open, if the system says which. It may be this process.
    """

    def __init__(self, errno: int, message: str, filename: str, holder: int | None = None) -> None:
        super().__init__(errno, message, filename)
        self.holder = holder


class StorageError(FlashwarpError, OSError):
    """A transfer failed in the storage; `errno`, `filename` and `offset` say where.

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
    """The caller stored to an array that was opened for reading."""


class CheckpointError(FlashwarpError, RuntimeError):
    """A checkpoint or a table that is trained is not in the state that the call needs.

    Attributes
    ----------
    step : int or None
        Steps of the optimizer at the last checkpoint, if a record of the table says so.
    """

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class RankError(CheckpointError):
    """A rank could not write its part of a version, so no rank has committed the version.

    Attributes
    ----------
    rank : int
        Which rank has failed.
    reason : str
        Why.
    """

    def __init__(self, message: str, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason


class MissingVersionError(FlashwarpError, LookupError):
    """A checkpoint has no such version: it was never committed, or it was discarded since."""


class ExistingVersionError(FlashwarpError, FileExistsError):
    """A checkpoint has this version already, and the caller did not ask to replace it."""


class DamagedVersionError(FileFormatError):
    """A version of a checkpoint is not what was committed; none of its bytes may be used.

    Attributes
    ----------
    path : str
        The file that is damaged or missing.
    reason : str
        What is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class RemoteError(FlashwarpError, ConnectionError):
    """A remote store refused a request, or failed it as often as it was tried."""


class WaitTimeout(FlashwarpError, TimeoutError):
    """What the caller waited for did not happen within the time limit; the message names it."""


class ShareError(FlashwarpError, RuntimeError):
    """A kernel ended without releasing lines that it had acquired through a share table.

    Attributes
    ----------
    lines : tuple of int
        Line numbers, as the cache counts them.
    """

    def __init__(self, message: str, lines: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.lines = lines


class ClosedError(FlashwarpError, ValueError):
    """An array, cache, controller or device was used after `close()`."""


class CopyError(FlashwarpError, TypeError):
    """The caller tried to copy or pickle an object that owns memory, threads or a file."""


class ChangedTensorError(FlashwarpError, RuntimeError):
    """A tensor that autograd has saved was changed in place before backward has used it."""


class CacheError(FlashwarpError, ValueError):
    """A cache cannot have this geometry, or has no room for what it must hold."""


class SharedCacheError(CacheError):
    """A cache cannot be shared so: its name, owner, version or settings, or what a client asked."""


class OwnerLostError(SharedCacheError, ConnectionError):
    """The owner of a shared cache has died, has closed it, or does not answer.

    What was flushed is in the files. Close the arrays and the cache, and open them again.
    """


class RankLostError(FlashwarpError, ConnectionError):
    """A rank of a sharded array has ended, has left a call, or did not come within the time limit.

    What was flushed is in the files. Close the array on all ranks, and open it again.
    """


class ControllerError(FlashwarpError, RuntimeError):
    """The controller refused or aborted a command, or was stopped."""


class ControllerTimeout(ControllerError, TimeoutError):
    """A command did not complete within the time limit; the message names the wait."""


class ControllerLost(ControllerError):
    """The drive completes nothing any more: a fatal status, removed, reset or closed.

    Arrays on it are to be closed. What they had not flushed is lost.
    """


class DeviceError(FlashwarpError, RuntimeError):
    """The device is absent or a driver call failed; the message names the call and its result."""


class DeviceTimeout(DeviceError, TimeoutError):
    """Work on the device did not finish within the time limit."""


class DeviceOutOfMemory(DeviceError, MemoryError):
    """The device, or host memory, has no room for an allocation; the message has its size."""


class CaptureError(DeviceError):
    """A call cannot become part of a CUDA graph, or an array is closed while a graph uses it."""


class CompileError(DeviceError):
    """Device code did not compile; `log` has the compiler's output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class ForkError(FlashwarpError, RuntimeError):
    """A forked child process used an object that owns threads and device memory."""


__all__ = sorted(name for name, each in globals().items() if isinstance(each, type))

__getattr__, __dir__ = _names.later(__name__, {})
