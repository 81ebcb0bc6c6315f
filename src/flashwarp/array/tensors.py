"""The short way of calls whose operands are tensors of torch on the array's GPU.

The ordinary way describes operands of any library, which takes longer than a small gather. This one
asks the tensors only what it must know, and launches by one call of the extension. Whatever is
unusual goes the ordinary way, which also raises the errors.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TypeAlias

from flashwarp.array.launcher import Launcher
from flashwarp.device import Launch, stream_handle
from flashwarp.device.foreign import torch_dtype
from flashwarp.errors import DtypeError, FlashwarpError

__all__ = ["TensorCalls", "TensorRows"]

TensorRows: TypeAlias = tuple[Any, int, tuple[int, int, int, int]]
"""Of a gather: its result, the stream that it follows, and what `Launcher.gather_launch` takes."""


class TensorCalls:
    """Launches gathers and prefetches of one array.

    Parameters
    ----------
    launcher : Launcher
        The array's, on a GPU.
    streams : set of int
        Where the array may have work; the streams of calls are added.
    """

    def __init__(self, launcher: Launcher, streams: set[int]) -> None:
        self._launcher = launcher
        self._streams = streams
        self._ordinal = launcher.volume.cache.device.ordinal
        self._row_shape = launcher.format.row_shape
        self._row_bytes = launcher.format.row_bytes
        self._torch: Any = None
        self._dtype: Any = None
        self._index_bytes: dict[Any, int] = {}

    def serves(self, idx: object) -> bool:
        """Return whether the index is a tensor of torch, and no object of a subclass."""
        torch = self._torch or self._find()
        return torch is not None and type(idx) is torch.Tensor

    def _find(self) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda"):  # imported completely
            with contextlib.suppress(DtypeError):  # the ordinary way raises it
                self._dtype = torch_dtype(torch, self._launcher.format.dtype)
            self._index_bytes = {torch.int64: 8, torch.int32: 4}
            self._torch = torch
        return self._torch

    def operands(self, idx: Any, out: Any, stream: object) -> TensorRows | None:
        """Describe the operands of a gather; None if it goes the ordinary way."""
        index_bytes = self._index_bytes.get(idx.dtype)
        count = idx.numel()
        if index_bytes is None or not self._usable(idx, count) or self._launcher.splitting.on():
            return None
        shape = (*idx.shape, *self._row_shape)
        current: int = self._torch._C._cuda_getCurrentRawStream(self._ordinal)
        handle = current if stream is None else stream_handle(stream)
        if out is None:
            if handle != current or self._dtype is None:
                return None
            out = self._torch.empty(shape, dtype=self._dtype, device=idx.device)
        elif (
            type(out) is not self._torch.Tensor
            or out.dtype is not self._dtype
            or out.get_device() != self._ordinal
            or out.shape != shape
            or not out.is_contiguous()
            or (out.requires_grad and self._torch.is_grad_enabled())
        ):
            return None
        indices, rows = idx.data_ptr(), out.data_ptr()
        apart = indices + count * index_bytes <= rows or rows + count * self._row_bytes <= indices
        return (out, handle, (indices, count, index_bytes, rows)) if apart else None

    def gather(self, idx: Any, out: Any, stream: object) -> tuple[Any, int] | None:
        """Queue a gather; return the result and its stream, or None if it goes the ordinary way."""
        found = self.operands(idx, out, stream)
        if found is None:
            return None
        out, handle, which = found
        launch, params = self._launcher.gather_launch(*which)
        self._launcher.wake()
        if not self._launched(launch, params, handle):
            return None
        self._launcher.moved.add(which[1])
        return out, handle

    def prefetch(self, idx: Any, stream: object) -> int | None:
        """Queue a prefetch; return its stream, or None if it goes the ordinary way."""
        index_bytes = self._index_bytes.get(idx.dtype)
        count = idx.numel()
        if index_bytes is None or not self._usable(idx, count):
            return None
        current: int = self._torch._C._cuda_getCurrentRawStream(self._ordinal)
        handle = current if stream is None else stream_handle(stream)
        launch, params = self._launcher.prefetch_launch(idx.data_ptr(), count, index_bytes)
        self._launcher.wake()
        return handle if self._launched(launch, params, handle) else None

    def _launched(self, launch: Launch, params: bytes, stream: int) -> bool:
        """Launch on a stream, and note it; return False if it is being captured."""
        # Before the launch: if a signal handler raises behind it, `close` must wait all the same.
        known = stream in self._streams
        self._streams.add(stream)
        try:
            launched = launch.after_own((params,), stream)
        except FlashwarpError:
            if not known:
                self._streams.discard(stream)  # which may not exist
            raise
        if not launched and not known:
            self._streams.discard(stream)
        return launched

    def _usable(self, idx: Any, count: int) -> bool:
        return bool(
            count
            and self._row_bytes
            and idx.get_device() == self._ordinal
            and idx.is_contiguous()
            and not self._launcher.watchers
        )
