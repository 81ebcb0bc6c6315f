"""Tables of numbers of every type: rows that are converted, scaled and pooled, beside torch."""

from __future__ import annotations

from typing import Any

import numpy as np

import flashwarp as fw
from oracle import torches
from oracle.model import Wrong
from oracle.steps import step
from oracle.world import Hand

# How numpy holds what torch names.
_HELD = {"float32": "f4", "float16": "f2", "bfloat16": "u2", "float8_e4m3fn": "u1",
         "float8_e5m2": "u1", "int8": "i1"}  # fmt: skip
_OUT = ("float32", "float16", "bfloat16")
_WIDTHS = (1, 3, 7, 10, 16, 32, 96, 128, 130, 160, 1000)


class _Table:
    """A file of numbers, options of a table over it, and the rows that it must give."""

    def __init__(self, hand: Hand) -> None:
        torch, draw = torches.torch, hand.random
        stored = draw.choice(tuple(_HELD))
        count, width = draw.randint(1, 300), draw.choice(_WIDTHS)
        generator = torch.Generator().manual_seed(draw.getrandbits(30))
        numbers = 3 * torch.randn(count, width, generator=generator)
        held = (20 * numbers if stored == "int8" else numbers).to(getattr(torch, stored))
        self.path = hand.world.folders["memory"] / f"table{hand.number}"
        self.path.write_bytes(held.view(torch.uint8).numpy().tobytes())
        first = draw.randint(0, count - 1) if hand.odds(0.3) else 0
        last = draw.randint(first + 1, count) if first else count
        dim = draw.randint(1, width) if hand.odds(0.3) else width
        self.rows = held.float()[first:last, :dim]
        self.out = draw.choice(_OUT)
        self.options: dict[str, Any] = {
            "stored": getattr(torch, stored), "dim": dim, "dtype": getattr(torch, self.out)
        }  # fmt: skip
        if first:
            self.options["rows"] = range(first, last)
        if hand.odds(0.4):
            blocks = draw.choice([each for each in (1, 2, 4, 8) if dim % each == 0])
            shape = draw.choice(((), (last - first,), (last - first, blocks)))
            scales = torch.rand(shape, generator=generator)
            self.options["scales"] = scales.to(torches._device(hand))
            each = scales.reshape(-1, scales.shape[-1] if scales.ndim == 2 else 1)
            self.rows = self.rows * each.repeat_interleave(dim // each.shape[1], 1)
        self.shape = f"{stored}[{count}, {width}]"
        self.where = {
            "device": hand.machine.devices[hand.world.device],
            "line": draw.choice((512, 4096)),
            "cache": "64 KiB",
            "dtype": np.dtype(_HELD[stored]),
            "shape": (count, width),
        }

    def ids(self, hand: Hand, *shape: int) -> Any:
        made = [hand.random.randrange(len(self.rows)) for _ in range(int(np.prod(shape)))]
        kind = hand.random.choice(("int64", "int32"))
        return torches.torch.tensor(made, dtype=getattr(torches.torch, kind)).reshape(shape)


def _compare(hand: Hand, table: _Table, got: Any, right: Any) -> None:
    torch = torches.torch
    hand.world.checks += 1
    got, right = got.detach().cpu(), right.to(getattr(torch, table.out))
    if got.dtype != right.dtype or got.shape != right.shape:
        raise Wrong(f"{got.dtype}{tuple(got.shape)}, not {right.dtype}{tuple(right.shape)}")
    near = 1e-2 if right.itemsize < 4 else 1e-5
    # A sum may be small beside what it is of, up to 60 rows.
    terms = 1e-6 * 60 * float(table.rows.float().abs().max())
    if not torch.allclose(got.float(), right.float(), rtol=near, atol=max(near, terms)):
        raise Wrong(f"a table of {table.shape} gives {got.flatten()[:4]}, not "
                    f"{right.flatten()[:4]}")  # fmt: skip


@step(2)
def look_up_numbers(hand: Hand) -> None:
    """Look rows of a table of any type up, alone and beside each other."""
    if not torches.there_is_torch(hand):
        return
    table, torch = _Table(hand), torches.torch
    shape = hand.random.choice(((), (0,), (7,), (300,), (3, 5), (2, 0, 4)))
    index = table.ids(hand, *shape)
    hand.say(f"fwt.Embedding({table.shape}, {table.options})(ids of {shape})")
    with fw.open(table.path, **table.where) as x, torch.no_grad():
        made = torches.fwt.Embedding(x, **table.options)
        got = made(index.to(torches._device(hand)))
        right = table.rows[index.long()].to(getattr(torch, table.out))
        hand.world.checks += 1
        if not torch.equal(got.cpu(), right):
            _compare(hand, table, got, right)
            raise Wrong(f"a table of {table.shape} gives rows of other bits")
        if index.ndim == 1:
            both = torch.stack([index, index.flip(0)]).to(torches._device(hand))
            beside = torch.cat([right, right.flip(0)], -1)
            _compare(hand, table, torches.fwt.EmbeddingGroup([made, made])(both), beside)


@step(2)
def pool_numbers(hand: Hand) -> None:
    """Pool rows of a table of any type, in bags of one length or of any."""
    if not torches.there_is_torch(hand):
        return
    table, torch, device = _Table(hand), torches.torch, torches._device(hand)
    mode = hand.random.choice(("sum", "mean", "max"))
    padding = hand.random.choice((None, hand.random.randrange(len(table.rows))))
    how: dict[str, Any] = {"mode": mode, "padding_idx": padding}
    count = hand.random.randint(0, 60)
    weights = torch.rand(count) if mode == "sum" and hand.odds(0.3) else None
    index, offsets = table.ids(hand, count), None
    if hand.odds(0.6) or count % 6:
        how["include_last_offset"] = hand.odds(0.5)
        ends = sorted(hand.random.randint(0, count) for _ in range(hand.random.randint(0, 9)))
        offsets = torch.tensor([0, *ends, *[count] * how["include_last_offset"]]).to(index.dtype)
    else:
        index = index.reshape(-1, 6)
        weights = None if weights is None else weights.reshape(-1, 6)
    hand.say(f"fwt.EmbeddingBag({table.shape}, {table.options}, {how})(ids of {count})")
    given = [None if each is None else each.to(device) for each in (index, offsets, weights)]
    with fw.open(table.path, **table.where) as x, torch.no_grad():
        got = torches.fwt.EmbeddingBag(x, **how, **table.options)(*given)
        other = torch.nn.EmbeddingBag.from_pretrained(table.rows, **how)
        _compare(hand, table, got, other(index, offsets, weights))
