"""Every public name of `flashwarp.torch` with arguments that cannot work.

Each call gets its usual arguments, of which one is replaced by each of many wrong values. It must
succeed, or raise an error of the library, and afterwards the file must hold what it held.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import nn

import flashwarp as fw
import flashwarp.torch
from flashwarp import errors
from support.safetensors_files import save

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROWS, DIM = 40, 8


class Strange:
    """Answers what is asked of it by errors of its own."""

    def __repr__(self):
        return "Strange()"

    def __bool__(self):
        raise RuntimeError("it has no truth")

    __hash__ = None


def _recursive():
    made = []
    made.append(made)
    return made


def wrong_values():
    """Values by name: of wrong types, and of right types beyond all limits."""
    return {
        "none": None,
        "true": True,
        "zero": 0,
        "negative": -1,
        "three": 3,
        "huge": 1 << 70,
        "half": 0.5,
        "nan": math.nan,
        "infinite": math.inf,
        "minus-infinite": -math.inf,
        "complex": 1j,
        "text": "x",
        "no-text": "",
        "null-text": "a\0b",
        "surrogate": "\udcff",
        "bytes": b"x",
        "object": object(),
        "strange": Strange(),
        "list": [],
        "list-of-none": [None],
        "list-of-text": ["x", 3],
        "tuple": (),
        "pair": (1, 2),
        "dict": {},
        "dict-of-none": {"x": None},
        "strange-dict": {3: 4},
        "set": {1},
        "function": lambda *_: None,
        "type": int,
        "range": range(3),
        "empty-range": range(0),
        "gaps": range(0, 9, 2),
        "module": nn.Linear(2, 2),
        "array": np.arange(6.0),
        "no-array": np.zeros((0, 3)),
        "number": np.int64(3),
        "dtype": torch.float64,
        "numpy-dtype": np.dtype("f4"),
        "device": torch.device("meta"),
        "float": torch.ones(3),
        "float64": torch.ones(3, dtype=torch.float64),
        "scalar": torch.tensor(3),
        "nan-tensor": torch.tensor(math.nan),
        "bool": torch.ones(3, dtype=torch.bool),
        "meta": torch.ones(3, device="meta"),
        "meta-ids": torch.ones(3, dtype=torch.int64, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "ragged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "complex-tensor": torch.ones(3, dtype=torch.complex64),
        "uint8": torch.ones(3, dtype=torch.uint8),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "no-tensor": torch.empty(0),
        "no-ids": torch.empty(0, dtype=torch.int64),
        "wide": torch.ones(2, 2, 2, dtype=torch.int64),
        "out": torch.tensor([ROWS]),
        "below": torch.tensor([-1]),
        "most": torch.tensor([2**63 - 1]),
        "least": torch.tensor([-(2**63)]),
        "needs": torch.ones(3, requires_grad=True),
        "nested-list": [[[[1]]]],
        "recursive": _recursive(),
    }


def model():
    """A table and a layer, on the meta device."""
    with torch.device("meta"):
        made = nn.ModuleDict({"table": nn.Embedding(ROWS, DIM), "head": nn.Linear(DIM, 2)})
    return made.eval()


class Stage:
    """Open tables of each kind, and files that calls may name."""

    def __init__(self, folder):
        self.folder = folder
        self.plain = folder / "plain.npy"
        content = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
        np.save(self.plain, content)
        self.read = folder / "read.npy"
        np.save(self.read, np.ones((ROWS, DIM), np.float32))
        self.trained = folder / "trained.npy"
        fw.torch.create_table(self.trained, ROWS, DIM, optimizer="adam")
        self.checkpoint = save(folder / "x.safetensors", {"table.weight": torch.ones(ROWS, DIM)})
        self.array = fw.open(self.plain, mode="r+", device="cpu")
        self.rows = fw.torch.Embedding(self.array)
        self.bags = fw.torch.EmbeddingBag(self.array, mode="sum")
        self.group = fw.torch.EmbeddingGroup([self.rows, self.rows])
        self.bag_group = fw.torch.EmbeddingGroup([self.bags, self.bags])
        self.table = fw.torch.Embedding(self.trained, mode="r+", dim=DIM, device="cpu")
        self.optimizer = fw.torch.Adam(self.table)
        self.optimizer.checkpoint(folder / "checkpoints")
        self.copy = folder / "checkpoints" / "step-000000000000" / "0-trained.npy"
        self.model = model()
        self.offloaded = fw.torch.offload(self.model, "table", self.checkpoint, device="cpu",
                                          host_memory="1 MiB", gpu_memory="1 MiB")  # fmt: skip
        self.weight = self.model["table"].weight
        self.content = self.array[...].copy()
        self.content_trained = self.table.array[...].copy()

    def check(self):
        """Nothing was lost or changed, and everything still works."""
        ids = torch.arange(ROWS)
        assert self.rows(ids).detach().numpy().tobytes() == self.content.tobytes()
        assert self.table.array[...].tobytes() == self.content_trained.tobytes()
        assert torch.equal(self.model["table"](ids), torch.ones(ROWS, DIM))
        assert not self.rows.pending
        assert not self.table.pending

    def close(self):
        self.offloaded.close()
        self.group.close()
        self.table.close()
        self.array.close()


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a text among the values is a name of a file to make
    made = Stage(tmp_path)
    yield made
    made.close()


def closing(made):
    made.close()


def stepping(optimizer, **group):
    """A step with what an optimizer's group has now."""
    before = dict(optimizer.param_groups[0])
    module = next(iter(optimizer._tables.values())).module
    try:
        module.pending.append((torch.empty(0, dtype=torch.int64), torch.empty(0, DIM)))
        optimizer.param_groups[0].update(group)
        optimizer.step()
    finally:
        optimizer.param_groups[0].update(before)
        optimizer.zero_grad()


def pending(optimizer, ids=None, gradients=None, entry=None):
    module = next(iter(optimizer._tables.values())).module
    try:
        module.pending.append((ids, gradients) if entry is None else entry)
        optimizer.step()
    finally:
        optimizer.zero_grad()


IDS = torch.tensor([[1, 2], [3, 4]])

# Calls with their usual arguments, by name.
CALLS = {
    "Embedding": (
        lambda s, **a: closing(fw.torch.Embedding(**a)),
        lambda s: {
            "table": s.read,
            "scales": None,
            "rows": None,
            "dim": None,
            "dtype": None,
            "stored": None,
            "padding_idx": None,
            "mode": "r",
            "cache": "4 KiB",
            "device": "cpu",
            "line": 512,
            "max_norm": None,
            "norm_type": 2.0,
            "scale_grad_by_freq": False,
            "sparse": True,
            "_weight": None,
        },
    ),
    "Embedding of an array": (
        lambda s, **a: closing(fw.torch.Embedding(**a)),
        lambda s: {
            "table": s.array,
            "scales": torch.ones(ROWS),
            "rows": range(ROWS),
            "dim": DIM,
            "dtype": torch.float32,
            "stored": torch.float32,
            "padding_idx": 0,
        },
    ),
    "Embedding.from_pretrained": (
        lambda s, **a: closing(fw.torch.Embedding.from_pretrained(**a)),
        lambda s: {"embeddings": torch.ones(ROWS, DIM), "freeze": True, "padding_idx": None},
    ),
    "EmbeddingBag": (
        lambda s, **a: closing(fw.torch.EmbeddingBag(**a)),
        lambda s: {
            "table": s.read,
            "mode": "sum",
            "include_last_offset": False,
            "scales": None,
            "rows": None,
            "dim": None,
            "dtype": None,
            "stored": None,
            "padding_idx": None,
        },
    ),
    "EmbeddingGroup": (
        lambda s, **a: fw.torch.EmbeddingGroup(**a),
        lambda s: {"tables": [s.rows]},
    ),
    "Embedding.forward": (lambda s, **a: s.rows(**a), lambda s: {"input": IDS}),
    "Embedding.prefetch": (
        lambda s, **a: s.rows.prefetch(**a),
        lambda s: {"ids": IDS, "stream": None},
    ),
    "Embedding.requires_grad_": (
        lambda s, **a: s.rows.requires_grad_(**a),
        lambda s: {"requires_grad": True},
    ),
    "EmbeddingBag.forward": (
        lambda s, **a: s.bags(**a),
        lambda s: {"input": IDS, "offsets": None, "per_sample_weights": None},
    ),
    "EmbeddingBag.forward with offsets": (
        lambda s, **a: s.bags(**a),
        lambda s: {
            "input": IDS.reshape(-1),
            "offsets": torch.tensor([0, 1]),
            "per_sample_weights": torch.ones(4),
        },
    ),
    "EmbeddingBag.prefetch": (lambda s, **a: s.bags.prefetch(**a), lambda s: {"ids": IDS}),
    "EmbeddingGroup.forward": (
        lambda s, **a: s.group(**a),
        lambda s: {"input": IDS, "offsets": None, "per_sample_weights": None},
    ),
    "EmbeddingGroup.forward of bags": (
        lambda s, **a: s.bag_group(**a),
        lambda s: {"input": [IDS, IDS], "offsets": None, "per_sample_weights": None},
    ),
    "EmbeddingGroup.forward with offsets": (
        lambda s, **a: s.bag_group(**a),
        lambda s: {
            "input": IDS.reshape(-1),
            "offsets": torch.tensor([0, 2]),
            "per_sample_weights": torch.ones(4),
        },
    ),
    "EmbeddingGroup.prefetch": (
        lambda s, **a: s.bag_group.prefetch(**a),
        lambda s: {"ids": IDS.reshape(-1), "offsets": torch.tensor([0, 2]), "stream": None},
    ),
    "gather": (
        lambda s, **a: fw.torch.gather(**a),
        lambda s: {"array": s.array, "idx": IDS, "out": None},
    ),
    "scatter": (
        lambda s, **a: fw.torch.scatter(**a),
        lambda s: {
            "array": s.array,
            "idx": torch.tensor([ROWS - 1]),
            "values": torch.from_numpy(s.content[-1:]),
        },
    ),
    "create_table": (
        lambda s, **a: fw.torch.create_table(**a),
        lambda s: {
            "path": s.folder / "new.npy",
            "rows": 3,
            "dim": 4,
            "optimizer": "sgd",
            "init": "normal",
            "scale": 1.0,
            "state": 0.0,
            "seed": 0,
            "overwrite": True,
        },
    ),
    "restore_table": (
        lambda s, **a: fw.torch.restore_table(**a),
        lambda s: {"source": s.copy, "path": s.folder / "back.npy", "overwrite": True},
    ),
    "SGD": (
        lambda s, **a: fw.torch.SGD(**a),
        lambda s: {"tables": s.rows, "lr": 1.0, "accept_newer": False},
    ),
    "Adam": (
        lambda s, **a: _newest(s, **a),
        lambda s: {
            "tables": s.table,
            "lr": 1.0,
            "betas": (0.9, 0.99),
            "eps": 0.1,
            "accept_newer": False,
        },
    ),
    "Adam of groups": (
        lambda s, **a: _newest(s, [{**a}]),
        lambda s: {"tables": s.table, "lr": 1.0, "betas": (0.9, 0.99), "eps": 0.1},
    ),
    "step": (lambda s, **a: s.optimizer.step(**a), lambda s: {"closure": None}),
    "step of other rates": (
        lambda s, **a: stepping(s.optimizer, **a),
        lambda s: {"lr": 1.0, "betas": (0.9, 0.99), "eps": 0.1},
    ),
    "step of gradients": (
        lambda s, **a: pending(s.optimizer, **a),
        lambda s: {"ids": torch.empty(0, dtype=torch.int64), "gradients": torch.empty(0, DIM)},
    ),
    "step of pending": (
        lambda s, **a: pending(s.optimizer, **a),
        lambda s: {"entry": (torch.empty(0, dtype=torch.int64), torch.empty(0, DIM))},
    ),
    "zero_grad": (lambda s, **a: s.optimizer.zero_grad(**a), lambda s: {"set_to_none": True}),
    "checkpoint": (
        lambda s, **a: s.optimizer.checkpoint(**a),
        lambda s: {"folder": s.folder / "more", "extra": {"x": 1}, "last": False},
    ),
    "load_state_dict": (
        lambda s, **a: s.optimizer.load_state_dict(**a),
        lambda s: {"state_dict": s.optimizer.state_dict()},
    ),
    "load_state_dict of parts": (
        lambda s, **a: s.optimizer.load_state_dict(a),
        lambda s: s.optimizer.state_dict(),
    ),
    "load_state_dict of a step": (
        lambda s, **a: s.optimizer.load_state_dict({**s.optimizer.state_dict(), "state": {0: a}}),
        lambda s: {"step": torch.tensor(0)},
    ),
    "offload": (
        lambda s, **a: closing(fw.torch.offload(**{"device": "cpu", **a})),
        lambda s: {
            "model": model(),
            "pattern": "table",
            "files": s.checkpoint,
            "host_memory": "1 MiB",
            "gpu_memory": "1 MiB",
            "device": "cpu",
            "names": None,
            "rows_per_step": None,
            "line": None,
            "policy": "clock",
            "immutable": False,
        },
    ),
    "offload with names": (
        lambda s, **a: closing(fw.torch.offload(model(), "table", s.checkpoint, device="cpu", **a)),
        lambda s: {"names": {"table": "table.weight"}},
    ),
    "offload with names of a table": (
        lambda s, table: closing(
            fw.torch.offload(model(), "table", s.checkpoint, device="cpu", names={"table": table})
        ),
        lambda s: {"table": ["table.weight"]},
    ),
    "embedding of a weight": (
        lambda s, **a: nn.functional.embedding(**{**a, "weight": s.weight}),
        lambda s: {"input": IDS, "padding_idx": None, "max_norm": None},
    ),
    "module of a weight": (lambda s, **a: s.model["table"](**a), lambda s: {"input": IDS}),
    "weight.size": (lambda s, **a: s.weight.size(**a), lambda s: {"dim": 0}),
    "weight.requires_grad_": (
        lambda s, **a: s.weight.requires_grad_(**a),
        lambda s: {"requires_grad": False},
    ),
}


CALLABLE = {"init": ("type", "module"), "closure": ("module", "type", "function")}


def _newest(stage, tables, **options):
    """Make an optimizer, and let the one before go on."""
    try:
        fw.torch.Adam(tables, **options)
    finally:
        stage.optimizer = fw.torch.Adam(stage.table)


@pytest.mark.parametrize("call", CALLS)
def test_wrong_values_are_refused_by_errors_of_the_library(stage, call):
    act, usual = CALLS[call]
    act(stage, **usual(stage))  # the usual arguments work
    stage.check()

    raw = []
    for name in usual(stage):
        for what, value in wrong_values().items():
            try:
                act(stage, **{**usual(stage), name: value})
            except errors.FlashwarpError:
                pass
            except Exception as error:
                if what in CALLABLE.get(name, ()):
                    continue  # it can be called, and raised that itself
                raw.append(f"{name}={what}: {type(error).__name__}: {error}"[:200])
            stage.array.check()
            stage.rows.pending.clear()

    assert not raw, "\n" + "\n".join(raw)
    stage.check()


OPERATIONS = {
    "sum": lambda w, ids: w + 1,
    "reversed sum": lambda w, ids: torch.ones(DIM) + w,
    "product": lambda w, ids: torch.ones(2, ROWS) @ w,
    "function": lambda w, ids: torch.relu(w),
    "linear": lambda w, ids: nn.functional.linear(torch.ones(DIM), w),
    "item": lambda w, ids: w[0],
    "store": lambda w, ids: w.__setitem__(0, 1),
    "length": lambda w, ids: len(w),
    "iteration": lambda w, ids: list(w),
    "truth": lambda w, ids: bool(w),
    "equal": lambda w, ids: w == 3,
    "not equal": lambda w, ids: w != 3,
    "less": lambda w, ids: w < 3,
    "float": lambda w, ids: float(w),
    "numpy": lambda w, ids: np.asarray(w),
    "dlpack": lambda w, ids: torch.from_dlpack(w),
    "to": lambda w, ids: w.to("cpu"),
    "clone": lambda w, ids: w.clone(),
    "data": lambda w, ids: w.data,
    "detach": lambda w, ids: w.detach(),
    "T": lambda w, ids: w.T,
    "copy_": lambda w, ids: w.copy_(ids),
    "data_ptr": lambda w, ids: w.data_ptr(),
    "contains": lambda w, ids: 3 in w,
    "in place": lambda w, ids: torch.add(ids, 1, out=w),
    "bag": lambda w, ids: nn.functional.embedding_bag(ids, w),
    "max_norm": lambda w, ids: nn.functional.embedding(ids, w, max_norm=1.0),
    "item of": lambda w, ids: w.item(),
    "index": lambda w, ids: torch.ones(3)[w],
    "copy": lambda w, ids: copy.copy(w),
    "deepcopy": lambda w, ids: copy.deepcopy(w),
    "pickle": lambda w, ids: pickle.dumps(w),
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_operations_of_an_offloaded_weight_are_refused(stage, what):
    with pytest.raises((errors.ArgumentError, errors.CopyError)):
        OPERATIONS[what](stage.weight, torch.tensor([1]))

    stage.check()


def test_an_offloaded_weight_answers_what_models_ask_of_it(stage):
    weight = stage.weight

    assert (weight.ndim, weight.dim(), weight.size(), weight.size(-1)) == (2, 2, (ROWS, DIM), DIM)
    assert (weight.numel(), weight.nelement(), weight.element_size()) == (ROWS * DIM, ROWS * DIM, 4)
    assert (weight.is_cuda, weight.is_meta, weight.is_floating_point()) == (False, False, True)
    assert not hasattr(weight, "quant_state")
    assert not hasattr(weight, "data")
    assert getattr(weight, "tensor_model_parallel", None) is None
    assert weight == weight
    assert weight in [None, weight]
    assert weight.requires_grad_(False) is weight


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_optimizers_and_what_they_train_are_not_copied(stage, act):
    for each in (stage.optimizer, stage.table, stage.bags, stage.weight, stage.offloaded):
        with pytest.raises(errors.CopyError):
            act(each)
    stage.check()


AFTER_CLOSE = {
    "forward": lambda s: s.table(IDS),
    "prefetch": lambda s: s.table.prefetch(IDS),
    "step": lambda s: stepping(s.optimizer),
    "checkpoint": lambda s: s.optimizer.checkpoint(),
    "optimizer": lambda s: fw.torch.Adam(s.table),
    "module": lambda s: fw.torch.Embedding(s.table.array),
    "group": lambda s: fw.torch.EmbeddingGroup([s.table])(IDS[None]),
    "offloaded": lambda s: nn.functional.embedding(IDS, s.weight),
    "report": lambda s: s.offloaded.stats,
    "gather": lambda s: fw.torch.gather(s.table.array, IDS),
    "scatter": lambda s: fw.torch.scatter(
        s.table.array, IDS, torch.ones(2, 2, s.table.array.shape[1])
    ),
}


@pytest.mark.parametrize("what", AFTER_CLOSE)
def test_what_is_closed_raises_and_changes_nothing(stage, what):
    record = (stage.folder / "trained.npy.training.json").read_bytes()
    stage.offloaded.close()
    stage.table.close()

    for _ in range(2):
        with pytest.raises(errors.ClosedError):
            AFTER_CLOSE[what](stage)

    assert (stage.folder / "trained.npy.training.json").read_bytes() == record
    assert int(next(iter(stage.optimizer.state.values()))["step"]) == 0


def test_a_step_that_is_refused_changes_nothing(stage):
    """Neither rows nor the record nor the number of steps, whatever the gradients are."""
    record = (stage.folder / "trained.npy.training.json").read_bytes()
    stage.table(torch.tensor([3])).sum().backward()
    stage.table.pending.append((torch.tensor([3]), torch.ones(1, DIM + 1)))

    with pytest.raises(errors.ArgumentError, match="weights"):
        stage.optimizer.step()

    assert len(stage.table.pending) == 2, "the gradients are still there"
    stage.optimizer.zero_grad()
    assert (stage.folder / "trained.npy.training.json").read_bytes() == record
    assert int(next(iter(stage.optimizer.state.values()))["step"]) == 0
    stage.check()


def test_a_state_dict_of_others_changes_nothing(stage):
    for wrong in ({}, {"state": {}, "param_groups": []}, fw.torch.SGD(stage.rows).state_dict()):
        before = copy.deepcopy(stage.optimizer.state_dict())
        with pytest.raises(errors.ArgumentError):
            stage.optimizer.load_state_dict(wrong)
        assert stage.optimizer.state_dict() == before


def test_ids_out_of_bounds_name_the_rows_of_their_table(stage):
    for rows in (range(10, 20), range(ROWS)):
        table = fw.torch.Embedding(stage.array, rows=rows)
        for dtype in (torch.float32, torch.float16):
            table = fw.torch.Embedding(stage.array, rows=rows, dtype=dtype)
            with pytest.raises(errors.BoundsError, match=f"axis of length {len(rows)},"):
                table(torch.tensor([len(rows)]))


@pytest.mark.parametrize("name", ["momentum", "dampening", "modules"])
def test_groups_of_an_optimizer_have_no_other_keys(stage, name):
    with pytest.raises(errors.ArgumentError, match=name):
        fw.torch.SGD([{"tables": stage.rows, name: 0.9}])


def test_what_cannot_be_saved_leaves_no_checkpoint(stage):
    with pytest.raises(errors.ArgumentError, match="extra="):
        stage.optimizer.checkpoint(stage.folder / "more", extra=lambda: None)

    assert not list((stage.folder / "more").iterdir())


def test_lost_modules_and_optimizers_free_their_tables(stage):
    """In any order, and in a cycle."""
    made = fw.torch.Embedding(stage.read, device="cpu")
    group = fw.torch.EmbeddingGroup([made])
    group.cycle = [group, made]
    del made, group
    gc.collect()

    with fw.torch.Embedding(stage.read, mode="r+", device="cpu") as again:
        again(IDS)
