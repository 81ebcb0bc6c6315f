"""Replacement policies once more, as plain lists: what the device code is compared with.

One object is one set. Each is written from the paper's description of the policy, with queues in
place of numbers and marks.
"""

from __future__ import annotations

MASK = 0xFFFFFFFF


class Model:
    """Set `number` of `sets`, of `ways` lines; `access` tells whether the line was there."""

    def __init__(self, number: int, ways: int, sets: int) -> None:
        self.number = number
        self.ways = ways
        self.sets = sets

    def access(self, line: int) -> bool:
        raise NotImplementedError


class Fifo(Model):
    def __init__(self, number: int, ways: int, sets: int) -> None:
        super().__init__(number, ways, sets)
        self.queue: list[int] = []

    def access(self, line: int) -> bool:
        if line in self.queue:
            self.hit(line)
            return True
        if len(self.queue) == self.ways:
            self.queue.pop(0)
        self.queue.append(line)
        return False

    def hit(self, line: int) -> None:
        pass


class Lru(Fifo):
    def hit(self, line: int) -> None:
        self.queue.remove(line)
        self.queue.append(line)


class Frames(Model):
    """Where lines are matters: an empty frame of the likely pair is taken before any other."""

    def __init__(self, number: int, ways: int, sets: int) -> None:
        super().__init__(number, ways, sets)
        self.frames: list[int | None] = [None] * ways

    def access(self, line: int) -> bool:
        hit = line in self.frames
        if not hit:
            likely = 2 * (line // self.sets) % self.ways
            empty = [way for way, held in enumerate(self.frames) if held is None]
            near = [way for way in empty if way in (likely, likely + 1)]
            way = (near + empty + [self.ways])[0]
            self.frames[self.victim() if way == self.ways else way] = line
        self.used(line)
        return hit

    def victim(self) -> int:
        raise NotImplementedError

    def used(self, line: int) -> None:
        pass


class Clock(Frames):
    """Frames in a circle; a line is filled with its mark."""

    def __init__(self, number: int, ways: int, sets: int) -> None:
        super().__init__(number, ways, sets)
        self.marked: set[int | None] = set()
        self.hand = 0

    def victim(self) -> int:
        while self.frames[self.hand] in self.marked:
            self.marked.discard(self.frames[self.hand])
            self.hand = (self.hand + 1) % self.ways
        way, self.hand = self.hand, (self.hand + 1) % self.ways
        return way

    def used(self, line: int) -> None:
        self.marked.add(line)


class Sieve(Model):
    """Algorithm 1 of the paper; the queue's end is its head."""

    def __init__(self, number: int, ways: int, sets: int) -> None:
        super().__init__(number, ways, sets)
        self.queue: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None

    def access(self, line: int) -> bool:
        if line in self.queue:
            self.visited.add(line)
            return True
        if len(self.queue) == self.ways:
            self.evict()
        self.queue.append(line)
        return False

    def evict(self) -> None:
        at = 0 if self.hand is None else self.queue.index(self.hand)
        while self.queue[at] in self.visited:
            self.visited.discard(self.queue[at])
            at = (at + 1) % len(self.queue)
        # The hand waits where it is: behind the newest, for what comes after it.
        self.newer = self.queue[at + 1 :]
        self.queue.pop(at)
        self.hand = self.newer[0] if self.newer else None


class S3Fifo(Model):
    """Algorithm 1 of the paper, with the sizes and the threshold that policy.cuh states."""

    def __init__(self, number: int, ways: int, sets: int) -> None:
        super().__init__(number, ways, sets)
        self.small_max = 1 if ways < 16 else ways // 8
        self.small: list[int] = []
        self.main: list[int] = []
        self.frequency: dict[int, int] = {}
        # A ring of as many as there are ways, by place.
        self.ghosts: list[int | None] = [None] * ways
        self.oldest = 0

    def access(self, line: int) -> bool:
        if line in self.frequency:
            self.frequency[line] = min(3, self.frequency[line] + 1)
            return True
        if len(self.frequency) == self.ways:
            self.evict()
        if line in self.ghosts:
            self.ghosts[self.ghosts.index(line)] = None
            self.main.append(line)
        else:
            self.small.append(line)
        self.frequency[line] = 0
        return False

    def evict(self) -> None:
        while True:
            if self.small and (len(self.small) >= self.small_max or not self.main):
                line = self.small.pop(0)
                if self.frequency[line] == 0:
                    self.ghosts[self.oldest % self.ways] = line
                    self.oldest = self.oldest % self.ways + 1
                    break
                self.frequency[line] = 0
            else:
                line = self.main.pop(0)
                if self.frequency[line] == 0:
                    break
                self.frequency[line] -= 1
            self.main.append(line)
        del self.frequency[line]


class Random(Frames):
    """The same numbers: what is compared is that each line has its chance, and who is evicted."""

    def __init__(self, number: int, ways: int, sets: int) -> None:
        super().__init__(number, ways, sets)
        self.state = 0

    def victim(self) -> int:
        self.state = (self.state * 1664525 + 1013904223) & 0x7FFFFFFF
        mixed = self.state ^ (self.number * 0x9E3779B9) & MASK
        mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & MASK
        mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & MASK
        mixed ^= mixed >> 16
        return (mixed * self.ways) >> 32


MODELS = {
    "clock": Clock,
    "lru": Lru,
    "fifo": Fifo,
    "sieve": Sieve,
    "s3_fifo": S3Fifo,
    "random": Random,
}


class SetAssociative:
    """As many models as sets; a line's set is its number modulo theirs."""

    def __init__(self, policy: str, sets: int, ways: int) -> None:
        self.sets = [MODELS[policy](number, ways, sets) for number in range(sets)]

    def access(self, line: int) -> bool:
        return self.sets[line % len(self.sets)].access(line)
