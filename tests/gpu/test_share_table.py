"""Lines in threads' own buffers on a GPU: between warps, lanes and blocks, in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp.device import CudaDevice, DeviceMemory

pytestmark = pytest.mark.gpu

KERNELS = Path(__file__).parents[1] / "support" / "share_kernels.cu"
LINE_WORDS = 512
LINES = 33
SUCCESS = 0

# A block's warps keep lines in its shared memory, and other blocks want the same ones; a lane's own
# stack is refused.
BLOCKS = """
#include "flashwarp/array/shared.cuh"
#include "flashwarp/base/block.cuh"

FW_KERNEL add_in_shared_memory(fw::array<uint64_t> x, fw::share_table t, uint64_t rounds,
                               uint64_t* failed) {
  __shared__ alignas(16) uint64_t own[8][512];
  const uint64_t line = 512, lines = x.size() / line;
  const uint64_t warp = fw::warp::index(), lane = fw::warp::lane();
  fw::shared<uint64_t> s(x, t);
  uint64_t* mine = own[fw::block::warp_rank()];
  for (uint64_t r = 0; r < rounds; r++) {
    const uint64_t first = (warp * 5 + r) % lines * line;
    uint32_t status = fw::warp::acquire(s, first, mine);
    // Elements that no other warp adds to: 16 warps share a line.
    const uint64_t i = first + warp % 16 * 32 + lane;
    if (status == fw::nvme::kSuccess) status = s.store(i, s[i] + 1);
    const uint32_t released = fw::warp::release(s);
    if (status != fw::nvme::kSuccess || released != fw::nvme::kSuccess) {
      fw::atomic::add(failed, uint64_t(1));
    }
  }
}

FW_KERNEL use_own_stack(fw::array<uint64_t> x, fw::share_table t, uint64_t* seen) {
  alignas(16) uint64_t own[512];
  if (fw::base::thread_index() != 0) return;
  fw::shared<uint64_t> s(x, t);
  seen[0] = s.acquire(5, own);
  seen[1] = s[5];
}
"""


@pytest.fixture(scope="module")
def program(device: CudaDevice) -> fw.program.Program:
    return fw.compile(KERNELS, device)


@pytest.fixture(scope="module")
def blocks(device: CudaDevice) -> fw.program.Program:
    return fw.compile(BLOCKS, device)


@pytest.fixture(params=["memory", "file"])
def x(request: pytest.FixtureRequest, device: CudaDevice, tmp_path: Path) -> Iterator[fw.Array]:
    """33 lines, of which eight have frames, by the in-place route or through bounce buffers."""
    data = np.arange(LINES * LINE_WORDS, dtype=np.uint64)
    if request.param == "memory":
        storage: fw.storage.Storage = fw.storage.Memory(data)
    else:
        data.tofile(tmp_path / "x.bin")
        storage = fw.storage.File(tmp_path / "x.bin", writable=True)
    with fw.open(storage, "r+", np.uint64, data.shape, device=device, cache="32 KiB") as x:
        yield x


@pytest.fixture
def own(device: CudaDevice) -> Iterator[DeviceMemory]:
    with device.allocate(LINE_WORDS * LINE_WORDS * 8) as memory:
        yield memory


def words(device: CudaDevice, values: npt.ArrayLike, dtype: str = "u8") -> DeviceMemory:
    host = np.array(values, dtype)
    memory = device.allocate(host.nbytes)
    device.upload(memory.address, host)
    return memory


def values(memory: DeviceMemory) -> list[int]:
    data = memory.device.download(memory.address, memory.nbytes)
    return [int(value) for value in np.frombuffer(data, np.uint64)]


def hazard(
    program: fw.program.Program, name: str, x: fw.Array, own: DeviceMemory, other: int
) -> list[int]:
    device = program.device
    assert isinstance(device, CudaDevice)
    with (
        fw.array.ShareTable(x) as table,
        words(device, [0], "u4") as turn,
        words(device, [999] * 6) as seen,
    ):
        warps = other // 32 + 1
        program[name](x, table.kernel_handle, own, turn, seen, other, warps=warps)
        x.wait()
        table.check()
        return values(seen)


# The second thread is a lane of another block, of another warp, or of the same warp.
others = pytest.mark.parametrize("other", [1, 33, 300])


@others
def test_read_after_write_sees_the_owners_buffer(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory, other: int
) -> None:
    seen = hazard(program, "read_after_write", x, own, other)

    assert seen[:5] == [SUCCESS, SUCCESS, SUCCESS, 100, SUCCESS]
    assert x[4:7].tolist() == [4, 100, 6]


@others
def test_write_after_read_leaves_the_read_its_old_value(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory, other: int
) -> None:
    seen = hazard(program, "write_after_read", x, own, other)

    assert seen == [SUCCESS, SUCCESS, 5, 100, SUCCESS, SUCCESS]
    assert x[5] == 100


@others
def test_write_after_write_keeps_the_last_one(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory, other: int
) -> None:
    seen = hazard(program, "write_after_write", x, own, other)

    assert sorted(seen[2:4]) == [0, 1], "one owner, one user"
    assert [seen[k] for k in (0, 1, 4, 5)] == [SUCCESS] * 4
    assert x[4:8].tolist() == [4, 200, 201, 7]


@others
def test_readers_who_hold_nothing_look_into_the_table_first(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory, other: int
) -> None:
    seen = hazard(program, "look_first", x, own, other)

    assert seen == [101, 100, 101, 5, 100, SUCCESS]


@pytest.mark.parametrize("entries", [4, 64, 4096])
def test_additions_of_all_lanes_are_all_there(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory, entries: int
) -> None:
    rounds, device = 40, x.device
    assert isinstance(device, CudaDevice)
    with (
        fw.array.ShareTable(x, entries=entries) as table,
        words(device, [0]) as full,
        words(device, [0]) as failed,
    ):
        program["add_everywhere"](x, table.kernel_handle, own, rounds, full, failed, warps=16)
        x.wait()
        table.check()
        assert values(failed) == [0]
        assert entries != 4 or values(full)[0] > 0

    expected = np.arange(LINES * LINE_WORDS, dtype=np.uint64)
    for thread in range(LINE_WORDS):
        for r in range(rounds):
            line = (thread * 7 + r * (thread % 5 + 1)) % LINES
            expected[line * LINE_WORDS + thread] += np.uint64(1)
    np.testing.assert_array_equal(x[:], expected)


def test_copies_in_shared_memory_are_their_blocks_own(
    blocks: fw.program.Program, x: fw.Array
) -> None:
    rounds, device, warps = 60, x.device, 16
    assert isinstance(device, CudaDevice)
    with fw.array.ShareTable(x) as table, words(device, [0]) as failed:
        blocks["add_in_shared_memory"](x, table.kernel_handle, rounds, failed, warps=warps)
        x.wait()
        table.check()
        assert values(failed) == [0]

    expected = np.arange(LINES * LINE_WORDS, dtype=np.uint64)
    for warp in range(warps):
        for r in range(rounds):
            first = (warp * 5 + r) % LINES * LINE_WORDS + warp % 16 * 32
            expected[first : first + 32] += np.uint64(1)
    np.testing.assert_array_equal(x[:], expected)


def test_buffer_on_a_lanes_own_stack_is_refused(blocks: fw.program.Program, x: fw.Array) -> None:
    device = x.device
    assert isinstance(device, CudaDevice)
    with fw.array.ShareTable(x) as table, words(device, [9, 9]) as seen:
        blocks["use_own_stack"](x, table.kernel_handle, seen, warps=1)
        x.wait()

        assert values(seen)[0] == 0x7FA
        assert values(seen)[1] == 5, "the line is read where it is"
