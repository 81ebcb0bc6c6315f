"""The memory that is available: the machine's, or less where a control group limits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashwarp.device import CpuDevice, host_memory

MIB = 1 << 20
GIB = 1 << 30


def fake_host(folder: Path, groups: str) -> tuple[Path, Path]:
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9999 kB\nMemAvailable: {4 << 20} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    return proc, folder / "cgroup"


def group_v2(place: Path, limit: str, used: int, files: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.current").write_text(f"{used}\n")
    (place / "memory.stat").write_text(
        f"anon 5\nfile 7\nactive_file {files // 2}\ninactive_file {files - files // 2}\n"
    )


def test_memory_without_control_groups_is_the_machines(tmp_path: Path) -> None:
    proc, groups = fake_host(tmp_path, "")

    assert host_memory.available_bytes(proc, groups) == 4 * GIB


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", 4 * GIB), (str(16 * GIB), 4 * GIB), (str(GIB), 700 * MIB), ("4096", 0)],
)
def test_a_control_group_limits_what_is_available(
    tmp_path: Path, limit: str, expected: int
) -> None:
    proc, groups = fake_host(tmp_path, "0::/a/b\n")
    group_v2(groups / "a" / "b", limit, used=524 * MIB, files=200 * MIB)

    assert host_memory.available_bytes(proc, groups) == expected


def test_a_group_above_limits_too(tmp_path: Path) -> None:
    proc, groups = fake_host(tmp_path, "0::/a/b\n")
    group_v2(groups / "a" / "b", "max", used=0, files=0)
    group_v2(groups / "a", str(2 * GIB), used=GIB, files=0)

    assert host_memory.available_bytes(proc, groups) == GIB


def test_a_container_that_sees_only_its_own_group_at_the_root(tmp_path: Path) -> None:
    proc, groups = fake_host(tmp_path, "0::/docker/0123\n")
    group_v2(groups, str(GIB), used=GIB // 2, files=0)

    assert host_memory.available_bytes(proc, groups) == GIB // 2


def test_a_control_group_of_version_1_limits_too(tmp_path: Path) -> None:
    proc, groups = fake_host(tmp_path, "4:memory:/a\n1:cpu,cpuacct:/\n0::/\n")
    place = groups / "memory" / "a"
    place.mkdir(parents=True)
    (place / "memory.limit_in_bytes").write_text(str(GIB))
    (place / "memory.usage_in_bytes").write_text(str(600 * MIB))
    (place / "memory.stat").write_text(
        f"active_file 1\ntotal_active_file {100 * MIB}\ntotal_inactive_file {76 * MIB}\n"
    )

    assert host_memory.available_bytes(proc, groups) == 600 * MIB


def test_without_proc_it_is_what_nobody_uses(tmp_path: Path) -> None:
    found = host_memory.available_bytes(tmp_path / "none", tmp_path / "none")

    assert 0 < found < host_memory.total_bytes()


def test_the_cpu_device_has_no_more_memory_than_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 12345)

    assert CpuDevice(1).memory_info().free_bytes == 12345
