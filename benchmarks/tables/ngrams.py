"""N-gram embeddings of a language model by transformers' own code, with the table in its files.

`Qwen4ExpTextNGramEmbedding` of transformers hashes the n-grams of a text to rows of a table. The
table is random FP8, in shards as the checkpoints of that model have them. The module runs with the
table in the device's memory, and offloaded within limits; both must give the same bits. Each window
of the text is read once: first its beginning in one step, then token by token.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

from benchmarks.base import Record
from benchmarks.tables.file import DATA_OFFSET, write_table
from flashwarp.config import parse_bytes
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError

__all__ = ["run"]

_MODELING = "transformers.models.qwen4_exp.modeling_qwen4_exp"
_ROW_BYTES = 160
_HEADS = 16
# That checkpoint has 128 shards of 2,500,012 rows; here each file has several.
_SHARDS, _FILES = 128, 8
_PREFIX = "model.language_model.layers.0.ple.ple_embedding.ngram_embedding"
# By the kind of device: bytes of the table, of host and of GPU memory; tokens of a first step.
_DEFAULTS = {
    "cuda": ("4 GiB", "256 MiB", "128 MiB", 2048),
    "cpu": ("64 MiB", "16 MiB", "12 MiB", 256),
}


def run(
    device: str | None,
    folder: Path,
    size: Annotated[str, "Bytes of the table; empty: 4 GiB, 64 MiB on the CPU device."] = "",
    ram: Annotated[str, "Limit of host memory; empty: 256 MiB, 16 MiB on the CPU."] = "",
    gpu: Annotated[str, "Limit of GPU memory; empty: 128 MiB, 12 MiB on the CPU."] = "",
    prefill: Annotated[int, "Tokens of a first step; 0: 2048, 256 on the CPU device."] = 0,
    decode: Annotated[int, "Tokens after them, one a step."] = 512,
    text: Annotated[str, "A file of text; empty: the reference that comes with Python."] = "",
    tokenizer: Annotated[str, "A .tiktoken file; empty: that of dashscope, else words."] = "",
    runs: Annotated[int, "How many windows of the text count, beside a first one."] = 5,
    seed: Annotated[int, "Of the table."] = 1,
) -> Record:
    """Read a text by a model's n-gram embeddings, resident and offloaded."""
    where = resolve(device)
    defaults = _DEFAULTS[where.kind]
    size, ram, gpu = size or defaults[0], ram or defaults[1], gpu or defaults[2]
    prefill = prefill or defaults[3]
    tokens = _tokens(text, tokenizer)
    windows = tokens.windows(prefill + decode, runs + 1)
    bench = _NGrams(where.name, parse_bytes(size, "size"), tokens.vocabulary)
    report = Record(
        "N-gram embeddings of transformers",
        where.describe(),
        {
            "rows": bench.rows, "row_bytes": _ROW_BYTES, "shards": _SHARDS, "ram": ram, "gpu": gpu,
            "prefill": prefill, "decode": decode, "text": tokens.text, "tokens": tokens.how,
            "vocabulary": tokens.vocabulary,
            "transformers": importlib.import_module("transformers").__version__,
        },
        {"table": seed},
    )  # fmt: skip
    place = folder / "ngrams"
    place.mkdir()
    try:
        bench.write(place, seed)
        resident = bench.resident(place)
        expected = _Reader(bench, resident, prefill)
        for window in windows:
            expected.read(window)
        ids = bench.ids(resident, windows)
        model = bench.empty()
        modules = importlib.import_module("flashwarp.torch")
        tables = modules.offload(
            model, "*.ngram_embedding", place, ram=ram, gpu=gpu, device=where,
            rows_per_step=prefill * _HEADS,
        )  # fmt: skip
        with tables:
            ours = _Reader(bench, bench.with_hashes(model), prefill)
            for window in windows:
                ours.read(window)
            (table,) = tables.report().tables
    finally:
        shutil.rmtree(place)
    nbytes = bench.rows * _ROW_BYTES
    right = all(map(bench.torch.equal, ours.found, expected.found))
    for name, ours_s, their_s, count in (
        (f"first steps of {prefill} tokens", ours.first, expected.first, prefill),
        (f"{decode} steps of a token", ours.later, expected.later, decode),
    ):
        report.row(
            f"{name}, offloaded, {table.path}", count / median(ours_s[1:]), "tokens/s",
            "the table in the device's memory", count / median(their_s[1:]), checked=right,
            note="both by transformers' code, call by call; the files are in the page cache",
            footprint=nbytes,
        )  # fmt: skip
    touched = len(np.unique(ids))
    report.row(
        "rows a token", len(ids) / (len(windows) * (prefill + decode)), "rows",
        note=f"{len(ids)} rows looked up, {touched} of them different, which are "
        f"{touched / bench.rows:.4%} of the table",
    )  # fmt: skip
    report.row(
        "lines that were in the cache, of all that the text looked up", 100 * table.hit_rate,
        "%", note=f"{table.bytes_looked_up} bytes looked up, {table.bytes_from_storage} read, "
        f"{table.bytes_from_host} from the host tier",
    )  # fmt: skip
    return report


class _NGrams:
    """The module of transformers, its table, and the files of that."""

    def __init__(self, device: str, nbytes: int, vocabulary: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        try:
            self.code: Any = importlib.import_module(_MODELING)
        except ImportError as error:
            raise ArgumentError(
                f"bench ngrams runs code of transformers 5.17, which cannot be imported: {error}"
            ) from error
        self.device = device
        self.config = self.code.Qwen4ExpTextConfig(
            vocab_size=vocabulary, eos_token_id=vocabulary - 1, heads_per_ngram=_HEADS // 2,
            ngram_size=3, ngram_vocab_size_base=max(nbytes // _ROW_BYTES // _HEADS, 2),
            split_ngram_parts=_SHARDS, make_ngram_vocab_size_divisible_by=_SHARDS,
            ple_layer_ids=[1], ple_embed_dim=_HEADS * _ROW_BYTES, num_hidden_layers=1,
            layer_types=["linear_attention"],
        )  # fmt: skip
        self.rows = int(_embedding(self.empty()).ngram_embedding.num_embeddings)

    def empty(self) -> Any:
        """Return a model on the meta device that has the module where the checkpoint has it."""
        torch = self.torch
        with torch.device("meta"):
            module = self.code.Qwen4ExpTextNGramEmbedding(self.config, _HEADS * _ROW_BYTES, 0, 0)
        module.to(torch.bfloat16)
        ple = torch.nn.ModuleDict({"ple_embedding": module})
        layers = torch.nn.ModuleList([torch.nn.ModuleDict({"ple": ple})])
        return torch.nn.ModuleDict({"layers": layers}).eval()

    def with_hashes(self, model: Any) -> Any:
        """Give the module its hashes, as transformers computes them for a new model."""
        module, torch = _embedding(model), self.torch
        values = {
            "layer_multipliers": self.code._build_layer_multipliers(
                module.unigram_vocab_size, module.ngram_size, module.ple_layer_index, module.seed
            ),
            "ngram_heads_vocab_sizes": torch.tensor(module.head_vocab_sizes),
            "ngram_heads_offsets": torch.tensor(module.head_offsets),
        }
        values = {name: value.to(self.device) for name, value in values.items()}
        module.load_state_dict(values, strict=False, assign=True)
        return model

    def write(self, folder: Path, seed: int) -> None:
        """Write the shards, and their index."""
        names = [f"{_PREFIX}.shard_{number}.weight" for number in range(_SHARDS)]
        each = _SHARDS // _FILES
        files = {
            folder / f"model-{number + 1:05}-of-{_FILES:05}.safetensors": names[
                number * each : (number + 1) * each
            ]
            for number in range(_FILES)
        }
        write_table(files, self.rows, _ROW_BYTES, seed)
        weights = {name: path.name for path, inside in files.items() for name in inside}
        index = {"metadata": {"total_size": self.rows * _ROW_BYTES}, "weight_map": weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def resident(self, folder: Path) -> Any:
        """Return a model whose table is in the device's memory, in bfloat16."""
        torch, model, begin = self.torch, self.empty(), 0
        weight = torch.empty((self.rows, _ROW_BYTES), dtype=torch.bfloat16, device=self.device)
        for path in sorted(folder.glob("*.safetensors")):
            codes = torch.from_numpy(np.fromfile(path, np.uint8, offset=DATA_OFFSET))
            codes = codes.view(-1, _ROW_BYTES).to(self.device)
            weight[begin : begin + len(codes)] = codes.view(torch.float8_e4m3fn)
            begin += len(codes)
        table = _embedding(model).ngram_embedding
        table.weight = torch.nn.Parameter(weight, requires_grad=False)
        return self.with_hashes(model)

    def ids(self, model: Any, windows: list[Any]) -> Any:
        """Return the rows that the windows look up."""
        seen: list[Any] = []
        module = _embedding(model)
        hook = module.ngram_embedding.register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].cpu().numpy().ravel())
        )
        with hook, self.torch.no_grad():
            for window in windows:
                module(self.torch.from_numpy(window)[None].to(self.device), None)
        return np.concatenate(seen)


def _embedding(model: Any) -> Any:
    return model["layers"][0]["ple"]["ple_embedding"]


@dataclass
class _Reader:
    """A model, and what it made of the windows of the text."""

    bench: _NGrams
    model: Any
    prefill: int
    found: list[Any] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Seconds of the first steps."""
    later: list[float] = field(default_factory=list)
    """Seconds of all other steps of a window."""

    def read(self, window: Any) -> None:
        """Read a window: some tokens at once, then one after the other."""
        torch, module = self.bench.torch, _embedding(self.model)
        tokens = torch.from_numpy(window)[None].to(self.bench.device)
        # It holds the last tokens from step to step, as in the whole model.
        state = importlib.import_module("transformers").DynamicCache(config=self.bench.config)
        first, others = tokens[:, : self.prefill], tokens[:, self.prefill :].split(1, 1)
        rows: list[Any] = []
        with torch.no_grad():
            self.first.append(self._seconds(lambda: rows.append(module(first, state))))
            self.later.append(
                self._seconds(lambda: rows.extend([module(token, state) for token in others]))
            )
        self.found.append(torch.cat(rows, 1).cpu())

    def _seconds(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.bench.device != "cpu":
            self.bench.torch.cuda.synchronize()


@dataclass(frozen=True)
class _Tokens:
    """A text as tokens."""

    ids: list[int]
    vocabulary: int
    """How many different tokens there can be; the last one ends texts."""
    how: str
    text: str

    def windows(self, length: int, count: int) -> list[Any]:
        """Return so many windows of the text, which have no token in common."""
        if len(self.ids) < length * count:
            raise ArgumentError(
                f"{self.text} has {len(self.ids)} tokens, and {count} windows of {length} need "
                f"{length * count}: give a longer text, or less runs"
            )
        return list(np.array(self.ids[: length * count]).reshape(count, length))


def _tokens(path: str, tokenizer: str) -> _Tokens:
    """Read a text, and make tokens of it by a tokenizer, or of its words if there is none."""
    if path:
        text, name = Path(path).read_text(), path
    else:
        topics = importlib.import_module("pydoc_data.topics").topics
        text, name = "\n".join(topics.values()), "pydoc_data.topics of Python"
    ranks = Path(tokenizer) if tokenizer else _installed_ranks()
    if ranks is None:
        words = re.findall(r"\w+|[^\w\s]|\s+", text)
        numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
        how = "words by order of appearance, since no tokenizer is installed"
        return _Tokens([numbers[word] for word in words], len(numbers) + 1, how, name)
    converter = importlib.import_module("transformers.convert_slow_tokenizer").TikTokenConverter

    class Converter(converter):  # type: ignore[misc, valid-type]
        """Reads the file itself, for which the original needs another package."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            pairs = (line.split() for line in Path(tiktoken_url).read_bytes().splitlines())
            return {base64.b64decode(token): int(rank) for token, rank in pairs}

    made = Converter(str(ranks)).converted()
    return _Tokens(made.encode(text).ids, made.get_vocab_size() + 1, ranks.name, name)


def _installed_ranks() -> Path | None:
    """Return the tokenizer that comes with the package dashscope, if that is installed."""
    found = importlib.util.find_spec("dashscope")
    for place in (found and found.submodule_search_locations) or ():
        path = Path(place) / "resources" / "qwen.tiktoken"
        if path.exists():
            return path
    return None
