"""`offload_activations`: what autograd saves for backward goes to a file, and comes back in time.

The unit is a storage: views of it, such as the parts of a fused projection, are saved once and
restored with their strides, so that backward runs the same kernels on the same bytes.
`activation_store` moves the bytes.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from flashwarp import endings
from flashwarp._names import renamed
from flashwarp.config import integer, parse_bytes
from flashwarp.device import resolve
from flashwarp.endings import Closing
from flashwarp.errors import ChangedTensorError
from flashwarp.interop.torch.activation_store import ActivationStore, Kept

# A view keeps its storage on the device if it is a smaller part of it: its bytes alone would be
# saved with too many others.
_PART_MIN = 4
# Storages that were brought back last: several nodes of a graph often use one after another.
_RECENT = 4
# How far a look ahead goes, so that it costs microseconds.
_LOOKED_AT = 32


@dataclass(frozen=True)
class ActivationStats:
    """What `offload_activations` has done since it was entered."""

    saved: int
    """Storages that were saved."""
    saved_bytes: int
    written_bytes: int
    """Of these, bytes that went to the file: the host memory had no room."""
    read_bytes: int
    """Bytes that came back from the file."""
    waited_s: float
    """How long forward and backward have waited for host memory and the file."""
    o_direct: bool
    """Whether the file is written and read past the page cache."""


@renamed
def offload_activations(
    folder: str | os.PathLike[str],
    *,
    host_memory: int | str = "1 GiB",
    ahead: int | str = "256 MiB",
    least: int | str = "1 MiB",
    threads: int = 4,
    device: object = None,
) -> ActivationOffload:
    """Keep what autograd saves for backward in host memory and a file, not in device memory.

    A context manager, in which forward and backward both run, any number of times. What forward
    saves is copied to pinned host memory beside the work of its stream. When that is half full,
    threads write the oldest to a file. Backward brings tensors back in reverse order, before they
    are needed. Gradients are the same, bit by bit.

    Parameters
    ----------
    folder : path-like
        Of the file, which has no name: nothing is left over, even if the process is killed.
    host_memory : int or str
        Most bytes of pinned host memory.
    ahead : int or str
        Most bytes of device memory for tensors that are back before they are used.
    least : int or str
        Smaller tensors stay where they are. Parameters, and views of a small part of a storage,
        stay too.
    threads : int
        How many write, and how many read.
    device : Device, str or torch.device, optional
        Whose tensors are offloaded. Default: cuda:0 if it works, else the CPU.

    Returns
    -------
    ActivationOffload
        Enter it by a ``with`` statement.

    Raises
    ------
    ArgumentError
        A tensor is larger than `host_memory`: raised by forward.
    StorageError, PathError
        The file cannot be written, as when the disk is full: raised by forward, before anything
        that was saved is lost. Or it cannot be read: raised by backward.
    WaitTimeout
        Forward or backward waited longer than FLASHWARP_TIMEOUT_S.
    ClosedError
        Backward ran after the ``with`` statement.
    ChangedTensorError
        A tensor that backward needs, of any size, was changed in place since forward has saved it,
        as torch's RuntimeError: raised by backward.

    Notes
    -----
    Works with gradient accumulation, ``retain_graph=True`` and several graphs at a time. Do not
    change a saved tensor by ``tensor.data``, of which autograd knows nothing either.

    Examples
    --------
    >>> import tempfile, torch
    >>> import flashwarp.torch
    >>> layer = torch.nn.Linear(64, 64)
    >>> x = torch.ones(1000, 64, requires_grad=True)
    >>> with flashwarp.torch.offload_activations(
    ...     tempfile.gettempdir(), host_memory="8 MiB", least="64 KiB", device="cpu"
    ... ) as offloaded:
    ...     layer(x).relu().square().sum().backward()
    >>> offloaded.stats.saved > 0
    True
    """
    return ActivationOffload(
        os.fspath(folder),
        parse_bytes(host_memory, "host_memory"),
        parse_bytes(ahead, "ahead"),
        parse_bytes(least, "least"),
        integer("threads", threads, 1, 64),
        device,
    )


@dataclass(slots=True)
class _Saved:
    """What autograd keeps in place of a tensor.

    Torch compares no versions of tensors that hooks have taken, so this does: the version counter
    is that of the tensor and its views, with or without their memory.
    """

    tensor: torch.Tensor
    """Itself, apart from its graph; or of no elements, if `kept` has the bytes."""
    version: int
    kept: Kept | None
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def check(self) -> None:
        """Raise ChangedTensorError if the tensor was changed since it was saved."""
        now = self.tensor._version
        if now != self.version:
            raise ChangedTensorError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.tensor.type()} {list(self.size)}] is at version {now}; "
                f"expected version {self.version} instead. Hint: what backward needs must not "
                "change between forward and backward; torch.autograd.set_detect_anomaly(True) "
                "shows the operation of forward that has saved it."
            )


class ActivationOffload(Closing):
    """The context manager of `offload_activations`."""

    def __init__(
        self, folder: str, host: int, ahead: int, least: int, threads: int, device: object
    ) -> None:
        self._device = resolve(device)
        self._place = torch.device(self._device.name)
        self._least = max(1, least)
        self._ahead = ahead
        self._store = ActivationStore(self._device, folder, host, threads)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._lock = endings.Lock()
        # By storage and version of its content; a weak reference keeps the key from being reused.
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[Kept]]] = {}
        self._recent: deque[weakref.ref[Kept]] = deque()
        self._side: Any = None
        if self._device.kind == "cuda":
            self._side = torch.cuda.Stream(self._place)

    def __enter__(self) -> ActivationOffload:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__()
        self.close()

    def close(self) -> None:
        """Wait for what is under way, and free all memory and the file. May be called twice."""
        with self._lock:
            while self._recent:
                self._leave_device(self._recent.popleft())
            self._known.clear()
        self._store.close()

    @property
    def stats(self) -> ActivationStats:
        """What was done so far."""
        store = self._store
        return ActivationStats(
            store.saved, store.saved_bytes, store.written_bytes, store.read_bytes,
            store.waited_s, store.o_direct,
        )  # fmt: skip

    # Forward.

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor.detach(), tensor._version, None, tensor.size(), (), 0)
        if not self._is_activation(tensor):
            return saved
        with self._lock, torch.no_grad():
            storage = tensor.untyped_storage()
            key = storage._cdata, tensor._version
            kept = self._find(key)
            if kept is None:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                kept = self._store.save(flat)
                self._forget_freed()
                self._known[key] = StorageWeakRef(storage), weakref.ref(kept)
        saved.kept, saved.stride, saved.offset = kept, tensor.stride(), tensor.storage_offset()
        saved.tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return saved

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        # Parameters are of another type, and so are tensors that are no memory.
        if type(tensor) is not torch.Tensor or tensor.device != self._place:
            return False
        if tensor.layout != torch.strided or isinstance(tensor._base, torch.nn.Parameter):
            return False
        if tensor.nbytes < self._least or tensor.is_conj() or tensor.is_neg():
            return False
        return bool(tensor.untyped_storage().nbytes() <= _PART_MIN * tensor.nbytes)

    def _find(self, key: tuple[int, int]) -> Kept | None:
        if key not in self._known:
            return None
        storage, kept = self._known[key]
        return None if storage.expired() else kept()

    def _forget_freed(self) -> None:
        for key in [k for k, (s, kept) in self._known.items() if s.expired() or kept() is None]:
            del self._known[key]

    # Backward.

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        saved.check()
        kept = saved.kept
        if kept is None:
            return saved.tensor
        with self._lock, torch.no_grad():
            flat = self._bring(kept)
            self._look_ahead(kept)
            if self._side is not None:
                current = torch.cuda.current_stream(self._place)
                kept.arrival.before(current)
                flat.record_stream(current)
            else:
                kept.arrival.wait()
            found = torch.empty(0, dtype=saved.tensor.dtype, device=flat.device)
            return found.set_(flat.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _bring(self, kept: Kept) -> torch.Tensor:
        """Return the bytes of a storage on the device, and remember them among the recent ones."""
        if kept.restored is None:
            self._start(kept)
        this = weakref.ref(kept)
        if this in self._recent:
            self._recent.remove(this)
        self._recent.append(this)
        while len(self._recent) > _RECENT:
            self._leave_device(self._recent.popleft())
        restored: torch.Tensor = kept.restored
        return restored

    @staticmethod
    def _leave_device(one: weakref.ref[Kept]) -> None:
        kept = one()
        if kept is not None:
            kept.restored = None

    def _start(self, kept: Kept) -> None:
        """Start to copy a storage to the device; waits until the host has it."""
        if self._side is None:
            flat = torch.empty(kept.nbytes, dtype=torch.uint8)
        else:
            # Memory of a stream of its own is free when the allocator lends it, so the copy need
            # not wait for the work that is queued.
            with torch.cuda.stream(self._side):
                flat = torch.empty(kept.nbytes, dtype=torch.uint8, device=self._place)
        kept.arrival = self._store.bring(kept, flat)
        kept.restored = flat

    def _look_ahead(self, last: Kept) -> None:
        """Start reads and copies of what was saved before `last`, as far as there is room."""
        left = self._ahead
        for kept in islice(self._store.before(last), _LOOKED_AT):
            if kept.restored is not None:
                left -= kept.nbytes
            elif left >= kept.nbytes and self._store.is_on_host(kept):
                self._start(kept)
                left -= kept.nbytes
            elif not self._store.read_ahead(kept):
                return
