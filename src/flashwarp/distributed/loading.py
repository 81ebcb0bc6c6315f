"""Loading a checkpoint by all ranks: each reads a share of the files, and passes it on.

The bytes of all tensors, in the order of the files, are divided into rounds, and each round into a
share for each rank. A rank reads its share of a round straight to where its tensors are. Then the
others get it from there, on GPUs while the next round is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from flashwarp.config import flag
from flashwarp.device import Device
from flashwarp.distributed.opening import check_torch
from flashwarp.distributed.ranks import Ranks
from flashwarp.loading.contents import Content
from flashwarp.loading.load import Job, budget_of, prepare
from flashwarp.loading.moving import move
from flashwarp.loading.places import Place
from flashwarp.storage.safetensors import Checkpoint

# A share: so large that the start of its reading takes little of the time.
_SHARE_BYTES = 512 << 20
_PAGE_BYTES = 4096
_ALIGNMENT = 256  # of tensors in an allocation


def load(
    path: Checkpoint,
    device: object = None,
    *,
    only: str | Sequence[str] | None = None,
    into: object = None,
    host_memory: int | str = "256 MiB",
    o_direct: bool | None = None,
    group: Any = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Load tensors as `flashwarp.load` does, with one read of the files by all ranks. Collective.

    Each rank reads its share of the bytes, and sends it to the others: between GPUs by NCCL, else
    by gloo. Blocks until all bytes have arrived.

    Parameters
    ----------
    path, only, into, host_memory, o_direct
        As for `flashwarp.load`. All ranks name the same tensors of the same files, which each finds
        at a path of its own.
    device : Device, str or torch.device, optional
        As for `flashwarp.load`: the CPU device on all ranks, or a GPU of its own on each.
    group : ProcessGroup, optional
        The ranks, of any backend. Default: all.
    timeout_s : float, optional
        How long a rank waits for the others. Default: `Config.timeout_s`.

    Returns
    -------
    dict of str to torch.Tensor
        All tensors, on each rank.

    Raises
    ------
    ArgumentError
        If the ranks name different tensors, or torch.distributed is not initialised.
    RankLostError
        If a rank has ended, or does not come.
    FileFormatError, MissingFileError, PathError, DtypeError, DeviceOutOfMemory, StorageError
        On all ranks, if `flashwarp.load` raises it on one. Tensors of `into` then hold any bytes.

    Examples
    --------
    >>> import numpy, torch.distributed as dist
    >>> import flashwarp.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> numpy.save("shared.npy", numpy.arange(4.0))
    >>> flashwarp.distributed.load("shared.npy", device="cpu")["shared"].tolist()
    [0.0, 1.0, 2.0, 3.0]
    >>> dist.destroy_process_group()
    """
    ranks = Ranks(group, timeout_s)
    with contextlib.ExitStack() as held:
        held.callback(ranks.close)
        held.enter_context(ranks.together())

        def look() -> tuple[str, Any, tuple[Job, int, bool | None]]:
            budget = budget_of(host_memory)
            direct = None if o_direct is None else flag("o_direct", o_direct)
            job = prepare(path, device, only, into, "torch")
            check_torch(job.device)
            return f"load {_described(job)}", None, (job, budget, direct)

        job, budget, direct = ranks.agree("load", look)[0]
        place = torch.device(job.device.name)
        if place.type == "cuda":
            ranks.use(place, job.device.identity)
        return _Load(ranks, job, place, into is None, budget, direct).run()


def _described(job: Job) -> str:
    """Describe tensors for a comparison: the same for files that have the same tensors."""
    text = repr([(each.name, str(each.dtype), each.shape) for each in _in_order(job)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    nbytes = sum(each.nbytes for each in job.wanted.values())
    return f"{len(job.wanted)} tensors of {nbytes} bytes (digest {digest}) to {job.device.kind}"


def _in_order(job: Job) -> list[Content]:
    """Return the tensors in the order in which files have them; of all paths alike."""
    first: dict[str, str] = {}
    for name, each in sorted(job.wanted.items()):
        first.setdefault(each.path, name)
    return sorted(job.wanted.values(), key=lambda each: (first[each.path], each.offset))


class _Part(NamedTuple):
    """Bytes of a tensor: what reads them, and where they go."""

    content: Content
    place: Place


class _Load:
    """One load by one rank, together with the others."""

    def __init__(
        self,
        ranks: Ranks,
        job: Job,
        place: torch.device,
        owned: bool,
        budget: int,
        direct: bool | None,
    ) -> None:
        self._ranks, self._job, self._place = ranks, job, place
        self._contents = _in_order(job)
        self._owned, self._budget, self._direct = owned, budget, direct
        self._side = torch.cuda.Stream(place) if place.type == "cuda" else None

    def run(self) -> dict[str, Any]:
        """Read and pass on; returns the tensors."""
        ranks, made = self._ranks, self._job.made()
        nbytes = sum(each.nbytes for each in self._job.wanted.values())
        pages = -(-nbytes // (ranks.count * _PAGE_BYTES))
        share = min(_SHARE_BYTES, max(1, pages) * _PAGE_BYTES)
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._place))
        try:
            for begin in range(0, nbytes, share * ranks.count):
                shares = [
                    list(self._between(begin + share * rank, begin + share * (rank + 1)))
                    for rank in range(ranks.count)
                ]
                mine = functools.partial(self._read, shares[ranks.rank])
                ranks.step("read a share", mine)
                with torch.cuda.stream(self._side):
                    for root, each in enumerate(shares):
                        for run in self._runs(each):
                            ranks.spread(_bytes_at(*run, self._job.device), root)
        finally:
            if self._side is not None:
                self._side.synchronize()
        ranks.step("end the load", ranks.check)
        return made

    def _between(self, begin: int, end: int) -> Iterator[_Part]:
        """Return the parts of tensors that lie in a range of all bytes."""
        at = 0
        for content in self._contents:
            first, last = max(begin, at) - at, min(end, at + content.nbytes) - at
            at += content.nbytes
            if first < last:
                place = self._job.places[content.name]
                yield _Part(
                    replace(content, offset=content.offset + first, nbytes=last - first),
                    replace(place, address=place.address + first),
                )

    def _read(self, share: list[_Part]) -> None:
        # Each part has a name of its own: a tensor may be in no other share.
        named = {
            f"{number}": part._replace(content=replace(part.content, name=f"{number}"))
            for number, part in enumerate(share)
        }
        move(
            [part.content for part in named.values()],
            {name: part.place for name, part in named.items()},
            self._job.device,
            o_direct=self._direct,
            staging_bytes=self._budget,
            progress=lambda *_: None,
            meanwhile=lambda: None,
        )

    def _runs(self, share: list[_Part]) -> Iterator[tuple[int, int]]:
        """Return memory that goes in one message, on all ranks alike: address and bytes.

        Tensors of one file lie in one allocation, if it is made here, with nothing between them.
        """
        begin = end = 0
        last = ""
        for content, place in share:
            joins = self._owned and content.path == last
            if not (joins and end <= place.address <= end + _ALIGNMENT):
                if end > begin:
                    yield begin, end - begin
                begin = place.address
            end, last = place.address + content.nbytes, content.path
        if end > begin:
            yield begin, end - begin


def _bytes_at(address: int, nbytes: int, device: Device) -> torch.Tensor:
    """View memory that the caller keeps."""
    if device.kind == "cuda":
        known = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        memory = SimpleNamespace(__cuda_array_interface__=known)
        return torch.as_tensor(memory, device=device.name)
    held = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(held, dtype=torch.uint8)
