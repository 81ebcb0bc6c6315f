"""A checkpoint loaded to the device, from the disk and from the page cache, beside other loaders.

The file has the tensors of a language model. Ceilings of the same run are the disk's reads in
order, and copies from pinned memory. Each way gives all tensors on the device, whose bytes are
compared with what was written.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

from benchmarks.base import Record, bytes_of
from flashwarp.config import parse_bytes
from flashwarp.device import CudaDevice, Device, resolve
from flashwarp.loading.load import load
from flashwarp.probe import disk
from flashwarp.probe.timing import in_turns
from flashwarp.transfer import CopyEngine, Direction, TransferClient

__all__ = ["run"]

# What this project accepts.
_OF_DISK, _OF_ENGINE, _TIMES_SAFETENSORS = 0.95, 0.9, 3.0

_TILE_BYTES = 64 << 20
_COPY_BYTES = 16 << 20
_LAYERS = 32
# Elements of a layer's matrices, in squares of the hidden size: attention, and three of the MLP.
_SQUARES = (1, 1, 1, 1, 3.5, 3.5, 3.5)
_COLD = 0.05


def run(
    device: str | None,
    folder: Path,
    size: Annotated[str, "Bytes of the file; empty: 10 GB, 32 MB on the CPU device."] = "",
    staging: Annotated[str, "Pinned memory of our loader."] = "256 MiB",
    runs: Annotated[int, "How often each way has its turn, warm."] = 3,
    colds: Annotated[int, "How often each way has its turn, cold."] = 1,
    others: Annotated[bool, "Measure the other loaders that are installed."] = True,
    seconds: Annotated[float, "Leave out what would begin later."] = 3600,
    seed: Annotated[int, "Of the data."] = 1,
) -> Record:
    """Load a checkpoint cold and warm by every loader that is installed."""
    where = resolve(device)
    nbytes = bytes_of(where, size, "10 GB", "32 MB")
    bench = _Load(where, folder, nbytes, staging, seed)
    bench.report = Record(
        "A checkpoint loaded to the device",
        where.describe(),
        {
            "bytes": bench.nbytes,
            "tensors": len(bench.shapes),
            "staging": parse_bytes(staging),
        },
        {"data": seed},
    )
    bench.report.end_in(seconds)
    bench.write()
    ways = bench.ways(others)
    with bench.report.part("warm"):
        bench.warm(ways, runs)
    with bench.report.part("cold"):
        bench.cold(ways, max(1, colds))
    return bench.report


@dataclass
class _Way:
    """A loader: returns tensors by name, and what must be closed before they are freed."""

    name: str
    load: Callable[[contextlib.ExitStack], dict[str, Any]]
    path: Path


@dataclass
class _Cold:
    """Loads from the disk by ways that take turns."""

    nbytes: int
    seconds: dict[str, list[float]]
    right: dict[str, bool]
    ceilings: list[float] = field(default_factory=list)
    note: str = ""

    def rate(self, key: str) -> float:
        """GB/s of a way."""
        return self.nbytes / median(self.seconds[key]) / 1e9


class _Load:
    report: Record

    def __init__(self, device: Device, folder: Path, nbytes: int, staging: str, seed: int) -> None:
        self.device, self.staging = device, staging
        self.torch: Any = importlib.import_module("torch")
        self.path, self.pickled = folder / "model.safetensors", folder / "model.pt"
        self.shapes = _shapes(nbytes)
        self.nbytes = sum(2 * int(np.prod(shape)) for shape in self.shapes.values())
        tile = np.random.default_rng(seed).integers(0, 1 << 16, _TILE_BYTES // 2, np.uint16)
        self.tile = self.torch.from_numpy(tile.view(np.int16))

    # The files.

    def write(self) -> None:
        """Write the file, whose data is the same random tile again and again."""
        header: dict[str, dict[str, Any]] = {}
        at = 0
        for name, shape in self.shapes.items():
            size = 2 * int(np.prod(shape))
            header[name] = {
                "dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size],
            }  # fmt: skip
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        bytes_ = memoryview(self.tile.numpy()).cast("B")
        with self.path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for entry in header.values():
                begin, end = entry["data_offsets"]
                while begin < end:
                    within = begin % _TILE_BYTES
                    count = min(end - begin, _TILE_BYTES - within)
                    file.write(bytes_[within : within + count])
                    begin += count

    def right(self, found: dict[str, Any]) -> bool:
        """Whether all tensors have their dtype, shape, device and every byte."""
        torch, at = self.torch, 0
        if set(found) != set(self.shapes):
            return False
        tile = self.tile.to(self.device.name)
        for name, shape in self.shapes.items():
            tensor = found[name]
            if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16:
                return False
            if tensor.device.type != self.device.kind:
                return False
            flat, begin = tensor.reshape(-1).view(torch.int16), 0
            while begin < len(flat):
                within = (at + begin) % len(tile)
                part = flat[begin : begin + len(tile) - within]
                if not torch.equal(part, tile[within : within + len(part)]):
                    return False
                begin += len(part)
            at += len(flat)
        return True

    # The loaders.

    def ways(self, others: bool) -> dict[str, _Way]:
        """Return ours, and those that are installed."""
        name = self.device.name

        def ours(_: contextlib.ExitStack) -> dict[str, Any]:
            return load(self.path, self.device, staging=self.staging, library="torch")

        found = {"ours": _Way("fw.load", ours, self.path)}
        if not others:
            return found
        with contextlib.suppress(ImportError):
            safetensors = importlib.import_module("safetensors.torch")
            found["safetensors"] = _Way(
                "safetensors", lambda _: safetensors.load_file(self.path, device=name), self.path
            )
        if self.device.kind == "cuda":
            for key, way in (("fast", self._fastsafetensors), ("instant", self._instanttensor)):
                with contextlib.suppress(ImportError):
                    found[key] = way()
        self.torch.save(load(self.path, "cpu", library="torch"), self.pickled)
        found["torch"] = _Way(
            "torch.load(mmap=True)",
            lambda _: self.torch.load(self.pickled, map_location=name, mmap=True),
            self.pickled,
        )
        return found

    def _fastsafetensors(self) -> _Way:
        module: Any = importlib.import_module("fastsafetensors")
        place = self.torch.device(self.device.name)

        def fast(held: contextlib.ExitStack) -> dict[str, Any]:
            loader = module.SafeTensorsFileLoader(module.SingleGroup(), str(place), nogds=True)
            held.callback(loader.close)
            loader.add_filenames({0: [str(self.path)]})
            buffers = loader.copy_files_to_device()
            held.callback(buffers.close)
            return {name: buffers.get_tensor(name) for name in self.shapes}

        return _Way("fastsafetensors", fast, self.path)

    def _instanttensor(self) -> _Way:
        module: Any = importlib.import_module("instanttensor")

        def instant(_: contextlib.ExitStack) -> dict[str, Any]:
            with module.safe_open(
                [str(self.path)], framework="pt", device=self.device.ordinal
            ) as file:
                return dict(file.tensors())

        return _Way("InstantTensor", instant, self.path)

    @contextlib.contextmanager
    def _loaded(self, way: _Way) -> Iterator[tuple[float, dict[str, Any]]]:
        """Load by one way; give the seconds and the tensors."""
        self._synchronize()
        with contextlib.ExitStack() as held:
            start = time.perf_counter()
            found = way.load(held)
            self._synchronize()
            yield time.perf_counter() - start, found
            found.clear()
        if self.device.kind == "cuda":
            self.torch.cuda.empty_cache()

    def _seconds(self, way: _Way) -> float:
        with self._loaded(way) as (seconds, _):
            return seconds

    def _synchronize(self) -> None:
        if self.device.kind == "cuda":
            self.torch.cuda.synchronize(self.device.name)

    def _working(self, ways: dict[str, _Way]) -> dict[str, tuple[_Way, bool]]:
        """Try each way once; return those that run, and whether their bytes are right."""
        found = {}
        for key, way in ways.items():
            try:
                with self._loaded(way) as (_, tensors):
                    found[key] = way, self.right(tensors)
            except Exception as error:  # of libraries that do not know this machine
                if key == "ours":
                    raise
                self.report.leave_out(way.name, f"{type(error).__name__}: {error}")
        return found

    # Measurements.

    def warm(self, ways: dict[str, _Way], runs: int) -> None:
        """Load what is in the page cache."""
        for path in {way.path for way in ways.values()}:
            disk.fill_page_cache(path)
        working = self._working(ways)
        for key in set(ways) - set(working):
            del ways[key]
        turns: dict[str, Callable[[], float]] = {
            key: partial(self._seconds, way) for key, (way, _) in working.items()
        }
        if self.device.kind == "cuda":
            turns["ceiling"] = self._copy_engine()
        times = in_turns(turns, runs)
        rates = {key: self.nbytes / seconds / 1e9 for key, seconds in times.items()}
        if "ceiling" in rates:
            self._row("warm", working["ours"], rates["ours"], "copy engine", rates["ceiling"],
                      _OF_ENGINE)  # fmt: skip
        for key in set(working) - {"ours"}:
            way, right = working[key]
            target = _TIMES_SAFETENSORS if key == "safetensors" else 0.0
            self._row("warm", working["ours"], rates["ours"], way.name, rates[key], target, right)

    def cold(self, ways: dict[str, _Way], colds: int) -> None:
        """Load from the disk: ours first, so that its row is there whatever becomes of others."""
        for way in ways.values():
            disk.drop_page_cache(way.path)  # what is written back later would take the disk's time
        ours = {"ours": ways["ours"]}
        found = self._cold(ours, colds)
        mine = ways["ours"], found.right["ours"]
        self._row("cold", mine, found.rate("ours"), "disk, 8 reads of 1 MiB in flight",
                  median(found.ceilings), _OF_DISK, note=found.note)  # fmt: skip
        for key, way in ways.items():
            if key == "ours":
                continue
            if self.report.is_late(f"cold, {way.name}"):
                continue
            try:
                found = self._cold({**ours, key: way}, colds)
            except Exception as error:  # of libraries that do not know this machine
                self.report.leave_out(f"cold, {way.name}", f"{type(error).__name__}: {error}")
                continue
            mine = ways["ours"], found.right["ours"]
            self._row("cold", mine, found.rate("ours"), way.name, found.rate(key), 0.0,
                      found.right[key], found.note)  # fmt: skip

    def _cold(self, ways: dict[str, _Way], colds: int) -> _Cold:
        done = _Cold(self.nbytes, {key: [] for key in ways}, dict.fromkeys(ways, True))
        for _ in range(colds):
            for key, way in ways.items():
                disk.drop_page_cache(way.path)
                ceiling = disk.measure_ceiling(self.path, 4096)
                done.ceilings.append(ceiling.sequential_gb_per_s)
                resident = disk.resident_fraction(way.path)
                if resident is None or resident > _COLD:
                    done.note = f"{resident} of the file could not be dropped from the page cache"
                with self._loaded(way) as (seconds, found):
                    done.seconds[key].append(seconds)
                    done.right[key] = done.right[key] and self.right(found)
        return done

    def _row(
        self,
        state: str,
        ours: tuple[_Way, bool],
        rate: float,
        against: str,
        reference: float,
        target: float,
        right: bool = True,
        note: str = "",
    ) -> None:
        if not right:
            note = f"{against} gave other bytes. {note}"
        self.report.row(
            f"{state}, {ours[0].name}", rate, "GB/s", against, reference, target, ours[1],
            note=note, footprint=self.nbytes
        )  # fmt: skip

    def _copy_engine(self) -> Callable[[], float]:
        """Return what times copies of as many bytes from a few pinned buffers."""
        assert isinstance(self.device, CudaDevice)
        target = self.device.allocate(self.nbytes)
        client = TransferClient(self.device, "the copy engine", 4 * _COPY_BYTES, _COPY_BYTES)
        buffers = [client.take() for _ in range(4)]
        engine = CopyEngine(self.device)

        def measure() -> float:
            start = time.perf_counter()
            for at in range(0, self.nbytes, _COPY_BYTES):
                last = engine.copy(
                    target.address + at, buffers[at // _COPY_BYTES % 4],
                    min(_COPY_BYTES, self.nbytes - at), after=(), direction=Direction.TO_DEVICE,
                )  # fmt: skip
            last.wait()
            return time.perf_counter() - start

        return measure


def _shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model of about this size: 32 layers, embedding and head."""
    per_layer = sum(_SQUARES)
    hidden = max(64, int((nbytes / 2 / (_LAYERS * per_layer)) ** 0.5) // 64 * 64)
    names = ("q", "k", "v", "o", "gate", "up", "down")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(_LAYERS):
        for name, square in zip(names, _SQUARES, strict=True):
            shapes[f"model.layers.{layer}.{name}_proj.weight"] = (int(square * hidden), hidden)
        for name in ("input", "post_attention"):
            shapes[f"model.layers.{layer}.{name}_layernorm.weight"] = (hidden,)
    return shapes
