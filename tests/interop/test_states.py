"""State dicts in a directory of checkpoints: what comes back, what is refused, and damage."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp.torch
from flashwarp.checkpoint.directory import Directory
from flashwarp.checkpoint.region import Region
from flashwarp.errors import (
    ArgumentError,
    DamagedVersionError,
    DtypeError,
    ExistingVersionError,
    MissingFileError,
    MissingVersionError,
)

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.builds(
        lambda shape, seed: torch.from_numpy(np.random.default_rng(seed).random(shape)),
        st.lists(st.integers(0, 4), max_size=3),
        st.integers(0, 1 << 30),
    ),
)
keys = st.one_of(st.text(max_size=10), st.integers(), st.booleans())
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(state=st.dictionaries(keys, states, max_size=4))
def test_what_was_saved_comes_back(tmp_path: Path, state: dict[Any, Any]) -> None:
    version = flashwarp.torch.save(state, tmp_path)

    assert same(flashwarp.torch.load(tmp_path, version=version), state)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16],
)
def test_all_dtypes_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(30).to(dtype)

    flashwarp.torch.save([tensor, dtype, torch.Size([2]), torch.device("cpu")], tmp_path)
    again, kind, size, device = flashwarp.torch.load(tmp_path)

    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))
    assert (again.dtype, kind, size, device) == (dtype, dtype, torch.Size([2]), tensor.device)


def test_other_floats_layouts_and_shared_tensors(tmp_path: Path) -> None:
    weight = torch.randn(4, 5)
    state = {
        "nan": math.nan,
        "inf": -math.inf,
        "t": weight.t(),
        "strided": weight[::2, 1:4],
        "one": weight[1:2, 3::2],
        "a": weight,
        "b": weight,
        "ordered": OrderedDict(x=1),
        "numpy": np.arange(3),
        "1": torch.ones(1),
        1: torch.zeros(1),
    }
    flashwarp.torch.save(state, tmp_path)

    again = flashwarp.torch.load(tmp_path)

    assert math.isnan(again["nan"])
    assert again["inf"] == -math.inf
    assert torch.equal(again["t"], weight.t())
    assert torch.equal(again["strided"], weight[::2, 1:4])
    assert torch.equal(again["one"], weight[1:2, 3::2]), "contiguous, with strides of others"
    assert again["a"] is again["b"]
    assert again["ordered"] == {"x": 1}
    assert again["numpy"].tolist() == [0, 1, 2]
    assert (float(again["1"]), float(again[1])) == (1, 0)


def test_views_that_differ_in_a_bit_alone_are_no_aliases(tmp_path: Path) -> None:
    value = torch.full((3,), 1 + 2j)
    state = [value, value.conj(), value.imag, value.conj().imag, value.conj(), value]

    flashwarp.torch.save(state, tmp_path)

    again = flashwarp.torch.load(tmp_path)
    assert all(map(torch.equal, again, state))
    assert again[0] is again[5]
    assert again[1] is again[4]


def test_versions_count_up_and_are_kept(tmp_path: Path) -> None:
    assert [flashwarp.torch.save({"n": n}, tmp_path) for n in range(3)] == [0, 1, 2]
    assert flashwarp.torch.save({"n": 9}, tmp_path, version=9) == 9

    assert flashwarp.torch.load(tmp_path) == {"n": 9}
    assert flashwarp.torch.load(tmp_path, version=1) == {"n": 1}
    with pytest.raises(ExistingVersionError):
        flashwarp.torch.save({"n": 0}, tmp_path, version=1)
    flashwarp.torch.save({"n": 5}, tmp_path, version=1, replace=True)
    assert flashwarp.torch.load(tmp_path, version=1) == {"n": 5}


def test_ranks_have_versions_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        flashwarp.torch.save({"rank": rank}, tmp_path, rank=rank)

    assert flashwarp.torch.load(tmp_path, rank=1) == {"rank": 1}
    with pytest.raises(MissingVersionError, match="no state of rank 2"):
        flashwarp.torch.load(tmp_path, rank=2)
    with pytest.raises(MissingFileError):
        flashwarp.torch.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("thing", "match"),
    [
        (object(), "is a object, which only pickle"),
        ({1, 2}, "is a set"),
        (np.ma.masked_equal([1, 2], 2), "is masked"),
        (np.array([1], ">f4"), "which torch does not have"),
        (np.array(["a"]), "which torch does not have"),
        (torch.eye(2).to_sparse(), "no dense tensor"),
        (torch.ones(2, device="meta"), "no dense tensor"),
        ({(1, 2): 3}, "is a tuple, which only pickle"),
    ],
)
def test_what_only_pickle_could_store_is_refused(tmp_path: Path, thing: Any, match: str) -> None:
    with pytest.raises(DtypeError, match=match):
        flashwarp.torch.save({"good": torch.ones(1), "bad": thing}, tmp_path)

    assert not any(tmp_path.rglob("*.manifest"))


def test_endless_nesting_is_refused(tmp_path: Path) -> None:
    state: list[Any] = []
    state.append(state)

    with pytest.raises(ArgumentError, match="deeper than 100"):
        flashwarp.torch.save(state, tmp_path)


def test_a_flipped_bit_is_an_error_and_not_another_version(tmp_path: Path) -> None:
    for n in range(2):
        flashwarp.torch.save({"a": torch.full((5000,), float(n))}, tmp_path)
    path = sorted(tmp_path.rglob("*.data"))[-1]
    content = bytearray(path.read_bytes())
    content[9000] ^= 1
    path.write_bytes(content)

    with pytest.raises(DamagedVersionError):
        flashwarp.torch.load(tmp_path)
    assert float(flashwarp.torch.load(tmp_path, version=0)["a"][0]) == 0


@pytest.mark.parametrize(
    "structure",
    [
        "[]",
        "[2, null]",
        '[1, ["tensor", "tensor/none"]]',
        '[1, ["code", "os.system"]]',
        '[1, ["dtype", "save"]]',
        '[1, ["dict", [[["list", []], ["is", 1]]]]]',
        "[1, " + '["list", [' * 200 + "]]" * 200 + "]",
        "{",
    ],
)
def test_a_structure_that_makes_no_sense_is_damage(tmp_path: Path, structure: str) -> None:
    text = structure.encode()
    with Directory(tmp_path) as directory:
        regions = [Region("structure", "|u1", (len(text),), len(text))]
        with directory.begin("state", 0, regions) as writer:
            writer.write("structure", 0, text)
            writer.commit()

    with pytest.raises(DamagedVersionError, match="no state of save"):
        flashwarp.torch.load(tmp_path)
