"""Share tables: copies of lines in threads' buffers; mirrors `cache/share_table.cuh`.

Kernels use it through `fw::shared<T>` of `array/shared.cuh`.
"""

from __future__ import annotations

import ctypes
import os
import warnings

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.cache.cache import Cache
from flashwarp.config import integer
from flashwarp.device.layouts import fields_of
from flashwarp.endings import Closing
from flashwarp.errors import ArgumentError, ClosedError, SharedCacheError, ShareError

ENTRIES_MAX = 1 << 20
"""Most entries of a table: one for each thread that can be on a device."""

_WAYS = 4
_WORD_BYTES = 8
_COPY_BYTES = 16
_LINE_MASK = (1 << 38) - 1
_MODIFIED = 1 << 61
_NAMED_MAX = 4


class ShareTableStruct(ctypes.Structure):
    """Mirror of `cache::share_table`."""

    _fields_ = fields_of("share_table")


class ShareTable(Closing):
    """A table in which threads find each other's copies of lines; `fw::share_table` in kernels.

    Parameters
    ----------
    of : Array or Cache
        Threads keep copies of its lines. A table serves all arrays of one cache. If you give an
        array, error messages name the lines of that array.
    entries : int
        Lines that can have a copy at a time, from 1 to `ENTRIES_MAX`; rounded up to a power of two
        of at least 4. Each takes 26 bytes of device memory.

    Attributes
    ----------
    entries : int
        Lines that can have a copy at a time, after rounding.

    Notes
    -----
    If the table is full, `acquire` returns a status. The constructor allocates the memory, and
    `close` frees it. Close the table before its array or cache. `fw::shared<T, false>` compiles the
    same source to plain accesses, and so does ``FW_SHARE_TABLE=0`` in the defines of `compile`.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> program = fw.compile('''
    ... #include "flashwarp/array/shared.cuh"
    ... FW_KERNEL add_one(fw::array<float> x, fw::share_table table, float* buffers) {
    ...   const uint64_t t = fw::base::thread_index();
    ...   const uint64_t line = fw::cache::line_bytes(x.geometry) / sizeof(float);
    ...   fw::shared<float> s(x, table);
    ...   for (uint64_t i = t * line; i < x.size(); i += fw::base::thread_count() * line) {
    ...     s.acquire(i, buffers + t * line);
    ...     for (uint64_t k = i; k < i + line && k < x.size(); k++) s.store(k, s[k] + 1);
    ...     s.release();
    ...   }
    ... }
    ... ''', device="cpu")
    >>> with fw.create("shared.npy", "float32", 5000, device="cpu") as x:
    ...     with fw.array.ShareTable(x) as table:
    ...         buffers = x.device.allocate(64 * x.cache.line_bytes)
    ...         program["add_one"](x, table.kernel_handle, buffers, warps=2)
    ...         x.wait()
    ...         table.check()
    ...     float(x[:].sum())
    5000.0
    """

    def __init__(self, of: Array | Cache, entries: int = 1024) -> None:
        if not isinstance(of, Array | Cache):
            raise ArgumentError(f"a share table needs an Array or a Cache, not {of!r}")
        entries = integer("entries", entries, 1, ENTRIES_MAX)
        self._array = of if isinstance(of, Array) else None
        cache = of.cache if isinstance(of, Array) else of
        if of.closed:
            raise ClosedError("the array or cache of a share table is closed")
        if not cache.owned:
            raise SharedCacheError(
                f"a client of the shared cache {cache.shared!r} has no share tables: they are for "
                "kernels of its owner"
            )
        self.cache = cache
        self._device = cache.device
        buckets = 1 << (-(-entries // _WAYS) - 1).bit_length()
        self.entries = buckets * _WAYS
        words, copies = self.entries * _WORD_BYTES, self.entries * _COPY_BYTES
        self._nbytes = words + copies + buckets * 8
        self._memory = self._device.allocate(self._nbytes)
        cache._keep_for(self)
        self._pid = os.getpid()
        address = self._memory.address
        self._struct = ShareTableStruct(
            words=address,
            copies=address + words,
            locks=address + words + copies,
            overflows=address + words + copies + buckets * 4,
            bucket_bits=buckets.bit_length() - 1,
        )
        self._device.fill(address, 0, self._nbytes)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._memory.closed

    @property
    def kernel_handle(self) -> ShareTableStruct:
        """The struct `fw::share_table`, as an argument of your kernels.

        Valid until `close`.
        """
        self._check_open()
        return self._struct

    def check(self, stream: object = None) -> None:
        """Wait for kernels that use the table, and raise if a kernel has left a line in it.

        If a kernel ends without `release` of a line that it acquired, it leaves an entry that
        points to a lost buffer. `check` empties the table, so that the next kernel does not find
        the entry. Stores to these lines since they were acquired are lost.

        Parameters
        ----------
        stream : optional
            The stream of the launches; default: the library's own.

        Raises
        ------
        ShareError
            Names the lines.
        DeviceTimeout
            If the stream did not become idle in time.
        """
        self._check_open()
        self._device.wait(stream)
        left = self._left()
        if not left:
            return
        self._device.fill(self._struct.words, 0, self._nbytes)
        raise self._error(left)

    def close(self) -> None:
        """Wait for kernels that use the table, and free its memory. May be called twice.

        Afterwards, raises ShareError if a kernel has left lines in it.
        """
        if self.closed or os.getpid() != self._pid:
            return
        left = endings.holding([self.cache.turn], self._free)
        if left:
            raise self._error(left)

    def _free(self) -> list[int]:
        self._device.wait()
        for stream in list(self.cache.streams):
            with self.cache.streams.asking(stream) as noted:
                if noted:
                    self._device.wait(stream)
        left = self._left()
        self._memory.close()
        self.cache._leave(self)
        return left

    def _left(self) -> list[int]:
        data = self._device.download(self._struct.words, self.entries * _WORD_BYTES)
        words = memoryview(data).cast("Q")
        return sorted((word for word in words if word), key=lambda word: word & _LINE_MASK)

    def _error(self, left: list[int]) -> ShareError:
        names = [self._name(word) for word in left[:_NAMED_MAX]]
        if len(left) > _NAMED_MAX:
            names.append(f"{len(left) - _NAMED_MAX} more")
        return ShareError(
            f"a kernel ended and left {len(left)} line{'s' * (len(left) > 1)} in the share table: "
            f"{', '.join(names)}; what was stored to them is lost: call release() on each of them",
            tuple(word & _LINE_MASK for word in left),
        )

    def _name(self, word: int) -> str:
        line = word & _LINE_MASK
        modified = ", modified" if word & _MODIFIED else ""
        if self._array is not None and not self._array.closed:
            number = line - int(self._array.kernel_handle.line_begin)
            first = number * self.cache.line_bytes
            if 0 <= first < max(self._array.nbytes, 1):
                return f"line {number} of {self._array!r} from byte {first} on{modified}"
        return f"line {line} of the cache{modified}"

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the share table is closed")

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is None or memory.closed or os.getpid() != self._pid:
            return
        warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        of = f"{self.entries} entries on {self._device.name!r}"
        return f"<{state}flashwarp.array.ShareTable of {of}>"
