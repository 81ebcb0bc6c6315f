"""Offloaded tables on a GPU: rows along each path, one graph for ids and rows, and memory."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import nn

from flashwarp.torch import offload
from gpu.captures import MARKS
from support.safetensors_files import save

pytestmark = MARKS

ROWS, WIDTH = 100_003, 80  # rows of 160 bytes, as those of n-gram tables


@pytest.fixture(scope="module")
def weight():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def hashed(tokens):
    """Ids of n-grams, computed on the GPU."""
    mixed = (tokens * 2654435761) ^ (tokens.roll(1, -1) * 40503)
    return torch.stack([mixed % ROWS, (mixed * 31) % ROWS], -1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ngram_embedding = nn.Embedding(ROWS, WIDTH, dtype=torch.bfloat16)

    def forward(self, tokens):
        return self.ngram_embedding(hashed(tokens)).flatten(-2)


def model_on_meta():
    with torch.device("meta"):
        return Model().eval()


PATHS = {
    "in_place": {"host_memory": "256 MiB", "immutable": True},
    "bounce": {"host_memory": "12 MiB"},
}


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("path", PATHS)
def test_rows_are_bit_equal_along_each_path(path, shift, tmp_path, weight, device):
    save(tmp_path / "x.safetensors", {"ngram_embedding.weight": weight}, shift=shift)
    model, ids = model_on_meta(), torch.randperm(ROWS, device="cuda").repeat(2)

    with (
        torch.no_grad(),
        offload(
            model, "*", tmp_path, gpu_memory="16 MiB", device=device, rows_per_step=1, **PATHS[path]
        ) as tables,
    ):
        found = model.ngram_embedding(ids)
        tables.tables["ngram_embedding"].check()
        assert torch.equal(found, weight.cuda()[ids])
        report = tables.stats
        assert report.tables[0].route == path
        assert report.gpu_bytes <= 16 << 20
        assert report.seconds_per_step > 0


def test_a_table_in_parts_with_scales_is_looked_up(tmp_path, weight, device):
    held, scales = (weight.float() * 50).to(torch.float8_e4m3fn), torch.rand(ROWS)
    tensors = {}
    for i, rows in enumerate(torch.arange(ROWS).tensor_split([7001, 50_000])):
        tensors[f"model.ngram_embedding.shard_{i}.weight"] = held[rows]
        tensors[f"model.ngram_embedding.shard_{i}.weight_scale"] = scales[rows]
    save(tmp_path / "x.safetensors", tensors)
    model, ids = model_on_meta(), torch.randint(0, ROWS, (9999,), device="cuda")

    with (
        torch.no_grad(),
        offload(
            model,
            "ngram*",
            tmp_path,
            host_memory="64 MiB",
            gpu_memory="64 MiB",
            device=device,
            rows_per_step=9,
        ),
    ):
        found = model.ngram_embedding(ids)
        expected = (held.float() * scales[:, None]).bfloat16().cuda()[ids]
        assert torch.equal(found, expected)


@pytest.mark.parametrize("immutable", [True, False])
def test_a_table_in_parts_of_two_files_is_read_in_place(immutable, tmp_path, weight, device):
    """Parts in the order of their names, as libraries write them: of 13, the second is part 1."""
    parts = [f"ngram_embedding.shard_{i}.weight" for i in range(13)]
    held = dict(zip(parts, weight.tensor_split(13), strict=True))
    names = sorted(held)
    save(tmp_path / "x-1.safetensors", {name: held[name] for name in names[:5]}, shift=8)
    save(tmp_path / "x-2.safetensors", {name: held[name] for name in names[5:]})
    model, ids = model_on_meta(), torch.randperm(ROWS, device="cuda").repeat(2)
    resident = weight.cuda()

    with (
        torch.no_grad(),
        offload(
            model, "*", tmp_path, host_memory="256 MiB", gpu_memory="16 MiB", device=device,
            rows_per_step=1, immutable=immutable,
        ) as tables,
    ):  # fmt: skip
        array = tables.tables["ngram_embedding"]
        # A file system without leases leaves only the promise.
        assert array.service.route == "in_place" or not immutable
        before = array.stats.commands
        assert torch.equal(model.ngram_embedding(ids), resident[ids])
        array.check()
        graph, few = torch.cuda.CUDAGraph(), ids[:100].clone()
        with torch.cuda.graph(graph):
            out = model.ngram_embedding(few)
        few.copy_(ids[500:600])
        graph.replay()
        assert torch.equal(out, resident[few])
        if array.service.route == "in_place":
            assert array.stats.commands == before
        del graph, out
        gc.collect()


@pytest.mark.parametrize("path", PATHS)
def test_ids_and_rows_are_one_graph(path, tmp_path, weight, device):
    save(tmp_path / "x.safetensors", {"ngram_embedding.weight": weight})
    model, tokens = model_on_meta(), torch.zeros(4, 17, dtype=torch.int64, device="cuda")
    resident = weight.cuda()

    with (
        torch.no_grad(),
        offload(model, "*", tmp_path, gpu_memory="16 MiB", device=device, **PATHS[path]) as tables,
    ):
        model(tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(tokens)
        for seed in range(20):
            torch.manual_seed(seed)
            tokens.copy_(torch.randint(0, 300_000, tokens.shape))
            graph.replay()
            assert torch.equal(out, resident[hashed(tokens)].flatten(-2))
        tables.tables["ngram_embedding"].check()
        del graph, out
        gc.collect()


def test_compiled_models_use_graphs(tmp_path, weight, device):
    torch.compiler.reset()
    save(tmp_path / "x.safetensors", {"ngram_embedding.weight": weight})
    model, resident = model_on_meta(), weight.cuda()

    with (
        torch.no_grad(),
        offload(model, "*", tmp_path, host_memory="64 MiB", gpu_memory="16 MiB", device=device),
    ):
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for seed in range(6):
            torch.manual_seed(seed)
            tokens = torch.randint(0, 300_000, (3, 5), device="cuda")
            found = compiled(tokens)
            assert torch.equal(found, resident[hashed(tokens)].flatten(-2))
        del found, compiled
        torch.compiler.reset()
        gc.collect()


def test_ids_out_of_bounds_are_reported(tmp_path, weight, device):
    save(tmp_path / "x.safetensors", {"ngram_embedding.weight": weight})
    model = model_on_meta()

    with (
        torch.no_grad(),
        offload(
            model, "*", tmp_path, host_memory="64 MiB", gpu_memory="16 MiB", device=device
        ) as tables,
    ):
        for wrong in (ROWS, -1):
            found = model.ngram_embedding(torch.tensor([5, wrong], device="cuda"))
            torch.cuda.synchronize()
            with pytest.raises(IndexError):
                tables.tables["ngram_embedding"].check()
            assert not found[1].any()


def test_memory_stays_within_the_limits(tmp_path, device):
    """What the driver and the kernel count beside what tables took before."""
    gpu, ram, rows = 64 << 20, 48 << 20, 1_000_003
    bits = torch.arange(rows * WIDTH, dtype=torch.int32).to(torch.int16).bitwise_and_(0x3FFF)
    weight = bits.view(torch.bfloat16).reshape(rows, WIDTH)
    save(tmp_path / "x.safetensors", {"ngram_embedding.weight": weight})
    ids = torch.randint(0, rows, (2000,), device="cuda")
    expected = weight[ids.cpu()].cuda()
    assert weight.nbytes > gpu + ram
    del bits, weight
    gc.collect()

    def held():
        torch.cuda.synchronize()
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        rss = sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
        return torch.cuda.mem_get_info()[0], rss

    def run(limit_gpu, limit_ram):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(rows, WIDTH, dtype=torch.bfloat16)).eval()
        names = {"0": "ngram_embedding.weight"}
        with (
            torch.no_grad(),
            offload(
                model, "0", tmp_path, host_memory=limit_ram, gpu_memory=limit_gpu, device=device,
                names=names, rows_per_step=1,
            ),
        ):  # fmt: skip
            for _ in range(20):
                assert torch.equal(model(ids), expected)
            return held()

    run("16 MiB", "12 MiB")  # contexts, kernels, allocators
    taken = []
    for _ in range(30):  # other processes take and free memory of this GPU meanwhile
        gc.collect()
        free, rss = held()
        then_free, then_rss = run(gpu, ram)
        assert then_rss - rss <= ram + (8 << 20)
        taken.append(free - then_free)
        if gpu // 2 <= taken[-1] <= gpu + (2 << 20):
            return
    pytest.fail(f"{taken} bytes of the GPU's memory, for a limit of {gpu}")


def test_ngram_embeddings_of_transformers(tmp_path, device):
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    torch.manual_seed(4)
    config = Qwen4ExpTextConfig(vocab_size=300, ngram_vocab_size_base=5000, eos_token_id=2)
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    module = modeling.Qwen4ExpTextNGramEmbedding(config, heads * WIDTH, 0).bfloat16().eval()
    held = nn.ModuleDict({"ple_embedding": module})
    weight = module.ngram_embedding.weight.detach()
    parts = {f"ple_embedding.ngram_embedding.shard_{i}.weight": part
             for i, part in enumerate(weight.chunk(5))}  # fmt: skip
    save(tmp_path / "x.safetensors", parts)
    tokens = torch.randint(0, 300, (2, 40), device="cuda")
    with torch.no_grad():
        expected = held.cuda()["ple_embedding"](tokens, None)
        with offload(held, "*.ngram_embedding", tmp_path, host_memory="64 MiB", gpu_memory="32 MiB",
                     device=device):  # fmt: skip
            assert torch.equal(held["ple_embedding"](tokens, None), expected)
