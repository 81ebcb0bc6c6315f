"""A model whose n-gram table stays in its checkpoint, as many times larger than memory as you like.

    python examples/offload_ngram.py [--device cpu | cuda] [--rows N] [--gpu-memory SIZE]
        [--host-memory SIZE]

The model hashes the last tokens to rows of a table, as models with n-gram embeddings do, and
decodes greedily. It runs twice: with its table in memory, and with the table left in a safetensors
file within limits of memory. Both give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from flashwarp.torch import offload

VOCABULARY, HEADS, WIDTH = 1000, 8, 32


class NGramEmbedding(nn.Module):
    """Hashes each token and the one before to rows, one for each head, and joins them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.ngram_embedding = nn.Embedding(rows, WIDTH, dtype=torch.bfloat16)
        self.multipliers = nn.Buffer(torch.arange(1, HEADS + 1) * 2654435761)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        pairs = tokens[:, 1:] * VOCABULARY + tokens[:, :-1]
        ids = (pairs.unsqueeze(-1) * self.multipliers) % self.rows
        return self.ngram_embedding(ids).flatten(-2)


class Model(nn.Module):
    """The smallest model that decodes: n-gram features, and an output layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.features = NGramEmbedding(rows)
        self.head = nn.Linear(HEADS * WIDTH, VOCABULARY, dtype=torch.bfloat16)

    def decode(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Append so many tokens."""
        for _ in range(count):
            logits = self.head(self.features(tokens[:, -2:]))[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
        return tokens


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file. `safetensors.torch.save_file` does the same."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        kind = {torch.bfloat16: "BF16", torch.int64: "I64"}[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)


@torch.no_grad()
def main() -> None:
    """Decode with the table in memory and in its file, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=1 << 18)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--host-memory", default="64 MiB")
    parser.add_argument("--gpu-memory", default="32 MiB")
    asked = parser.parse_args()

    torch.manual_seed(1)
    resident = Model(asked.rows).eval()
    begin = torch.randint(0, VOCABULARY, (4, 2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        state = resident.state_dict()
        save(path, state)
        expected = resident.to(asked.device).decode(begin.to(asked.device), asked.tokens)

        with torch.device("meta"):
            model = Model(asked.rows).eval()
        with offload(
            model,
            "*.ngram_embedding",
            path,
            host_memory=asked.host_memory,
            gpu_memory=asked.gpu_memory,
            device=asked.device,
        ) as tables:
            rest = {name: state[name] for name in tables.rest()}
            model.load_state_dict(rest, assign=True)
            model.to(asked.device)
            started = time.perf_counter()
            found = model.decode(begin.to(asked.device), asked.tokens)
            took = time.perf_counter() - started
            report = tables.stats
        assert torch.equal(found, expected), "the same tokens"
    print(f"{asked.device}: {found.numel()} tokens, the same, in {took:.2f} s")
    print(report)


if __name__ == "__main__":
    main()
