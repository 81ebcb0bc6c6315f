"""Tables of models that stay in safetensors files: what lookups give, limits, and misuse."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import nn

from flashwarp.errors import (
    ArgumentError,
    CacheError,
    ClosedError,
    CopyError,
    DtypeError,
    FileFormatError,
    MissingFileError,
    ReadOnlyError,
)
from flashwarp.torch import offload
from support.safetensors_files import save

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

ROWS, WIDTH = 700, 20


class Scaled(nn.Embedding):
    """As the per-layer embeddings of Gemma: the lookup of the base class, times a number."""

    def __init__(self, rows, width, scale):
        super().__init__(rows, width, 0)
        self.register_buffer("embed_scale", torch.tensor(scale), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class Table(nn.Module):
    """No subclass of torch's module, but a table."""

    def __init__(self, rows, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width))

    def forward(self, ids):
        return nn.functional.embedding(ids.to(self.weight.device), self.weight)


class Hashed(nn.Module):
    """Hashes n-grams to rows, where its table is, and joins them."""

    def __init__(self):
        super().__init__()
        self.ngram_embedding = nn.Embedding(ROWS, WIDTH)

    def forward(self, tokens):
        ids = torch.stack([tokens * 31 % ROWS, (tokens ^ tokens.roll(1)) * 7 % ROWS], -1)
        weight = self.ngram_embedding.weight
        where = weight.device if weight.device.type != "meta" else None
        return self.ngram_embedding(ids.to(where)).to(tokens.device).flatten(-2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Hashed(), Hashed()])
        self.scaled = Scaled(ROWS, WIDTH, 2.5)
        self.table = Table(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens):
        rows = torch.cat([layer(tokens) for layer in self.layers], -1)
        return rows, self.head(self.scaled(tokens) + self.table(tokens))


ALL = ["*.ngram_embedding", "scaled", "table"]


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Model().eval()


@pytest.fixture
def tokens():
    return torch.randint(0, ROWS, (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path, model):
    """A checkpoint of the model in two files, whose names have a prefix."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    names = list(state)
    shards = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for shard, inside in shards.items():
        save(tmp_path / shard, {name: state[name] for name in inside})
    weight_map = {name: shard for shard, inside in shards.items() for name in inside}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def small(model, files, pattern=ALL, **options):
    """Offload with limits far below the tables' 224 KB."""
    options = {
        "host_memory": "64 KiB",
        "gpu_memory": "64 KiB",
        "device": "cpu",
        "rows_per_step": 1,
        **options,
    }
    return offload(model, pattern, files, **options)


# What lookups give.


def test_outputs_are_those_of_the_resident_model(model, folder, tokens):
    with torch.no_grad():
        expected = model(tokens)

        with small(model, folder) as offloaded:
            for _ in range(3):
                assert all(map(torch.equal, model(tokens), expected))
            assert "ngram_embedding.weight" not in " ".join(offloaded.rest())
            assert list(offloaded.tables) == [
                "layers.0.ngram_embedding", "layers.1.ngram_embedding", "scaled", "table",
            ]  # fmt: skip


def test_a_model_on_the_meta_device_gets_its_tables(model, folder, tokens):
    with torch.no_grad():
        expected = model(tokens)
    with torch.device("meta"):
        other = Model().eval()

    with torch.no_grad(), small(other, folder) as offloaded:
        rest = {k: v for k, v in model.state_dict().items() if k in offloaded.rest()}
        assert sorted(rest) == ["head.bias", "head.weight"]
        other.load_state_dict(rest, assign=True)
        other.scaled.embed_scale = model.scaled.embed_scale
        assert all(map(torch.equal, other(tokens), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_converted_to_the_dtype_of_the_module(tmp_path, dtype, tokens):
    module = nn.Sequential(nn.Embedding(ROWS, WIDTH).to(dtype)).eval()
    held = torch.randn(ROWS, WIDTH).to(torch.float8_e4m3fn)
    save(tmp_path / "x.safetensors", {"pad": torch.ones(3, dtype=torch.uint8), "0.weight": held})

    with small(module, tmp_path / "x.safetensors", "0"), torch.no_grad():
        assert torch.equal(module(tokens), held.to(dtype)[tokens])
        assert module[0].weight.dtype == dtype


@pytest.mark.parametrize("shape", [(), (1,), (ROWS,), (ROWS, 1), (ROWS, 4)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rows_are_multiplied_by_their_scales(tmp_path, shape, kind, tokens):
    module = nn.Sequential(nn.Embedding(ROWS, WIDTH)).eval()
    held = (torch.randn(ROWS, WIDTH) * 20).to(torch.int8)
    scales = torch.rand(shape).to(kind)
    save(tmp_path / "x.safetensors", {"0.weight": held, "0.weight_scale": scales})
    blocks = scales.float().reshape(-1, scales.shape[-1] if scales.ndim == 2 else 1)
    expected = held.float() * blocks.repeat_interleave(WIDTH // blocks.shape[1], 1)

    with small(module, tmp_path / "x.safetensors", "0"), torch.no_grad():
        torch.testing.assert_close(module(tokens), expected[tokens], rtol=0, atol=0)


def test_parts_have_their_own_scales(tmp_path, tokens):
    module = nn.Sequential(nn.Embedding(ROWS, WIDTH)).eval()
    held, scales = torch.randn(ROWS, WIDTH).to(torch.float8_e4m3fn), torch.rand(ROWS)
    tensors = {}
    for i, rows in enumerate(torch.arange(ROWS).tensor_split([11, 400])):
        tensors[f"0.shard_{i}.weight"] = held[rows]
        tensors[f"0.shard_{i}.weight_scale"] = scales[rows]
    save(tmp_path / "x.safetensors", tensors)

    with small(module, tmp_path / "x.safetensors", "0"), torch.no_grad():
        assert torch.equal(module(tokens), (held.float() * scales[:, None])[tokens])

    del tensors["0.shard_1.weight_scale"]
    save(tmp_path / "x.safetensors", tensors)
    with pytest.raises(FileFormatError, match="2 of 3 parts"):
        small(module, tmp_path / "x.safetensors", "0")


def test_a_table_in_parts_is_one(tmp_path, tokens):
    module = nn.ModuleDict({"ngram_embedding": nn.Embedding(ROWS, WIDTH)}).eval()
    weight = module["ngram_embedding"].weight.detach().clone()
    parts = list(weight.tensor_split([100, 101, 355, 400, 401, 402, 500, 600, 650, 690]))
    name = "model.language_model.ngram_embedding.shard_{}.weight"
    named = {name.format(i): part for i, part in enumerate(parts)}
    save(tmp_path / "1.safetensors", {n: named[n] for n in sorted(named)[:6]})
    save(tmp_path / "2.safetensors", {n: named[n] for n in sorted(named)[6:]})

    with small(module, tmp_path, "ngram*"), torch.no_grad():
        everything = torch.arange(ROWS)
        assert torch.equal(module["ngram_embedding"](everything), weight)

    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(FileFormatError, match="but not number"):
        small(module, tmp_path, "ngram*")


def test_a_model_may_be_a_table_itself(tmp_path, tokens):
    module = nn.Embedding(ROWS, WIDTH).eval()
    weight = module.weight.detach().clone()
    save(tmp_path / "x", {"weight": weight})
    save(tmp_path / "parts", {"part_0.weight": weight[:9], "part_1.weight": weight[9:]})

    for name in ("x", "parts"):
        with small(module, tmp_path / name, "*"), torch.no_grad():
            assert torch.equal(module(tokens), weight[tokens])


def test_two_modules_with_one_parameter_share_a_table(tmp_path, tokens):
    model = nn.ModuleDict({"encoder": nn.Embedding(ROWS, WIDTH), "decoder": Table(ROWS, WIDTH)})
    model["decoder"].weight = model["encoder"].weight
    weight = model["encoder"].weight.detach().clone()
    save(tmp_path / "x.safetensors", {"encoder.weight": weight})
    model.eval()

    with small(model, tmp_path / "x.safetensors", ["encoder", "decoder"]) as offloaded:
        assert len(offloaded.stats.tables) == 1
        with torch.no_grad():
            assert torch.equal(model["decoder"](tokens), model["encoder"](tokens))
    assert model["decoder"].weight is model["encoder"].weight


def test_compiled_models_look_rows_up(model, folder, tokens):
    torch.compiler.reset()
    with torch.no_grad():
        expected = model(tokens)
        with small(model, folder):
            compiled = torch.compile(model, fullgraph=True)
            for each in (tokens, tokens.flip(1)):
                found = compiled(each)
                assert all(map(torch.allclose, found, model(each)))
            assert all(map(torch.allclose, compiled(tokens), expected))
            torch.compiler.reset()
            gc.collect()


def test_frozen_tables_serve_training_of_the_rest(model, folder, tokens):
    model.table.weight.requires_grad_(False)
    model.train()

    with small(model, folder, "table"):
        model.head(model.table(tokens)).sum().backward()

    assert model.head.weight.grad.abs().sum() > 0


def test_freezing_a_model_freezes_its_tables(model, folder, tokens):
    model.train()

    with small(model, folder, "table"):
        with pytest.raises(ReadOnlyError):
            model.table(tokens)
        assert model.requires_grad_(False) is model
        assert not model.table(tokens).requires_grad
        assert not model.head.weight.requires_grad
        model.table.requires_grad_(True)
        with pytest.raises(ReadOnlyError):
            model.table(tokens)

    assert "requires_grad_" not in model.__dict__
    assert model.table.weight.requires_grad


# Limits and the report.


def test_report_counts_what_lookups_did(model, folder, tokens):
    with small(model, folder) as offloaded, torch.no_grad():
        before = offloaded.stats
        model(tokens)
        first = offloaded.stats
        model(tokens)
        second = offloaded.stats

    assert before.seconds_per_step is None
    assert before.hit_rate == 0
    scaled = {table.name: table for table in first.tables}["scaled"]
    assert (scaled.rows, scaled.row_bytes, scaled.route) == (ROWS, 80, "direct")
    assert scaled.bytes_looked_up == tokens.numel() * 80
    assert scaled.bytes_from_storage >= 512 * scaled.misses > 0
    assert second.hit_rate > first.hit_rate
    assert first.seconds_per_step > 0
    assert "scaled: 700 rows of 80 bytes, direct" in str(second)


def test_memory_stays_within_the_limit(model, folder):
    with small(model, folder, host_memory="40 KiB", gpu_memory="1 GiB") as offloaded:
        held = offloaded.stats.host_bytes
        assert offloaded.cache.capacity < held <= 40 << 10
        assert held > 36 << 10, "it uses what it may"


@pytest.mark.parametrize("rows", [100, 1000])
def test_a_step_that_needs_more_is_refused_with_a_number_that_suffices(model, folder, rows):
    with pytest.raises(CacheError, match=f"a step of {rows} rows") as refused:
        small(model, folder, host_memory="16 KiB", rows_per_step=rows)
    suffices = int(re.search(r"at least (\d+) bytes", str(refused.value))[1])

    with small(
        model, folder, host_memory=suffices, gpu_memory=suffices, rows_per_step=rows
    ) as offloaded:
        model.table(torch.arange(rows) % ROWS)
        assert offloaded.stats.host_bytes <= suffices
    with pytest.raises(CacheError):
        small(model, folder, host_memory=suffices - 1024, gpu_memory=suffices, rows_per_step=rows)


def test_a_lookup_that_needs_more_is_refused_with_a_number(model, folder):
    with (
        small(model, folder, host_memory="16 KiB", rows_per_step=None),
        pytest.raises(CacheError, match=r"a step of 700 rows.*give at least"),
    ):
        model.table(torch.arange(ROWS))


def test_less_than_one_set_is_refused_with_a_number_that_suffices(model, folder):
    with pytest.raises(CacheError, match="one set") as refused:
        small(model, folder, gpu_memory=100, rows_per_step=None)
    suffices = int(re.search(r"at least (\d+) bytes", str(refused.value))[1])

    small(model, folder, gpu_memory=suffices, rows_per_step=None).close()


def test_the_first_row_of_a_table_of_40_gib_comes_within_two_seconds(tmp_path):
    rows, width = (40 << 30) // 320, 160
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, rows * width * 2]}
    text = json.dumps({"ngram_embedding.weight": entry}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + rows * width * 2)
        file.seek(-width * 2, 2)
        file.write(torch.arange(width, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    with torch.device("meta"):
        module = nn.ModuleDict(
            {"ngram_embedding": nn.Embedding(rows, width, dtype=torch.bfloat16)}
        ).eval()

    begin = time.perf_counter()
    with small(module, path, "*", host_memory="64 MiB", gpu_memory="64 MiB"):
        found = module["ngram_embedding"](torch.tensor([rows - 1]))
        took = time.perf_counter() - begin

    assert torch.equal(found[0], torch.arange(width, dtype=torch.bfloat16))
    assert took < 2


# The end.


def test_modules_have_parameters_on_the_meta_device_after_close(model, folder, tokens):
    offloaded = small(model, folder)
    weight = model.table.weight
    offloaded.close()
    offloaded.close()

    assert model.table.weight.device.type == "meta"
    assert model.table.weight.shape == (ROWS, WIDTH)
    assert model.table.weight.requires_grad
    assert "closed" in repr(offloaded)
    with pytest.raises(ClosedError, match="'table'"):
        nn.functional.embedding(tokens, weight)
    with pytest.raises(ClosedError):
        _ = offloaded.stats
    small(model, folder).close()  # again


def test_memory_of_the_parameter_is_freed(folder, model):
    import weakref

    gone = weakref.ref(model.table.weight)
    with small(model, folder, "table"):
        gc.collect()
        assert gone() is None


def test_a_refusal_changes_nothing(model, folder, tokens):
    with torch.no_grad():
        expected = model(tokens)
        with pytest.raises(ArgumentError):
            small(model, folder, [*ALL, "head"])
        with pytest.raises(CacheError):
            small(model, folder, gpu_memory=1)
        assert all(map(torch.equal, model(tokens), expected))


# Misuse.


@pytest.mark.parametrize("pattern", ["*.ngram_embeding", "tabel", "Scaled"])
def test_a_pattern_without_a_match_names_the_nearest_tables(model, folder, pattern):
    with pytest.raises(ArgumentError, match=r"matches no module.*(ngram_embedding|table|scaled)"):
        small(model, folder, pattern)


@pytest.mark.parametrize("pattern", ["head", "h*", ["table", "head"]])
def test_what_is_no_embedding_is_refused(model, folder, pattern):
    with pytest.raises(ArgumentError, match="'head', a Linear, is no embedding"):
        small(model, folder, pattern)


def test_a_module_stands_for_the_tables_in_it(model, folder):
    with small(model, folder, "layers.?") as offloaded:
        assert len(offloaded.tables) == 2


@pytest.mark.parametrize("meta", [False, True])
def test_tied_weights_are_refused(folder, meta):
    with torch.device("meta" if meta else "cpu"):
        model = Model()
        model.head = nn.Linear(WIDTH, ROWS)
    model.head.weight = model.table.weight

    with pytest.raises(ArgumentError, match=r"tied: it is head\.weight too"):
        small(model, folder, "table")


def test_weights_that_share_memory_are_tied(folder, model):
    model.head.weight = nn.Parameter(model.table.weight.data)

    with pytest.raises(ArgumentError, match="tied"):
        small(model, folder, "table")


def test_a_missing_shard_is_named(model, folder):
    (folder / "b.safetensors").unlink()

    with pytest.raises(MissingFileError, match=r"b\.safetensors"):
        small(model, folder)


def test_a_shard_that_is_cut_is_refused(model, folder):
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-7])

    with pytest.raises(FileFormatError, match="no range"):
        small(model, folder)


@pytest.mark.parametrize("shape", [(ROWS - 1, WIDTH), (ROWS, WIDTH + 1), (ROWS * WIDTH,)])
def test_another_shape_is_refused(tmp_path, model, shape):
    save(tmp_path / "x.safetensors", {"table.weight": torch.zeros(shape)})

    with pytest.raises(FileFormatError, match="table"):
        small(model, tmp_path, "table")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64])
def test_a_dtype_without_conversion_is_refused(tmp_path, model, dtype):
    save(tmp_path / "x.safetensors", {"table.weight": torch.zeros(ROWS, WIDTH).to(dtype)})

    with pytest.raises(DtypeError, match="cannot be looked up"):
        small(model, tmp_path, "table")


def test_a_module_of_another_dtype_is_refused(tmp_path, model):
    save(tmp_path / "x.safetensors", {"table.weight": torch.zeros(ROWS, WIDTH)})
    model.double()

    with pytest.raises(DtypeError, match="float64"):
        small(model, tmp_path, "table")
    assert isinstance(model.table.weight, nn.Parameter)


def test_a_name_that_is_not_there_gets_near_names(tmp_path, model):
    save(tmp_path / "x.safetensors", {"tables.weight": torch.zeros(ROWS, WIDTH)})

    with pytest.raises(ArgumentError, match=r"near names are tables\.weight"):
        small(model, tmp_path, "table")
    with small(model, tmp_path, "table", names={"table": "tables.weight"}):
        assert not model.table(torch.tensor([5])).any()
    with pytest.raises(ArgumentError, match="names= has"):
        small(model, tmp_path, "table", names={"tables": "tables.weight"})
    with pytest.raises(ArgumentError, match="has no 'x'"):
        small(model, tmp_path, "table", names={"table": ["x"]})


def test_a_name_that_two_tensors_have_is_refused(tmp_path, model):
    zeros = torch.zeros(ROWS, WIDTH)
    save(tmp_path / "x", {"model.table.weight": zeros, "language_model.table.weight": zeros})

    with pytest.raises(ArgumentError, match="2 tensors could be"):
        small(model, tmp_path / "x", "table")


@pytest.mark.parametrize("wrong", [ROWS, -1, 1 << 40])
def test_ids_out_of_bounds_are_an_index_error(model, folder, wrong):
    with small(model, folder, "table"):
        with pytest.raises(IndexError):
            model.table(torch.tensor([3, wrong]))
        model.table(torch.tensor([3]))


def test_training_is_refused(model, folder, tokens):
    model.train()

    with small(model, folder, "table"):
        with pytest.raises(ReadOnlyError, match="in training"):
            model.table(tokens)
        with torch.no_grad():
            model.table(tokens)
        model.table.weight.requires_grad = False
        model.table(tokens)


def test_other_functions_of_the_weight_are_refused(model, folder):
    with small(model, folder, "table"):
        weight = model.table.weight
        with pytest.raises(ArgumentError, match="linear would need all rows"):
            nn.functional.linear(torch.zeros(WIDTH), weight)
        with pytest.raises(ArgumentError):
            torch.sum(weight)
        assert weight.size(0) == ROWS
        assert weight.numel() == ROWS * WIDTH
        with pytest.raises(ArgumentError, match="offloaded already"):
            small(model, folder, "table")


def test_rows_that_lookups_change_are_refused(model, folder):
    model.scaled.max_norm = 1.0

    with pytest.raises(ArgumentError, match="max_norm"):
        small(model, folder, "scaled")


def test_scales_that_fit_no_rows_are_refused(tmp_path, model):
    held = torch.zeros(ROWS, WIDTH).to(torch.float8_e4m3fn)
    for scales, error in [
        (torch.ones(ROWS - 1), FileFormatError),
        (torch.ones(ROWS, 1).double(), DtypeError),
        (torch.ones(7, 1), FileFormatError),
        (torch.ones(ROWS, 3), FileFormatError),
        (torch.ones(ROWS, 0), FileFormatError),
    ]:
        save(tmp_path / "x", {"table.weight": held, "table.weight_scale_inv": scales})
        with pytest.raises(error):
            small(model, tmp_path / "x", "table")
    one = torch.ones(1)
    save(tmp_path / "x", {"table.weight": held, "table.weight_scale": one, "table.scale": one})
    with pytest.raises(ArgumentError, match="could have the scales"):
        small(model, tmp_path / "x", "table")
    assert isinstance(model.table.weight, nn.Parameter)


def test_integers_without_scales_are_refused(tmp_path, model):
    save(tmp_path / "x", {"table.weight": torch.zeros(ROWS, WIDTH, dtype=torch.int8)})

    with pytest.raises(DtypeError, match="no scales"):
        small(model, tmp_path / "x", "table")


def test_rss_stays_within_the_limit(tmp_path):
    """A process that looks up rows of a gigabyte keeps its memory."""
    code = f"""
import json, resource, sys, torch, numpy as np
from torch import nn
import flashwarp.torch
rows, width = 4 << 20, 64
path = {str(tmp_path / "x.safetensors")!r}
entry = dict(dtype="F32", shape=[rows, width], data_offsets=[0, rows * width * 4])
text = json.dumps({{"0.weight": entry}}).encode()
with open(path, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + rows * width * 4)
with torch.device("meta"):
    model = nn.Sequential(nn.Embedding(rows, width)).eval()
def anonymous():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) << 10
limits = {{"host_memory": "8 MiB", "gpu_memory": "8 MiB"}}
with flashwarp.torch.offload(model, "0", path, device="cpu", **limits):
    model(torch.randint(0, rows, (100,)))
    before = anonymous()
    for _ in range(50):
        assert not model(torch.randint(0, rows, (4000,))).any()
    print(anonymous() - before)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )

    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 20 << 20, "the cache, and what torch and threads keep"


# Models of transformers, as they are.


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed")


def test_ngram_embeddings_of_transformers(transformers, tmp_path):
    modeling = pytest.importorskip(
        "transformers.models.qwen4_exp.modeling_qwen4_exp", reason="this version has no such model"
    )
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    torch.manual_seed(4)
    config = Qwen4ExpTextConfig(vocab_size=300, ngram_vocab_size_base=500, eos_token_id=2)
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    module = nn.ModuleDict(
        {"ple_embedding": modeling.Qwen4ExpTextNGramEmbedding(config, heads * 16, 0)}
    ).eval()
    weight = module["ple_embedding"].ngram_embedding.weight.detach().clone()
    parts = {f"ple_embedding.ngram_embedding.shard_{i}.weight": part
             for i, part in enumerate(weight.chunk(5))}  # fmt: skip
    save(tmp_path / "x.safetensors", parts)
    tokens = torch.randint(0, 300, (2, 40))
    with torch.no_grad():
        expected = module["ple_embedding"](tokens, None)

        with small(module, tmp_path, "*.ngram_embedding", host_memory="8 MiB", gpu_memory="8 MiB"):
            assert torch.equal(module["ple_embedding"](tokens, None), expected)


def test_per_layer_embeddings_of_transformers(transformers, tmp_path):
    modeling = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    torch.manual_seed(5)
    kind = modeling.Gemma3nTextScaledWordEmbedding
    model = nn.ModuleDict({"embed_tokens_per_layer": kind(ROWS, WIDTH, 0, 4.5)}).eval()
    model = model.to(torch.bfloat16)
    table = model["embed_tokens_per_layer"]
    save(tmp_path / "x.safetensors", {
        "model.language_model.embed_tokens_per_layer.weight": table.weight,
    })  # fmt: skip
    tokens = torch.randint(0, ROWS, (2, 40))
    with torch.no_grad():
        expected = table(tokens)

        with small(model, tmp_path, "*per_layer"):
            assert torch.equal(table(tokens), expected)
            assert isinstance(table, kind)


def test_a_state_that_would_lack_a_table_is_refused(model, folder):
    def names():
        return sorted(model.state_dict())

    whole = names()
    with small(model, folder, "table") as first, small(model, folder, "scaled") as second:
        with pytest.raises(CopyError, match=r"scaled\.weight.*safetensors.*rest\(\)"):
            names()
        with pytest.raises(CopyError, match="the offloaded table scaled"):
            torch.save(model.state_dict(), folder / "saved.pt")
        assert sorted(set(whole) - set(first.rest())) == ["scaled.weight", "table.weight"]
        assert sorted(first.rest()) == sorted(second.rest())
        assert first.rest()["head.weight"].data_ptr() == model.head.weight.data_ptr()
        with pytest.raises(CopyError):
            names()

    assert names() == whole
    assert not (folder / "saved.pt").exists()


def test_files_of_the_library_of_the_format(tmp_path, model, tokens):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = model(tokens)

        with small(model, tmp_path):
            assert all(map(torch.equal, model(tokens), expected))


def test_lookups_equal_those_of_torch_for_every_row(tmp_path):
    module = nn.Sequential(nn.Embedding(5000, 37)).eval()
    weight = module[0].weight.detach().clone()
    save(tmp_path / "x.safetensors", {"0.weight": weight})
    order = torch.from_numpy(np.random.default_rng(2).permutation(np.arange(20_000) % 5000))

    with small(module, tmp_path, "0", host_memory="1 MiB", gpu_memory="1 MiB"), torch.no_grad():
        for ids in order.split(1000):
            assert torch.equal(module(ids), nn.functional.embedding(ids, weight))
