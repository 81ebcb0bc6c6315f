"""Benchmarks of applications, small and on the CPU device: what they check is right."""

import functools
import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import benchmarks
from benchmarks import BENCHES, small_memory
from benchmarks.arrays import arrays, defaults, vectoradd, vectoradd_files
from benchmarks.calls import neighbours
from benchmarks.graphs import bfs, cc, spmv
from benchmarks.kernels import ctc, registers
from benchmarks.tables import dlrm, ngrams
from benchmarks.tables import file as tables_file
from flashwarp._jit.compiler import Source, compile_source
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError, FlashwarpError
from flashwarp.storage.safetensors import read_checkpoint
from support.architectures import ARCHITECTURES

ALL_PARTS = "memory,file,by_degree,drives,kinds,queue_pairs,cache_sizes,reuse"


SMALL = {
    "asynchronous": {"size": "1 MiB", "cache": "256 KiB", "bytes_each": "64 KiB"},
    "arrays": {"gib": 1 / 64},
    "calls": {"resident": "1 MiB", "cold": "4 MiB", "runs": 3, "first": True},
    "shared": {"size": "2 MiB", "seconds": 0.1, "threads": 1},
    "sharded": {"size": "1 MiB", "rows": "256", "call": "32 KiB", "tables": 3, "runs": 1},
    "files": {"size": "2 MiB", "disk": "256 KiB", "warps": "2", "levels": "1,2", "runs": 1},
    "latency": {"size": "4 MiB", "steps": 20},
    "defaults": {"sizes": "1 MB", "memory": "", "runs": 1, "seconds": 0.05},
    "hits": {"size": "1 MiB", "loads": 1 << 12},
    "scaling": {"drives": 1, "milliseconds": 0.5, "drive_mib": 1, "queue_pairs": 2},
    "bfs": {"graph": "kron:8", "parts": "memory", "runs": 1},
    "cc": {"graph": "kron:8", "parts": "memory", "runs": 1},
    "spmv": {"graph": "kron:8", "uniform": "urand:8", "runs": 1},
    "vectoradd": {"gib": 1 / 1024, "storage": "memory", "cache": "256 KiB", "runs": 1},
    "ctc": {"threads": 2, "blocks": 2, "model": "none", "runs": 1},
    "dlrm": {"divide": 1 << 20, "dim": 16, "batch": 4, "steps": 2, "runs": 1},
    "tables": {"size": "1 MiB", "steps": 2, "runs": 1},
    "pipelines": {
        "size": "2 MiB",
        "batch": "256 KiB",
        "rows": "4 KiB",
        "dims": "128",
        "models": "GraphSAGE,GAT",
        "seeds": 8,
        "keys": 1 / 16,
        "side": 64,
        "storages": "memory,page cache",
        "steps": 2,
        "runs": 1,
    },
    "ngrams": {"size": "2 MiB", "prefill": 16, "decode": 4, "runs": 1},
    "activations": {"layers": 1, "host": "1 MiB", "fits": "8 MiB", "least": "4 KiB", "steps": 1},
    "load": {"size": "4 MB", "runs": 1},
    "first": {"state": "1 MiB", "data": "1 MiB", "arrays": "1,2", "runs": 1, "seconds": 0.1},
    "tiers": {"mib": 1, "rows": 50, "runs": 1},
    "workers": {"drives": 4, "rows": 64, "mib": 1, "seconds": 0.002},
    "registers": {"arch": "sm_90"},
    "prices": {},
    "checkpoints": {
        "mib": 3,
        "steps": 12,
        "intervals_ms": "0.1",
        "sizes": "variable",
        "state": "1 MiB",
        "runs": 1,
        "limit": False,
        "gpus": "1",
        "nodes": "1,3",
    },
}
"""Options for a run of a second."""

NEEDS = {
    "activations": ["torch"],
    "load": ["torch"],
    "tables": ["torch"],
    "pipelines": ["torch"],
    "sharded": ["torch"],
    "ngrams": ["torch", "transformers.models.qwen4_exp"],
}

ON_GPUS = ("neighbours", "peers", "ranks")
PARTS = [(name, part) for name, parts in BENCHES.items() for part in parts if part not in ON_GPUS]
RATES = re.compile("(GB|rows|k|M|G|G entries)/s")


def right(report):
    assert report.rows
    assert report.wrong == []
    return {row.name: row for row in report.rows}


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_record_says_how_its_figures_came_about(name, part, tmp_path, monkeypatch):
    for needed in NEEDS.get(part, ()):
        pytest.importorskip(needed)
    run = importlib.import_module(f"benchmarks.{name}.{part}").run
    given = {"device": "cpu", "folder": tmp_path}
    wanted = {key: given[key] for key in given if key in inspect.signature(run).parameters}
    ceiling = functools.partial(arrays.measure_ceiling, seconds=0.02)
    monkeypatch.setattr(arrays, "measure_ceiling", lambda path, nbytes, _: ceiling(path, nbytes))
    program = str(Path(benchmarks.__file__).with_name("__main__.py"))
    monkeypatch.setattr(sys, "argv", [program, name, part, "--device", "a b"])

    report = run(**wanted, **SMALL[part])
    report.save(tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())

    assert record["command"] == f"python -m benchmarks {name} {part} --device 'a b'"
    assert re.fullmatch("[0-9a-f]{12,40}(-dirty)?|unknown: .*", record["commit"])
    assert record["versions"].keys() >= {"flashwarp", "python", "numpy", "driver", "cuda", "kernel"}
    assert record["machine"].keys() == {"device", "cpu", "cores", "memory_gib"}
    assert (
        part in ("registers", "prices") or record["machine"]["device"] == resolve("cpu").describe()
    )
    assert record["settings"]
    assert all(isinstance(seed, int) for seed in record["seeds"].values())
    assert record["rows"]
    for row in record["rows"]:
        assert row["footprint"] > 0 or not RATES.fullmatch(row["unit"]), row["name"]


def test_a_part_for_gpus_refuses_other_devices(tmp_path):
    with pytest.raises(ArgumentError, match="needs a GPU, device='cuda'"):
        neighbours.run("cpu", tmp_path)


@pytest.mark.parametrize("files", [1, 4])
def test_rows_of_written_tables_all_differ(tmp_path, files):
    names = [f"t.shard_{number}.weight" for number in range(16)]
    each = 16 // files
    paths = {tmp_path / f"{k}.safetensors": names[k * each : (k + 1) * each] for k in range(files)}
    tables_file.write_table(paths, 16 * 500, 160, 1)

    found = read_checkpoint(list(paths))
    tensors = [found[name] for name in names]
    rows = np.concatenate([np.memmap(t.path, np.uint8, "r", t.offset, t.shape) for t in tensors])

    assert rows.shape == (16 * 500, 160)
    assert rows.max() == 0x7E
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_recommenders_modules_are_compared_with_torchs(tmp_path):
    pytest.importorskip("torch")
    rows = right(
        dlrm.run("cpu", tmp_path, divide=1 << 20, dim=8, batch=4, steps=2, runs=1, parts="modules")
    )

    assert list(rows) == [
        f"config-1, {how}: {mode} steps by flashwarp.torch.EmbeddingGroup"
        for how in ("in place", "page cache, bounce")
        for mode in ("synchronous", "asynchronous")
    ]
    assert all("torch.nn.EmbeddingBag" in row.reference_name for row in rows.values())


def test_wrong_rows_of_a_recommender_are_found(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(
        dlrm._Bench, "_by_bag", lambda self, *_: lambda ids: ids.reshape(-1)[:, None] * 0.0
    )
    report = dlrm.run(
        "cpu", tmp_path, divide=1 << 20, dim=8, batch=4, steps=2, runs=1, parts="modules"
    )

    assert len(report.wrong) == 4


def test_recommenders_refuse_parts_that_are_none(tmp_path):
    with pytest.raises(ArgumentError, match="tape"):
        dlrm.run("cpu", tmp_path, parts="configs,tape")


def test_ngrams_refuse_texts_that_are_too_short(tmp_path):
    for needed in NEEDS["ngrams"]:
        pytest.importorskip(needed)
    (tmp_path / "text").write_text("some words")

    with pytest.raises(ArgumentError, match="3 tokens, and 2 windows of 20 need 40"):
        ngrams.run("cpu", tmp_path, text=str(tmp_path / "text"), prefill=16, decode=4, runs=1)


@pytest.mark.parametrize("bench", [bfs, cc])
def test_every_part_of_the_graph_benchmarks(tmp_path, bench):
    rows = right(
        bench.run("cpu", tmp_path, graph="kron:10", small="kron:8", parts=ALL_PARTS, runs=1)
    )

    assert all(row.checked for row in rows.values() if "bytes read" not in row.name)
    names = "\n".join(rows)
    for part in (
        "host memory: ",
        "naive cache",
        "bytes needed",
        "by degree, ",
        "8 modelled drives",
    ):
        assert part in names, part
    for part in ("4 modelled drives 980 Pro", "cache of 0.25 of the lists", "16 queue pairs"):
        assert part in names, part


def test_graph_benchmarks_refuse_parts_that_are_none(tmp_path):
    with pytest.raises(ArgumentError, match="'tape' is none of memory, file"):
        bfs.run("cpu", tmp_path, parts="memory,tape")
    with pytest.raises(ArgumentError, match="'memory' is none of interface"):
        spmv.run("cpu", tmp_path, parts="memory")


@pytest.mark.parametrize("bench", [bfs, cc, spmv])
def test_interface_is_measured_in_three_steps_on_both_graphs(tmp_path, bench):
    options = {} if bench is spmv else {"parts": "interface"}
    rows = right(bench.run("cpu", tmp_path, graph="kron:10", uniform="urand:10", runs=1, **options))

    assert list(rows) == [
        f"interface, {graph}: {step}"
        for graph in ("kron:10", "urand:10")
        for step in ("kernel on device memory", "all resident", "nothing resident")
    ]
    assert all(row.checked for row in rows.values())


@pytest.mark.parametrize("gib", [1 / 1024, 1.3 / 1000])
def test_vectors_of_whole_lines_and_of_others(tmp_path, gib):
    # Tiles of several kinds: one for all, and so many that each slot of the pipeline is used again.
    tiles = "16 MiB,100 KiB"
    report = vectoradd.run("cpu", tmp_path, gib=gib, cache="256 KiB", tiles=tiles, runs=1)
    rows = right(report)

    assert all(row.checked for row in rows.values())
    assert [name for name in rows if name.startswith("files")] == [
        "files: tiled, 16 MiB",
        "files: tiled, 100 KiB",
        "files: flashwarp",
        "files: flashwarp, tiles of pipelines",
    ]
    assert rows["files: flashwarp"].reference == max(
        row.value for name, row in rows.items() if name.startswith("files: tiled")
    )
    assert set(report.settings["files"]["paths"]) == {"a", "b", "c"}


def test_sums_that_stay_out_of_the_file_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(vectoradd_files, "_write", lambda file, memory, offset: None)
    report = vectoradd.run(
        "cpu", tmp_path, gib=1 / 1024, cache="256 KiB", storage="file", tiles="64 KiB", runs=1
    )

    assert report.wrong == ["files: tiled, 64 KiB"]


@pytest.mark.parametrize(
    ("options", "told"), [({"storage": "tape"}, "tape"), ({"tiles": "1 MiB,1 KiB"}, "1 KiB")]
)
def test_vectors_refuse_what_they_cannot_use(tmp_path, options, told):
    with pytest.raises(ArgumentError, match=told):
        vectoradd.run("cpu", tmp_path, **options)


@pytest.mark.parametrize(
    ("kernels", "count"), [(vectoradd.KERNELS, 3), (ctc.KERNELS, 2)], ids=["vectoradd", "ctc"]
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_for_gpus(kernels, count, arch):
    assert len(compile_source(arch, Source.read(kernels)).kernels) == count


def test_kernels_take_at_most_20_registers_more_than_on_plain_memory():
    rows = right(registers.run("sm_90"))

    assert len(rows) == 6
    for name, row in rows.items():
        assert " 0 bytes of spills" in row.note, name
        assert row.value - row.reference <= 20, name


@pytest.mark.parametrize("memory", ["", "300 MiB"])
def test_defaults_are_compared_with_both_ways(tmp_path, memory):
    report = defaults.run(
        "cpu", tmp_path, memory=memory, sizes="3 MB", epochs=2, runs=1, seconds=0.1
    )
    rows = right(report)

    uses = [name.partition(": ")[0] for name in rows if name.endswith("first epoch")]
    assert len(uses) == 6
    assert all(rows[f"{use}: later epochs"].reference > 0 for use in uses)
    assert all(row.checked for name, row in rows.items() if name.endswith(("epoch", "epochs")))
    assert "way, page cache; " in rows[f"{uses[0]}: first epoch"].note
    assert rows["figures of 12 where the default took it"].value <= 12
    assert report.settings["memory_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_stores_that_do_not_come_to_the_file_are_found(tmp_path, monkeypatch):
    path = tmp_path / "table.npy"
    defaults._make(path, 64)
    plan = defaults._Plan("cpu", str(tmp_path), 64 * 4096, 0, 8, 2, 1, 1.0)
    turn = defaults._Turn(plan, defaults._Use("cold", "random updates"), path, 64)
    monkeypatch.setattr(defaults, "_make", lambda path, rows: None)
    assert turn.take(None)[1]
    lying = defaults._Turn(plan, defaults._Use("cold", "random updates"), path, 64)

    # Its rows hold 2 more by now.
    assert not lying.take(None)[1]


def test_a_process_without_memory_is_an_error_that_says_so(tmp_path):
    with small_memory.small_group(16 << 20) as group:
        if group is None:
            pytest.skip("no memory control group can be made here")
        with pytest.raises(FlashwarpError, match="memory is too small"):
            list(small_memory.events_of(_take_memory, (256 << 20,), group))


def test_an_error_of_the_measuring_process_is_raised_here():
    with pytest.raises(ArgumentError, match="negative"):
        list(small_memory.events_of(_take_memory, (-1,), None))


def _take_memory(nbytes):
    if nbytes < 0:
        raise ArgumentError(f"{nbytes} is negative")
    yield len(bytearray(nbytes).replace(b"\0", b"\1"))
