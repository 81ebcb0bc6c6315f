"""The kernel that drives many modelled drives, and the benchmark around it, in small."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from benchmarks.drives import scaling
from benchmarks.drives.scaling import Drives, DrivesParams, DriveStruct, Load, Namespaces
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError


def test_mirrored_structures_have_the_same_layout() -> None:
    header = Path(scaling.__file__).with_name("drives.cuh")
    program = fw.compile(
        f"""
#include "{header.name}"
FW_KERNEL layouts(uint64_t* out) {{
  out[0] = sizeof(bench::drives_params);
  out[1] = offsetof(bench::drives_params, opcode);
  out[2] = sizeof(bench::drive);
}}
""",
        "cpu",
        include_dirs=[header.parent],
    )
    out = np.zeros(3, np.uint64)
    program["layouts"](out, warps=1)

    mirrors = [ctypes.sizeof(DrivesParams), DrivesParams.opcode.offset, ctypes.sizeof(DriveStruct)]
    assert out.tolist() == mirrors


@pytest.mark.parametrize("bits", [0, 1, 2, 7, 12])
def test_commands_of_a_drive_name_each_block_once(bits: int) -> None:
    j = np.arange(1 << bits, dtype=np.uint64)
    for seed in (0, 1, 0x1234567 * 999):
        blocks = scaling.scatter_blocks(j, np.uint64(seed), bits)
        assert sorted(blocks.tolist()) == j.tolist()


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("depth", "window"),
    [
        (1024, 1),
        (1024, 64),
        (2, 1),
        # More outstanding than the rings have slots: a warp that held slots while it waits for
        # others' would never get them.
        (2, 64),
        (8, 3),
    ],
)
def test_launch_moves_every_block_of_every_drive(write: bool, depth: int, window: int) -> None:
    device = resolve("cpu")
    namespaces = Namespaces(3, 1 << 20)
    commands = (1 << 19) // 4096  # all blocks of the half

    with Drives(device, namespaces, "P5800X", 3, queue_pairs=1, depth=depth) as drives:
        load = Load(3, 4096, write, device.threads, window)
        drives.seconds(load, commands)

        assert drives.right(load, commands)
        for number, controller in enumerate(drives.controllers):
            stats = controller.stats()
            assert stats["commands"]["write" if write else "read"] == commands
            assert stats["held"] == commands
            written = namespaces.words_of(number, 1 << 19, 1 << 19)
            assert written.all() == write, "each block of the half was written, or none"


def test_data_that_is_not_what_it_must_be_is_noticed() -> None:
    device = resolve("cpu")
    namespaces = Namespaces(2, 1 << 20)
    with Drives(device, namespaces, "P5800X", 2, queue_pairs=2) as drives:
        for write in (False, True):
            load = Load(2, 512, write, device.threads, 8)
            drives.seconds(load, 1024)
            assert drives.right(load, 1024)
            if write:
                namespaces.words[:] = 0
            else:
                namespaces.words[:] += 1
            assert not drives.right(load, 1024)


def test_failed_commands_are_noticed() -> None:
    """Half of the namespace is missing, so that half of the commands is out of its range."""
    device = resolve("cpu")
    namespaces = Namespaces(1, 1 << 20)
    with Drives(device, namespaces, "P5800X", 1, queue_pairs=2) as drives:
        drives.namespaces.half_bytes *= 4
        load = Load(1, 4096, False, device.threads, 8)
        drives.seconds(load, 512)
        assert not drives.right(load, 512)
        drives.namespaces.half_bytes //= 4
        drives.seconds(load, 64)
        assert drives.right(load, 64)


def test_benchmark_runs_in_small() -> None:
    report = scaling.run("cpu", drives=2, milliseconds=1, drive_mib=1, queue_pairs=2)

    assert report.wrong == []
    assert all("modelled drive" in row.name for row in report.rows)
    assert sum(row.checked is True for row in report.rows) > 20
    assert any("BaM, Figure 9" in row.paper for row in report.rows)
    assert any("AGILE, Figure 6" in row.paper for row in report.rows)
    names = {curve["name"] for curve in report.settings["curves"]}
    assert "1 modelled drive P5800X, 512 B random reads, synchronous" in names


@pytest.mark.parametrize(
    "options", [{"drives": 0}, {"drives": 17}, {"drive_mib": 3}, {"milliseconds": 0}]
)
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        scaling.run("cpu", **options)
