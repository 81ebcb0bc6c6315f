"""Turns: when a call of an array may be made, and what comes before it.

Calls of all arrays on a cache take turns. A call first checks that the array can be used by its
caller, comes behind the asynchronous calls before it, and raises what earlier calls have left.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from flashwarp import endings
from flashwarp.array import reopening
from flashwarp.array.attachment import Attachment
from flashwarp.device import stream_handle
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    ForkError,
    RouteError,
)
from flashwarp.launch.launcher import Watcher

A = TypeVar("A", bound=Any)
P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """When calls of one array may be made.

    Parameters
    ----------
    attachment : Attachment
    recipe : Recipe or None
        How a forked child opens the array again.
    strict : str or None
        The only route that is allowed.

    Attributes
    ----------
    holder : str
        Who moves rows past the cache now, in words; all others are refused.
    """

    def __init__(
        self, attachment: Attachment, recipe: reopening.Recipe | None, strict: str | None
    ) -> None:
        self._attachment = attachment
        self._recipe = recipe
        self._strict = strict
        self.holder = ""
        self._owner: object = None

    # What comes before a call.

    def come_behind(self, stores: bool) -> None:
        """Let a load or store come behind the asynchronous calls before it; see `Calls`.

        Checks first that the array can be used: before its turn, which another thread may have held
        when this process was forked. Who is in the turn already has come behind them.
        """
        self.check_usable()
        if not self._attachment.cache.turn._is_owned():
            self._attachment.calls.come_behind(stores)

    def check_usable(self) -> None:
        """Raise ClosedError, or in a forked child ForkError, if no call can be made."""
        attachment = self._attachment
        if attachment.closed:
            raise ClosedError(f"the array {attachment.place} is closed")
        if attachment.in_child:
            raise ForkError(
                f"the array was opened by process {attachment.opened_by} "
                f"{reopening.why_not(attachment, self._recipe)}"
            )

    def begin(self) -> None:
        """Check that a call can be made, and raise the failures of earlier calls."""
        attachment = self._attachment
        if attachment.closed or attachment.in_child:
            self.check_usable()
        attachment.calls.raise_lost()
        attachment.raise_noted()
        if attachment.launcher.service.changes != attachment.row_calls.changes:
            self._drop_old_lines()

    def join_launch(self, stream: object) -> tuple[object, ...]:
        """Prepare for a launch of a caller's kernel, in the cache's turn; return what it uses."""
        attachment = self._attachment
        if attachment.closed or attachment.in_child:
            self.check_usable()
        launcher = attachment.launcher
        if launcher.service.changes != attachment.row_calls.changes:
            self._drop_old_lines()
        if stream is None:
            attachment.note_launch()
        else:
            attachment.join(stream_handle(stream), refreshes=True)
        return launcher.wake()

    @contextlib.contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Show a watcher what calls are about to move: byte offsets in the array, and bytes."""
        self.check_usable()
        watchers = self._attachment.launcher.watchers
        try:
            watchers.append(watcher)
            yield
        finally:
            with contextlib.suppress(ValueError):  # a signal came before it was there
                watchers.remove(watcher)

    # Acting in the turn.

    @property
    def lock(self) -> endings.Lock:
        """What is held in the array's turn."""
        return self._attachment.cache.turn

    def act(self, act: Callable[[], R]) -> R:
        """Act in the array's turn, by what no CUDA graph can have."""
        self.come_behind(False)
        try:
            with self.lock:
                self.begin()
                self._refuse_capture()
                return act()
        except DeviceError as error:
            self.raise_reason(error)

    def act_after_calls(self, act: Callable[[], None]) -> None:
        """Wait for asynchronous calls made before, then act in the array's turn."""
        self.begin()
        self._refuse_capture()
        self._attachment.calls.wait()
        self.act(act)

    def fact(self, read: Callable[[], R]) -> R:
        """Read a fact in the array's turn, whoever has the array and whatever has failed."""
        self.check_usable()
        try:
            with self.lock:
                return read()
        except DeviceError as error:
            self.raise_reason(error)

    def _refuse_capture(self) -> None:
        self._attachment.device.refuse_capture("this call", "make it before or after the capture")

    def raise_reason(self, error: DeviceError) -> NoReturn:
        """Raise why a kernel was stopped, if `error` came from that; else `error`."""
        reason = self._attachment.reason_of(error)
        if reason is error:
            raise error
        raise reason from error

    # Who moves rows past the cache.

    def hand_over(self, owner: object, holder: str, before: object = None) -> None:
        """Give the storage to one who moves rows past the cache; other calls are refused.

        If the owner `before` has it, it leaves it to this one. All calls compare the changes with
        the service's, so they cost nothing more.
        """
        if before is None or self._owner is not before:
            self.act_after_calls(lambda: self._attachment.drop_lines(drop_dirty=False))
        self._owner, self.holder = owner, holder
        self._attachment.row_calls.changes = -1

    def refuse_others(self, owner: object) -> None:
        """Raise ArgumentError if the array was handed over to another owner."""
        if self._owner is not owner and self.holder:
            raise ArgumentError(
                f"the array {self._attachment.place} belongs to {self.holder} now: use that, or "
                "close it first"
            )

    def take_back(self, owner: object) -> None:
        """End the `hand_over` to an owner, and begin the next call without old lines."""
        if self._owner is owner:
            self._owner, self.holder = None, ""

    def _drop_old_lines(self) -> None:
        """Remove lines that were read before a writer opened the file, or before it closed it.

        Raises
        ------
        StorageError
            If rows may have been read in place while they were written.
        RouteError
            If only the in-place route is allowed.
        ArgumentError
            If the array was handed over.
        """
        self.refuse_others(None)
        attachment, service = self._attachment, self._attachment.launcher.service
        with self.lock:
            changes = service.changes
            if changes == attachment.row_calls.changes:
                return
            if self._strict == "in_place" and service.route != self._strict:
                raise RouteError(
                    f"strict='in_place', but a writer has opened {attachment.place}, so it cannot "
                    "be read in place any more: close the array, and open it again when the writer "
                    "has closed the file"
                )
            attachment.drop_lines(drop_dirty=False)
            attachment.row_calls.changes = changes
            stale = service.take_stale()
        if stale is not None:
            raise stale


def loads(
    method: Callable[Concatenate[A, P], R], *, stores: bool = False
) -> Callable[Concatenate[A, P], R]:
    """Serialise operations on the array, so that an error belongs to the call that raises it.

    No operand may be an array of ours: if two threads each read the other's array in their own
    turn, both would wait for ever. `in_memory` copies it before.
    """

    @functools.wraps(method)
    def call(self: A, /, *args: P.args, **kwargs: P.kwargs) -> R:
        turns: Turns = self._turns
        turns.come_behind(stores)
        try:
            with turns.lock:
                turns.begin()
                return method(self, *args, **kwargs)
        except DeviceError as error:
            turns.raise_reason(error)

    return call


stores = functools.partial(loads, stores=True)


def in_turns(accesses: Iterable[tuple[Any, bool]], act: Callable[[], R]) -> R:
    """Act in the turns of several arrays, each of which is loaded from or stored to.

    All take turns in one order, so that two callers never wait for each other.
    """
    turns = {}
    for array, stores in accesses:
        array._turns.come_behind(stores)
        turns[id(array.cache)] = array._turns.lock
    return endings.holding([turns[each] for each in sorted(turns)], act)
