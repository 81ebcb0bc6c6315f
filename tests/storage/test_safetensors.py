"""Headers of safetensors files and indices: what is found, and hostile ones, which are refused."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from flashwarp.errors import ArgumentError, FileFormatError, MissingFileError
from flashwarp.storage.safetensors import read_checkpoint, read_header


def raw(path, header, data=b"", length=None):
    """Write a file with this header, which may be text, bytes or an object, and these bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, shape, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# What is found.


def test_places_of_tensors_are_bytes_of_the_file(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "b": entry(4, 12, [2, 2], "BF16"),
              "a": entry(0, 4, [1], "F32"), "none": entry(12, 12, [0, 3])}  # fmt: skip
    path = raw(tmp_path / "x.safetensors", header, bytes(range(12)))

    found = read_header(path)

    assert list(found) == ["a", "b", "none"]
    assert (found["b"].dtype, found["b"].shape, found["b"].nbytes) == ("BF16", (2, 2), 8)
    with path.open("rb") as file:
        file.seek(found["b"].offset)
        assert file.read(8) == bytes(range(4, 12))


def test_a_file_without_tensors_has_none(tmp_path):
    assert read_header(raw(tmp_path / "x", {})) == {}


def test_a_scalar_has_no_axes(tmp_path):
    assert (
        read_header(raw(tmp_path / "x", {"s": entry(0, 4, [], "F32")}, b"0" * 4))["s"].shape == ()
    )


def test_the_library_of_the_format_agrees(tmp_path):
    oracle = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    random = np.random.default_rng(3)
    arrays = {
        f"t{i}": random.integers(0, 100, random.integers(0, 9, random.integers(0, 4))).astype(kind)
        for i, kind in enumerate(["u1", "i8", "f2", "f4", "f8", "i2", "u4", "bool"] * 4)
    }
    oracle.save_file(arrays, tmp_path / "x.safetensors")

    found = read_header(tmp_path / "x.safetensors")

    content = (tmp_path / "x.safetensors").read_bytes()
    assert set(found) == set(arrays)
    for name, tensor in found.items():
        held = content[tensor.offset : tensor.offset + tensor.nbytes]
        assert tensor.shape == arrays[name].shape
        assert held == arrays[name].tobytes()


def shards(folder):
    raw(folder / "m-1.safetensors", {"a": entry(0, 2, [2])}, b"aa")
    raw(folder / "m-2.safetensors", {"b": entry(0, 3, [3])}, b"bbb")
    return folder


@pytest.mark.parametrize("named", ["folder", "index", "files", "folder without an index"])
def test_a_checkpoint_is_named_in_any_way(tmp_path, named):
    shards(tmp_path)
    if named != "folder without an index":
        index(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    given = {
        "index": tmp_path / "model.safetensors.index.json",
        "files": [tmp_path / "m-1.safetensors", os.fspath(tmp_path / "m-2.safetensors")],
    }.get(named, tmp_path)

    found = read_checkpoint(given)

    assert {name: tensor.shape for name, tensor in found.items()} == {"a": (2,), "b": (3,)}
    assert found["b"].path.endswith("m-2.safetensors")


def test_a_single_file_needs_no_index(tmp_path):
    raw(tmp_path / "model.safetensors", {"a": entry(0, 2, [2])}, b"aa")

    assert list(read_checkpoint(tmp_path)) == list(read_checkpoint(tmp_path / "model.safetensors"))


# Hostile headers.

_TOO_LARGE = 1 << 63
_BAD = {
    "a range beyond the file": ({"a": entry(0, 9, [9])}, "no range in the 8 bytes"),
    "a range that ends before it begins": ({"a": entry(4, 2, [2])}, "no range"),
    "a negative offset": ({"a": entry(-4, 4, [8])}, "not a list of integers"),
    "three offsets": ({"a": {**entry(0, 8, [8]), "data_offsets": [0, 4, 8]}}, "no range"),
    "an offset that is no integer": ({"a": entry(0.0, 8, [8])}, "not a list of integers"),
    "a length that is true": ({"a": entry(0, 1, [True])}, "not a list of integers"),
    "a shape that needs more": ({"a": entry(0, 8, [3], "F32")}, "needs 12"),
    "a shape that needs less": ({"a": entry(0, 8, [1], "F32")}, "needs 4"),
    "lengths that overflow": ({"a": entry(0, 8, [1 << 33, 1 << 33])}, "needs"),
    "a length beyond 2^63": ({"a": entry(0, 8, [_TOO_LARGE, 0])}, "not a list of integers"),
    "a hundred axes": ({"a": entry(0, 1, [1] * 100)}, "100 axes"),
    "an unknown dtype": ({"a": entry(0, 8, [8], "F128")}, "none of BOOL"),
    "a dtype that is a list": ({"a": entry(0, 8, [8], ["U8"])}, "none of BOOL"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 8]}}, "None"),
    "an entry that is a number": ({"a": 7}, "described by 7"),
    "ranges that overlap": ({"a": entry(0, 5, [5]), "b": entry(4, 8, [4])}, "inside of 'a'"),
    "a range inside of another": ({"a": entry(0, 8, [8]), "b": entry(2, 3, [1])}, "inside of 'a'"),
    "the same range twice": ({"a": entry(0, 8, [8]), "b": entry(0, 8, [8])}, "inside of"),
    "a list": ([1], "no JSON object"),
    "no JSON": (b"{'a'", "no JSON"),
    "a name twice": (
        b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{}}',
        "has the name 'a' twice",
    ),
    "brackets without end": (b"[" * 100_000, "no JSON"),
    "a number of ten thousand digits": (b'{"a":' + b"9" * 10_000 + b"}", "no JSON"),
    "no UTF-8": (b'{"\xff": 1}', "no JSON"),
}


@pytest.mark.parametrize("name", _BAD)
def test_a_hostile_header_is_refused(tmp_path, name):
    header, message = _BAD[name]
    path = raw(tmp_path / "x", header, b"12345678")

    with pytest.raises(FileFormatError, match=message):
        read_header(path)


@pytest.mark.parametrize("length", [0, 1, 100, 1 << 40, (1 << 64) - 1])
def test_a_length_that_no_header_can_have_is_refused(tmp_path, length):
    with pytest.raises(FileFormatError, match=f"with {length} as the length"):
        read_header(raw(tmp_path / "x", {}, b"1234", length))


def test_a_giant_header_is_refused_before_it_is_read(tmp_path):
    path = raw(tmp_path / "x", b"{", length=100_000_001)
    os.truncate(path, 1 << 40)  # sparse

    with pytest.raises(FileFormatError, match="a header of 100000001 bytes"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_file_that_is_too_short_is_refused(tmp_path, size):
    (tmp_path / "x").write_bytes(b"\2" * size)

    with pytest.raises(FileFormatError, match="cut short"):
        read_header(tmp_path / "x")


def test_mutated_headers_give_tensors_inside_of_the_file_or_a_typed_error(tmp_path):
    header = {"a": entry(0, 8, [2], "F32"), "b": entry(8, 12, [2, 2])}
    good = raw(tmp_path / "x", header, b"x" * 12).read_bytes()
    random = np.random.default_rng(8)
    refused = 0
    for i in range(1500):
        bad = bytearray(good)
        for _ in range(random.integers(1, 3)):
            bad[random.integers(len(bad))] = random.integers(256)
        (tmp_path / "x").write_bytes(bad[: random.integers(1, len(bad))] if i % 4 == 0 else bad)
        try:
            found = read_header(tmp_path / "x")
        except FileFormatError:
            refused += 1
            continue
        size = (tmp_path / "x").stat().st_size
        assert all(t.offset + t.nbytes <= size for t in found.values())
    assert 500 < refused < 1490


# Hostile checkpoints.


def test_a_missing_shard_is_named(tmp_path):
    index(shards(tmp_path), {"a": "m-1.safetensors", "b": "m-3.safetensors"})

    with pytest.raises(MissingFileError, match="m-3"):
        read_checkpoint(tmp_path)


def test_a_shard_without_the_tensor_is_named(tmp_path):
    index(shards(tmp_path), {"a": "m-2.safetensors"})

    with pytest.raises(FileFormatError, match="'a' is in m-2"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../m-1.safetensors", "/etc/passwd", "", "..", "x/y"])
def test_an_index_names_files_of_its_folder_only(tmp_path, shard):
    index(shards(tmp_path), {"a": shard})

    with pytest.raises(FileFormatError, match="not in its folder"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[]", "x"]
)
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "x.index.json").write_text(text)

    with pytest.raises(FileFormatError):
        read_checkpoint(tmp_path / "x.index.json")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    raw(tmp_path / "1.safetensors", {"a": entry(0, 2, [2])}, b"aa")
    raw(tmp_path / "2.safetensors", {"a": entry(0, 2, [2])}, b"aa")

    with pytest.raises(FileFormatError, match="'a' is in"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("given", [[], 7, ""])
def test_what_names_no_checkpoint_is_refused(given):
    with pytest.raises(ArgumentError):
        read_checkpoint(given)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match="the folder has no model"):
        read_checkpoint(tmp_path)
    with pytest.raises(MissingFileError):
        read_checkpoint(tmp_path / "absent")
