"""`flashwarp bench`: what it prints, checks and refuses, in runs of a second on the CPU device."""

import json

import numpy as np
import pytest

from benchmarks import BENCHES
from flashwarp.cli import bench
from flashwarp.cli.main import main
from flashwarp.probe import disk, reach


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs the command and returns its exit code."""
    monkeypatch.setattr(reach, "_DISK_S", 0.01)
    monkeypatch.setattr(disk, "_WRITE_SECONDS", 0.01)

    def call(*arguments):
        options = ["--device", "cpu", "--size", "2 MiB", "--runs", "1", "--folder", str(tmp_path)]
        monkeypatch.setattr("sys.argv", ["flashwarp", "bench", *options, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return call


def test_every_part_stands_beside_its_ceiling_and_is_checked(run, tmp_path, capsys):
    path = tmp_path / "record.json"

    assert run("--json", str(path)) == 0

    record = json.loads(path.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    ours = {name for name in rows if name.partition(":")[0] not in ("host memory", "disk")}
    assert {name.partition(":")[0] for name in ours} == {*bench._PARTS, "restart"}
    assert all(rows[name]["checked"] and rows[name]["ratio"] > 0 for name in ours)
    told = capsys.readouterr().out
    assert all(name in told for name in rows)
    assert record["command"].startswith("flashwarp bench --device cpu")
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


def test_only_what_is_asked_for_is_measured(run, tmp_path):
    path = tmp_path / "record.json"

    assert run("--parts", "load", "--json", str(path)) == 0

    names = {row["name"].partition(":")[0] for row in json.loads(path.read_text())["rows"]}
    assert names <= {"host memory", "disk", "load"}
    assert "load" in names


@pytest.mark.parametrize("part", bench._PARTS)
def test_wrong_data_is_found(run, monkeypatch, capsys, part):
    content, calls = reach._content, []

    def others(rows):
        """Something else at each call."""
        calls.append(rows)
        return content(rows) + np.int32(len(calls))

    monkeypatch.setattr(reach, "_content", others)

    assert run("--parts", part) == 1

    assert f"wrong data: {part}" in capsys.readouterr().err


def test_a_file_system_without_o_direct_is_left_out(run, monkeypatch, capsys):
    monkeypatch.setattr(disk, "direct_reads_work", lambda path: False)

    assert run("--parts", "gather") == 0

    told = capsys.readouterr().out
    assert "left out: the disk: no O_DIRECT on this file system" in told
    assert "on the disk" not in told


@pytest.mark.parametrize("name", bench._MOVED)
def test_a_name_of_a_benchmark_is_refused_by_its_new_command(monkeypatch, capsys, name):
    monkeypatch.setattr("sys.argv", ["flashwarp", "bench", name])
    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    new, _, part = bench._MOVED[name].partition(" ")
    assert f"`python -m benchmarks {bench._MOVED[name]}`" in capsys.readouterr().err
    assert (part or new) in BENCHES[new]
