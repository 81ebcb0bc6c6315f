"""Lines in threads' own buffers, on the CPU device: hazards, refusals, leaks and failures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp._jit import compiler, elf
from flashwarp.array.share_table import ENTRIES_MAX, ShareTableStruct
from flashwarp.device import CpuDevice, DeviceMemory
from flashwarp.errors import ArgumentError, ClosedError, ShareError, StorageError
from flashwarp.testing.faults import Faulty
from support.samples import sample

KERNELS = Path(__file__).parents[1] / "support" / "share_kernels.cu"
HEADER = Path(fw.__file__).parent / "include" / "flashwarp" / "cache" / "share_table.cuh"
LINE_WORDS = 512
LINES = 9
SUCCESS, LATER, FULL, MISALIGNED, TIMED_OUT, OUT_OF_RANGE = 0, 0x7FD, 0x7FC, 0x7FB, 0x7F9, 0x80


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    with CpuDevice(threads=4) as device:
        yield device


@pytest.fixture(scope="module")
def program(device: CpuDevice) -> fw.program.Program:
    return fw.compile(KERNELS, device)


@pytest.fixture
def x(device: CpuDevice) -> Iterator[fw.Array]:
    """Nine lines, of which four have frames."""
    data = np.arange(LINES * LINE_WORDS, dtype=np.uint64)
    with fw.open(
        fw.storage.Memory(data), "r+", np.uint64, data.shape, device=device, cache="16 KiB"
    ) as x:
        yield x


@pytest.fixture
def own(device: CpuDevice) -> Iterator[DeviceMemory]:
    with device.allocate(64 * LINE_WORDS * 8) as memory:
        yield memory


def hazard(
    program: fw.program.Program,
    name: str,
    x: fw.Array,
    table: fw.array.ShareTable,
    own: DeviceMemory,
) -> npt.NDArray[np.uint64]:
    """Run a kernel of two threads; return what they have seen."""
    turn = np.zeros(1, np.uint32)
    seen = np.full(6, 999, np.uint64)
    program[name](x, table.kernel_handle, own, turn, seen, 1, warps=2)
    x.wait()
    table.check()
    return seen


def test_read_after_write_sees_the_owners_buffer(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory
) -> None:
    with fw.array.ShareTable(x) as table:
        seen = hazard(program, "read_after_write", x, table, own)

    assert seen[:5].tolist() == [SUCCESS, SUCCESS, SUCCESS, 100, SUCCESS]
    assert x[4:7].tolist() == [4, 100, 6]


def test_write_after_read_leaves_the_read_its_old_value(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory
) -> None:
    with fw.array.ShareTable(x) as table:
        seen = hazard(program, "write_after_read", x, table, own)

    assert seen.tolist() == [SUCCESS, SUCCESS, 5, 100, SUCCESS, SUCCESS]
    assert x[5] == 100


def test_write_after_write_keeps_the_last_one(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory
) -> None:
    with fw.array.ShareTable(x) as table:
        seen = hazard(program, "write_after_write", x, table, own)

    assert sorted(seen[2:4].tolist()) == [0, 1], "one owner, one user"
    assert seen[[0, 1, 4, 5]].tolist() == [SUCCESS] * 4
    assert x[4:8].tolist() == [4, 200, 201, 7]


def test_readers_who_hold_nothing_look_into_the_table_first(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory
) -> None:
    with fw.array.ShareTable(x) as table:
        seen = hazard(program, "look_first", x, table, own)

    past_the_table, through_a_view, stored = seen[3:].tolist()
    assert (past_the_table, through_a_view, stored) == (5, 100, SUCCESS)
    assert seen[:3].tolist() == [101, 100, 101], "the owner, and plain loads after its release"


@pytest.mark.parametrize("entries", [4, 8, 1024])
def test_additions_of_many_threads_are_all_there(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory, entries: int
) -> None:
    rounds = 500
    full, failed = np.zeros(1, np.uint64), np.zeros(1, np.uint64)

    with fw.array.ShareTable(x, entries=entries) as table:
        program["add_everywhere"](x, table.kernel_handle, own, rounds, full, failed)
        x.wait()
        table.check()

    expected = np.arange(LINES * LINE_WORDS, dtype=np.uint64)
    for thread in range(4):
        for r in range(rounds):
            line = (thread * 7 + r * (thread % 5 + 1)) % LINES
            expected[line * LINE_WORDS + thread] += np.uint64(1)
    assert failed[0] == 0
    np.testing.assert_array_equal(x[:], expected)
    assert x.stats.write_backs > 0, "lines that had copies were evicted meanwhile"


def test_full_table_is_a_status(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory
) -> None:
    seen = np.zeros(9, np.uint64)

    with fw.array.ShareTable(x, entries=1) as table:
        program["fill_table"](x, table.kernel_handle, own, seen)

        assert table.entries == 4
    assert seen[:5].tolist() == [SUCCESS] * 4 + [FULL]
    assert seen[5] == 4 * LINE_WORDS + 1, "the line is read where it is"
    assert seen[6:].tolist() == [SUCCESS] * 3


def test_buffers_that_cannot_be_copies_are_refused(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory
) -> None:
    seen = np.full(5, 999, np.uint64)

    with fw.array.ShareTable(x) as table:
        program["refusals"](x, table.kernel_handle, own, seen)

    assert seen.tolist() == [MISALIGNED, MISALIGNED, 0, SUCCESS, OUT_OF_RANGE]
    with pytest.raises(IndexError, match=str(LINES * LINE_WORDS)):
        x.wait()


def test_line_that_a_kernel_leaves_is_named(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory
) -> None:
    with fw.array.ShareTable(x) as table:
        program["leave"](x, table.kernel_handle, own, 2)

        with pytest.raises(ShareError, match=r"2 lines .*line 0 of .*modified, line 1 of ") as info:
            table.check()

        assert info.value.lines == (0, 1)
        table.check()  # the table is empty again
        hazard(program, "write_after_write", x, table, own)
    assert x[1] == 1, "what was stored to a line that was left is lost, as the error says"


def test_many_lines_left_are_counted(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory
) -> None:
    table = fw.array.ShareTable(x.cache)
    program["leave"](x, table.kernel_handle, own, LINES)

    with pytest.raises(ShareError, match=r"9 lines.*line 3 of the cache, 5 more"):
        table.close()

    assert table.closed
    table.close()


def test_discard_gives_up_what_was_stored(
    program: fw.program.Program, x: fw.Array, own: DeviceMemory
) -> None:
    seen = np.full(5, 999, np.uint64)

    with fw.array.ShareTable(x) as table:
        program["change"](x, table.kernel_handle, own, 100, 0, seen)

    assert seen[:2].tolist() == [SUCCESS, SUCCESS]
    assert x[5] == 5


def test_owner_that_waits_for_ever_is_told_and_keeps_the_line(
    program: fw.program.Program,
    device: CpuDevice,
    own: DeviceMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "0.8")
    seen = np.full(5, 999, np.uint64)
    data = np.arange(LINE_WORDS, dtype=np.uint64)
    storage = fw.storage.Memory(data)
    with (
        fw.open(storage, "r+", np.uint64, data.shape, device=device) as x,
        fw.array.ShareTable(x) as table,
    ):
        program["wait_for_itself"](x, table.kernel_handle, own, seen)

        with pytest.raises(ShareError, match=r"waited 0.2 s .* bytes 0\.\. of the array"):
            x.wait()
        table.check()
        assert seen.tolist() == [LATER, TIMED_OUT, 1, SUCCESS, SUCCESS]
        assert x[5] == 100


def faulty(path: Path, device: CpuDevice, faults: str) -> fw.Array:
    np.arange(LINES * LINE_WORDS, dtype=np.uint64).tofile(path)
    storage = Faulty(fw.storage.File(path, writable=True), faults)
    return fw.open(storage, "r+", np.uint64, (LINES * LINE_WORDS,), device=device, cache="16 KiB")


def test_failed_read_leaves_no_entry(
    program: fw.program.Program, tmp_path: Path, device: CpuDevice, own: DeviceMemory
) -> None:
    seen = np.full(5, 999, np.uint64)
    with faulty(tmp_path / "x.bin", device, "read eio") as x, fw.array.ShareTable(x) as table:
        program["change"](x, table.kernel_handle, own, 100, 1, seen)

        with pytest.raises(StorageError, match="a kernel"):
            x.wait()

        assert seen[0] == 0x281
        table.check()


def test_copy_that_cannot_be_written_back_stays_with_its_owner(
    program: fw.program.Program, tmp_path: Path, device: CpuDevice, own: DeviceMemory
) -> None:
    seen = np.full(5, 999, np.uint64)
    x = faulty(tmp_path / "x.bin", device, "write eio")
    # All frames of the one set hold lines that cannot be written, and the copy's line is none of
    # them: there is no room for it in the cache.
    with fw.array.ShareTable(x) as table:
        crowd = device.allocate(4 * LINE_WORDS * 8)
        program_of_stores(device)["crowd"](x, table.kernel_handle, own, crowd, seen)

        with pytest.raises(StorageError, match="a kernel"):
            x.wait()
        table.check()
        crowd.close()
    with pytest.raises(StorageError):
        x.close()

    assert seen[0] == SUCCESS
    assert seen[1] == 0x280, "the write fault that was in the way"
    assert seen[2:4].tolist() == [1, 100], "still held, with what was stored"
    assert seen[4] == SUCCESS, "until its owner gives it up"


def program_of_stores(device: CpuDevice) -> fw.program.Program:
    return fw.compile(
        """
#include "flashwarp/array/shared.cuh"
FW_KERNEL crowd(fw::array<uint64_t> x, fw::share_table t, uint64_t* own, uint64_t*,
                uint64_t* seen) {
  if (fw::base::thread_index() != 0) return;
  fw::shared<uint64_t> s(x, t);
  const uint64_t line = fw::cache::line_bytes(x.geometry) / 8;
  seen[0] = s.acquire(5, own);
  s.store(5, 100);
  for (uint64_t k = 1; k < 9; k++) x.store(k * line, 1);
  seen[1] = s.release();
  seen[2] = s.holds_line();
  seen[3] = s[5];
  seen[4] = s.discard();
}
""",
        device,
    )


# Without the table.


PLAIN = """
#include "flashwarp/array/shared.cuh"
FW_KERNEL scale(const FW_GRID_CONSTANT fw::array<float> x,
                const FW_GRID_CONSTANT fw::share_table t, float* own, uint64_t n) {
  const uint64_t step = fw::base::thread_count();
#if defined(PLAIN)
  fw::array<float> s = x;
#else
  fw::shared<float> s(x, t);
#endif
  for (uint64_t i = fw::base::thread_index(); i < n; i += step) {
#if !defined(PLAIN)
    s.acquire(i, own);
#endif
    s.store(i, s[i] * 2.0f);
#if !defined(PLAIN)
    s.release();
#endif
  }
}
"""


def test_without_the_table_the_same_source_is_plain_accesses(device: CpuDevice) -> None:
    program = fw.compile(PLAIN, device, defines={"FW_SHARE_TABLE": 0})
    data = np.arange(3000, dtype=np.float32)

    with fw.open(fw.storage.Memory(data.copy()), "r+", "f4", (3000,), device=device) as x:
        program["scale"](x, bytes(ShareTableStruct()), None, 3000)
        x.wait()
        np.testing.assert_array_equal(x[:], data * 2)


@pytest.mark.parametrize("arch", sample(["sm_80", "sm_90"], 2))
def test_without_the_table_the_code_is_that_of_plain_accesses(arch: str) -> None:
    text = compiler.Source("plain.cu", PLAIN.encode())

    without = compiler.compile_source(arch, text, options=("-DFW_SHARE_TABLE=0",))
    plain = compiler.compile_source(arch, text, options=("-DPLAIN",))
    shared = compiler.compile_source(arch, text)

    assert without.kernels["scale"] == plain.kernels["scale"], "registers, stack, spills"
    # The assembler lays equal functions out differently, by some instructions of thousands.
    assert code_bytes(without) == pytest.approx(code_bytes(plain), rel=0.005)
    assert code_bytes(shared) > 1.2 * code_bytes(plain)


def code_bytes(artifact: Any) -> int:
    """Bytes of code of all functions."""
    return sum(
        len(content) for name, content in elf.sections(artifact.cubin) if name.startswith(".text.")
    )


# The host's half.


def test_the_most_entries_are_those_of_the_header() -> None:
    text = HEADER.read_text()

    [shift] = re.findall(r"kShareEntriesMax = 1u << (\d+)", text)

    assert 1 << int(shift) == ENTRIES_MAX


def test_wrong_arguments_are_refused(x: fw.Array) -> None:
    with pytest.raises(ArgumentError, match="entries=0"):
        fw.array.ShareTable(x, entries=0)
    with pytest.raises(ArgumentError, match=str(ENTRIES_MAX)):
        fw.array.ShareTable(x, entries=ENTRIES_MAX + 1)
    with pytest.raises(ArgumentError, match="an Array or a Cache"):
        fw.array.ShareTable(np.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "got"), [(1, 4), (4, 4), (5, 8), (1000, 1024), (1025, 2048)])
def test_room_is_rounded_up(x: fw.Array, asked: int, got: int) -> None:
    with fw.array.ShareTable(x, entries=asked) as table:
        assert table.entries == got


def test_closed_table_says_so(x: fw.Array) -> None:
    table = fw.array.ShareTable(x)
    table.close()

    with pytest.raises(ClosedError):
        table.check()
    with pytest.raises(ClosedError):
        _ = table.kernel_handle
    assert "closed" in repr(table)


def test_table_that_is_lost_warns(x: fw.Array) -> None:
    table = fw.array.ShareTable(x)

    with pytest.warns(ResourceWarning, match="was not closed"):
        del table


def test_forked_child_leaves_the_table_to_its_parent(x: fw.Array) -> None:
    with fw.array.ShareTable(x) as table:
        child = os.fork()
        if child == 0:
            table.close()
            os._exit(0 if not table.closed else 1)
        assert os.waitpid(child, 0)[1] == 0
