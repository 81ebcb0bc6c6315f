"""Inference of a recommender whose tables exceed the cache: AGILE's figures 7 to 10.

A step looks 26 rows up for each of its samples and feeds them to two stacks of matrices. The
synchronous way looks a batch up, then computes. The asynchronous way prefetches the next batch
beside the computation of this one. The rows stand in one array, table behind table, as AGILE's do.
Each table has the size that MLPerf's DLRM gives it, divided. Rows are drawn by Zipf's law: no log
of clicks is read. AGILE's figures stand over BaM; of its two modes, the ratio is given here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record, by_kind, listed
from benchmarks.calls.graphs import MappedRows
from flashwarp.config import parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.errors import ArgumentError
from flashwarp.nvme.queue_pair import Route
from flashwarp.probe.timing import device_seconds, in_turns

__all__ = ["run"]

# Rows of the 26 tables of MLPerf's DLRM, which come from Criteo's logs of clicks.
_TABLES = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
    2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
_DENSE, _BOTTOM, _TOP = 13, 512, 1024
# Matrix products of each stack, and the speedups of AGILE over BaM: synchronous, asynchronous.
_CONFIGS = {"config-1": (3, 1.30, 1.48), "config-2": (1, 1.39, 1.63), "config-3": (18, 1.27, 1.32)}
_BATCHES = {
    1: "1.46", 16: "1.75", 64: "1.57", 256: "1.43", 1024: "1.38", 2048: "1.48",
}  # fmt: skip
_QUEUE_PAIRS = {
    1: (1.33, 1.32),
    2: (1.31, 1.42),
    4: (1.31, 1.44),
    8: (1.30, 1.46),
    16: (1.34, 1.46),
}
_DEPTH = 64
_CACHE_SHARES = (1 / 512, 1 / 128, 1 / 32, 1 / 8, 1 / 2)
_LEAST_CACHE = 1 << 20
_PARTS = ("configs", "batches", "queue_pairs", "caches", "neighbours", "modules")


def run(
    device: str | None,
    folder: Path,
    divide: Annotated[int, "Divides the rows of each table; 20000 on the CPU device."] = 0,
    dim: Annotated[int, "Elements of a row, float32."] = 128,
    batch: Annotated[int, "Samples of a step."] = 2048,
    steps: Annotated[int, "Steps that one measurement takes."] = 30,
    cache: Annotated[str, "Bytes of the cache; empty: an eighth of the tables."] = "",
    line: Annotated[str, "Bytes of a line."] = "4 KiB",
    skew: Annotated[float, "Exponent of Zipf's law; not 1."] = 1.05,
    drive: Annotated[str, "Modelled drive; empty: none."] = "980 Pro",
    parts: Annotated[
        str, f"Of {', '.join(_PARTS)}; empty: all, the last one if torch is there."
    ] = "",
    runs: Annotated[int, "How often each way has its turn."] = 3,
    seed: Annotated[int, "Of the rows that the samples ask for."] = 1,
) -> Record:
    """Time steps that wait for their rows, and steps that prefetch the next ones."""
    chosen = listed("parts", parts, _PARTS) if parts else list(_PARTS)
    if not parts and importlib.util.find_spec("torch") is None:
        chosen.remove("modules")
    if skew == 1:
        raise ArgumentError("skew=1: draws are made for exponents other than 1, such as 1.05")
    where = resolve(device)
    bench = _Bench(where, by_kind(where, divide, 64, 20_000), dim, steps, runs, skew, seed)
    capacity = parse_bytes(cache) if cache else max(bench.data.nbytes // 8, _LEAST_CACHE)
    bench.report = Record(
        "Recommender",
        where.describe(),
        {
            "rows": len(bench.data), "dim": dim, "batch": batch, "steps": steps, "line": line,
            "cache": capacity, "skew": skew, "drive": drive,
        },
        {"samples": seed},
    )  # fmt: skip
    bench.line = line
    path = folder / "tables.bin"
    bench.data.tofile(path)
    served: dict[str, dict[str, Any]] = {
        "in place": {},
        "page cache, bounce": {"path": path},
    }
    if drive:
        served[f"modelled {drive}"] = {"model": drive}
    if "configs" in chosen:
        for name, how in served.items():
            for config in _CONFIGS:
                waiting, ahead = _CONFIGS[config][1:]
                bench.compare(
                    f"{config}, {name}", config, batch, capacity, how, _paper(waiting, ahead, 7),
                    round(ahead / waiting, 2) if "path" in how else 0.0,
                )  # fmt: skip
    bounce = served["page cache, bounce"]
    if "batches" in chosen:
        for size, paper in _BATCHES.items():
            what = f"batch of {size}, bounce"
            bench.compare(
                what, "config-1", size, capacity, bounce, f"{paper} over BaM (AGILE Fig. 8)"
            )
    if "queue_pairs" in chosen:
        for pairs, (waiting, ahead) in _QUEUE_PAIRS.items():
            how = {**bounce, "queue_pairs": pairs, "depth": _DEPTH}
            what = f"{pairs} queue pairs of {_DEPTH}, bounce"
            bench.compare(what, "config-1", batch, capacity, how, _paper(waiting, ahead, 9))
    if "caches" in chosen:
        for share in _CACHE_SHARES:
            nbytes = max(int(bench.data.nbytes * share), _LEAST_CACHE)
            what = f"cache of {share:.1%} of the tables, bounce"
            bench.compare(
                what, "config-1", batch, nbytes, bounce, "0.95 to 1.73 over BaM (AGILE Fig. 10)"
            )
    if "neighbours" in chosen:
        bench.neighbours(batch, capacity)
    if "modules" in chosen:
        bench.modules(batch, capacity, {name: served[name] for name in list(served)[:2]})
    return bench.report


def _paper(waiting: float, ahead: float, figure: int) -> str:
    """Return what AGILE's two modes reached."""
    return f"{ahead / waiting:.2f} ({ahead} and {waiting} over BaM, AGILE Fig. {figure})"


class _Bench:
    """The tables, the samples, and ways to take steps."""

    report: Record
    line: str

    def __init__(
        self, device: Device, divide: int, dim: int, steps: int, runs: int, skew: float, seed: int
    ) -> None:
        self.device, self.dim, self.steps, self.runs, self.skew = device, dim, steps, runs, skew
        self.on_gpu = device.kind == "cuda"
        self.xp: Any = importlib.import_module("torch") if self.on_gpu else np
        self.rng = np.random.default_rng(seed)
        self.tables = np.array([max(rows // divide, 1) for rows in _TABLES], np.int64)
        self.firsts = np.concatenate(([0], np.cumsum(self.tables)[:-1]))
        rows = np.arange(self.tables.sum(), dtype=np.uint32)[:, None] * np.uint32(0x9E3779B1)
        mixed = rows + np.arange(dim, dtype=np.uint32) * np.uint32(0x85EBCA6B)
        self.data = (mixed >> 9).astype(np.float32)
        self.data *= 2.0**-23
        self.random: Any = self.rng.random
        if self.on_gpu:
            made = self.xp.Generator("cuda").manual_seed(seed)
            self.random = lambda shape: self.xp.rand(
                shape, generator=made, dtype=self.xp.float64, device="cuda"
            )

    def samples(self, batch: int) -> Any:
        """Draw the rows of all steps of a measurement, and of one more."""
        count = (self.steps + 1, batch, len(_TABLES))
        least = 1 - self.skew
        # Inverse of the distribution function of Zipf's law with real numbers for ranks.
        width = self.there(np.power(self.tables + 1.0, least) - 1)
        ranks = (self.random(count) * width + 1) ** (1 / least)
        ranks = (ranks.long() if self.on_gpu else ranks.astype(np.int64)) - 1
        # Neighbours in rank are none in the table, which spares the cache nothing.
        return ranks * 0x9E3779B1 % self.there(self.tables) + self.there(self.firsts)

    def there(self, values: np.ndarray[Any, Any]) -> Any:
        """Bring values to the device."""
        return self.xp.from_numpy(values).cuda() if self.on_gpu else values

    def model(self, config: str, batch: int) -> Callable[[Any], Any]:
        """Return what computes a step out of its rows."""
        products = _CONFIGS[config][0]

        def weights(*shape: int) -> Any:
            return self.there(self.rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32))

        dense = self.there(self.rng.random((batch, _DENSE), np.float32))
        first = weights(_DENSE, _BOTTOM)
        bottom = [weights(_BOTTOM, _BOTTOM) for _ in range(min(products, 3))]
        project = weights(len(_TABLES) * self.dim + _BOTTOM, _TOP)
        top = [weights(_TOP, _TOP) for _ in range(min(products, 3))]

        def forward(rows: Any) -> Any:
            hidden = dense @ first
            for k in range(products):
                hidden = (hidden @ bottom[k % len(bottom)]).clip(min=0)
            both = (rows.reshape(batch, -1), hidden)
            hidden = self.xp.concatenate(both, 1) @ project
            for k in range(products):
                hidden = (hidden @ top[k % len(top)]).clip(min=0)
            return hidden

        return forward

    @contextmanager
    def opened(self, cache: int, how: dict[str, Any]) -> Iterator[fw.Array]:
        """Open the tables: in memory, in a file through bounce buffers, or on a modelled drive."""
        settings: dict[str, Any] = {
            "dtype": np.float32, "shape": self.data.shape, "device": self.device, "cache": cache,
            "line": self.line,
        }  # fmt: skip
        rings = {key: how[key] for key in ("queue_pairs", "depth", "model") if key in how}
        source: Any = fw.storage.Memory(self.data, writable=False)
        if rings or "path" in how:
            served: Route = "bounce" if self.on_gpu else "direct"
            settings["controller"] = fw.nvme.SoftwareController(route=served, **rings)
        if "path" in how:
            source = how["path"]
            settings |= {"o_direct": False}
        with fw.open(source, **settings) as array:
            yield array

    def compare(
        self, what: str, config: str, batch: int, cache: int, how: dict[str, Any], paper: str,
        target: float = 0.0,
    ) -> None:  # fmt: skip
        """Add a row for steps that wait, and one for steps that prefetch."""
        forward, rows = self.model(config, batch), self.rows(batch)
        with self.opened(cache, how) as array:
            ways = {
                "synchronous": lambda: self.seconds(
                    batch, lambda ids: self.waits(array, ids, rows, forward)
                ),
                "asynchronous": lambda: self.seconds(
                    batch, lambda ids: self.ahead(array, ids, rows, forward)
                ),
            }
            times = in_turns(ways, self.runs)
            ids = self.samples(batch)
            before = array.stats
            self.waits(array, ids, rows, forward)
            right = self.right(rows, ids)
            after = array.stats
            ids = self.samples(batch)
            self.ahead(array, ids, rows, forward)
            right_ahead = self.right(rows, ids)
        touched = after.hits + after.misses - before.hits - before.misses
        hits = (after.hits - before.hits) / max(touched, 1)
        rates = {name: batch / seconds for name, seconds in times.items()}
        name = "synchronous steps"
        self.add(f"{what}: {name}", rates["synchronous"], right, note=f"{hits:.0%} hits")
        self.add(
            f"{what}: asynchronous steps", rates["asynchronous"], right_ahead, name,
            rates["synchronous"], paper, target=target,
        )  # fmt: skip

    def neighbours(self, batch: int, cache: int) -> None:
        """Steps whose tables lie in memory of the device, or are read in place without a cache."""
        config = "config-1"
        forward, rows = self.model(config, batch), self.rows(batch)
        with self.opened(cache, {}) as array:
            table = self.there(self.data)
            mapped = self._mapped(array)

            def takes(source: Any) -> Callable[[], float]:
                def steps(ids: Any) -> None:
                    for k in range(self.steps):
                        self.take(source, ids[k], rows)
                        forward(rows)

                return lambda: self.seconds(batch, steps)

            ways = {
                "ours": lambda: self.seconds(
                    batch, lambda ids: self.ahead(array, ids, rows, forward)
                ),
                "table": takes(table),
            }
            if mapped is not None:
                ways["mapped"] = takes(mapped)
            times = in_turns(ways, self.runs)
            ids = self.samples(batch)
            self.ahead(array, ids, rows, forward)
            right = self.right(rows, ids)
        ours = batch / times["ours"]
        for way, name in (
            ("table", "the same steps with the tables in the device's memory"),
            ("mapped", "the same steps, each row read in place without a cache"),
        ):
            if way in times:
                self.add(
                    f"{config}, in place: asynchronous steps", ours, right, name,
                    batch / times[way],
                )  # fmt: skip

    def modules(self, batch: int, cache: int, served: dict[str, dict[str, Any]]) -> None:
        """Steps by torch's modules, and by ours in their place.

        torch has all tables in one `EmbeddingBag`, so that one launch serves them, as ours does.
        """
        torch: Any = importlib.import_module("torch")
        ours: Any = importlib.import_module("flashwarp.torch")
        forward = self.model("config-1", batch)
        side = torch.cuda.Stream() if self.on_gpu else None
        ways: dict[str, Callable[[Any], Any]] = {}
        mapped = None
        with ExitStack() as undo:
            for name, how in served.items():
                array = undo.enter_context(self.opened(cache, how))
                mapped = self._mapped(array) if mapped is None else mapped
                group = ours.EmbeddingGroup(
                    [
                        ours.EmbeddingBag(array, mode="sum", rows=range(first, first + rows))
                        for first, rows in zip(self.firsts, self.tables, strict=True)
                    ]
                )
                undo.callback(group.close)
                ways[f"{name}: synchronous"] = self._by_group(group, forward, None, False)
                ways[f"{name}: asynchronous"] = self._by_group(group, forward, side, True)
            theirs = {"the tables in the device's memory": torch.as_tensor(self.there(self.data))}
            if mapped is not None:
                theirs["the tables in pinned memory (UVA)"] = mapped
            for name, table in theirs.items():
                bag = torch.nn.EmbeddingBag.from_pretrained(table, mode="sum")
                ways[name] = self._by_bag(bag, forward)

            def timed(way: Callable[[Any], Any]) -> Callable[[], float]:
                return lambda: self.seconds(batch, way)

            with torch.no_grad():
                times = in_turns({name: timed(way) for name, way in ways.items()}, self.runs)
                ids = self.samples(batch)
                right = {name: self.right(way(ids), ids) for name, way in ways.items()}
        for name in ways:
            for other in theirs:
                if name not in theirs:
                    self.add(
                        f"config-1, {name} steps by flashwarp.torch.EmbeddingGroup",
                        batch / times[name], right[name] and right[other],
                        f"torch.nn.EmbeddingBag, {other}", batch / times[other],
                    )  # fmt: skip

    def _by_group(
        self, group: Any, forward: Callable[[Any], Any], side: Any, prefetches: bool
    ) -> Callable[[Any], Any]:
        """Return what takes steps by our modules, and returns the last rows."""

        def steps(ids: Any) -> Any:
            # A bag of one row for each sample, table by table.
            bags = self._tensor(ids - self.there(self.firsts)).permute(0, 2, 1)[..., None]
            bags = bags.contiguous()
            for k in range(self.steps):
                rows = group(bags[k])
                if prefetches:
                    if side is not None:
                        side.wait_stream(self.stream())
                    group.prefetch(bags[k + 1], stream=side)
                forward(self._plain(rows))
            return self._plain(rows).reshape(-1, self.dim)

        return steps

    def _by_bag(self, bag: Any, forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what takes steps by torch's module, and returns the last rows."""

        def steps(ids: Any) -> Any:
            bags = self._tensor(ids).reshape(len(ids), -1, 1)
            for k in range(self.steps):
                rows = bag(bags[k])
                forward(self._plain(rows))
            return self._plain(rows)

        return steps

    def _tensor(self, values: Any) -> Any:
        return values if self.on_gpu else importlib.import_module("torch").from_numpy(values)

    def _plain(self, tensor: Any) -> Any:
        return tensor if self.on_gpu else tensor.numpy()

    def _mapped(self, array: fw.Array) -> Any:
        if not self.on_gpu or array.in_place is None:
            return None
        rows = MappedRows(array.in_place, self.data.shape)
        return self.xp.as_tensor(rows, device=f"cuda:{self.device.ordinal}").view(self.xp.float32)

    def rows(self, batch: int) -> Any:
        """Make room for the rows of a step."""
        shape = (batch * len(_TABLES), self.dim)
        if self.on_gpu:
            return self.xp.empty(shape, dtype=self.xp.float32, device="cuda")
        return np.empty(shape, np.float32)

    def take(self, table: Any, ids: Any, rows: Any) -> None:
        """Look rows up in a table that the device can address."""
        if self.on_gpu:
            self.xp.index_select(table, 0, ids.reshape(-1), out=rows)
        else:
            table.take(ids.reshape(-1), 0, out=rows)

    def waits(self, array: fw.Array, ids: Any, rows: Any, forward: Callable[[Any], Any]) -> None:
        """Take steps, each of which looks its rows up first."""
        stream = self.stream()
        for k in range(self.steps):
            array.gather(ids[k].reshape(-1), rows, stream)
            forward(rows)

    def ahead(self, array: fw.Array, ids: Any, rows: Any, forward: Callable[[Any], Any]) -> None:
        """Take steps, each of which prefetches the rows of the next one beside its computation."""
        stream = self.stream()
        side = self.xp.cuda.Stream() if self.on_gpu else None
        for k in range(self.steps):
            array.gather(ids[k].reshape(-1), rows, stream)
            if side is not None:
                side.wait_stream(stream)
            array.prefetch(ids[k + 1].reshape(-1), side)
            forward(rows)

    def stream(self) -> Any:
        """Return torch's current stream; None on the CPU device."""
        return self.xp.cuda.current_stream() if self.on_gpu else None

    def seconds(self, batch: int, steps: Callable[[Any], object]) -> float:
        """Return what one step takes, with samples that no step has seen."""
        ids = self.samples(batch)
        if self.on_gpu:
            self.xp.cuda.synchronize()
        taken = device_seconds(self.device, lambda: steps(ids), self.stream())
        return taken / self.steps

    def right(self, rows: Any, ids: Any) -> bool:
        """Return whether these are the rows of the last step."""
        if self.on_gpu:
            self.xp.cuda.synchronize()
            rows, ids = rows.cpu().numpy(), ids.cpu().numpy()
        return bool(np.array_equal(rows, self.data[ids[self.steps - 1].reshape(-1)]))

    def add(
        self, name: str, rate: float, right: bool, other: str = "", reference: float = 0.0,
        paper: str = "", note: str = "", target: float = 0.0,
    ) -> None:  # fmt: skip
        """Report samples a second, in thousands."""
        self.report.row(
            name, rate / 1e3, "k samples/s", other, reference / 1e3, target, right,
            paper=paper, note=note, footprint=self.data.nbytes,
        )  # fmt: skip
