"""The adapter for vLLM: with the abstract classes of its wheel, and no engine.

The classes come from the files of vllm, which must be on the path: installed, or unpacked. What
they import of the rest of vllm is replaced here, since that needs a GPU and many packages.
"""

from __future__ import annotations

import abc
import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import nn

from flashwarp.errors import ArgumentError, DtypeError
from flashwarp.interop.vllm import plugin
from flashwarp.interop.vllm.loading import Left, leave
from flashwarp.interop.vllm.table import table_class
from flashwarp.storage.safetensors import read_header
from support.safetensors_files import save

ROWS, WIDTH, HEADS, PARTS = 1000, 40, 4, 7
PREFIX = "language_model.model.layers.2.ple.ple_embedding.ngram_embedding"
_FOLDER = "vllm.models.qwen4_exp.common"


def checkpoint(folder, weight, dtype, more=None):
    parts = weight.tensor_split(PARTS)
    name = "model.language_model.layers.2.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    held = {name.format(i): (dtype, part) for i, part in enumerate(parts)} | (more or {})
    spelled = {name: (kind, list(tensor.shape)) for name, (kind, tensor) in held.items()}
    tensors = {name: tensor for name, (_, tensor) in held.items()}
    save(folder / "model.safetensors", tensors, spelled)


class VocabParallelEmbedding(nn.Module):
    """What vLLM's class does for one process."""

    def __init__(self, rows, width, *, params_dtype, quant_method, parallel_group, **_):
        super().__init__()
        self.embedding_dim, self.org_vocab_size = width, rows
        self.tp_size = parallel_group.world_size
        self.shard_indices = types.SimpleNamespace(org_vocab_start_index=0,
                                                   org_vocab_end_index=rows)  # fmt: skip
        quant_method.create_weights(self, width, [rows], width, rows, params_dtype,
                                    weight_loader=self.weight_loader)  # fmt: skip


class _Parts(types.ModuleType):
    """A module of vLLM that is not there: each name that is asked of it is a new class."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"jit": staticmethod(lambda act: act)})
        setattr(self, name, made)
        return made


class _Rest(importlib.machinery.PathFinder):
    """Finds the modules of vLLM that these tests replace."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, _Rest, is_package=True)

    @staticmethod
    def create_module(spec):
        return _Parts(spec.name)

    @staticmethod
    def exec_module(module):
        pass


@pytest.fixture
def world():
    return types.SimpleNamespace(world_size=1)


@pytest.fixture
def abstract(monkeypatch, world):
    """vLLM's file of abstract classes."""
    found = importlib.util.find_spec("vllm")
    if found is None:
        pytest.skip("the files of vllm are not on the path")
    folder = Path(found.submodule_search_locations[0]) / "models" / "qwen4_exp" / "common"
    if not (folder / "ngram_embedding.py").is_file():
        pytest.skip("this vllm has no n-gram tables")
    before = {name for name in sys.modules if name.split(".")[0] == "vllm"}
    assert not before
    monkeypatch.setattr(sys, "meta_path", [_Rest, *sys.meta_path])

    def rest(name, **things):
        module = importlib.import_module(name)
        for each, thing in things.items():
            setattr(module, each, thing)

    rest("vllm.model_executor.layers.vocab_parallel_embedding",
         VocabParallelEmbedding=VocabParallelEmbedding)  # fmt: skip
    rest("vllm.distributed", get_etp_group=lambda: world, get_tp_group=lambda: world)
    rest("vllm.logger", init_logger=lambda _: None)
    rest("vllm.compilation.breakable_cudagraph", eager_break_during_capture=lambda act: act)
    rest("vllm.model_executor.utils", set_weight_attrs=lambda *_: None)
    rest("vllm.triton_utils", tl=types.SimpleNamespace(constexpr=int, pointer_type=lambda _: None,
                                                       uint8=None))  # fmt: skip
    rest("vllm.model_executor.parameter", ModelWeightParameter=parameter,
         PerTensorScaleParameter=parameter)  # fmt: skip
    rest("vllm.model_executor.layers.quantization.utils.fp8_utils",
         create_fp8_scale_parameter=lambda *_, **__: nn.Parameter(torch.ones(1)))  # fmt: skip
    for name in ("ple", "ngram_embedding"):
        spec = importlib.util.spec_from_file_location(f"{_FOLDER}.{name}", folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def parameter(data, weight_loader, **_):
    made = nn.Parameter(data, requires_grad=False)
    made.weight_loader = weight_loader
    return made


def made_table(abstract, folder, method, left=None):
    limits = "64 MiB", "64 MiB"
    made = table_class(abstract.Qwen4ExpPLEEmbedding, str(folder), *limits, "cpu", left)
    return made(ROWS, WIDTH, params_dtype=torch.bfloat16, padding_size=64, prefix=PREFIX,
                embedding_method=method, num_ngram_heads=HEADS, max_total_tokens=64)  # fmt: skip


def test_rows_come_as_vllm_asks_for_them(abstract, tmp_path):
    weight = torch.randn(ROWS, WIDTH).bfloat16()
    checkpoint(tmp_path, weight, "BF16")
    table = made_table(abstract, tmp_path, abstract.Qwen4ExpPLEUnquantizedEmbeddingMethod())
    ids = torch.randint(0, ROWS, (9, HEADS))

    assert isinstance(table, abstract.Qwen4ExpPLEEmbedding)
    assert table.supports_prefetch
    assert table.weight.is_meta
    assert not table.weight.is_pinned()
    assert dict(table.named_parameters()).keys() == {"weight"}
    for _ in range(2):
        table.start_prefetch(ids)
        found = table.finalize_prefetch(9)
        assert torch.equal(found, weight[ids].flatten(-2))
    assert torch.equal(table(ids), weight[ids])
    table.close()


def test_float8_rows_are_scaled_by_vllm(abstract, tmp_path):
    weight = torch.randn(ROWS, WIDTH).to(torch.float8_e4m3fn)
    checkpoint(tmp_path, weight, "F8_E4M3")
    table = made_table(abstract, tmp_path, abstract.Qwen4ExpPLEFp8EmbeddingMethod())
    table.weight_scale.data.fill_(0.5)
    ids = torch.randint(0, ROWS, (5, HEADS))

    table.start_prefetch(ids)
    found = table.finalize_prefetch(5)

    assert found.dtype == torch.float8_e4m3fn
    expected = weight[ids].flatten(-2).to(torch.bfloat16) * 0.5
    assert torch.equal(table.dequantize(found, torch.bfloat16), expected)
    table.close()


def test_the_loader_of_vllm_copies_nothing(abstract, tmp_path):
    weight = torch.randn(ROWS, WIDTH).bfloat16()
    checkpoint(tmp_path, weight, "BF16")
    table = made_table(abstract, tmp_path, abstract.Qwen4ExpPLEUnquantizedEmbeddingMethod())
    ids = torch.arange(ROWS).reshape(-1, HEADS)

    table.weight_loader(table.weight, torch.zeros(100, WIDTH).bfloat16(), checkpoint_start=200)

    assert torch.equal(table(ids), weight[ids])
    table.close()


@pytest.fixture
def reader(abstract):
    """vLLM's own iterator over safetensors files; what it needs of the rest is replaced."""
    folder = Path(importlib.util.find_spec(abstract.__name__).origin).parents[3]
    folder = folder / "model_executor" / "model_loader"
    (found,) = (
        node
        for node in ast.parse((folder / "weight_utils.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "safetensors_weights_iterator"
    )
    found.returns = None
    for argument in (*found.args.args, *found.args.kwonlyargs):
        argument.annotation = None
    log = types.SimpleNamespace(info_once=lambda *_: None, warning_once=lambda *_: None)
    module = types.SimpleNamespace(
        tqdm=lambda files, **_: files, enable_tqdm=lambda _: False, _BAR_FORMAT="", logger=log,
        _natural_sort_key=str, _get_fs_type=lambda _: "ext4", should_skip_weight=lambda *_: False,
        _get_checkpoints_size_bytes=lambda _: 1, _get_available_ram_bytes=lambda: 1,
        DEFAULT_SAFETENSORS_PREFETCH_NUM_THREADS=1, DEFAULT_SAFETENSORS_PREFETCH_BLOCK_SIZE=1,
        safe_open=lambda path, framework: _Opened(module, path), read=[],
    )  # fmt: skip
    code = compile(ast.Module([found], []), "weight_utils.py", "exec")
    exec(code, module.__dict__)
    loader = types.SimpleNamespace()
    text = (folder / "default_loader.py").read_text()
    assert "    safetensors_weights_iterator,\n" in text
    assert "weights_iterator = safetensors_weights_iterator(" in text
    return module, loader


class _Opened:
    """As safe_open of safetensors; notes the tensors that are read."""

    def __init__(self, module, path):
        self.module, self.held = module, read_header(path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def keys(self):
        return list(self.held)

    def get_tensor(self, name):
        self.module.read.append(name)
        return torch.zeros(self.held[name].shape)


def test_the_loader_of_vllm_reads_no_rows(abstract, reader, tmp_path):
    weight = torch.randn(ROWS, WIDTH).bfloat16()
    checkpoint(tmp_path, weight, "BF16", {"model.norm.weight": ("BF16", torch.ones(5).bfloat16())})
    (tmp_path / "draft").mkdir()
    checkpoint(tmp_path / "draft", weight, "BF16")
    weight_utils, default_loader = reader
    left = Left()
    leave(left, weight_utils, default_loader)
    method = abstract.Qwen4ExpPLEUnquantizedEmbeddingMethod()
    table = made_table(abstract, tmp_path, method, left)

    files = [str(tmp_path / "model.safetensors")]
    found = dict(default_loader.safetensors_weights_iterator(files, False))

    assert weight_utils.read == ["model.norm.weight"]
    assert len(found) == PARTS + 1
    rows = [each for name, each in found.items() if "shard" in name]
    assert all(each.is_meta and each.dtype == torch.bfloat16 for each in rows)
    assert sum(len(each) for each in rows) == ROWS
    for each in rows:  # as the model gives them to the table
        table.weight_loader(table.weight, each, checkpoint_start=0)
    ids = torch.arange(ROWS).reshape(-1, HEADS)
    assert torch.equal(table(ids), weight[ids])

    weight_utils.read.clear()
    other = [str(tmp_path / "draft" / "model.safetensors")]
    dict(default_loader.safetensors_weights_iterator(other, False, None, local_expert_ids=None))
    assert len(weight_utils.read) == PARTS, "those of another checkpoint are read"
    table.close()


def test_finalizing_needs_ids_of_as_many_tokens(abstract, tmp_path):
    checkpoint(tmp_path, torch.randn(ROWS, WIDTH).bfloat16(), "BF16")
    table = made_table(abstract, tmp_path, abstract.Qwen4ExpPLEUnquantizedEmbeddingMethod())

    with pytest.raises(ArgumentError, match="no ids were given"):
        table.finalize_prefetch(3)
    table.start_prefetch(torch.zeros(2, HEADS, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"rows of 3 tokens .* the ids of 2 tokens"):
        table.finalize_prefetch(3)
    table.close()


def test_what_it_cannot_read_is_refused(abstract, tmp_path, world):
    checkpoint(tmp_path, torch.randn(ROWS, WIDTH).bfloat16(), "BF16")
    method = abstract.Qwen4ExpPLEUnquantizedEmbeddingMethod()

    made = table_class(abstract.Qwen4ExpPLEEmbedding, str(tmp_path), 1 << 26, 1 << 26, "cpu")
    with pytest.raises(DtypeError, match=r"uint8.*not packed numbers"):
        made.allocate_embedding_weight(None, ROWS, WIDTH, torch.uint8)
    world.world_size = 2
    with pytest.raises(ArgumentError, match="divided among 2 processes"):
        made_table(abstract, tmp_path, method)


def test_no_method_of_the_abstract_class_is_left(abstract):
    left = table_class(abstract.Qwen4ExpPLEEmbedding, ".", 1, 1).__abstractmethods__

    assert issubclass(abstract.Qwen4ExpPLEEmbedding, abc.ABC)
    assert not left


def test_the_names_that_are_replaced_exist(abstract):
    tree = Path(importlib.util.find_spec(abstract.__name__).origin).parents[1]
    text = (tree / "nvidia" / "ngram_embedding.py").read_text()

    for name in plugin._MADE:
        assert f"    {name},\n" in text


# Without vLLM.


class PlainBase(nn.Module):
    """As much of the abstract class as a table needs to be opened."""

    tp_size = 1

    def __init__(self, dtype, *, prefix):
        super().__init__()
        self.weight = nn.Parameter(self.allocate_embedding_weight(ROWS, WIDTH, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_another_dtype_are_refused(tmp_path, dtype):
    weight = torch.randn(ROWS, WIDTH).bfloat16()
    checkpoint(tmp_path, weight, "BF16")
    made = table_class(PlainBase, str(tmp_path), 1 << 26, 1 << 26, "cpu")

    with pytest.raises(DtypeError, match=rf"stored as torch.bfloat16, and vLLM .* {dtype}"):
        made(dtype, prefix=PREFIX)

    table = made(torch.bfloat16, prefix=PREFIX)
    assert torch.equal(table(torch.arange(9)), weight[:9])
    table.close()


def environment(monkeypatch, tmp_path, version):
    monkeypatch.setenv("FLASHWARP_VLLM_TABLES", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)


def test_registering_replaces_the_classes_of_tables(monkeypatch, tmp_path):
    environment(monkeypatch, tmp_path, plugin.KNOWN_VERSIONS[0])
    base = type("Qwen4ExpPLEEmbedding", (nn.Module,), {})
    abstract = types.SimpleNamespace(Qwen4ExpPLEEmbedding=base)
    maker = types.SimpleNamespace(**dict.fromkeys(plugin._MADE))
    made = []
    readers = [
        types.SimpleNamespace(should_skip_weight=len, safetensors_weights_iterator=iter)
        for _ in plugin._READERS
    ]
    modules = {plugin._ABSTRACT: abstract, plugin._MAKER: maker}
    modules |= dict(zip(plugin._READERS, readers, strict=True))
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: modules.get(name) or real(name))

    for _ in range(2):
        plugin.register()

        for name in plugin._MADE:
            assert issubclass(getattr(maker, name), base)
        assert readers[1].safetensors_weights_iterator is readers[0].safetensors_weights_iterator
        made.append((maker.__dict__.copy(), readers[0].should_skip_weight))
    assert made[0] == made[1], "the second call changes nothing"


@pytest.mark.parametrize("version", ["0.32.1", "0.33.1", "0.34.0rc1"])
def test_unknown_versions_are_refused(version, monkeypatch, tmp_path):
    environment(monkeypatch, tmp_path, version)

    with pytest.raises(ArgumentError, match=version):
        plugin.register()


def test_nothing_happens_unless_asked():
    script = (
        "import sys; from flashwarp.interop.vllm.plugin import register; register(); "
        "print({'torch', 'vllm'} & set(sys.modules))"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                            check=True, timeout=60)  # fmt: skip

    assert result.stdout.strip() == "set()"


def test_vllm_finds_the_plugin():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    entry = project["project"]["entry-points"]["vllm.general_plugins"]["flashwarp"]
    module, _, name = entry.partition(":")

    assert getattr(importlib.import_module(module), name) is plugin.register


@pytest.mark.parametrize("name", ["FLASHWARP_VLLM_HOST_MEMORY", "FLASHWARP_VLLM_GPU_MEMORY"])
def test_limits_that_are_no_sizes_are_refused_at_once(name, monkeypatch, tmp_path):
    environment(monkeypatch, tmp_path, plugin.KNOWN_VERSIONS[0])
    monkeypatch.setenv(name, "much")

    with pytest.raises(ArgumentError, match=f"{name}='much' is not a size"):
        plugin.register()


@pytest.mark.parametrize(("old", "new"), [("RAM", "HOST_MEMORY"), ("GPU", "GPU_MEMORY")])
def test_limits_by_old_names_are_refused(old, new, monkeypatch, tmp_path):
    environment(monkeypatch, tmp_path, plugin.KNOWN_VERSIONS[0])
    monkeypatch.setenv(f"FLASHWARP_VLLM_{old}", "1 GiB")

    with pytest.raises(ArgumentError, match=f"is now FLASHWARP_VLLM_{new}: rename it"):
        plugin.register()
