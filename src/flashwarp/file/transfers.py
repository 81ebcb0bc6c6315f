"""Reads and writes of a file by the host, at byte offsets."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from flashwarp.array.futures import Future
from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError, BoundsError, DtypeError
from flashwarp.file.kernel_file import FileStateStruct, KernelFile


class FileBytes(KernelFile):
    """The half of `File` that moves bytes."""

    @abstractmethod
    def _check_writable(self) -> None:
        """Raise if the file takes no writes."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes [offset, offset + nbytes), as far as the file has them. Blocks."""
        begin, end = self._readable(offset, nbytes)
        return self.array[begin:end].tobytes() if end > begin else b""

    def read_into(self, tensor: Any, offset: int) -> int:
        """Fill a tensor with the bytes from `offset` on; blocks.

        Parameters
        ----------
        tensor : array of numpy, torch or CuPy
            Contiguous, of any dtype and shape, on the host or on the file's device.
        offset : int
            Byte of the file, of any alignment.

        Returns
        -------
        int
            How many bytes: fewer than the tensor has if the file ends before.

        Raises
        ------
        ArgumentError, DtypeError
            If the tensor is not contiguous, or no tensor, or the offset is negative.
        StorageError, ClosedError
        """
        future, nbytes = self._start_read(tensor, offset)
        if future is not None:
            future.result()
        return nbytes

    def read_into_async(self, tensor: Any, offset: int) -> Future[Any]:
        """Start what `read_into` does; the future is of the bytes as an array of dtype uint8.

        The file must have all bytes, or this raises BoundsError.
        """
        wanted = _bytes_of(tensor).shape[0]
        future, nbytes = self._start_read(tensor, offset)
        if nbytes != wanted or future is None:
            raise BoundsError(
                f"bytes [{offset}, {offset + wanted}) of a file of {self.size} bytes: take a "
                "tensor of at least one byte that ends before the file does"
            )
        return future

    def write_from(self, tensor: Any, offset: int) -> int:
        """Store all bytes of a tensor from `offset` on; blocks. Durable after `flush`.

        If they go past the end, the file then ends behind them, and what lies between is zeros.

        Parameters
        ----------
        tensor : array of numpy, torch or CuPy, or bytes
            Contiguous.
        offset : int
            Byte of the file, of any alignment.

        Returns
        -------
        int
            The bytes of the tensor.

        Raises
        ------
        BoundsError
            If they end behind the capacity; nothing is written.
        ReadOnlyError, ArgumentError, DtypeError, StorageError, ClosedError
        """
        future, nbytes = self._start_write(tensor, offset)
        if future is not None:
            future.result()
        return nbytes

    def write_from_async(self, tensor: Any, offset: int) -> Future[None]:
        """Start what `write_from` does. The end moves at once; the future is of None.

        Raises ArgumentError for a tensor without bytes.
        """
        future, _ = self._start_write(tensor, offset)
        if future is None:
            raise ArgumentError("the tensor has no bytes, so there is nothing to wait for")
        return future

    def append(self, tensor: Any) -> int:
        """Store all bytes of a tensor behind the end; return their offset. Blocks."""
        begin = self.size
        self.write_from(tensor, begin)
        return begin

    def _start_read(self, tensor: Any, offset: int) -> tuple[Future[Any] | None, int]:
        room = _bytes_of(tensor)
        begin, end = self._readable(offset, room.shape[0])
        if begin == end:
            return None, 0
        return self.array.gather_async(slice(begin, end), room[: end - begin]), end - begin

    def _start_write(self, tensor: Any, offset: int) -> tuple[Future[None] | None, int]:
        self._check_writable()
        data = _bytes_of(tensor)
        begin = integer("offset", offset, 0, SIZE_MAX)
        end = begin + data.shape[0]
        if end > self.capacity:
            raise BoundsError(
                f"bytes [{begin}, {end}) of a file that has room for {self.capacity}: extend it, "
                "or open it with a larger capacity="
            )
        if begin == end:
            return None, 0
        future = self.array.scatter_async(slice(begin, end), data)
        if end > self.size:
            self._set_size(end)
        return future, end - begin

    def _readable(self, offset: int, nbytes: int) -> tuple[int, int]:
        begin = integer("offset", offset, 0, SIZE_MAX)
        end = min(begin + integer("nbytes", nbytes, 0, SIZE_MAX), self.size)
        return min(begin, end), end

    def _set_size(self, size: int) -> None:
        self.array.device.upload(self._state.address, bytes(FileStateStruct(size)))


def _bytes_of(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor as one axis of uint8, of the tensor's library."""
    if isinstance(tensor, bytes | bytearray | memoryview):
        tensor = np.frombuffer(tensor, np.uint8)
    library = type(tensor).__module__.partition(".")[0]
    if library == "torch":
        import torch

        if not tensor.is_contiguous():
            raise ArgumentError("the tensor is not contiguous: give tensor.contiguous()")
        # A single element counts as contiguous whatever its strides are, and `view` minds them.
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if library not in ("numpy", "cupy"):
        raise DtypeError(
            f"{type(tensor).__name__} is no tensor of numpy, torch or CuPy: convert it, as by "
            "numpy.asarray"
        )
    if not tensor.flags.c_contiguous:
        raise ArgumentError("the tensor is not contiguous: copy it first")
    if tensor.dtype.hasobject:
        raise DtypeError("a tensor of Python objects has no bytes that a file could hold")
    return tensor.reshape(-1).view("u1")
