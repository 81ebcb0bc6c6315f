"""`flashwarp doctor` finishes on any machine, says what is missing, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashwarp.cli import doctor
from flashwarp.cli import main as cli
from flashwarp.errors import DeviceError


def findings(path: Path) -> dict[str, doctor.Finding]:
    return {found.name: found for _, found in doctor.examine(path) if found is not None}


def run(*arguments: str) -> int:
    """Run the command, and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.run(["doctor", *arguments])
    return int(str(ended.value.code))


def without_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure next to nothing, for tests that look at something else."""
    monkeypatch.setattr(doctor, "_FILE_BYTES", doctor._FILE_BYTES_MIN)
    monkeypatch.setattr(doctor, "_READ_SECONDS", 0.05)


def test_report_is_complete_quick_and_leaves_no_file(tmp_path: Path) -> None:
    start = time.monotonic()

    found = findings(tmp_path)

    assert time.monotonic() - start < 30  # 10 s are promised, to a machine with nothing else to do
    assert [name for name, each in found.items() if each.state == "broken"] == []
    assert all(each.detail for each in found.values())
    assert list(tmp_path.iterdir()) == []


def test_every_check_is_announced_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_seconds(monkeypatch)

    events = list(doctor.examine(tmp_path))

    assert all(found is None for _, found in events[::2])
    assert [name for name, _ in events[::2]] == [found.name for _, found in events[1::2] if found]


def test_json_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from flashwarp.cli.main import main; main()"]
    command += ["doctor", "--json", "--path", str(tmp_path)]

    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    report = json.loads(result.stdout)
    assert report["works"] is True
    assert {finding["state"] for finding in report["findings"]} <= {"ok", "limited", "missing"}


def test_table_names_the_reason_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_seconds(monkeypatch)

    def no_driver() -> int:
        raise DeviceError("libcuda.so.1 was not found")

    monkeypatch.setattr(doctor.cuda_api, "device_count", no_driver)

    assert run("--path", str(tmp_path)) == 0

    shown = capsys.readouterr().out
    assert "libcuda.so.1 was not found" in shown
    assert "→ without a GPU, flashwarp runs on the CPU" in shown
    assert "flashwarp works here." in shown


def test_without_the_native_part_it_says_so_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_seconds(monkeypatch)

    def broken() -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(doctor, "_native", broken)

    code = run("--json", "--path", str(tmp_path))

    report = json.loads(capsys.readouterr().out)
    states = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert code == 1
    assert states["native part"] == "broken"
    assert report["works"] is False


def test_crash_of_one_check_becomes_its_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_seconds(monkeypatch)

    def crash() -> doctor.Finding:
        raise KeyError("MemAvailable")

    monkeypatch.setattr(doctor, "_check_machine", crash)

    found = findings(tmp_path)

    assert found["machine"].state == "broken"
    assert "MemAvailable" in found["machine"].detail
    assert found["io_uring"].detail


def test_directory_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by chmod: root may write everywhere.
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)

    found = findings(tmp_path)

    assert found["disk"].state == "missing"
    assert "Read-only file system" in found["disk"].detail


def test_path_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_seconds(monkeypatch)
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(8192))

    found = findings(file)

    assert found["file system"].values["path"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == bytes(8192)


def test_path_that_does_not_exist_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--path", str(tmp_path / "nowhere")) == 2

    assert "nowhere does not exist" in capsys.readouterr().err


@pytest.mark.gpu
def test_gpu_is_found_and_its_link_measured(tmp_path: Path) -> None:
    found = findings(tmp_path)

    assert found["GPU"].state == "ok"
    assert found["pinned memory"].state == "ok"
    assert found["host-GPU link"].values["to_gpu_bytes_per_s"] > 1e9


def test_a_machine_without_a_compiler_is_told_what_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = doctor._check_host_compiler()
    (tmp_path / "g++").touch(0o755)
    found = doctor._check_host_compiler()

    assert absent.state == "missing"
    assert "samples of graphs: apt-get install g++" in absent.advice
    assert (found.state, found.detail) == ("ok", str(tmp_path / "g++"))


def test_folder_of_compiled_code_that_is_not_used_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_CACHE_DIR", str(tmp_path))

    used = doctor._check_compiled_code()
    tmp_path.chmod(0o777)
    unused = doctor._check_compiled_code()

    assert (used.state, used.values["used"]) == ("ok", True)
    assert (unused.state, unused.values["used"]) == ("limited", False)
    assert "in memory" in unused.detail
    assert unused.advice.startswith(f"chmod 700 {tmp_path}")
