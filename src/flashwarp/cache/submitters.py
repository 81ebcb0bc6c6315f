"""Who submits to the services of the arrays of one cache on the CPU device."""

from __future__ import annotations

from collections.abc import Callable

from flashwarp import endings


class Submitters:
    """Tells each service whether only launches of its own array submit to it.

    A launch of any array in the cache may evict a dirty line, and then submits to the service of
    the array that the line belongs to.
    """

    def __init__(self) -> None:
        self._lock = endings.Lock()
        self._arrays: dict[int, tuple[bool, Callable[[bool], None]]] = {}

    def join(self, slot: int, writable: bool, hear: Callable[[bool], None]) -> None:
        """Tell the service of an array by `hear`, now and when arrays join or leave."""
        with self._lock:
            self._arrays[slot] = writable, hear
        self.tell()

    def leave(self, slot: int) -> None:
        """Forget an array that has no lines left."""
        with self._lock:
            self._arrays.pop(slot, None)
        self.tell()

    def tell(self) -> None:
        """Tell all services."""
        with self._lock:
            for writable, hear in self._arrays.values():
                hear(not writable or len(self._arrays) == 1)
