"""`Stager`: copies of a state that training may go on changing, in memory that is used again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flashwarp import endings
from flashwarp._names import renamed
from flashwarp.config import number, parse_bytes, time_limit_s
from flashwarp.device import Device, resolve
from flashwarp.device.memory import align_up
from flashwarp.errors import ArgumentError, ClosedError, DtypeError
from flashwarp.interop.torch.dcp.relied import check_torch
from flashwarp.transfer import Copy, CopyEngine, Direction, TransferClient

# Tensors begin at its multiples in a block: every dtype is aligned, and no two share a cache line.
_ALIGNMENT = 64
_TIMEOUT_S_MAX = 1e9
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@renamed
class Stager(AsyncStager, endings.Closing):  # type: ignore[misc]
    """Copies a state to host memory for ``dcp.async_save``, by copy engines.

    Tensors on a GPU are copied after the present work of torch's current stream, without a kernel
    and without a wait of the host: `stage` returns at once, and ``async_save`` returns torch's
    ``AsyncSaveResponse``. Tensors in host memory have been copied when `stage` returns. Nothing
    that a program does to its state afterwards is seen in the copy, and objects that are no tensors
    are copied as `copy.deepcopy` does.

    The copy lies in one block of pinned memory of a pool. A block is used again only when every
    tensor in it is gone: while a checkpoint is written, or while you hold a part of it, a next
    `stage` takes another block, or waits if `host_memory` has no room for it.

    Parameters
    ----------
    host_memory : int or str
        The most staging memory, in bytes. It must hold the state once; twice, if a save begins
        before the one before it is written.
    ordered : bool
        Whether later work on torch's current stream waits for the copies, so that it may change the
        state at once. If False, compute goes on beside the copies, and you call `before_changes`
        before the first change, such as the optimizer's step.
    timeout_s : float, optional
        How long `stage` waits for staging memory. Default: `Config.timeout_s`.

    Raises
    ------
    ArgumentError
        torch lacks what this relies on; the error says what.

    Examples
    --------
    >>> import tempfile, torch, torch.distributed.checkpoint as dcp
    >>> import flashwarp.dcp
    >>> state = {"weight": torch.arange(4.0)}
    >>> writer = flashwarp.dcp.Writer(tempfile.mkdtemp())
    >>> with flashwarp.dcp.Stager(host_memory="1 MiB") as stager:
    ...     saved = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    ...     _ = state["weight"].zero_()
    ...     _ = saved.result()
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        host_memory: int | str = "8 GiB",
        *,
        ordered: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        check_torch()
        self.host_bytes = parse_bytes(host_memory, "host_memory")
        self.ordered = ordered
        self.timeout_s = number("timeout_s", time_limit_s(timeout_s), 0, _TIMEOUT_S_MAX)
        self._lock = endings.Lock()
        self._engines: dict[str, CopyEngine] = {}
        self._blocks: TransferClient | None = None
        self._waiter: endings.Pool | None = None
        self._last: list[Copy] = []
        self._closed = False

    def stage(self, state_dict: Mapping[str, Any]) -> Any:
        """Copy a state; returns the copy, or a future of it if a part lies on a GPU.

        Raises
        ------
        ArgumentError
            The state is larger than `host_memory`, or has a tensor of a kind that cannot be copied.
        DeviceTimeout
            Earlier copies, which are still being written, kept the staging memory.
        """
        if self._closed:
            raise ClosedError("the stager was closed")
        with self._lock:
            plan = _Plan(state_dict)
            copies = self._copy(plan)
            staged = plan.copy_of(state_dict)
            self._last = [each for each in copies if each.direction is Direction.TO_HOST]
        if all(each.over() for each in copies):
            _end(copies, None)
            return staged
        return self._in_background(copies, staged)

    def _copy(self, plan: _Plan) -> list[Copy]:
        """Copy all tensors into one block; those in host memory have arrived on return."""
        if not plan.nbytes:
            return []
        copies = []
        by_device: dict[str, list[int]] = {}
        for i, source in enumerate(plan.sources):
            by_device.setdefault(_device_name(source), []).append(i)
        block = self._blocks_for(by_device).take(plan.nbytes, self.timeout_s)
        plan.give(torch.from_numpy(block.as_numpy()))
        for name, members in by_device.items():
            targets = [block.address + plan.offsets[i] for i in members]
            sources = [plan.sources[i] for i in members]
            queued = self._engine(name).copy_pieces(
                targets,
                sources,
                [each.nbytes for each in sources],
                after=() if name == "cpu" else torch.cuda.current_stream(sources[0].device),
                direction=Direction.TO_HOST,
            )
            block.joins(queued)
            if name == "cpu":
                queued.wait()
            elif self.ordered:
                queued.before(torch.cuda.current_stream(sources[0].device))
            copies.append(queued)
        return copies

    def before_changes(self, stream: object = None) -> None:
        """Make later work on a stream wait for the last copies; does not block the host.

        Needed before the first change of the state if `ordered` is False.

        Parameters
        ----------
        stream : stream, optional
            Default: torch's current stream on the device of each copy.
        """
        for each in self._last:
            if not each.over():
                each.before(torch.cuda.current_stream() if stream is None else stream)

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Block until the last copies have arrived; raises what they failed with."""
        _end(self._last, timeout_s)

    def synchronize_staging(self) -> None:
        """Do as `wait_staged`; torch's name for it."""
        self.wait_staged()

    def _in_background(self, copies: list[Copy], staged: Any) -> Future[Any]:
        if self._waiter is None:
            self._waiter = endings.Pool(1, "flashwarp-staging")

        def arrived() -> Any:
            _end(copies, None)
            return staged

        return self._waiter.submit(arrived)

    def _engine(self, name: str) -> CopyEngine:
        if name not in self._engines:
            self._engines[name] = CopyEngine(resolve(name))
        return self._engines[name]

    def _blocks_for(self, names: Mapping[str, object]) -> TransferClient:
        # Memory that one GPU has pinned serves all of them, and host memory too.
        device: Device = resolve(min(names, key=lambda name: name == "cpu"))
        if self._blocks is None or (self._blocks.device.kind == "cpu" and device.kind == "cuda"):
            if self._blocks is not None:
                self._blocks.close()
            budget = self.host_bytes
            self._blocks = TransferClient(device, "dcp", budget, budget, reserved=True)
        return self._blocks

    def close(self) -> None:
        """Wait for copies in flight, and free the memory that nobody holds. May be called twice."""
        self._closed = True
        if self._waiter is not None:
            self._waiter.close()
        engines, self._engines = self._engines, {}
        for engine in engines.values():
            engine.close()
        if self._blocks is not None:
            self._blocks.close()

    def __repr__(self) -> str:
        used = 0 if self._blocks is None else self._blocks.allocated_bytes
        return f"<Stager, {used} of {self.host_bytes} bytes of staging memory allocated>"


class _Plan:
    """Where the tensors of a state go. A tensor that occurs twice is copied once."""

    def __init__(self, state: Any) -> None:
        self.sources: list[torch.Tensor] = []
        self.offsets: list[int] = []
        self.nbytes = 0
        self._found: dict[int, tuple[torch.Tensor, _Copied | _Wrapped]] = {}
        self._placed: dict[Any, int] = {}
        self._block: torch.Tensor | None = None
        for tensor in _tensors(state, {}):
            if id(tensor) not in self._found:
                self._found[id(tensor)] = (tensor, self._place(tensor))

    def _place(self, tensor: torch.Tensor) -> _Copied | _Wrapped:
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            inner = {
                name: self._place(each) if isinstance(each, torch.Tensor) else each
                for name, each in parts.items()
            }
            return _Wrapped(tensor, inner, context)
        _check_kind(tensor)
        source = tensor.detach().resolve_conj().resolve_neg().contiguous()
        key = (source.data_ptr(), source.nbytes, source.device)
        if not source.nbytes or key not in self._placed:
            self._placed[key] = len(self.sources)
            self.sources.append(source)
            self.offsets.append(self.nbytes)
            self.nbytes = align_up(self.nbytes + source.nbytes, _ALIGNMENT)
        return _Copied(self._placed[key], source.dtype, source.shape)

    def give(self, block: torch.Tensor) -> None:
        """Name the memory that the tensors are copied to."""
        self._block = block

    def copy_of(self, state: Any) -> Any:
        """Return the state with its tensors replaced, and all else copied."""
        memo = {key: self._staged(placed) for key, (_, placed) in self._found.items()}
        return copy.deepcopy(state, memo)

    def _staged(self, placed: Any) -> Any:
        if isinstance(placed, _Wrapped):
            return placed.around({name: self._staged(each) for name, each in placed.inner.items()})
        if not isinstance(placed, _Copied):
            return placed  # what a wrapper has besides tensors, such as a mesh of devices
        begin, nbytes = self.offsets[placed.source], self.sources[placed.source].nbytes
        if self._block is None or not nbytes:
            return torch.empty(placed.shape, dtype=placed.dtype)
        return self._block[begin : begin + nbytes].view(placed.dtype).view(placed.shape)


class _Copied(NamedTuple):
    """A tensor that is copied: the number of its source, and what it looks like."""

    source: int
    dtype: torch.dtype
    shape: torch.Size


class _Wrapped:
    """A tensor around others, such as a DTensor around its shard."""

    def __init__(self, tensor: torch.Tensor, inner: dict[str, Any], context: Any) -> None:
        self.inner = inner
        self._type = type(tensor)
        self._shape = tensor.shape, tensor.stride()
        self._context = context

    def around(self, inner: dict[str, Any]) -> torch.Tensor:
        """Return the same around copies."""
        made: torch.Tensor = self._type.__tensor_unflatten__(inner, self._context, *self._shape)
        return made


def _tensors(thing: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    """Find the tensors in nested dicts, lists and tuples; `seen` keeps these, for their ids."""
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    if not isinstance(thing, dict | list | tuple) or id(thing) in seen:
        return
    seen[id(thing)] = thing
    for each in thing.values() if isinstance(thing, dict) else thing:
        yield from _tensors(each, seen)


def _check_kind(tensor: torch.Tensor) -> None:
    if type(tensor) not in _PLAIN:
        raise DtypeError(
            f"a {type(tensor).__name__} cannot be staged: save a DTensor, or a plain tensor"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise DtypeError(
            f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} cannot be staged: save "
            "its parts as dense tensors"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"a tensor on {tensor.device} cannot be staged: only those on a CUDA GPU or the CPU can"
        )


def _device_name(tensor: torch.Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index}"


def _end(copies: list[Copy], timeout_s: float | None) -> None:
    for each in copies:
        each.wait(timeout_s)
