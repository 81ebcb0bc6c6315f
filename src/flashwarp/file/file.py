"""`File`: a file that kernels and the host read and write at byte offsets, through one cache."""

from __future__ import annotations

import hashlib
import os
import warnings
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flashwarp import endings
from flashwarp._names import renamed
from flashwarp.array import opening
from flashwarp.array.array import Array
from flashwarp.cache.cache import Cache
from flashwarp.cache.sizes import LINE_DEFAULT
from flashwarp.config import SIZE_MAX, choice, flag, integer, parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    FileFormatError,
    ForkError,
    ReadOnlyError,
    RouteError,
    SharedCacheError,
)
from flashwarp.file.ends import EndOf, drafted
from flashwarp.file.gvdk import Gvdk, Recovered, Report, is_gvdk
from flashwarp.file.gvdk.making import exported
from flashwarp.file.kernel_file import LINES_AHEAD_MAX, KernelFile, read_size
from flashwarp.file.transfers import FileBytes
from flashwarp.nvme import Controller
from flashwarp.storage import files, npy, source

_ZEROS_BYTES = 4 << 20
_COPY_BYTES = 16 << 20


@renamed
class File(FileBytes):
    r"""An open file, for kernels and for the host; made by `open` and `create`.

    Pass it to a kernel for a parameter of type `fw::file`. Kernels and the host go through one
    cache, so each sees what the other has written before: the host's calls wait until launches so
    far have ended, unless they say otherwise.

    An ordinary file is as long as its `capacity` while it is open for writing, and has its `size`
    again after `close`. An image (docs/files.md) keeps its size in its header, so that it is right
    after a crash, too.

    Attributes
    ----------
    array : Array
        All bytes up to the capacity, of dtype uint8.
    image : Gvdk or None
        If the file is one.

    Notes
    -----
    Several threads may call, as for arrays. Calls that move the end (`append`, `truncate`, a
    `write_from` past the end) must not run beside kernels or other calls that move it.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> with fw.File.create("log.bin", 0, capacity="1 MiB", device="cpu") as f:
    ...     f.append(np.arange(4, dtype="u1"))
    ...     f.write_from(np.array([9, 9], "u1"), 1)
    ...     f.size, f.read(0, 10)
    0
    2
    (4, b'\x00\t\t\x03')
    """

    image: Gvdk | None
    _path: str
    _mode: opening.Mode
    _options: dict[str, Any]
    _access: dict[str, Any]
    _key: bytes | None
    _read_ahead: int
    _opened: Opened
    _end_of: EndOf | None

    def __init__(self, *_: object, **__: object) -> None:
        raise ArgumentError("files are made by flashwarp.File.open and flashwarp.File.create")

    # Opening.

    @classmethod
    @renamed
    def open(
        cls,
        path: files.PathLike,
        mode: Literal["r", "r+"] = "r",
        *,
        device: Device | str | None = None,
        cache: opening.CacheLike = "auto",
        line: int | str | None = None,
        read_ahead: int = 8,
        capacity: int | str | None = None,
        shared: bool | str = False,
        o_direct: bool | None = None,
        controller: Controller | None = None,
        key: bytes | None = None,
        lock: bool = True,
    ) -> File:
        """Open any regular file, or an image.

        Parameters
        ----------
        path : path-like
        mode : {"r", "r+"}
            Read, or read and write.
        device, cache, line, o_direct, controller, lock
            As for `flashwarp.open`.
        read_ahead : int
            Lines that reads by kernels start to fetch behind the ones that they need; none where
            the device reads the storage itself.
        capacity : int or str, optional
            Bytes up to which writes and appends may go, for mode "r+". Default: the size, or the
            capacity of an image, which has its own.
        shared : bool or str
            Share the cache with other processes that do the same (docs/caches.md), under a name
            that follows from the path, or under this one. The first process owns it, and says by
            `cache` how large it is; the others read, and cannot pass the file to kernels.
        key : bytes, optional
            Of an image that has one.

        Raises
        ------
        MissingFileError, PathError, LockedError, FileFormatError, ReadOnlyError, CacheError
            As `flashwarp.open` and `Gvdk` raise them.
        ArgumentError
            For a capacity below the size, or with mode "r", or of an image.
        """
        opened = partial(
            cls._open, path, mode, read_ahead=read_ahead, capacity=capacity, shared=shared, key=key,
            o_direct=o_direct, lock=lock, device=device, cache=cache, line=line,
            controller=controller,
        )  # fmt: skip
        return endings.uninterrupted(opened)

    @classmethod
    @renamed
    def create(
        cls,
        path: files.PathLike,
        size: int | str = 0,
        *,
        capacity: int | str | None = None,
        format: Literal["plain", "gvdk"] = "plain",  # noqa: A002
        block: int | str = "4 KiB",
        preallocate: bool | str = True,
        overwrite: bool = False,
        key: bytes | None = None,
        **options: Any,
    ) -> File:
        """Make a file of zeros, durably, and open it with mode "r+".

        The file takes its name last: a call that fails, or a crash, leaves what was there before.

        Parameters
        ----------
        path : path-like
        size : int or str
            Bytes up to its end.
        capacity : int or str, optional
            Bytes up to which it may grow. Default: `size`.
        format : {"plain", "gvdk"}
            An ordinary file, or an image (docs/files.md).
        block, key : optional
            Of an image.
        preallocate : bool or str
            Take all space now, as for `Gvdk.create`. An ordinary file takes that of its capacity,
            or is sparse; `close` gives back what lies behind its end.
        overwrite : bool
            Replace an existing file.
        **options
            As for `open`: `device`, `cache`, `line`, `read_ahead`, `shared`, `o_direct`,
            `controller`, `lock`.

        Raises
        ------
        ExistingFileError, MissingFileError, PathError
            If the file exists, its folder does not, or the disk is full; nothing is left then.
        ArgumentError
            For numbers outside of their limits.
        """

        def make() -> File:
            own: dict[str, Any] = {"key": key}
            choice("format", format, ("plain", "gvdk"))
            if format == "gvdk":
                draft = Gvdk.drafted(path, size, block, preallocate, capacity, key, overwrite)
            elif key is not None or block != "4 KiB":
                raise ArgumentError('key= and block= are of images: give format="gvdk"')
            else:
                nbytes = integer("size", parse_bytes(size, "size"), 0, SIZE_MAX)
                most = nbytes if capacity is None else parse_bytes(capacity, "capacity")
                own["capacity"] = integer("capacity", most, nbytes, SIZE_MAX)
                own["_reserve"] = flag("preallocate", preallocate)
                draft = drafted(path, nbytes, flag("overwrite", overwrite))
            with draft as made:
                file = cls._open(path, "r+", **own, **options, _at=made.path)
                try:
                    made.publish()
                except BaseException:
                    file.close()
                    raise
            return file

        return endings.uninterrupted(make)

    @classmethod
    def _open(
        cls,
        path: files.PathLike,
        mode: opening.Mode,
        *,
        read_ahead: int = 8,
        capacity: int | str | None = None,
        shared: bool | str = False,
        o_direct: bool | None = None,
        key: bytes | None = None,
        lock: bool = True,
        _at: str | None = None,
        _reserve: bool = False,
        **options: Any,
    ) -> File:
        endings.check_not_ended()
        choice("mode", mode, ("r", "r+"))
        name = files.check_name(path)
        writable = mode == "r+"
        if capacity is not None and not writable:
            raise ArgumentError("capacity= is for writing: give mode='r+', or leave it out")
        self = cls.__new__(cls)
        self.image = self._end_of = None
        self._path, self._mode, self._options = name, mode, options
        direct = None if o_direct is None else flag("o_direct", o_direct)
        self._access = {"o_direct": direct, "lock": flag("lock", lock)}
        self._key, self._read_ahead = key, integer("read_ahead", read_ahead, 0, LINES_AHEAD_MAX)
        at = name if _at is None else _at
        with ExitStack() as made:
            if shared is not False:
                own = _of_shared(made, name, shared, **options)
                self._options = {**options, "device": None, "cache": own, "line": None}
                if writable and not own.owned:
                    raise SharedCacheError(
                        f"{name}: another process owns its cache, and only the owner of a shared "
                        'cache writes files: open it with mode="r", or without shared='
                    )
            if is_gvdk(at):
                if capacity is not None:
                    raise ArgumentError(
                        f"{name} is an image, which has its own capacity: File.extend moves it"
                    )
                self._attach_image(made, at)
            elif key is not None:
                raise ArgumentError(f"{name} is no image, so it has no key")
            elif writable:
                self._attach_plain(made, at, capacity, _reserve)
            else:
                array = opening.open(
                    name, mode, np.uint8, offset=0, **self._options, **self._access
                )
                self._attach(made, array, array.size)
            self._opened = Opened(self, made.pop_all())
        return self

    def _attach_image(self, made: ExitStack, at: str) -> None:
        image = self.image = Gvdk(
            at,
            writable=self._mode == "r+",
            key=self._key,
            lock=self._access["lock"],
            o_direct=bool(self._access["o_direct"]),
            _shown=self._path,
        )
        made.callback(image.close)
        array = opening.open(image, self._mode, np.uint8, **self._options)
        self._attach(made, array, image.size)

    def _attach_plain(
        self, made: ExitStack, at: str, capacity: int | str | None, reserve: bool
    ) -> None:
        """Open an ordinary file for writing: its lock first, which its end then stays under."""
        plan = opening.planned(self._path, "r+", **self._options, **{**self._access, "lock": False})
        plan.make_way(at)
        # One that is kept has the lock already.
        end = self._end_of = self._end_of or EndOf(at, self._path, self._access["lock"])
        end.kept = False
        made.callback(end.let_go)
        size = end.size
        most = size if capacity is None else parse_bytes(capacity, "capacity")
        end.reserve(integer("capacity", most, size, SIZE_MAX), reserve)
        made.callback(end.cut)
        part = source.FilePart(
            end.same_file, npy.Layout(np.dtype(np.uint8), (end.capacity,), 0), shown=self._path
        )
        array = plan.open(source.Source(part.layout.dtype, part.layout.shape, (part,)))
        self._attach(made, array, size)

    def _attach(self, made: ExitStack, array: Array, size: int) -> None:
        made.callback(array.close)
        KernelFile.__init__(self, array, size=size, read_ahead=self._read_ahead)
        made.callback(self._state.close)

    # Facts.

    @property
    def path(self) -> str:
        """The file as it was named."""
        return self._path

    @property
    def device(self) -> Device:
        """Where kernels use it."""
        return self.array.device

    @property
    def writable(self) -> bool:
        """Whether it takes writes."""
        return self._mode == "r+"

    @property
    def recovered(self) -> Recovered | None:
        """What the last writer of an image had not synced; None for an ordinary file."""
        return self.image.recovered if self.image is not None else None

    # The end of the file, and of everything.

    def truncate(self, size: int) -> None:
        """Let the file end at `size` or, if it is longer already, cut it; blocks.

        What is cut reads as zeros if the file grows again. No kernel may use these bytes meanwhile.
        """
        self._check_writable()
        size = integer("size", size, 0, self.capacity)
        old = self.size
        if size < old and self.image is not None:
            self.array.flush()
            self.array.drop_cache()
            self.image.discard(size, old - size)
        else:
            zeros = np.zeros(min(_ZEROS_BYTES, max(0, old - size)), np.uint8)
            for begin in range(size, old, _ZEROS_BYTES):
                self.array[begin : min(old, begin + _ZEROS_BYTES)] = zeros[: old - begin]
        self._set_size(size)

    def extend(self, capacity: int | str) -> None:
        """Give the file a larger capacity; blocks. Its cache is empty then.

        It opens the file anew, so no launch, CUDA graph or future may use it any more.

        Raises
        ------
        ArgumentError
            If the capacity would shrink, or the file is a sparse image, which keeps its capacity.
        """
        self._check_writable()
        most = integer("capacity", parse_bytes(capacity, "capacity"), self.capacity, SIZE_MAX)
        if self.image is not None and self.image.type == "sparse":
            raise ArgumentError(
                f"{self._path} is a sparse image, which keeps its capacity of {self.capacity} "
                "bytes: export it, and import it with a larger one"
            )
        end = self._end_of
        with ExitStack() as made:
            if end is not None:
                end.kept = True  # until it is attached again: nobody gets the lock meanwhile
                made.callback(end.give_up)
            self.close()
            if end is None:
                Gvdk.extend(self._path, most, key=self._key)
                self._attach_image(made, self._path)
            else:
                self._attach_plain(made, self._path, most, reserve=False)
            self._opened = Opened(self, made.pop_all())

    def flush(self) -> None:
        """Make all that was written durable, and of an image its size; blocks.

        Waits for launches and asynchronous calls so far. The size of an ordinary file is right on
        the disk after `close`.

        Raises
        ------
        StorageError
            If the disk is full, nothing is lost: make room, and call again.
        """
        self._check_writable()
        size = self.size
        if self.image is not None:
            self.image.note_size(size)
        self.array.flush()
        if self.image is not None:
            self.image.flush()

    def close(self) -> None:
        """Sync, give the file its size, and release everything. May be called twice.

        A forked child leaves it to its parent.
        """
        opened = self.__dict__.get("_opened")
        if opened is not None:
            endings.uninterrupted(opened.close)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        opened = self.__dict__.get("_opened")
        return opened is None or opened.closed

    def __del__(self) -> None:
        if self.closed or self._opened.in_child:
            return
        try:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)
        finally:  # a warning may be raised as an error
            self.close()

    # Images.

    def verify(self) -> Report:
        """Look for damage in header and tables of an image; syncs first. See `Gvdk.verify`."""
        image = self._image("has nothing that could be verified")
        if self.writable:
            self.flush()
        return image.verify()

    @staticmethod
    def repair(path: files.PathLike, *, key: bytes | None = None) -> Report:
        """Make what is left of an image usable; see `Gvdk.repair`."""
        return Gvdk.repair(path, key=key)

    def export(self, path: files.PathLike, *, overwrite: bool = False) -> None:
        """Write the bytes up to the end to an ordinary file; blocks until they are durable."""
        self._check_open()
        exported(path, self.size, self.read, overwrite)

    @staticmethod
    def import_(source: files.PathLike, path: files.PathLike, **options: Any) -> None:
        """Make an image of the bytes of an ordinary file; see `Gvdk.import_`."""
        Gvdk.import_(source, path, **options)

    def _image(self, lack: str) -> Gvdk:
        self._check_open()
        if self.image is None:
            raise FileFormatError(
                f"{self._path} is an ordinary file, which {lack}: make an image with "
                'File.create(path, size, format="gvdk") or File.import_'
            )
        return self.image

    # Arrays.

    def as_array(
        self, dtype: npt.DTypeLike, shape: Any = None, offset: int = 0, **options: Any
    ) -> Array:
        """Open a part of the file as an array for reading, with a cache of its own.

        Parameters
        ----------
        dtype, shape
            As for `flashwarp.open`.
        offset : int
            Byte of the file at which it begins.
        **options
            As for `flashwarp.open`; `device` is by default the file's.

        Raises
        ------
        ReadOnlyError
            If the file is open for writing: the array would not see what is written. Close it, or
            `flush` it and open the array in another process.
        RouteError
            If it is a sparse image, whose data is not in one piece.
        """
        self._check_open()
        if self.writable:
            raise ReadOnlyError(
                f"{self._path} is open for writing, and an array beside it would not see what is "
                'written: close it, and open it with mode="r"'
            )
        begin = 0
        if self.image is not None:
            if self.image.data_offset is None:
                raise RouteError(
                    f"{self._path} is a sparse image, whose data is not in one piece: open the "
                    "image itself, flashwarp.open(Gvdk(path), dtype=...)"
                )
            begin = self.image.data_offset
        offset = integer("offset", offset, 0, self.size)
        if shape is None:
            shape = ((self.size - offset) // np.dtype(dtype).itemsize,)
        options.setdefault("device", self.device)
        return opening.open(
            self._path, "r", dtype, shape, offset=begin + offset, **self._access, **options
        )

    def _check_writable(self) -> None:
        self._check_open()
        if not self.writable:
            raise ReadOnlyError(f'{self._path} was opened for reading: open it with mode="r+"')

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"the file {self.__dict__.get('_path')} was closed")
        if self._opened.in_child:
            raise ForkError(
                f"{self._path} belongs to the process that opened it: a forked child must open it "
                "itself"
            )

    def __repr__(self) -> str:
        path, mode = self.__dict__.get("_path"), self.__dict__.get("_mode")
        return f"<{'closed ' if self.closed else ''}File {path} mode={mode!r}>"


def _of_shared(
    made: ExitStack,
    path: str,
    shared: bool | str,
    device: Device | str | None = None,
    cache: opening.CacheLike = "auto",
    line: int | str | None = None,
    **_: Any,
) -> Cache:
    """Return a cache that processes share."""
    if isinstance(cache, Cache):
        raise ArgumentError(
            "shared= makes a cache: give cache= as its capacity, or leave shared out"
        )
    if isinstance(shared, str):
        name = shared
    else:
        flag("shared", shared)
        name = f"file-{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:16]}"
    # Who only joins takes the owner's capacity.
    capacity = None if isinstance(cache, str) and cache == "auto" else cache
    own = Cache(capacity, line or LINE_DEFAULT, device=resolve(device), shared=name)
    made.callback(own.close)
    return own


class Opened:
    """What a file holds until its end, which the registry of `endings` may be the one to see."""

    def __init__(self, file: File, held: ExitStack) -> None:
        self.device = file.device
        self.closed = False
        self._array, self._state, self._image = file.array, file._state, file.image
        self._end_of = file._end_of
        self._writable = file.writable
        self._held = held
        self._pid = os.getpid()
        endings.remember(self)

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child of the one that opened the file."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Give the file its size, and release everything. May be called twice."""
        if self.closed:
            return
        self.closed = True
        endings.forget(self)
        if self.in_child:
            return
        with self._held:
            if self._writable and not self._array.closed:
                try:
                    self._array.wait()
                finally:
                    size = read_size(self.device, self._state)
                    if self._end_of is not None:
                        self._end_of.size = size
                    if self._image is not None:
                        self._image.note_size(size)
