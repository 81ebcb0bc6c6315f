"""`Communicator`: NCCL between the GPUs of ranks, for all arrays of these ranks.

A process has one for each set of ranks, because it takes seconds to make and much memory of the
GPU. Its messages run in the order of streams, and also in CUDA graphs, so no call on the host waits
for them. They count where the host sees it without a call of CUDA, and a thread watches the counts:
if a message does not end in time, because another rank has ended, the thread aborts the
communicator. Kernels of NCCL that wait for the lost rank end then, with messages of any content.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flashwarp import endings
from flashwarp.errors import ArgumentError, CaptureError

_LOOK_S = 0.05
# How long messages that have begun may take when a rank is known to be lost.
_HURRY_S = 5.0
# One for each stream, and for each message in a CUDA graph.
_COUNTS = 4096
# So late that nothing of torch ends messages before the thread does.
_SLACK_S = 600.0
# Torch reads it when it makes a communicator. Else a thread of torch ends the process on an error.
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Party(Protocol):
    """The ranks of an array, as `Ranks` has them."""

    members: list[int]
    rank: int
    count: int
    number: int
    store: Any


class Communicator:
    """All-to-all messages between tensors of ranks.

    Attributes
    ----------
    number : int
        The same on all ranks; no other communicator of these ranks has it.
    place : torch.device
        Where the tensors of this rank are.
    lost : str
        Why it was aborted; empty before.
    """

    _made: dict[tuple[tuple[int, ...], torch.device], Communicator] = {}  # noqa: RUF012

    def __init__(self, ranks: Party, place: torch.device, timeout_s: float) -> None:
        self.number, self.place, self.lost = ranks.number, place, ""
        self._timeout_s = timeout_s
        self._ranks = ranks.count
        self._backend = _backend(ranks, place, timeout_s)
        self._lock = endings.Lock()
        on_gpu = place.type == "cuda"
        # Odd while a message is under way.
        self._counts = torch.zeros(_COUNTS, dtype=torch.int64, device=place)
        self._seen = self._counts
        if on_gpu:
            self._seen = torch.zeros(_COUNTS, dtype=torch.int64, pin_memory=True)
            torch.cuda.synchronize(place)
        self._watched = self._seen.numpy()
        self._words: dict[int, int] = {}
        self._used = 0
        self._hurry_at = float("-inf")
        self._connected = endings.Event()
        self._thread = endings.Thread(self._run, "flashwarp-communicator")
        self._ending = endings.Thread(self._abort, "flashwarp-abort")
        self._pid = os.getpid()

    # One for all arrays of the ranks.

    @classmethod
    def number_of(cls, ranks: Party, place: torch.device) -> int:
        """Return the number of the one that this process has of these ranks; 0 if it has none."""
        found = cls._made.get((tuple(ranks.members), place))
        return 0 if found is None or found.lost else found.number

    @classmethod
    def of(cls, ranks: Party, place: torch.device, number: int, timeout_s: float) -> Communicator:
        """Return the one of this number, or make one if it is 0; `connect` makes it usable."""
        key = tuple(ranks.members), place
        found = cls._made.get(key)
        if found is None or not number:
            if found is not None:
                found.abort("the ranks have made another communicator")
            found = cls._made[key] = cls(ranks, place, timeout_s)
        found._timeout_s = max(found._timeout_s, timeout_s)
        return found

    def connect(self) -> None:
        """Connect to the other ranks, which do it at the same time; raises RuntimeError."""
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()
        if not self._connected.wait(self._timeout_s) and not self.lost:
            self.abort(f"the GPUs of all ranks were not connected within {self._timeout_s:g} s")
        if self.lost:
            raise RuntimeError(self.lost)

    # Messages.

    def swap(
        self, sent: torch.Tensor, to: Sequence[int], of: Sequence[int], got: torch.Tensor
    ) -> None:
        """Queue a message to each rank on torch's current stream; raises RuntimeError if lost."""
        self._queue(lambda: self._send(sent, to, of, got))

    def spread(self, tensor: torch.Tensor, root: int) -> None:
        """Queue a message from a rank to all others; raises RuntimeError if lost."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, False
        self._queue(lambda: _join(self._backend.broadcast([tensor], options)))

    def _queue(self, send: Callable[[], None]) -> None:
        if self.lost:
            raise RuntimeError(self.lost)
        with self._lock:
            word = self._word()
            self._count(word)
            try:
                send()
            except RuntimeError as error:
                self.abort(str(error).partition("\n")[0])
                raise
            self._count(word)

    def hurry(self) -> None:
        """Give messages that are under way little time: a rank is lost."""
        self._hurry_at = time.monotonic()

    def abort(self, why: str) -> None:
        """End all messages, also those under way, soon. Other ranks are not told."""
        if not self.lost:
            self.lost = why
            self._ending.start()  # NCCL may take its time for it

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._backend.abort()

    def end(self) -> None:
        """Abort it when the process ends, after messages that are under way."""
        if self._pid != os.getpid():
            return
        end = time.monotonic() + _HURRY_S
        while not self.lost and (self._watched[: self._used] % 2).any() and time.monotonic() < end:
            time.sleep(_LOOK_S)
        self.abort("the process ends")
        self._ending.join(_HURRY_S)

    def _send(
        self, sent: torch.Tensor, to: Sequence[int], of: Sequence[int], got: torch.Tensor
    ) -> None:
        options = dist.AllToAllOptions()
        options.asyncOp = False  # on the current stream
        _join(self._backend.alltoall_base(got, sent, list(of), list(to), options))

    def _word(self) -> int:
        """Return the number of the word that counts for the current stream, or for a capture."""
        stream = 0
        if self.place.type == "cuda":
            stream = torch.cuda.current_stream(self.place).cuda_stream
            if torch.cuda.is_current_stream_capturing():
                stream = -1 - self._used
        if stream not in self._words:
            if self._used == _COUNTS:
                raise CaptureError(
                    f"{_COUNTS} messages of these ranks are in CUDA graphs, or on streams: capture "
                    "fewer, and use them again"
                )
            self._words[stream] = self._used
            self._used += 1
        return self._words[stream]

    def _count(self, word: int) -> None:
        self._counts[word : word + 1].add_(1)
        if self._seen is not self._counts:
            self._seen[word : word + 1].copy_(self._counts[word : word + 1], non_blocking=True)

    # The thread.

    def _run(self) -> None:
        try:
            if self.place.type == "cuda":
                torch.cuda.set_device(self.place)  # of this thread
            self._greet()
        except RuntimeError as error:
            self.abort(str(error).partition("\n")[0])
        self._connected.set()
        since: dict[int, tuple[int, float]] = {}
        while not self.lost:
            self._look(since)
            time.sleep(_LOOK_S)

    def _greet(self) -> None:
        """Send a first message, for which the communicator connects."""
        sent = torch.zeros(self._ranks, dtype=torch.int64, device=self.place)
        self._send(sent, [1] * self._ranks, [1] * self._ranks, torch.empty_like(sent))
        if self.place.type == "cuda":
            torch.cuda.current_stream(self.place).synchronize()

    def _look(self, since: dict[int, tuple[int, float]]) -> None:
        """Abort if a message has been under way for too long; `since` has when each was seen."""
        now = time.monotonic()
        for word in range(self._used):
            count = int(self._watched[word])
            if count % 2 == 0:
                since.pop(word, None)
                continue
            if word not in since or since[word][0] != count:
                since[word] = count, now
            begun = since[word][1]
            limit_s = self._timeout_s
            if begun <= self._hurry_at:
                limit_s, begun = _HURRY_S, self._hurry_at
            if now - begun > limit_s:
                self.abort(
                    "another rank has ended or has not come: a message between GPUs was under way "
                    f"for {limit_s:g} s"
                )


def _join(work: Any) -> None:
    if work is not None:
        work.wait()


def agreed(told: Sequence[tuple[str, int]]) -> int:
    """Return the number of the communicator that all ranks have, or 0.

    Raises ArgumentError if two ranks use one GPU.
    """
    first: dict[str, int] = {}
    for rank, (gpu, _) in enumerate(told):
        if first.setdefault(gpu, rank) != rank:
            raise ArgumentError(
                f"ranks {first[gpu]} and {rank} use one GPU, {gpu}: each needs its own, as "
                "device=f'cuda:{local_rank}'"
            )
    numbers = {number for _, number in told}
    return numbers.pop() if len(numbers) == 1 else 0


def _backend(ranks: Party, place: torch.device, timeout_s: float) -> Any:
    """Make NCCL's group of the ranks; on the CPU gloo's."""
    limit = timedelta(seconds=timeout_s + _SLACK_S)
    store = dist.PrefixStore("communicator", ranks.store)
    if place.type == "cpu":
        return dist.ProcessGroupGloo(store, ranks.rank, ranks.count, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    options.group_name = f"flashwarp-{ranks.number}"
    options.global_ranks_in_group = ranks.members
    before = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"
    try:
        return dist.ProcessGroupNCCL(store, ranks.rank, ranks.count, options)
    finally:
        os.environ.pop(_HANDLING)
        os.environ |= {} if before is None else {_HANDLING: before}


@atexit.register
def _end_all() -> None:
    for each in list(Communicator._made.values()):
        each.end()
