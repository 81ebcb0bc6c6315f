"""`Gvdk`: an image, a file with a format of its own, as a storage.

Marks, data, tables and header reach the disk in this order. So what was synced is never lost, and
the marks name all that was written since.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from dataclasses import replace
from typing import Any, Self

import numpy as np

from flashwarp import _native, endings
from flashwarp._names import renamed
from flashwarp.config import flag, integer, parse_bytes
from flashwarp.errors import (
    ArgumentError,
    ForkError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.file.gvdk.callbacks import weakly_called
from flashwarp.file.gvdk.inspecting import (
    Recovered,
    Report,
    clear_torn_marks,
    inspect,
    marked_ranges,
    marks_of,
    native_image,
    newest_header,
)
from flashwarp.file.gvdk.layout import (
    CAPACITY_MAX,
    PAGE,
    DamagedImageError,
    Header,
    ImageType,
    Sealer,
    places,
)
from flashwarp.file.gvdk.making import (
    COPY_BYTES,
    checked_key,
    drafted,
    exported,
    new_header,
    rounded,
    take_space,
)
from flashwarp.file.gvdk.tables import Disk, Table, Tables
from flashwarp.storage import files
from flashwarp.storage.base import Storage, typed_errors
from flashwarp.storage.progress import counting

_log = logging.getLogger(__name__)

# A sync waits so long for the writes that have begun.
_WRITES_END_MS = 60_000


@renamed
class Gvdk(Storage):
    """An image: a file that knows its size, what was written since the last sync, and its blocks.

    It is a storage of `capacity` bytes. Those from `size` on are zeros.

    Parameters
    ----------
    path : path-like
        An existing image; see `create`.
    writable : bool
        Take writes.
    key : bytes, optional
        For an image that was made with a key: at least 16 bytes.
    lock : bool
        Refuse a second writer, as arrays do.
    o_direct : bool
        Read and write the data past the page cache. Only for images of type fixed.

    Raises
    ------
    FileFormatError
        No image, another version, or no key where one is needed.
    DamagedImageError
        If header or tables are not what was written.
    MissingFileError, PathError, LockedError
    ReadOnlyError
        If `writable`, and the image itself is read-only.

    Notes
    -----
    Any number of threads may call. A write returns when its bytes are in the page cache or on the
    disk; `flush` makes all of them durable, and so does `flush` of an array on it. The first writes
    after a sync take longer, because they note durably what will be written.

    After a crash, the next open finds what was synced. `recovered` says what was written since.

    Examples
    --------
    >>> from flashwarp.file.gvdk import Gvdk
    >>> with Gvdk.create("table.gvdk", "1 MiB", preallocate=False) as image:
    ...     image.write(5000, b"flash")
    ...     image.flush()
    >>> with Gvdk("table.gvdk") as image:
    ...     image.size, image.read(5000, 5), image.recovered
    (1048576, b'flash', None)
    """

    flushes_in_python = True

    def __init__(
        self,
        path: files.PathLike,
        *,
        writable: bool = False,
        key: bytes | None = None,
        lock: bool = True,
        o_direct: bool = False,
        _shown: files.PathLike | None = None,
    ) -> None:
        name = files.check_name(path)
        self._file = name if _shown is None else files.check_name(_shown)
        writable = flag("writable", writable)
        self._pid = os.getpid()
        self._lock = endings.Lock()
        self._sealer = Sealer(checked_key(key))
        self._changed = False  # whether the next sync writes a header in any case
        files.check(name, writable)
        self._opened = files.opened(
            lambda: _native.FileStorage(
                name, writable=writable, lock=flag("lock", lock), name=self._file
            ),
            self._file,
            writable=writable,
        )
        try:
            self._open(writable, flag("o_direct", o_direct))
        except BaseException:
            del self._opened  # whoever keeps the exception does not keep the lock
            raise

    def _open(self, writable: bool, o_direct: bool) -> None:
        self._disk = Disk(self._opened.fd)
        self._header, _ = newest_header(self._disk, self._sealer, self._file)
        if writable and not self._header.writable:
            raise ReadOnlyError(
                f"{self._file}: the image is read-only: import it anew to change it"
            )
        if o_direct and self._header.type is not ImageType.FIXED:
            raise ArgumentError(
                f"{self._file}: o_direct=True, but the image is sparse: make it with preallocate"
            )
        self._size = self._header.size
        self._tables = Tables(self._disk, self._header, self._sealer, self._file)
        marks = marks_of(self._disk, self._header)
        self._newest = marks.newest  # generation, also of a sync that did not end
        native = self._storage(writable, o_direct, marks.bits)
        ranges = marked_ranges(marks, self._header)
        super().__init__(native)
        self._load(native)
        self.recovered = Recovered(self._header.generation, ranges) if ranges else None
        """What the last writer had not synced, or None if it closed the image."""
        if self.recovered is not None and writable:
            self._recover(self.recovered)

    def _storage(self, writable: bool, o_direct: bool, marks: bytes) -> _native.ImageStorage:
        header, at = self._header, places(self._header)
        if o_direct:  # marks are written through the page cache, in no folio with data
            os.posix_fadvise(self._disk.fd, 0, 0, os.POSIX_FADV_RANDOM)
        data = None
        if header.type is ImageType.FIXED:
            missing = at.data + header.capacity - self._disk.nbytes
            if missing > 0:
                raise DamagedImageError(
                    f"{self._file}: the file ends {missing} bytes before its data does: it was cut "
                    "short"
                )
            data = files.opened(
                lambda: _native.FileStorage(
                    f"/proc/self/fd/{self._disk.fd}",  # the same file, whatever has its name now
                    at.data,
                    header.capacity,
                    writable=writable,
                    mode="direct" if o_direct else "buffered",
                    name=self._file,
                ),
                self._file,
                writable=writable,
            )
        return native_image(
            self._disk,
            header,
            self._file,
            data=data,
            writable=writable,
            marks=marks,
            sync=weakly_called(self, Gvdk._sync),
        )

    def _load(self, native: _native.ImageStorage) -> None:
        if self._header.type is not ImageType.SPARSE:
            return
        for table in self._tables.load():
            try:
                native.load_table(table.index, table.slot, table.entries)
            except ValueError as error:
                raise DamagedImageError(f"{self._file}: {error}") from error
        self._tables.check_bitmap(native.used())

    # Making images.

    @classmethod
    @renamed
    def create(
        cls,
        path: files.PathLike,
        size: int | str,
        *,
        block: int | str = 4096,
        preallocate: bool | str = True,
        capacity: int | str | None = None,
        key: bytes | None = None,
        overwrite: bool = False,
    ) -> Self:
        """Make an image of zeros, durably, and open it for writing.

        Parameters
        ----------
        path : path-like
        size : int or str
            Bytes up to the end of its data.
        block : int or str
            Bytes of a block: a power of two from 4 KiB to 2 MiB.
        preallocate : bool or "zeros"
            True: the file gets all its space now, and its data lies in one piece (type fixed).
            "zeros": in addition, zeros are written, as block maps need them. False: blocks get
            their space when they are written (type sparse).
        capacity : int or str, optional
            Bytes up to which the data may grow. Default: `size`. Rounded up to whole blocks.
        key : bytes, optional
            Protects header and tables against forgery, by HMAC-SHA256. The data is not protected.
        overwrite : bool
            Replace an existing file.

        Raises
        ------
        ArgumentError
            For numbers outside of their limits.
        ExistingFileError, MissingFileError, PathError
        """
        with cls.drafted(path, size, block, preallocate, capacity, key, overwrite) as draft:
            image = cls(draft.path, writable=True, key=key, _shown=path)
            try:
                draft.publish()
            except BaseException:
                image.close()
                raise
        return image

    @staticmethod
    def drafted(
        path: files.PathLike,
        size: int | str,
        block: int | str,
        preallocate: bool | str,
        capacity: int | str | None,
        key: bytes | None,
        overwrite: bool,
    ) -> contextlib.AbstractContextManager[files.Draft]:
        """Make an image as `create` does, which takes its name by `Draft.publish`."""
        if not isinstance(preallocate, bool) and preallocate != "zeros":
            raise ArgumentError(f'preallocate={preallocate!r} is neither True, False nor "zeros"')
        header = new_header(size, block, capacity, preallocate is not False, key)
        return drafted(path, header, checked_key(key), overwrite, zeros=preallocate == "zeros")

    @classmethod
    def import_(
        cls,
        source: files.PathLike,
        path: files.PathLike,
        *,
        block: int | str = 4096,
        preallocate: bool | str = False,
        capacity: int | str | None = None,
        key: bytes | None = None,
        read_only: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Make an image of the bytes of an ordinary file. Blocks until it is durable.

        The image takes its name last: a call that fails, or a crash, leaves what was there before.

        Parameters
        ----------
        source : path-like
        path : path-like
            Of the image.
        block, preallocate, capacity, key, overwrite
            As for `create`.
        read_only : bool
            Nobody can open the image for writing.
        """
        name = files.check_name(source)
        read_only = flag("read_only", read_only)
        with files.open_for_reading(name) as file:
            size = os.fstat(file.fileno()).st_size
            with cls.drafted(path, size, block, preallocate, capacity, key, overwrite) as draft:
                with cls(draft.path, writable=True, key=key, _shown=path) as image:
                    done, count = 0, counting(f"reading {name}", size)
                    while done < size:
                        data = file.read(min(COPY_BYTES, size - done))
                        if not data:
                            why = "was cut short while it was read"
                            raise StorageError(errno.ENODATA, why, name)
                        if any(data):
                            image.write(done, data)
                        done += len(data)
                        count(len(data))
                    if read_only:
                        image._header = replace(image._header, writable=False)
                        image._changed = True  # so that the sync writes a header
                    image.flush()
                draft.publish()

    def export(self, path: files.PathLike, *, overwrite: bool = False) -> None:
        """Write the bytes up to `size` to an ordinary file. Blocks until it is durable."""
        exported(path, self.size, self.read, overwrite)

    # Facts.

    @property
    def path(self) -> str:
        """The file as it was named."""
        return self._file

    @property
    def size(self) -> int:
        """Bytes up to the end of the data."""
        return self._size

    @property
    def capacity(self) -> int:
        """Bytes up to which the data may grow."""
        return self._header.capacity

    @property
    def block(self) -> int:
        """Bytes of a block."""
        return self._header.block

    @property
    def type(self) -> str:
        """``fixed``: block n is the n-th of the data. ``sparse``: a table says where it lies."""
        return self._header.type.name.lower()

    @property
    def data_offset(self) -> int | None:
        """Where the data begins in the file if it lies in one piece, else None."""
        return places(self._header).data if self._header.type is ImageType.FIXED else None

    def describe(self) -> dict[str, Any]:
        """Return facts for people: type, size, block, generation, identity."""
        facts = super().describe()
        facts.update(
            size=self.size,
            generation=self._header.generation,
            identity=self._header.identity.hex(),
            checksums="HMAC-SHA256" if self._header.keyed else "CRC-32C",
        )
        return facts

    # Changing.

    def resize(self, size: int) -> None:
        """Move the end of the data within the capacity. Durable after `flush`.

        No transfer of the bytes that go away may be under way. What comes is zeros.

        Raises
        ------
        ArgumentError
            For a size above the capacity: `extend` moves that.
        """
        self._check_writable()
        size = integer("size", size, 0, self.capacity)
        if size < self._size:
            self.discard(size, self._size - size)
        self._size = size

    def note_size(self, size: int) -> None:
        """Move the end to where data was written already, or cut already; durable after `flush`."""
        self._check_writable()
        self._size = integer("size", size, 0, self.capacity)

    @staticmethod
    def extend(path: files.PathLike, capacity: int | str, *, key: bytes | None = None) -> None:
        """Give an image that nobody has open a larger capacity. Blocks until it is durable.

        Raises
        ------
        ArgumentError
            If the capacity would shrink, or the image is sparse: its tables have the size of its
            first capacity, which costs nothing, so make it with a large one.
        """
        with Gvdk(path, writable=True, key=key) as image:
            header = image._header
            wanted = rounded(parse_bytes(capacity, "capacity"), header.block)
            if not header.capacity <= wanted <= CAPACITY_MAX:
                raise ArgumentError(
                    f"capacity={wanted} is not between {header.capacity}, the image's now, and "
                    f"{CAPACITY_MAX}"
                )
            if header.type is ImageType.SPARSE:
                raise ArgumentError(
                    f"{image.path}: a sparse image keeps its capacity of {header.capacity} bytes: "
                    "export it, and import it with a larger one"
                )
            larger = replace(header, capacity=wanted)
            with files.writing(image.path):
                take_space(image._disk.fd, places(larger).data + wanted)
            image._header = larger
            image._changed = True
            image.flush()

    def flush(self) -> None:
        """Make all writes and the size durable; returns when the storage has flushed.

        Raises
        ------
        StorageError
            If the disk is full, nothing is lost: make room, and call again. After any other
            failure the image stays at its last sync; close it, and open it again.
        ForkError
        """
        self._check_open()
        self.flush_served()

    def flush_served(self) -> None:
        """Do the same for an array that serves the image, which may be closed meanwhile."""
        with typed_errors("sync"):
            self._sync()

    def _sync(self) -> None:
        if not self.writable:
            return
        if self._pid != os.getpid():
            raise ForkError(
                f"{self._file}: the image belongs to process {self._pid}: a forked child must "
                "open it itself"
            )
        with self._lock:
            self._check_unbroken()
            native = self._native
            self._flush_disk()
            size = self._size
            if not (self._changed or native.marked or size != self._header.size):
                return
            self._changed = True  # until it has ended well
            newest = max(self._header.generation, self._newest)
            header = replace(self._header, generation=newest + 1, size=size)
            tables, used = native.begin_sync(header.generation, _WRITES_END_MS)
            synced = False
            try:
                self._commit(header, tables, used)
                synced = True
            finally:
                native.end_sync(synced)
            self._changed = False

    def _commit(self, header: Header, tables: list[tuple[int, int, bytes]], used: bytes) -> None:
        """Make tables and header durable; writes go on meanwhile."""
        self._flush_disk()
        if header.type is ImageType.SPARSE:
            changed = [
                Table(index, slot, np.frombuffer(entries, "<u8")) for index, slot, entries in tables
            ]
            root = self._tables.write(changed, used, header.generation)
            header = replace(header, root=root)
            self._flush_disk()
        page = header.pack(self._sealer)
        self._disk.write(0, page)
        self._flush_disk()
        # Durable before the first copy is written again, by what a sync does first.
        self._disk.write(PAGE, page)
        self._header = header
        self._tables.commit(header)

    def _flush_disk(self) -> None:
        try:
            self._disk.flush()
        except OSError as error:
            # Linux drops pages that it could not write: a second sync would succeed without them.
            self._native.break_off(error.errno or errno.EIO)
            raise

    def _check_unbroken(self) -> None:
        broken = self._native.broken
        if broken != 0:
            raise OSError(
                broken,
                f"{os.strerror(broken)}, at an earlier sync: writes since the last good one may "
                "be lost; close the image, and open it again",
                self._file,
            )

    def _recover(self, recovered: Recovered) -> None:
        """Make what lies behind the end zeros again, and begin a generation without marks."""
        for begin, end in recovered.ranges:
            if end > self.size:
                self.discard(max(begin, self.size), end - max(begin, self.size))
        self._changed = True
        self.flush()
        with typed_errors("sync"):
            clear_torn_marks(self._disk, self._header)
        _log.info("%s: recovered what was synced; %s", self._file, recovered)

    # Looking for damage.

    def verify(self) -> Report:
        """Look at header copies, tables and marks in the file; syncs first if it is writable.

        Blocks. The data has no checksums.
        """
        self._check_open()
        if self.writable:
            self.flush()
        with self._lock, typed_errors("verify"):
            return inspect(self._disk, self._sealer, self._file)

    @staticmethod
    def inspect(path: files.PathLike, *, key: bytes | None = None) -> Report:
        """Do what `verify` does to an image that need not open. Blocks.

        Raises
        ------
        FileFormatError
            If no header is left.
        """
        name = files.check_name(path)
        with files.open_for_reading(name) as file, typed_errors("verify"):
            return inspect(Disk(file.fileno()), Sealer(checked_key(key)), name)

    @staticmethod
    def repair(path: files.PathLike, *, key: bytes | None = None) -> Report:
        """Make what is left of an image usable; blocks until it is durable.

        Damaged pages are replaced by their other copies, of an earlier generation, or given up.
        The bitmap is made anew from the tables, and blocks that two tables name stay the newer
        table's. Copy an image before, if it matters.

        Raises
        ------
        FileFormatError
            If no header is left.
        """
        from flashwarp.file.gvdk.repairing import repaired

        return repaired(files.check_name(path), checked_key(key))

    def _let_go(self) -> None:
        native = self._native
        try:
            if native is not None and self._pid == os.getpid() and native.broken == 0:
                with typed_errors("sync"):
                    self._sync()
        finally:
            if native is not None:
                native.detach()
            super()._let_go()
            del self._opened
