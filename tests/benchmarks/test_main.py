"""`python -m benchmarks`: its names, its options, its exit code."""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, get_type_hints

import numpy as np
import pytest

import flashwarp as fw
from benchmarks import BENCHES, __main__
from benchmarks.arrays import arrays
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError
from flashwarp.probe.report import Report, Row

PARTS = [(name, part) for name, parts in BENCHES.items() for part in parts]


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    try:
        __main__.main(arguments)
    except SystemExit as ended:
        return ended.code
    return 0


def report_of(*rows):
    report = Report("Some", "cpu", {}, {})
    for row in rows:
        report.add(row)
    return report


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every run of a benchmark `fake`, and of its part `other`."""
    seen = []

    def run(
        device: str | None,
        folder: Path,
        size: Annotated[int, "How large."] = 3,
        checked: Annotated[bool, "Whether right."] = True,
    ) -> Report:
        seen.append((device, folder.is_dir(), size))
        return report_of(Row("a", 1.0, "GB/s", checked=checked))

    monkeypatch.setitem(sys.modules, "benchmarks.fake", ModuleType("fake"))
    for part in ("fake", "other"):
        module = ModuleType(part)
        module.run = run
        monkeypatch.setitem(sys.modules, f"benchmarks.fake.{part}", module)
    monkeypatch.setitem(BENCHES, "fake", {"fake": "Nothing.", "other": "Nothing else."})
    return seen


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_option_of_a_benchmark_has_a_default_and_a_help_text(name, part):
    run = importlib.import_module(f"benchmarks.{name}.{part}").run

    hints = get_type_hints(run, include_extras=True)
    for key, parameter in inspect.signature(run).parameters.items():
        if key not in ("device", "folder"):
            assert parameter.default is not inspect.Parameter.empty
            assert isinstance(hints[key].__metadata__[0], str)


def test_list_names_every_part(monkeypatch, capsys):
    assert run_main(monkeypatch, "--list") == 0

    listed = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [name if name == part else f"{name} {part}" for name, part in PARTS]


@pytest.mark.parametrize("name", [("fake",), ("fake", "other")])
def test_options_are_the_parameters_of_the_benchmark(monkeypatch, tmp_path, calls, name):
    options = ("--size", "7", "--device", "cpu", "--folder", str(tmp_path))

    assert run_main(monkeypatch, *name, *options, "--json", str(tmp_path / "x.json")) == 0

    assert calls == [("cpu", True, 7)]
    assert [row["name"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_wrong_data_ends_with_1(monkeypatch, calls, capsys):
    assert run_main(monkeypatch, "fake", "--no-checked") == 1

    assert "wrong data: a" in capsys.readouterr().err


def test_json_alone_leaves_stdout_to_it(monkeypatch, calls, capfd):
    assert run_main(monkeypatch, "fake", "--json") == 0

    printed = capfd.readouterr()
    assert [row["name"] for row in json.loads(printed.out)["rows"]] == ["a"]
    assert "measurement" in printed.err


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("torch.nn", "pip install '.[torch]'"),
        ("scipy", "pip install '.[graphs]'"),
        ("transformers", "pip install transformers"),
    ],
)
def test_a_library_that_is_absent_is_named(monkeypatch, calls, capsys, module, said):
    def run(device: str | None, folder: Path) -> Report:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(sys.modules["benchmarks.fake.fake"], "run", run)

    ended = run_main(monkeypatch, "fake")

    assert f"No module named {module!r}" in ended
    assert said in ended


def test_a_part_that_fails_costs_no_other_part(monkeypatch, calls, tmp_path, capsys):
    def run(device: str | None, folder: Path) -> Report:
        report = report_of(Row("a", 1.0, "GB/s"))
        with report.part("second"):
            raise OSError(5, "the disk is gone")
        report.add(Row("c", 3.0, "GB/s"))
        return report

    monkeypatch.setattr(sys.modules["benchmarks.fake.fake"], "run", run)

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

    monkeypatch.setattr(sys.modules["benchmarks.fake.fake"], "run", run)

    assert run_main(monkeypatch, "fake", "--json", str(tmp_path / "x.json")) != 0

    record = json.loads((tmp_path / "x.json").read_text())
    assert [row["name"] for row in record["rows"]] == ["a"]
    assert record["unfinished"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nothing", "invalid choice: 'nothing'"),
        ("fake nothing", "unrecognized arguments: nothing"),
        ("graphs", "the following arguments are required: PART"),
        ("fake --size much", "argument --size: invalid int value: 'much'"),
        ("fake --size -1", "argument --size: -1 is not a finite number from 0 on"),
        ("calls --runs 0", "argument --runs: 0 is not a finite number from 1 on"),
        ("fake --folder absent", "argument --folder: absent does not exist"),
        ("fake --json absent/x", "argument --json: absent does not exist"),
        ("fake --json .", "argument --json: . is a folder"),
    ],
)
def test_wrong_arguments_are_named_and_end_with_2(monkeypatch, calls, capsys, arguments, said):
    assert run_main(monkeypatch, *arguments.split()) == 2

    assert said in capsys.readouterr().err
    assert calls == []


def test_an_error_ends_with_its_message(monkeypatch, calls):
    def run() -> Report:
        raise ArgumentError("not so")

    monkeypatch.setattr(sys.modules["benchmarks.fake.fake"], "run", run)

    assert run_main(monkeypatch, "fake") == "error: not so"


@pytest.mark.parametrize("random", [0, 1])
def test_sums_of_arrays_are_those_of_plain_memory(tmp_path, random):
    content = np.arange(30_001, dtype=np.uint32)
    np.save(tmp_path / "a.npy", content)
    device = resolve("cpu")
    kernels = arrays.load_kernels(device)
    total, sums = np.zeros(1, np.uint64), []
    with fw.open(tmp_path / "a.npy", device=device, cache="64 KiB", line=512) as array:
        for kernel in ("reduce_array", "reduce_plain"):
            total[:] = 0
            params = arrays.ReduceParams(
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


def test_the_package_starts_from_a_checkout():
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "drives", "prices"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )

    assert "P5800X" in ran.stdout
