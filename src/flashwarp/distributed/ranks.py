"""The ranks of a sharded array: what all do together, and errors that all raise.

Every step begins with a message of three numbers to each rank: whether its sender has failed, a
hash of what it does, and how much it will send. Its size never changes, because gloo ends a process
that gets another size than it expects. So a step is entered by all ranks or by none. If one has
failed, or they do different things, all raise the same error.

These messages go over a group of gloo of these ranks alone, with the time limit of the array. Rows
and their numbers do, too, unless they are on GPUs: then they go by a `Communicator`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from flashwarp import endings, errors
from flashwarp.config import number, time_limit_s
from flashwarp.distributed.communicator import Communicator, agreed
from flashwarp.errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    FlashwarpError,
    RankLostError,
)

_T = TypeVar("_T")

_FAILED, _WHAT, _SIZE = range(3)

_LOOK_S = 0.01
_OVER = "meeting {} is over"
# Of each group of ranks, the number of the last meeting that this process has gone to.
_met: dict[str, int] = {}


class Ranks:
    """The ranks of a process group, for one array.

    Attributes
    ----------
    members : list of int
        Their numbers in torch.distributed.
    rank, count : int
        This rank among them, and how many they are.
    number : int
        The same on all ranks: how many such groups were made before of them.
    store : Store
        Where these ranks alone meet.
    lost : str
        Why the ranks cannot meet any more; empty while they can.
    on_gpus : bool
        Whether rows are on GPUs.
    """

    def __init__(self, group: Any, timeout_s: float | None) -> None:
        timeout = timedelta(seconds=number("timeout_s", time_limit_s(timeout_s), 1e-3, 1e6))
        if not dist.is_initialized():
            raise ArgumentError("sharded arrays need torch.distributed.init_process_group first")
        self._given = dist.group.WORLD if group is None else group
        self._check_given("is none of torch.distributed, or this process is no rank of it")
        self.members: list[int] = dist.get_process_group_ranks(self._given)
        self.rank: int = self.members.index(dist.get_rank())
        self.count = len(self.members)
        self.lost = ""
        self._timeout_s = timeout.total_seconds()
        self._lock = endings.Lock()
        self._agreed: BaseException | None = None
        self._gloo: Any = None
        self.store: Any = None
        self._communicator: Communicator | None = None
        try:
            self._connect()
        except RuntimeError as error:
            self._lose(error)

    def _connect(self) -> None:
        """Connect to the other ranks, under a number that rank 0 chooses.

        Not by `new_group`, which all processes would have to call, and not only those of the group.
        Ranks cannot count by themselves how often they have met: one may have stayed away from a
        meeting that the others have waited for.
        """
        name = hashlib.sha256(repr(self.members).encode()).hexdigest()[:16]
        whole = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"flashwarp/sharded/{name}", whole)
        end = time.monotonic() + self._timeout_s
        self.number = _met[name] = self._meeting(store, _met.get(name, 0), end)
        left = timedelta(seconds=max(end - time.monotonic(), _LOOK_S))
        self.store = dist.PrefixStore(str(self.number), store)
        try:
            self._gloo = dist.ProcessGroupGloo(self.store, self.rank, self.count, left)
        finally:
            if self.rank == 0:
                store.add(_OVER.format(self.number), 1)
        self._gloo._set_default_timeout(timedelta(seconds=self._timeout_s))

    def _meeting(self, store: Any, last: int, end: float) -> int:
        """Return the number of the meeting that rank 0 calls now."""
        if self.rank == 0:
            return int(store.add("meetings", 1))
        while True:
            number = int(store.add("meetings", 0))
            # One that is over, and was without this rank, has failed.
            if number > last and not store.add(_OVER.format(number), 0):
                return number
            if time.monotonic() >= end:
                raise RuntimeError("rank 0 does not come")
            time.sleep(_LOOK_S)

    @property
    def on_gpus(self) -> bool:
        """Whether rows are on GPUs."""
        return self._communicator is not None and self._communicator.place.type == "cuda"

    def use(self, place: torch.device, identity: str) -> None:
        """Let rows go between GPUs by NCCL, from now on. All ranks call it in `together`.

        `identity` is of this rank's GPU, as no other machine has it.
        """

        def look() -> tuple[str, Any, None]:
            return "use GPUs", [identity, Communicator.number_of(self, place)], None

        told = self.agree("use GPUs", look)[1]
        number = self.step("compare the GPUs", lambda: agreed(told))
        make = functools.partial(Communicator.of, self, place, number, self._timeout_s)
        communicator = self.step("make a communicator", make)
        try:
            communicator.connect()
        except RuntimeError as error:
            self._lose(error)
        self._communicator = communicator
        self.step("connect GPUs", lambda: None)

    def close(self) -> None:
        """End the connections: ranks that wait for this one fail at once. May be called twice."""
        with self._lock:
            self.lost = self.lost or "this rank has closed it"
            self._gloo = None

    def check(self) -> None:
        """Raise RankLostError if the ranks cannot meet any more."""
        if self._communicator is not None and self._communicator.lost:
            self.lost = self.lost or self._communicator.lost
            self._gloo = None
        if self.lost:
            raise RankLostError(f"the sharded array is broken, since {self.lost}: open it again")

    def _check_given(self, why: str) -> None:
        try:
            inside = dist.get_rank(self._given) >= 0
        except (RuntimeError, TypeError, ValueError, KeyError):
            inside = False
        if not inside:
            raise ArgumentError(f"the process group {self._given!r} {why}")

    # Steps.

    @contextlib.contextmanager
    def together(self, alone: bool = False) -> Iterator[None]:
        """Enter steps. If this rank leaves them, the others fail at once, unless it is `alone`."""
        with self._lock:
            self.check()
            try:
                yield
            except BaseException as error:
                if error is not self._agreed and not alone:
                    self.lost = self.lost or f"this rank has left a call by {type(error).__name__}"
                    self._gloo = None  # whoever waits for this rank need not wait longer
                    self._hurry()
                raise
            finally:
                self._agreed = None

    def enter(
        self, what: str, error: Exception | None = None, sizes: Sequence[int] = ()
    ) -> list[int]:
        """Meet all ranks, and return how much each will send to this one.

        Parameters
        ----------
        what : str
            What this rank does; all must do the same.
        error : Exception, optional
            What it has failed with: then all raise it.
        sizes : sequence of int, optional
            How much it will send to each rank, in any unit.
        """
        if error is None:
            error = self._group_error()
        digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "little")
        sent = torch.zeros(self.count, 3, dtype=torch.int64)
        sent[:, _FAILED], sent[:, _WHAT] = error is not None, digest
        if error is None and sizes:
            sent[:, _SIZE] = torch.tensor(sizes)
        got = self.tell(sent.view(-1), [3] * self.count, [3] * self.count).view(-1, 3)
        if got[:, _FAILED].any() or (got[:, _WHAT] != digest).any():
            self._raise(what, error)
        return [int(size) for size in got[:, _SIZE]]

    def step(self, what: str, act: Callable[[], _T]) -> _T:
        """Do something on each rank; return what it returns, or raise on all what one raises."""
        return self.agree(what, lambda: (what, None, act()))[0]

    def agree(self, what: str, act: Callable[[], tuple[str, object, _T]]) -> tuple[_T, list[Any]]:
        """Do something on each rank, and tell the others of it; raise on all what one raises.

        `act` returns what this rank does, more exactly than `what`; what it tells, which JSON has;
        and what it keeps. Returns what it keeps, and what all have told.
        """
        found, error = attempt(act)
        what, told, kept = found or (what, None, None)
        text = json.dumps(told).encode() if told is not None else b""
        sizes = self.enter(what, error, [len(text)] * self.count)
        return kept, self._pass_on(text, sizes) if any(sizes) else []  # type: ignore[return-value]

    def swap(
        self,
        sent: torch.Tensor,
        to: Sequence[int],
        of: Sequence[int],
        got: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send each rank its part of rows, or of their numbers; return the parts for this rank.

        `to` and `of` are the lengths of the parts, which sender and receiver must know; `got` is
        where those for this rank go. On GPUs it happens in the order of torch's current stream, and
        the host does not wait for it.
        """
        if self._communicator is None:
            return self.tell(sent, to, of, got)
        if got is None:
            got = sent.new_empty(sum(of))
        try:
            self._communicator.swap(sent, to, of, got)
        except CaptureError:
            raise
        except RuntimeError as error:
            self._lose(error)
        return got

    def spread(self, tensor: torch.Tensor, root: int) -> None:
        """Send a tensor from a rank to all others; on GPUs in the order of the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        try:
            if self._communicator is not None:
                self._communicator.spread(tensor, root)
            else:
                self._gloo.broadcast([tensor], options).wait()
        except RuntimeError as error:
            self._lose(error)

    def tell(
        self,
        sent: torch.Tensor,
        to: Sequence[int],
        of: Sequence[int],
        got: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Swap parts of a tensor as `swap` does, by gloo between host memories."""
        if got is None:
            got = torch.empty(sum(of), dtype=sent.dtype)
        gloo = self._gloo
        if gloo is None:
            self.check()
        try:
            gloo.alltoall_base(got, sent, list(of), list(to), dist.AllToAllOptions()).wait()
        except RuntimeError as error:
            self._lose(error)
        return got

    def _group_error(self) -> Exception | None:
        try:
            self._check_given("was destroyed: close the array, and open it with another group")
        except ArgumentError as error:
            return ClosedError(str(error))
        return None

    def _hurry(self) -> None:
        if self._communicator is not None:
            self._communicator.hurry()

    def _lose(self, error: RuntimeError) -> NoReturn:
        self._hurry()
        said = str(error).partition("\n")[0]
        self.lost = (
            f"another rank has ended, has left a call, or did not come within {self._timeout_s:g} "
            f"s ({said})"
        )
        raise RankLostError(f"{self.lost}. Open it again: what was flushed is in the files")

    # Errors.

    def _raise(self, what: str, error: Exception | None) -> NoReturn:
        """Tell all ranks what each does or has failed with, and raise the same on all."""
        text = json.dumps({"what": what, "error": _packed(error)}).encode()
        sizes = torch.full((self.count * 3,), len(text))
        sizes = self.tell(sizes, [3] * self.count, [3] * self.count)[::3]
        found = self._pass_on(text, sizes.tolist())
        failed = [
            _unpacked(rank, *each["error"]) for rank, each in enumerate(found) if each["error"]
        ]
        if not failed:
            different: dict[str, list[int]] = {}
            for rank, each in enumerate(found):
                different.setdefault(each["what"], []).append(rank)
            said = ", ".join(f"{name} (ranks {ranks})" for name, ranks in different.items())
            failed = [ArgumentError(f"the ranks do different things: {said}")]
        for other in failed[1:]:
            failed[0].add_note(f"and another failed: {type(other).__name__}: {other}")
        self._agreed = failed[0]
        raise failed[0] from error

    def _pass_on(self, text: bytes, sizes: list[int]) -> list[Any]:
        sent = torch.frombuffer(bytearray(text * self.count or b" "), dtype=torch.uint8)
        got = self.tell(sent[: len(text) * self.count], [len(text)] * self.count, sizes)
        return [json.loads(part.numpy().tobytes()) for part in got.split(sizes)]


def attempt(act: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return what a function returns, or the error that it raises, for all ranks to raise."""
    try:
        return act(), None
    except Exception as error:
        return None, error


def _packed(error: Exception | None) -> list[Any] | None:
    if error is None:
        return None
    if not isinstance(error, FlashwarpError):
        return ["FlashwarpError", [f"{type(error).__name__}: {error}"]]
    if isinstance(error, OSError) and error.errno is not None:
        return [type(error).__name__, [error.errno, error.strerror, error.filename]]
    return [type(error).__name__, [str(error)]]


def _unpacked(rank: int, kind: str, said: list[Any]) -> Exception:
    at = min(1, len(said) - 1)
    said[at] = f"rank {rank}: {said[at]}"
    error: Exception = getattr(errors, kind)(*said)
    return error
