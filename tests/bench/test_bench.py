"""The bench command: its registry, its timing, its report."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Annotated, get_type_hints

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.bench import BENCHES, first_light
from flashwarp.cli import bench as command
from flashwarp.cli.main import main
from flashwarp.device import resolve
from flashwarp.probe import report as report_module
from flashwarp.probe.report import Report, Row, provenance
from flashwarp.probe.timing import device_seconds, in_turns, median_of


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["flashwarp", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def report_of(*rows):
    report = Report("Some", "cpu", {}, {})
    for row in rows:
        report.add(row)
    return report


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every run of a benchmark `fake`, which is the default, too."""
    seen = []

    def run(
        device: str | None,
        folder: Path,
        size: Annotated[int, "How large."] = 3,
        checked: Annotated[bool, "Whether right."] = True,
    ) -> Report:
        seen.append((device, folder.is_dir(), size))
        return report_of(Row("a", 1.0, "GB/s", checked=checked))

    module = ModuleType("flashwarp.bench.fake")
    module.run = run
    monkeypatch.setitem(sys.modules, "flashwarp.bench.fake", module)
    monkeypatch.setitem(BENCHES, "fake", "Nothing.")
    monkeypatch.setattr(command, "DEFAULT", "fake")
    return seen


@pytest.mark.parametrize("name", BENCHES)
def test_every_option_of_a_benchmark_has_a_default_and_a_help_text(name):
    run = importlib.import_module(f"flashwarp.bench.{name}").run

    hints = get_type_hints(run, include_extras=True)
    for key, parameter in inspect.signature(run).parameters.items():
        if key not in ("device", "folder"):
            assert parameter.default is not inspect.Parameter.empty
            assert isinstance(hints[key].__metadata__[0], str)


def test_list_names_every_benchmark(monkeypatch, capsys):
    assert run_main(monkeypatch, "--list") == 0

    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHES)


@pytest.mark.parametrize("name", [(), ("fake",)])
def test_options_are_the_parameters_of_the_benchmark(monkeypatch, tmp_path, calls, name):
    options = ("--size", "7", "--device", "cpu", "--folder", str(tmp_path))

    assert run_main(monkeypatch, *name, *options, "--json", str(tmp_path / "x.json")) == 0

    assert calls == [("cpu", True, 7)]
    assert [row["name"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_wrong_data_ends_with_1(monkeypatch, calls, capsys):
    assert run_main(monkeypatch, "fake", "--no-checked") == 1

    assert "wrong data: a" in capsys.readouterr().err


def test_a_part_that_fails_costs_no_other_part(monkeypatch, calls, tmp_path, capsys):
    def run(device: str | None, folder: Path) -> Report:
        report = report_of(Row("a", 1.0, "GB/s"))
        with report.part("second"):
            raise OSError(5, "the disk is gone")
        report.add(Row("c", 3.0, "GB/s"))
        return report

    monkeypatch.setattr(sys.modules["flashwarp.bench.fake"], "run", run)

    assert run_main(monkeypatch, "fake", "--json", str(tmp_path / "x.json")) == 1

    record = json.loads((tmp_path / "x.json").read_text())
    assert [row["name"] for row in record["rows"]] == ["a", "c"]
    assert record["failed"] == {"second": "OSError: [Errno 5] the disk is gone"}
    assert "unfinished" not in record
    assert "second failed" in capsys.readouterr().err


def test_a_run_that_ends_early_leaves_the_rows_that_it_had(monkeypatch, calls, tmp_path):
    def run(device: str | None, folder: Path) -> Report:
        report_of(Row("a", 1.0, "GB/s"))
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["flashwarp.bench.fake"], "run", run)

    assert run_main(monkeypatch, "fake", "--json", str(tmp_path / "x.json")) != 0

    record = json.loads((tmp_path / "x.json").read_text())
    assert [row["name"] for row in record["rows"]] == ["a"]
    assert record["unfinished"]


def test_unknown_benchmark_is_refused(monkeypatch, calls, capsys):
    assert run_main(monkeypatch, "nothing") == 2

    assert calls == []


def test_ways_take_turns_and_the_first_round_does_not_count():
    order, clock = [], count()

    def way(name):
        def measure():
            order.append(name)
            return float(next(clock))

        return measure

    medians = in_turns({"a": way("a"), "b": way("b")}, runs=3)

    assert order == ["a", "b"] * 4
    assert medians == {"a": 4.0, "b": 5.0}


def test_median_leaves_the_first_run_out():
    values = iter([100.0, 3.0, 1.0, 2.0])

    assert median_of(lambda: next(values), runs=3) == 2.0


def test_device_seconds_cover_the_launch():
    done = []

    seconds = device_seconds(resolve("cpu"), lambda: done.append(sum(range(100_000))))

    assert len(done) == 1
    assert 0 < seconds < 10


def git(folder, *words):
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True)


def test_commit_of_a_record_is_marked_where_the_sources_differ_from_it(tmp_path, monkeypatch):
    source = tmp_path / "report.py"
    source.write_text("1")
    monkeypatch.setattr(report_module, "__file__", str(source))
    monkeypatch.setenv("FLASHWARP_COMMIT", "abc-dirty")

    # An installed package inside another project: git does not know its file.
    git(tmp_path, "init")
    assert provenance("cpu")["commit"] == "abc-dirty"

    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "Begin")
    assert re.fullmatch("[0-9a-f]{12}", provenance("cpu")["commit"])

    source.write_text("2")
    assert re.fullmatch("[0-9a-f]{12}-dirty", provenance("cpu")["commit"])


def test_report_shows_the_figure_of_the_paper_where_there_is_one(capsys):
    report_of(Row("plain", 1.0, "s")).show()
    assert "paper" not in capsys.readouterr().out

    report_of(Row("plain", 1.0, "s"), Row("other", 2.0, "x", paper="1.88 [Fig. 4]")).show()
    shown = capsys.readouterr().out
    assert "paper" in shown
    assert "1.88 [Fig. 4]" in shown


@pytest.mark.parametrize("random", [0, 1])
def test_sums_of_first_light_are_those_of_plain_memory(tmp_path, random):
    content = np.arange(30_001, dtype=np.uint32)
    np.save(tmp_path / "a.npy", content)
    device = resolve("cpu")
    kernels = first_light.load_kernels(device)
    total, sums = np.zeros(1, np.uint64), []
    with fw.open(tmp_path / "a.npy", device=device, cache="64 KiB", line=512) as array:
        for kernel in ("reduce_array", "reduce_plain"):
            total[:] = 0
            params = first_light.ReduceParams(
                array=array.kernel_handle,
                plain=content.ctypes.data,
                sum=total.ctypes.data,
                count=content.size,
                span=1000,
                seed=5,
                random=random,
            )
            array.service.wake()
            uses = array.service.natives
            device.run_kernel(kernels[kernel], [bytes(params)], warps=4, uses=uses)
            array.wait()
            sums.append(int(total[0]))

    assert sums[0] == sums[1]
    assert random or sums[0] == int(content.sum(dtype=np.uint64))
