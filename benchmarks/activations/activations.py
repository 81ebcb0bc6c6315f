"""Steps of GPT-2 whose activations go to host memory and disk (GeminiFS section 4.3, figure 11b).

The model has random weights and reads random tokens. Beside ours stand training without offload,
torch's own `save_on_cpu`, and a file for each tensor by `torch.save`. After the first step all ways
must have the same weights.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from benchmarks.base import Record
from flashwarp.config import parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.probe import disk

__all__ = ["run"]

_PAPER = "GeminiFS 4.3: the time of training increases by about 4 times"
_HEADS, _VOCABULARY = 12, 50257
_SMALL = {"layers": 2, "width": 48, "batch": 2, "length": 32}
_CPU_VOCABULARY = 500


def run(
    device: str | None,
    folder: Path,
    batch: Annotated[
        int, "Sequences of a step; 0: 8, or 2 on the CPU device; 64 in the paper."
    ] = 0,
    length: Annotated[int, "Tokens of a sequence; 0: 1024, or 32 on the CPU device."] = 0,
    layers: Annotated[int, "0: 12, or 2 on the CPU device."] = 0,
    width: Annotated[int, "0: 768, or 48 on the CPU device."] = 0,
    host: Annotated[str, "Pinned host memory of ours; the paper's cache has 2 GB."] = "2 GiB",
    fits: Annotated[str, "The same where all fits the host; empty: leave it out."] = "",
    least: Annotated[str, "Smaller tensors stay on the device."] = "1 MiB",
    files: Annotated[bool, "Measure torch.save to a file for each tensor, too."] = True,
    steps: Annotated[int, "Steps of each way after its first one, which is not timed."] = 3,
    seconds: Annotated[float, "Leave out what would begin later."] = 3600,
    seed: Annotated[int, "Of weights, tokens and dropout."] = 1,
) -> Record:
    """Train GPT-2 with its activations on the device, in host memory, and on disk."""
    where = resolve(device)
    given = {"layers": layers, "width": width, "batch": batch, "length": length}
    # The scores of 8 sequences, 1.6 GB in one tensor, fit the host memory of the default.
    whole = {"layers": 12, "width": 768, "batch": 8, "length": 1024}
    default = whole if where.kind == "cuda" else _SMALL
    sizes = {name: value or default[name] for name, value in given.items()}
    bench = _Steps(where, folder, sizes, steps, seed)
    bench.report = Record(
        "Activations of GPT-2",
        where.describe(),
        {
            **sizes,
            "host": parse_bytes(host),
            "least": parse_bytes(least),
            "steps": steps,
        },
        {"weights, tokens and dropout": seed},
    )
    bench.report.end_in(seconds)
    bench.measure_disk()
    bench.measure("no offload", contextlib.nullcontext)  # starts libraries, too
    bench.resident = bench.measure("no offload", contextlib.nullcontext)
    ways: dict[str, Callable[[], Any]] = {
        f"ours, {host} of host memory": lambda: bench.ours(host, least),
        f"ours, {fits} of host memory": lambda: bench.ours(fits, least),
        "save_on_cpu": bench.save_on_cpu,
        "torch.save, a file a tensor": lambda: bench.files(parse_bytes(least)),
    }
    if not fits:
        del ways[f"ours, {fits} of host memory"]
    if not files:
        del ways["torch.save, a file a tensor"]
    for name, way in ways.items():
        if bench.report.is_late(name):
            continue
        with bench.report.part(name):
            bench.add(name, bench.measure(name, way))
    return bench.report


@dataclass
class _Result:
    """What one way reached."""

    seconds: float
    peak_bytes: int
    weights: list[Any]
    note: str = ""
    disk_s: float = 0.0
    """How long the disk alone takes for a step's writes and reads."""


@dataclass
class _Steps:
    device: Device
    folder: Path
    sizes: dict[str, int]
    steps: int
    seed: int
    report: Record = field(init=False)
    resident: _Result = field(init=False)
    writes_per_s: float = 0.0
    reads_per_s: float = 0.0
    disk_s: float = 0.0
    results: dict[str, list[_Result]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.place = self.torch.device(self.device.name)
        self.vocabulary = _VOCABULARY if self.device.kind == "cuda" else _CPU_VOCABULARY
        self.stats = ""

    # The ways.

    def ours(self, host: str, least: str) -> Any:
        """Offload by `offload_activations`."""
        module = importlib.import_module("flashwarp.torch")
        offloaded = module.offload_activations(
            self.folder, host=host, least=least, device=self.device
        )

        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            with offloaded:
                yield
                found = offloaded.stats()
            self.stats = (
                f"{found.saved_bytes / 1e9:.2f} GB saved, {found.written_bytes / 1e9:.2f} GB "
                f"written, {found.read_bytes / 1e9:.2f} GB read, {found.waited_s:.2f} s waited, "
                f"{'O_DIRECT' if found.o_direct else 'page cache'}"
            )
            if self.reads_per_s:
                seconds = found.written_bytes / self.writes_per_s
                seconds += found.read_bytes / self.reads_per_s
                self.disk_s = seconds / (self.steps + 1)

        return entered()

    def save_on_cpu(self) -> Any:
        """Offload by torch's own context manager."""
        pinned = self.device.kind == "cuda"
        return self.torch.autograd.graph.save_on_cpu(pin_memory=pinned)

    def files(self, least: int) -> Any:
        """Offload by a file for each tensor, as torch's tutorial does."""
        torch, folder = self.torch, self.folder
        numbers = iter(range(1 << 40))

        class File:
            def __init__(self, tensor: Any) -> None:
                self.path = folder / f"{next(numbers)}.pt"
                torch.save(tensor, self.path)

            def __del__(self) -> None:
                os.unlink(self.path)

        def pack(tensor: Any) -> Any:
            small = tensor.nbytes < least or isinstance(tensor, torch.nn.Parameter)
            return tensor if small else File(tensor)

        def unpack(saved: Any) -> Any:
            if isinstance(saved, File):
                return torch.load(saved.path, map_location=self.place)
            return saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    # Steps.

    def measure(self, name: str, offloading: Callable[[], Any]) -> _Result:
        """Train some steps by one way."""
        torch, sizes = self.torch, self.sizes
        torch.manual_seed(self.seed)
        model = _gpt2(torch, sizes, self.vocabulary).to(self.place).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        shape = (sizes["batch"], sizes["length"] + 1)
        tokens = torch.randint(self.vocabulary, shape, device=self.place)
        on_gpu = self.device.kind == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.place)
        self.stats, self.disk_s = "", 0.0
        weights: list[Any] = []
        taken: list[float] = []
        with offloading():
            for _ in range(self.steps + 1):
                self._synchronize()
                start = time.perf_counter()
                loss = model(tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                self._synchronize()
                taken.append(time.perf_counter() - start)
                weights = weights or [each.detach().clone() for each in model.parameters()]
            del loss
        peak = torch.cuda.max_memory_allocated(self.place) if on_gpu else 0
        result = _Result(median(taken[1:]), peak, weights, self.stats, self.disk_s)
        self.results.setdefault(name, []).append(result)
        print(f"{name}: {result.seconds * 1e3:.1f} ms a step", flush=True)
        return result

    def _synchronize(self) -> None:
        if self.device.kind == "cuda":
            self.torch.cuda.synchronize(self.place)

    def measure_disk(self) -> None:
        """Measure what the disk writes and reads, past the page cache."""
        path, small = self.folder / "disk", self.device.kind == "cpu"
        nbytes = 16 << 20 if small else 4 << 30
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        written, self.writes_per_s = disk.measure_writes(path, nbytes)
        os.truncate(path, written)
        found = disk.measure_ceiling(path, 4096, 0.02 if small else 1.0)
        self.reads_per_s = found.sequential_gb_per_s * 1e9
        path.unlink()
        self.report.settings["disk_bytes_per_s"] = {
            "writes": self.writes_per_s, "reads": self.reads_per_s,
        }  # fmt: skip

    def add(self, name: str, result: _Result) -> None:
        """Add the rows of a way: beside training without offload, the disk, and other ways."""
        resident, ours = self.resident, "ours" in name
        equal = self._same(self.results["no offload"][0], resident)
        # If two runs of the same way differ, the kernels themselves are not deterministic.
        right = self._same(result, resident) if equal else None
        note = f"peak of device memory {result.peak_bytes / 1e9:.2f} GB, without offload "
        note += f"{resident.peak_bytes / 1e9:.2f} GB. {result.note}"
        if not equal:
            note += " Weights differ between two runs without offload, too."
        rate = 1 / result.seconds
        self.report.row(
            f"GPT-2 steps, {name}", rate, "steps/s", "no offload",
            1 / resident.seconds, 0.0, right, _PAPER if ours else "", note
        )  # fmt: skip
        if result.disk_s:
            self.report.row(
                f"GPT-2 steps, {name}", rate, "steps/s",
                "writing and reading these bytes at the disk's rates", 1 / result.disk_s
            )  # fmt: skip
        pairs = [(name, result, other, one[0]) for other, one in self.results.items()]
        if not ours:
            pairs = [(other, one, name, result) for _, _, other, one in pairs]
        for mine, one, theirs, other in pairs:
            if "ours" in mine and "ours" not in theirs and theirs != "no offload":
                self.report.row(
                    f"GPT-2 steps, {mine}", 1 / one.seconds, "steps/s", theirs,
                    1 / other.seconds
                )  # fmt: skip

    def _same(self, one: _Result, other: _Result) -> bool:
        pairs = zip(one.weights, other.weights, strict=True)
        return all(bool(self.torch.equal(a, b)) for a, b in pairs)


def _gpt2(torch: Any, sizes: dict[str, int], vocabulary: int) -> Any:
    """Make GPT-2 with random weights; its forward gives the loss of tokens."""
    nn, functional = torch.nn, torch.nn.functional
    width = sizes["width"]

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            parts = self.project(self.norm(x)).split(width, 2)
            q, k, v = (p.view(batch, length, _HEADS, -1).transpose(1, 2) for p in parts)
            mixed = functional.scaled_dot_product_attention(q, k, v, None, 0.1, True)
            x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
            hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
            return x + self.drop(self.down(hidden))

    class GPT2(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.places = nn.Embedding(sizes["length"], width)
            self.blocks = nn.ModuleList([Block() for _ in range(sizes["layers"])])
            self.norm = nn.LayerNorm(width)
            self.drop = nn.Dropout(0.1)

        def forward(self, tokens: Any) -> Any:
            places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
            x = self.drop(self.tokens(tokens[:, :-1]) + self.places(places))
            for block in self.blocks:
                x = block(x)
            scores = functional.linear(self.norm(x), self.tokens.weight)
            return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    return GPT2()
