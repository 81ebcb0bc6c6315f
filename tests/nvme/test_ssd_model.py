"""Modelled drives: in model time against their parameters, then under a controller and an array."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashwarp as fw
from flashwarp import _native
from flashwarp.errors import ArgumentError, ControllerTimeout
from flashwarp.nvme import SSDModel
from flashwarp.storage import File, Memory, Storage
from flashwarp.testing import ControllerContract, Host
from flashwarp.testing.rings import COMMAND_ABORTED, FLUSH, READ, SUCCESS, WRITE_ZEROES

PLAIN: dict[str, Any] = {
    "name": "plain",
    "read_iops": ((512, 2e6), (4096, 1e6)),
    "write_iops": ((4096, 2.5e5),),
    "read_bytes_per_s": 5e9,
    "write_bytes_per_s": 2e9,
    "read_latency_us": (20, 50, 200),
    "write_latency_us": (5, 10, 40),
    "units": 64,
}


def plain(**changes: Any) -> SSDModel:
    return SSDModel(**{**PLAIN, **changes})


# The distribution of service times.


@pytest.mark.parametrize("write", [False, True])
def test_service_times_have_the_given_quantiles(write: bool) -> None:
    model = plain()
    # A command a millisecond: nobody waits, so what is beyond the pipe's time is service.
    arrivals = np.arange(1, 100_001) * 1_000_000

    times = (model.completion_times(arrivals, 4096, write=write) - arrivals) / 1e3

    service = times - 1e6 / model.iops(4096, write=write)
    least, median, high = model.write_latency_us if write else model.read_latency_us
    assert service.min() == pytest.approx(least, rel=0.2)
    assert service.min() > least - 0.01
    assert np.median(service) == pytest.approx(median, rel=0.02)
    assert np.quantile(service, 0.99) == pytest.approx(high, rel=0.05)
    assert service.mean() == pytest.approx(model.mean_latency_us(write=write), rel=0.02)


def test_drive_is_reproducible_from_its_seed() -> None:
    arrivals = np.cumsum(np.random.default_rng(1).integers(0, 2000, 5000))

    first, again = (plain(seed=7).completion_times(arrivals, 4096) for _ in range(2))
    other = plain(seed=8).completion_times(arrivals, 4096)

    assert (first == again).all()
    assert (first != other).mean() > 0.9


# Ceilings.


@pytest.mark.parametrize(
    ("block_bytes", "write", "per_s"),
    [
        (512, False, 2e6),
        (4096, False, 1e6),
        (2048, False, 1 / (0.5e-6 + 0.5e-6 * 1536 / 3584)),  # in between: of the time
        (16384, False, 5e9 / 16384),  # bytes bind
        (1 << 20, False, 5e9 / (1 << 20)),
        (512, True, 2.5e5),
        (8192, True, 2e9 / 8192),
    ],
)
def test_throughput_is_the_lower_ceiling(block_bytes: int, write: bool, per_s: float) -> None:
    model = plain(units=512)

    got = model.saturation(1024, block_bytes, write=write)

    assert model.iops(block_bytes, write=write) == pytest.approx(per_s, rel=1e-6)
    assert got.per_s == pytest.approx(per_s, rel=0.02)


def test_too_few_units_bind_before_the_ceiling() -> None:
    model = plain(units=16)

    got = model.saturation(512, 4096)

    limit = 16 / (model.mean_latency_us() * 1e-6)
    assert limit < 1e6
    assert got.per_s == pytest.approx(limit, rel=0.03)


def test_reads_and_writes_share_the_pipe() -> None:
    model = plain(units=512)
    drive = model.native_model()

    due = [drive.admit(0, i % 2 == 0, 8) for i in range(20_000)]

    # Half of them take 1 us, the others 4 us.
    assert max(due) / 1e3 == pytest.approx(10_000 * (1 + 4), rel=0.02)


def test_load_raises_latency_and_depth_raises_throughput() -> None:
    model = plain()
    got = [model.saturation(depth, 4096) for depth in (1, 8, 32, 64, 256, 1024)]

    assert [g.per_s for g in got[:4]] == sorted(g.per_s for g in got[:4])
    assert got[0].latency_us == pytest.approx(model.mean_latency_us() + 1, rel=0.02)
    assert got[-1].latency_us == pytest.approx(1024 / 1e6 * 1e6, rel=0.03)
    for g in got:
        assert g.per_s * g.latency_us * 1e-6 == pytest.approx(g.depth, rel=0.02), "Little's law"


@given(
    gaps=st.lists(st.integers(0, 5000), min_size=1, max_size=200),
    units=st.integers(1, 9),
    blocks=st.integers(1, 200),
)
@settings(max_examples=50, deadline=None)
def test_drive_is_its_two_stages(gaps: list[int], units: int, blocks: int) -> None:
    """Against the same two stages written plainly, with the service times of an idle drive."""
    model = plain(units=units)
    busy = max(float(np.interp(blocks * 512, [512, 4096], [500, 1000])), blocks * 512 / 5)
    spread = np.arange(1, len(gaps) + 1) * 10**9
    service = plain(units=1).completion_times(spread, 512) - spread - 500
    arrivals = np.cumsum(gaps)

    got = model.completion_times(arrivals, blocks * 512)

    free, pipe = [0.0] * units, 0.0
    for now, taken, due in zip(arrivals, service, got, strict=True):
        pipe = max(pipe, float(now)) + busy
        free.sort()
        free[0] = max(free[0], pipe) + int(taken)
        assert due == pytest.approx(free[0], abs=len(gaps) + 2)


# Parameters.


@pytest.mark.parametrize("name", SSDModel.names())
def test_profile_reaches_what_it_claims(name: str) -> None:
    model = SSDModel.named(name.upper())

    for write in (False, True):
        for block_bytes in (512, 4096):
            points = model.write_iops if write else model.read_iops
            claimed = dict(points).get(block_bytes)
            if claimed is not None:
                got = model.saturation(1024, block_bytes, write=write, commands=5000)
                assert got.per_s == pytest.approx(claimed, rel=0.02)
    assert model.source


def test_profiles_keep_to_the_paper() -> None:
    """BaM, Table 2; and the latency at full throughput that its section 2.2 gives."""
    table = {
        "P5800X": (5.1e6, 1.5e6, 1e6, 1.5e6),
        "PM1735": (1.1e6, 1.6e6, 351e3, 351e3),
        "980 Pro": (750e3, 750e3, 172e3, 172e3),
    }
    for name, (read512, read4096, write512, write4096) in table.items():
        model = SSDModel.named(name)
        assert (dict(model.read_iops)[512], dict(model.read_iops)[4096]) == (read512, read4096)
        assert (dict(model.write_iops)[512], dict(model.write_iops)[4096]) == (write512, write4096)
    optane = SSDModel.named("P5800X").saturation(56, 512)
    assert optane.latency_us == pytest.approx(11, rel=0.15)
    assert optane.per_s > 0.95 * 5.1e6
    assert SSDModel.named("980 Pro").saturation(243, 512).latency_us == pytest.approx(324, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"read_iops": ()},
        {"read_iops": ((4096, 1e6), (512, 2e6))},
        {"read_iops": ((512, 0),)},
        {"read_iops": ((512, float("nan")),)},
        {"write_iops": 3},
        {"write_iops": ((0, 1e6),)},
        {"read_bytes_per_s": 0},
        {"write_bytes_per_s": "fast"},
        {"write_bytes_per_s": float("inf")},
        {"read_latency_us": (1, 2)},
        {"read_latency_us": (2, 1, 3)},
        {"write_latency_us": (-1, 1, 3)},
        {"write_latency_us": (0, 1, float("nan"))},
        {"write_latency_us": (0, 1, 1e9)},
        {"units": 0},
        {"units": 1 << 20},
        {"units": 1.5},
        {"seed": 0},
        {"seed": True},
    ],
)
def test_bad_parameters_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(changes))):
        plain(**changes)


def test_native_model_checks_what_it_is_given() -> None:
    good = ([(512, 1e6)], 1e9, [1.0, 2.0])
    for bad in (
        ([], 1e9, [1.0, 2.0]),
        ([(512, 0.0)], 1e9, [1.0, 2.0]),
        ([(512, 1.0), (512, 2.0)], 1e9, [1.0, 2.0]),
        ([(512, 1e6)], 0.0, [1.0, 2.0]),
        ([(512, 1e6)], 1e9, [1.0]),
        ([(512, 1e6)], 1e9, [2.0, 1.0]),
        ([(512, 1e6)], 1e9, [1.0, 1e10]),
    ):
        parameters = _native.SsdParameters(
            _native.SsdDirection(*good), _native.SsdDirection(*bad), 1, 1
        )
        with pytest.raises(ValueError):
            _native.SsdModel(parameters)


# Under the controller.

FAST = plain(
    read_iops=((512, 2e5),),
    write_iops=((512, 2e5),),
    read_latency_us=(10, 60, 900),
    write_latency_us=(10, 60, 900),
    units=8,
)


class Modelled:
    """Gives the controllers of a contract a drive."""

    model: ClassVar[SSDModel] = FAST

    def host(self, storage: Storage, **options: Any) -> Host:
        return Host(storage.native, model=self.model.native_parameters(), **options)


class TestModelledControllerOfMemory(Modelled, ControllerContract):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        return Memory(bytearray(content), writable)


class TestModelledControllerOfFile(Modelled, ControllerContract):
    o_direct: ClassVar[bool] = False

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        (folder / "f").write_bytes(content)
        return File(folder / "f", writable=writable, o_direct=self.o_direct)


class TestModelledControllerOfDirectFile(TestModelledControllerOfFile):
    o_direct = True


SLOW = plain(
    read_latency_us=(30_000, 30_001, 30_002),
    write_latency_us=(30_000, 30_001, 30_002),
    units=1000,
)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("opcode", [READ, 1, FLUSH, WRITE_ZEROES])
def test_completion_comes_no_earlier_than_the_drive(opcode: int, threads: int) -> None:
    memory = Memory(bytearray(8192))
    with Host(memory.native, threads=threads, model=SLOW.native_parameters()) as host:
        start = time.monotonic()
        assert host.do(opcode, lba=0, blocks=8) == SUCCESS
        assert time.monotonic() - start >= 0.03
        assert host.controller.stats["held"] == 1


def test_refused_command_does_not_wait_for_the_drive() -> None:
    memory = Memory(bytearray(8192))
    with Host(memory.native, model=SLOW.native_parameters()) as host:
        assert host.read(1 << 40, 1) != SUCCESS
        assert host.controller.stats["held"] == 0


def test_outstanding_commands_overlap_and_overtake_each_other() -> None:
    """Four hundred commands of a millisecond take a few of them, in another order than theirs."""
    memory = Memory(bytearray(1 << 20))
    model = plain(read_latency_us=(0, 1000, 3000), units=500)
    with Host(memory.native, depth=512, model=model.native_parameters()) as host:
        (ring,) = host.rings
        for cid in range(400):
            ring.write(READ, cid, lba=cid, blocks=1, prp1=host.buffer.address)
        ring.ring()
        cids = [host.wait(ring).cid for _ in range(400)]
    assert sorted(cids) == list(range(400))
    assert cids != sorted(cids)


def test_stop_owes_nobody_the_latency_of_the_drive() -> None:
    """Held completions are posted at once, as done; what was not fetched is aborted."""
    hours = plain(read_iops=((512, 1),), units=1)
    memory = Memory(bytearray(1 << 20))
    host = Host(memory.native, depth=16, model=hours.native_parameters())
    (ring,) = host.rings
    for cid in range(10):
        ring.write(READ, cid, lba=cid, blocks=1, prp1=host.buffer.address)
        if cid == 4:
            ring.ring()
            host.poll()
    ring.ring()
    assert ring.consume() is None
    start = time.monotonic()

    host.controller.stop()

    assert time.monotonic() - start < 60  # the drive would take hours
    got = [ring.consume() for _ in range(10)]
    assert {c.cid: c.status for c in got if c} == {
        cid: SUCCESS if cid < 5 else COMMAND_ABORTED for cid in range(10)
    }
    host.controller.start()
    host.controller.stop()


def test_thread_with_held_completions_sleeps_until_they_are_due() -> None:
    tenth = plain(read_latency_us=(100_000, 100_001, 100_002))
    memory = Memory(bytearray(8192))
    with Host(memory.native, threads=1, model=tenth.native_parameters()) as host:
        before = time.process_time()
        host.rings[-1].write(READ, 1, lba=0, blocks=1, prp1=host.buffer.address)
        host.rings[-1].ring()
        time.sleep(0.09)
        # Expected: the 0.1 ms that it looks on and a few looks at the doorbells.
        assert time.process_time() - before < 0.03
        assert host.wait(host.rings[-1]).status == SUCCESS


# Under an array.


@pytest.mark.parametrize("path", ["in_place", "direct"])
def test_array_on_a_modelled_drive(path: str) -> None:
    data = np.arange(1 << 16, dtype=np.uint32).reshape(-1, 1024)
    held = data.copy()
    controller = fw.nvme.SoftwareController(route=path, model="980 pro")
    with fw.open(
        Memory(held),
        "r+",
        "uint32",
        data.shape,
        device="cpu",
        cache="64 KiB",
        controller=controller,
    ) as x:
        told = "modelled drive: 980 Pro (a model, not a measurement)"
        assert told in str(x.explain().reason)
        assert x.service.describe()["model"] == told
        index = np.random.default_rng(3).integers(0, len(data), 200)
        assert (x[index] == data[index]).all()
        x[5:9] = 7
        x.flush()
        assert x.service.stats["held"] > 60
    data[5:9] = 7
    assert (held == data).all()


def test_drive_slower_than_the_time_limit_is_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read raises, and closing takes no longer than a controller without a model would."""
    with fw.create(tmp_path / "x.npy", "uint32", (64, 1024)) as x:
        x[:] = 5
    hung = plain(read_iops=((512, 1),), read_latency_us=(900_000, 950_000, 1_000_000))
    controller = fw.nvme.SoftwareController(model=hung)
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "0.8")
    x = fw.open(tmp_path / "x.npy", device="cpu", cache="64 KiB", controller=controller)
    with pytest.raises(ControllerTimeout):
        x[0]
    start = time.monotonic()
    with pytest.raises(ControllerTimeout):
        x.close()
    assert time.monotonic() - start < 5.0
