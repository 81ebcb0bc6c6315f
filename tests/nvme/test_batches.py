"""Batches: what a controller counts, and how every wait for one ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flashwarp import _native
from flashwarp.nvme.batches import BatchRecordStruct
from flashwarp.storage import Memory as MemoryStorage
from flashwarp.testing import Faulty
from flashwarp.testing.rings import LBA, READ, SUCCESS, WRITE, AlignedMemory, Host, Ring

COUNT = 4


class Batched(Host):
    """A controller whose commands may name batches; the test plays the device."""

    def __init__(self, storage: Any, *, threads: int = 0, **options: Any) -> None:
        self.table, self.heart = AlignedMemory(4096), AlignedMemory(64)
        super().__init__(storage, threads=threads, make=self._make, **options)

    def _make(self, storage: Any, pairs: list[Any], regions: Any, **options: Any) -> Any:
        names = ["sq", "cq", "sq_doorbell", "cq_doorbell", "depth", "id"]
        batched = [
            _native.QueuePair(
                **{name: getattr(pair, name) for name in names},
                heartbeat=self.heart.address,
                batches=self.table.address,
                batch_count=COUNT,
            )
            for pair in pairs
        ]
        return _native.SoftwareController(storage, batched, regions, **options)

    def record(self, number: int) -> BatchRecordStruct:
        begin = self.table.address + (number - 1) * 64
        return BatchRecordStruct.from_address(begin)

    def submit(self, number: int, commands: int, **fields: int) -> None:
        """Rings commands of a batch."""
        for cid in range(commands):
            self.rings[-1].write(
                READ, cid, lba=8 * cid, blocks=8, prp1=self.buffer.address, cdw3=number, **fields
            )
        self.rings[-1].ring()

    def end_launch(self, number: int, submitted: int) -> bool:
        """As the last warp of a launch; returns whether the launch has ended the batch itself."""
        record = self.record(number)
        record.done = 0
        record.submitted = submitted
        if record.completed == submitted or record.watched == 0:
            record.done = 1
        return bool(record.done)

    def serve_until_done(self, number: int, limit_s: float = 10.0) -> None:
        end = time.monotonic() + limit_s
        while not self.record(number).done:
            self.poll()
            assert time.monotonic() < end, "the batch does not end"


def storage(nbytes: int = 1 << 20) -> Any:
    memory = AlignedMemory(nbytes)
    memory.view[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    return _native.MemoryStorage(memory.address, nbytes, True, memory)


@pytest.fixture
def host() -> Iterator[Batched]:
    with Batched(storage()) as made:
        yield made


def test_batch_ends_with_its_last_command(host: Batched) -> None:
    record = host.record(2)
    assert (record.done, record.watched) == (1, 1), "nothing is outstanding"

    assert not host.end_launch(2, 3)
    host.submit(2, 3)
    host.serve_until_done(2)

    assert (record.completed, record.done) == (3, 1)
    assert all(host.record(n).completed == 0 for n in (1, 3, 4))


def test_batch_whose_commands_were_faster_is_ended_by_the_launch(host: Batched) -> None:
    host.submit(1, 5)
    for _ in range(5):
        assert host.wait().status == SUCCESS
    assert host.record(1).done == 1, "the launch has not ended"

    assert host.end_launch(1, 5)


def test_batch_does_not_end_before_its_launch(host: Batched) -> None:
    host.submit(1, 5)
    for _ in range(3):
        host.wait()
    host.end_launch(1, 9)
    for _ in range(2):
        host.wait()
    assert host.record(1).done == 0
    assert host.record(1).completed == 5


def test_counts_go_on_from_launch_to_launch(host: Batched) -> None:
    for launch in range(1, 12):
        assert not host.end_launch(1, 3 * launch)
        host.submit(1, 3)
        host.serve_until_done(1)
        for _ in range(3):
            host.wait()
    assert host.record(1).completed == 33


def test_counts_wrap(host: Batched) -> None:
    record = host.record(1)
    record.completed = record.submitted = 0xFFFFFFFE
    host.end_launch(1, 1)
    host.submit(1, 3)
    host.serve_until_done(1)
    assert record.completed == 1


def test_commands_without_a_batch_and_those_that_fail_count_as_they_should(host: Batched) -> None:
    host.end_launch(1, 2)
    for number, lba in ((0, 0), (COUNT + 1, 0), (1, 0), (0xFFFFFFFF, 0), (1, 1 << 40)):
        host.do(READ, lba=lba, blocks=8, cdw3=number)
    # CDW3 means something else in other commands.
    host.do(WRITE, lba=0, blocks=8, cdw3=1)
    assert (host.record(1).completed, host.record(1).done) == (2, 1)
    assert not host.table.view.view("<u4")[COUNT * 16 :].any(), "nothing behind the table"


def test_stop_ends_every_batch_and_launches_end_theirs_afterwards() -> None:
    with Batched(storage()) as host:
        host.end_launch(1, 3)
        host.end_launch(2, 1)
        host.submit(1, 3)  # rung, and never fetched
    assert [host.record(n).done for n in (1, 2)] == [1, 1]
    assert host.record(1).completed == 3, "as aborted commands"
    assert all(host.record(n).watched == 0 for n in range(1, COUNT + 1))

    assert host.end_launch(3, 7), "nobody else would"


def test_start_watches_again() -> None:
    with Batched(storage()) as host:
        host.controller.stop()
        host.controller.start()
        assert host.record(1).watched == 1
        host.end_launch(1, 2)
        host.submit(1, 2)
        host.serve_until_done(1)


@pytest.mark.parametrize("threads", [0, 1])
def test_storage_that_hangs_does_not_hold_a_batch(threads: int) -> None:
    memory = MemoryStorage(np.zeros(1 << 16, np.uint8))
    faulty = Faulty(memory, "read hang n=2")
    with Batched(faulty.native, threads=threads, batch_limit_ns=200_000_000) as host:
        host.end_launch(1, 9)
        if threads:
            host.submit(1, 4)
        begin = time.monotonic()
        while not host.record(1).done:
            time.sleep(0.005)
            assert time.monotonic() - begin < 10
        assert time.monotonic() - begin > 0.15
        assert host.record(1).completed < 9
        faulty.inject("")


def test_limit_begins_anew_with_each_launch() -> None:
    with Batched(storage(), batch_limit_ns=400_000_000) as host:
        for launch in range(1, 5):
            host.end_launch(1, launch)
            time.sleep(0.25)
            assert host.record(1).done == 0


def test_completions_come_before_the_word() -> None:
    """A thread that sees the word sees every completion."""
    with Batched(storage(), threads=2, depth=64) as host:
        ring = host.rings[-1]
        for launch in range(1, 200):
            host.end_launch(1, 8 * launch)
            host.submit(1, 8)
            while not host.record(1).done:
                pass
            assert all(ring.consume() is not None for _ in range(8))


def test_data_is_read(host: Batched) -> None:
    host.end_launch(1, 1)
    assert host.read(8, 8, cdw3=1) == SUCCESS
    assert host.record(1).done == 1
    assert host.data[: 8 * LBA].any()


def test_tables_that_do_not_fit_are_refused() -> None:
    ring, heart = Ring(8), AlignedMemory(64)
    names = ["sq", "cq", "sq_doorbell", "cq_doorbell", "depth", "id"]
    given = {name: getattr(ring.pair, name) for name in names}

    def pair(**batches: int) -> Any:
        return _native.QueuePair(**given, heartbeat=heart.address, **batches)

    aligned = AlignedMemory(4096).address
    for pairs in (
        [pair(batches=aligned + 8, batch_count=1)],
        [pair(batches=aligned, batch_count=1), pair()],
        [pair(batches=aligned, batch_count=1), pair(batches=aligned, batch_count=2)],
    ):
        with pytest.raises(ValueError, match="batches"):
            _native.SoftwareController(storage(), pairs)
    with pytest.raises(ValueError, match="batch_limit_ns"):
        _native.SoftwareController(storage(), [pair()], batch_limit_ns=0)
