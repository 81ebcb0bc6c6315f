"""What is free and what is lent of a pool, for all of its clients together or for one."""

from __future__ import annotations

from typing import Protocol

from flashwarp.transfer.buffer import Block


class Client(Protocol):
    """A client of a pool, as far as its room needs it."""

    lent_bytes: int
    budget_bytes: int
    minimum_bytes: int


class Room:
    """Blocks that are free and what is lent: of all clients together, or of a reservation."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # By address: adding twice adds once.
        self.free: dict[int, Block] = {}
        self.lent = 0
        self.clients: list[Client] = []

    @property
    def free_bytes(self) -> int:
        """Bytes of the free blocks."""
        return sum(block.nbytes for block in self.free.values())

    def allows(self, client: Client, nbytes: int) -> bool:
        """Whether a client may have so many bytes more, now."""
        if client.lent_bytes + nbytes > client.budget_bytes:
            return False
        if client.lent_bytes + nbytes <= client.minimum_bytes:
            return True
        kept = (each.minimum_bytes - each.lent_bytes for each in self.clients if each is not client)
        return self.lent + nbytes + sum(max(0, each) for each in kept) <= self.limit

    def surplus(self, most: int) -> list[Block]:
        """Remove free blocks until all that is pinned is at most so many bytes; return them."""
        removed = []
        while self.free and self.lent + self.free_bytes > most:
            removed.append(self.free.popitem()[1])
        return removed
