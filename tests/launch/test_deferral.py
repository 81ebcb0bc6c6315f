"""Which launches leave their misses to a few blocks, as their parameters say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.cache import miss_list
from flashwarp.cache.miss_list import ListUseStruct, MissListStruct, allocate_misses
from flashwarp.errors import ArgumentError
from flashwarp.launch.deferral import Deferral
from flashwarp.launch.rows import NOT_DEFERRED, Deferred

LIST = 0x1000
WARPS = 132 * 8


def service(**facts: Any) -> Any:
    """What a deferral needs of a service; a file's by default."""
    slots = facts.pop("slots", 32 * 256)
    given = {
        "plain_reads": False,
        "makes_warps_wait": True,
        "waits_for_disk": False,
        "namespace_count": 1,
        "queues": SimpleNamespace(count=1, depth=slots),
    }
    return SimpleNamespace(**(given | facts))


def deferral(facts: Any, address: int | None = LIST) -> Deferral:
    held = None if address is None else SimpleNamespace(address=address)
    volume = SimpleNamespace(misses=held, cache=SimpleNamespace(line_bytes=4096))
    return Deferral(volume, facts)  # type: ignore[arg-type]


def choice(found: Deferral, items: int, warps: int, bundle: int, **how: bool) -> Deferred:
    return found.of(items, warps, bundle, found.blocks, **how)


def blocks_of(facts: Any, address: int | None = LIST) -> int:
    """How many blocks of a launch drain that is large enough for any number."""
    found = choice(deferral(facts, address), 1 << 20, 1 << 15, 32)
    used = ListUseStruct(*found)
    assert used.list == (LIST if used.blocks else 0)
    assert used.bundle == (32 if used.blocks else 0)
    return used.blocks


@pytest.mark.parametrize(
    ("facts", "blocks"),
    [
        (service(), 8),
        (service(slots=1024), 4),
        (service(slots=2), 1),
        (service(namespace_count=16), 32),
        (service(namespace_count=200, slots=1 << 20), 255),
        (service(waits_for_disk=True), 2),
        (service(waits_for_disk=True, namespace_count=16), 32),
        (service(plain_reads=True), 12),
        (service(plain_reads=True, waits_for_disk=True), 12),
        (service(makes_warps_wait=False), 0),
    ],
)
def test_storage_decides_how_many_blocks_drain(facts: Any, blocks: int) -> None:
    assert blocks_of(facts) == blocks


@pytest.mark.parametrize(("blocks", "warps"), [(2, 64), (8, 256)])
@pytest.mark.parametrize("bundle", [1, 32])
def test_launches_of_any_size_defer_but_those_of_few_warps(
    blocks: int, warps: int, bundle: int
) -> None:
    found = deferral(service(waits_for_disk=blocks == 2))

    assert found.blocks == blocks
    assert choice(found, warps - 1, warps - 1, bundle) == NOT_DEFERRED
    for many in (1, 2, 17, 1000):
        assert choice(found, warps * many, warps * many, bundle) != NOT_DEFERRED


def test_elements_defer_only_on_demand() -> None:
    assert choice(deferral(service()), 1 << 20, WARPS, 32, elements=True) == NOT_DEFERRED


def test_launch_of_few_blocks_for_each_that_drains_defers_nothing() -> None:
    many = service(namespace_count=32, slots=1 << 20)

    assert deferral(many).blocks == 64
    assert choice(deferral(many), 1 << 20, 2047, 32) == NOT_DEFERRED
    assert choice(deferral(many), 1 << 20, 2048, 32) != NOT_DEFERRED


def test_array_without_a_list_defers_nothing() -> None:
    assert blocks_of(service(), None) == 0


def test_in_place_launches_of_few_lines_do_not_defer() -> None:
    facts = service(plain_reads=True)
    found = deferral(facts)
    assert choice(found, 4095, 4095, 1) == NOT_DEFERRED
    assert choice(found, 4096, 4096, 1) != NOT_DEFERRED

    facts.plain_reads = False  # the lease breaks

    assert choice(found, 4095, 4095, 1) != NOT_DEFERRED


@pytest.mark.parametrize("asked", [0, 3, 255])
def test_setting_decides_in_place_of_the_storage(
    monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    monkeypatch.setenv("FLASHWARP_DRAIN_BLOCKS", str(asked))

    for facts in (service(), service(makes_warps_wait=False), service(plain_reads=True)):
        assert blocks_of(facts) == asked


@pytest.mark.parametrize(
    ("how", "waits"),
    [
        ({}, True),  # in place without commands: unused until a lease breaks
        ({"commands": True}, False),
        ({"route": "bounce"}, True),
        ({"model": fw.nvme.SSDModel.named("P5800X")}, False),
    ],
)
def test_storage_says_whether_a_few_warps_suffice(how: dict[str, Any], waits: bool) -> None:
    with fw.open(
        np_memory(),
        "r",
        "i8",
        device="cpu",
        cache="64 KiB",
        controller=fw.nvme.SoftwareController(**how),
    ) as x:
        assert x._attachment.launcher.service.makes_warps_wait == waits


@pytest.mark.parametrize("asked", ["-2", "256", "few"])
def test_setting_out_of_its_limits_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("FLASHWARP_DRAIN_BLOCKS", asked)

    with pytest.raises(ArgumentError, match="FLASHWARP_DRAIN_BLOCKS"):
        deferral(service())


def test_each_launch_has_a_number_of_its_own() -> None:
    numbers = [choice(deferral(service()), 1 << 20, 1 << 15, 32)[1] for _ in range(6)]

    assert len(set(numbers)) == 6
    assert 0 not in numbers


@pytest.mark.parametrize(
    ("lines", "entries"),
    [(1, 0), (1023, 0), (1024, 1 << 17), (200_000, 1 << 18), (1 << 30, 1 << 20)],
)
def test_list_grows_with_the_array_up_to_a_limit(lines: int, entries: int) -> None:
    uploads = []
    device = SimpleNamespace(
        kind="cuda",
        allocate=lambda nbytes, _: SimpleNamespace(address=LIST, nbytes=nbytes),
        upload=lambda address, data, _: uploads.append((address, data)),
    )

    memory = allocate_misses(device, lines)  # type: ignore[arg-type]

    if entries == 0:
        assert memory is None
        return
    assert memory is not None
    assert memory.nbytes == 512 + entries * 8
    ((address, data),) = uploads
    assert address == LIST
    head = MissListStruct.from_buffer_copy(data)
    assert 1 << head.capacity_log2 == entries
    assert (head.state, head.head, head.tail) == (0, 0, 0)


def test_cpu_device_has_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_list, "_LINES_MIN", 1)

    with fw.open(np_memory(), "r", "i8", device="cpu", cache="64 KiB") as x:
        assert x._attachment.launcher.volume.misses is None


def np_memory() -> fw.storage.Memory:
    """64 KiB of storage."""
    return fw.storage.Memory(np.zeros(8192, np.int64))
