"""Decode tokens with a table of n-grams that is larger than the cache, in one CUDA graph a token.

    python examples/decode_loop.py [--device cpu] [--compare]

Each step hashes the last tokens of some sequences, gathers a row for each hash, and feeds a small
model, whose best token comes next. All of it is one CUDA graph, and the host only launches it: the
program counts the calls of CUDA in the loop, and shows that the host has queued all tokens before
the GPU has begun with the first. On the CPU device the steps run one by one.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import flashwarp as fw
import flashwarp.torch

SEQUENCES, WINDOW, HASHES, VOCABULARY, HIDDEN = 8, 3, 4, 1024, 512
WAITS = ("Synchronize", "EventQuery", "StreamQuery", "StreamWaitEvent", "Memcpy", "Malloc", "Alloc")


class Decoder:
    """A model and its sequences. `lookup` returns the rows of the table for some ids."""

    def __init__(
        self, lookup: Callable | None, rows: int, width: int, device: str, tokens: int
    ) -> None:
        self.lookup = lookup
        self.rows = rows
        made = torch.Generator().manual_seed(1)

        def weights(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=made) / shape[0] ** 0.5).to(device)

        self.embedding = weights(VOCABULARY, HIDDEN) * VOCABULARY**0.5
        self.first = weights(HASHES * width + HIDDEN, HIDDEN)
        self.second = weights(HIDDEN, VOCABULARY)
        self.factors = torch.randint(1 << 60, (HASHES, WINDOW), generator=made).to(device) * 2 + 1
        # What a step reads and changes, at addresses that stay.
        self.window = torch.randint(VOCABULARY, (SEQUENCES, WINDOW), generator=made).to(device)
        self.shift = torch.zeros((), dtype=torch.int64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.history = torch.zeros((tokens, SEQUENCES), dtype=torch.int64, device=device)
        self.beginning = self.window.clone()

    def ids(self) -> torch.Tensor:
        """Hash the last tokens of each sequence, in several ways."""
        mixed = ((self.window[:, None] + 1) * self.factors).sum(2)
        mixed ^= mixed >> 29
        return (mixed * 0x5851F42D4C957F2D >> 20 & (1 << 40) - 1) % self.rows + self.shift

    def advance(self, rows: torch.Tensor) -> None:
        """Choose the next tokens, and note them."""
        last = self.embedding[self.window[:, -1]]
        hidden = torch.tanh(torch.cat((rows.flatten(1), last), 1) @ self.first)
        best = (hidden @ self.second).argmax(1)
        self.window.copy_(torch.cat((self.window[:, 1:], best[:, None]), 1))
        self.history.index_copy_(0, self.place, best[None])
        self.place += 1

    def step(self) -> None:
        """Decode one token of each sequence."""
        self.advance(self.lookup(self.ids()))

    def restart(self) -> None:
        """Begin again."""
        self.window.copy_(self.beginning)
        self.place.zero_()


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Record a step in a graph, after a run that compiles and loads what it needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def timed(decoder: Decoder, step: Callable[[], object], tokens: int) -> float:
    """Return the microseconds a token takes, and leave the tokens in `decoder.history`."""
    for _ in range(2):  # the first time does not count
        decoder.restart()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(tokens):
            step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds / tokens * 1e6


def calls_of_cuda(work: Callable[[], object]) -> collections.Counter[str]:
    """Count the calls of CUDA's runtime and driver, by any thread of the process, during `work`."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        with torch.profiler.record_function("decode loop"):
            work()
        torch.cuda.synchronize()
    events = profile.events()
    (loop,) = (each.time_range for each in events if each.name == "decode loop" and on_host(each))
    return collections.Counter(
        each.name
        for each in events
        if each.name.startswith("cu")
        and on_host(each)
        and loop.start <= each.time_range.start <= loop.end
    )


def on_host(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    """Return whether an event of a profile is a call, and not what a GPU did."""
    return event.device_type == torch.autograd.DeviceType.CPU


def check_that_the_host_waits_for_nothing(graph: torch.cuda.CUDAGraph, tokens: int) -> None:
    """Queue tokens behind work that keeps the GPU busy, and look whether it is still busy.

    CUDA lets about twenty replays of a graph that counts its users wait; then a replay itself waits
    for a place.
    """
    begun = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    begun.record()
    for _ in range(tokens):
        graph.replay()
    early = not begun.query()
    torch.cuda.synchronize()
    if not early:
        raise SystemExit("the host has waited for the GPU")
    print(f"{tokens} tokens were queued before the GPU began with the first")


def decode_on_gpu(table: fw.Array, weights: np.ndarray, tokens: int, compare: bool) -> None:
    """Decode by one graph a token; show what the host does, and what a bad id does."""
    rows, width = table.shape
    decoder = Decoder(lambda ids: fw.torch.gather(table, ids), rows, width, "cuda", tokens)
    graph = captured(decoder.step)
    print(
        f"a token: {timed(decoder, graph.replay, tokens):.1f} us, {table.stats.hit_rate:.0%} hits"
    )
    table.check()
    found = decoder.history.clone()

    decoder.restart()
    calls = calls_of_cuda(lambda: [graph.replay() for _ in range(tokens)])
    launches = sum(n for name, n in calls.items() if "Launch" in name)
    waits = sum(n for name, n in calls.items() if any(word in name for word in WAITS))
    print(f"calls of CUDA for {tokens} tokens: {dict(calls)}; waits, copies, allocations: {waits}")
    if not calls:
        print("(nothing is known of them: this machine lets no program trace calls of CUDA)")
    elif waits or launches != tokens:
        raise SystemExit("the host did more than launch one graph a token")
    decoder.restart()
    check_that_the_host_waits_for_nothing(graph, min(tokens, 16))

    # Three of five tokens ask for rows that do not exist; only a later call says so.
    decoder.restart()
    for token in range(5):
        decoder.shift.fill_(rows if token in (1, 2, 4) else 0)
        graph.replay()
    torch.cuda.synchronize()
    try:
        table.check()
        raise SystemExit("an id out of bounds was not noticed")
    except fw.errors.BoundsError as error:
        print(f"ids out of bounds: {error}")
    decoder.shift.zero_()

    expected = expected_tokens(weights, "cuda", tokens)
    timed(decoder, graph.replay, tokens)
    if not (torch.equal(found, expected) and torch.equal(decoder.history, expected)):
        raise SystemExit("the tokens are not those of a table in memory")
    print(f"{tokens * SEQUENCES} tokens are those of a table in memory")
    graph.reset()  # an array is open for as long as a graph reads it
    if compare:
        compare_ways(weights, tokens)


def expected_tokens(weights: np.ndarray, device: str, tokens: int) -> torch.Tensor:
    """Decode with the whole table in the device's memory, step by step."""
    table = torch.from_numpy(weights).to(device)
    decoder = Decoder(lambda ids: table[ids], *weights.shape, device, tokens)
    for _ in range(tokens):
        decoder.step()
    return decoder.history


class MappedMemory:
    """Pinned host memory as an array in the GPU's address space."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<f4",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def compare_ways(weights: np.ndarray, tokens: int) -> None:
    """Time the same steps with tables in GPU memory, in pinned memory, and on the host."""
    rows, width = weights.shape
    resident = torch.from_numpy(weights).cuda()
    pinned = torch.from_numpy(weights).pin_memory()
    mapped = torch.as_tensor(MappedMemory(pinned), device="cuda")
    for name, table in (("in GPU memory", resident), ("in pinned memory, read by the GPU", mapped)):
        decoder = Decoder(lambda ids, table=table: table[ids], rows, width, "cuda", tokens)
        graph = captured(decoder.step)
        print(f"a token, table {name}, one graph: {timed(decoder, graph.replay, tokens):.1f} us")
    print(f"a token, rows chosen on the host: {rows_from_the_host(weights, tokens):.1f} us")


def rows_from_the_host(weights: np.ndarray, tokens: int) -> float:
    """Time steps whose ids go to the host, which sends the rows: two graphs, and a wait between."""
    rows, width = weights.shape
    table = torch.from_numpy(weights)
    here = torch.empty(SEQUENCES * HASHES, width, pin_memory=True)
    there = torch.empty(SEQUENCES, HASHES, width, device="cuda")
    ids = torch.empty(SEQUENCES, HASHES, dtype=torch.int64, device="cuda")
    decoder = Decoder(None, rows, width, "cuda", tokens)
    before = captured(lambda: ids.copy_(decoder.ids()))
    after = captured(lambda: decoder.advance(there))

    def step() -> None:
        before.replay()
        torch.index_select(table, 0, ids.flatten().cpu(), out=here)
        there.copy_(here.view_as(there), non_blocking=True)
        after.replay()

    return timed(decoder, step, tokens)


def decode_on_cpu(table: fw.Array, weights: np.ndarray, tokens: int) -> None:
    """Decode step by step on the CPU device, and show what a bad id does."""
    rows, width = table.shape
    decoder = Decoder(lambda ids: fw.torch.gather(table, ids), rows, width, "cpu", tokens)
    start = time.perf_counter()
    for _ in range(tokens):
        decoder.step()
    print(f"a token: {(time.perf_counter() - start) / tokens * 1e6:.1f} us")
    if not torch.equal(decoder.history, expected_tokens(weights, "cpu", tokens)):
        raise SystemExit("the tokens are not those of a table in memory")
    print(f"{tokens * SEQUENCES} tokens are those of a table in memory")
    decoder.shift.fill_(rows)
    try:
        decoder.step()
    except fw.errors.BoundsError as error:
        print(f"ids out of bounds: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1 << 16)
    parser.add_argument("--width", type=int, default=1024, help="floats of a row")
    parser.add_argument("--tokens", type=int, default=200, help="of each of eight sequences")
    parser.add_argument("--cache", default="16 MiB")
    parser.add_argument("--device", help="cpu or cuda:N; default: the GPU, if torch has one")
    parser.add_argument(
        "--compare", action="store_true", help="also time other places of the table"
    )
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # Wide enough that the next token depends on the rows, and not on the last token alone.
    weights = 4 - 8 * np.random.default_rng(1).random((options.rows, options.width), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.npy"
        np.save(path, weights)
        with fw.open(path, device=device, cache=options.cache) as table:
            print(f"{device}: a table of {table.nbytes >> 20} MiB, a cache of {options.cache}")
            if device == "cpu":
                decode_on_cpu(table, weights, options.tokens)
            else:
                decode_on_gpu(table, weights, options.tokens, options.compare)


if __name__ == "__main__":
    main()
