"""Manifests and data: every flipped bit is found, and hostile manifests reach nothing."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from versions import CHUNK, bytes_of, check, regions_of, store

from flashwarp import _native
from flashwarp.checkpoint.directory import Directory, manifest
from flashwarp.checkpoint.directory.checksums import Checksums, chunk_checksums
from flashwarp.errors import DamagedVersionError, FlashwarpError

SIZES = (1, CHUNK + 10, 0, 3 * CHUNK)


# The checksum.


def test_checksum_is_that_of_the_standard() -> None:
    # RFC 3720, appendix B.4.
    assert _native.crc32c(bytes(32)) == 0x8A9136AA
    assert _native.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert _native.crc32c(bytes(range(32))) == 0x46DD794E
    assert _native.crc32c(b"123456789") == 0xE3069283
    assert _native.crc32c_engine() in ("sse4.2", "armv8", "portable")


@given(
    st.integers(0, 1 << 32),
    # Around the lengths at which the number of lanes changes.
    st.sampled_from([0, 1, 7, 8, 767, 768, 769, 12287, 12288, 12300, 196607, 196608, 250000]),
    st.integers(0, 8),
)
@settings(max_examples=60, deadline=None)
def test_instruction_and_tables_agree(seed: int, nbytes: int, shift: int) -> None:
    data = bytes_of(seed, nbytes + shift)[shift:]

    assert _native.crc32c(data, seed % 97) == _native.crc32c_portable(data, seed % 97)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_checksums_are_those_of_joined_bytes(first: bytes, second: bytes) -> None:
    joined = _native.crc32c_combine(_native.crc32c(first), _native.crc32c(second), len(second))

    assert joined == _native.crc32c(first + second) == _native.crc32c(second, _native.crc32c(first))


@given(st.data())
@settings(deadline=None)
def test_checksums_do_not_depend_on_how_a_region_is_cut(data: st.DataObject) -> None:
    nbytes = data.draw(st.integers(0, 40))
    chunk = data.draw(st.sampled_from([1, 2, 4, 8, 16, 64]))
    content = memoryview(bytes_of(nbytes, nbytes).tobytes())
    cuts = sorted({0, nbytes, *data.draw(st.lists(st.integers(0, nbytes), max_size=12))})
    pieces = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    checksums = Checksums("r", nbytes, chunk)

    for begin, end in pieces:
        checksums.reserve(begin, end - begin)
        found = chunk_checksums(content[begin:end], chunk, checksums.first_bytes(begin))
        checksums.put(begin, end - begin, found)

    assert checksums.finish().tolist() == chunk_checksums(content, chunk).tolist()


# Flipped bits.


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flips")
    with Directory(path, chunk_bytes=CHUNK) as directory:
        store(directory, 1, *SIZES, metadata={"a": 1})
    return path


def refuses(path: Path) -> bool:
    """Whether a reader that reads everything refuses version 1, as a missing one or by a reason."""
    with Directory(path, writable=False) as directory:
        try:
            with directory.open("run", 1) as reader:
                reader.verify()
        except DamagedVersionError as error:
            return bool(error.reason)
    return False


def with_flip(file: Path, bit: int, act: Callable[[], Any]) -> Any:
    original = file.read_bytes()
    changed = bytearray(original)
    changed[bit // 8] ^= 1 << bit % 8
    try:
        file.write_bytes(changed)
        return act()
    finally:
        file.write_bytes(original)


def test_every_flipped_bit_of_the_manifest_is_found(committed: Path) -> None:
    file = next(committed.glob("run/*/*.manifest"))
    text = file.read_bytes()

    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError):
            manifest.parse(bytes(changed))
    assert with_flip(file, 8 * 70, lambda: refuses(committed))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_every_flipped_bit_of_the_data_is_found(committed: Path, data: st.DataObject) -> None:
    file = next(committed.glob("run/*/*.data"))
    bit = data.draw(st.integers(0, 8 * file.stat().st_size - 1))

    assert with_flip(file, bit, lambda: refuses(committed))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_flipped_bits_never_reach_a_reader(committed: Path, data: st.DataObject) -> None:
    file = next(committed.glob("run/*/*.data"))
    bit = data.draw(st.integers(0, 8 * file.stat().st_size - 1))
    name, nbytes = data.draw(st.sampled_from([("r1", SIZES[1]), ("r3", SIZES[3])]))
    begin = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(begin, nbytes))
    wanted = bytes_of(1000 + int(name[1]), nbytes)[begin:end]

    def read() -> None:
        found = np.zeros(end - begin, np.uint8)
        with Directory(committed, writable=False) as directory, directory.open("run", 1) as reader:
            try:
                reader.read_into(name, begin, found)
            except DamagedVersionError:
                return
        assert np.array_equal(found, wanted)

    with_flip(file, bit, read)


def test_any_cut_of_the_manifest_is_found(committed: Path) -> None:
    text = next(committed.glob("run/*/*.manifest")).read_bytes()

    for length in range(len(text)):
        with pytest.raises(ValueError):
            manifest.parse(text[:length])
    for more in (b"\0", b"\n", text):
        with pytest.raises(ValueError):
            manifest.parse(text + more)


# Hostile manifests: their checksum is right, and what they say is not.


def signed(body: Any) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"flashwarp-checkpoint 2 %012d %08x\n" % (len(text), _native.crc32c(text)) + text


def body_of(path: Path) -> Any:
    return json.loads(next(path.glob("run/*/*.manifest")).read_bytes().split(b"\n", 1)[1])


def changed(body: Any, region: int | None = None, **fields: Any) -> Any:
    target = body if region is None else body["regions"][region]
    target.update(fields)
    return body


HOSTILE: list[dict[str, Any]] = [
    {"version": -1},
    {"version": 2},
    {"version": 1 << 70},
    {"version": True},
    {"name": "../x"},
    {"name": "other"},
    {"rank": 1},
    {"data": "../../../../etc/passwd"},
    {"data": "/etc/passwd"},
    {"data": "0000000000000000002-0123456789abcdef.data"},
    {"data": None},
    {"data_bytes": 0},
    {"data_bytes": 1 << 62},
    {"data_bytes": 1.5},
    {"chunk_bytes": 0},
    {"chunk_bytes": 1},
    {"chunk_bytes": 5000},
    {"chunk_bytes": 1 << 40},
    {"byte_order": "big"},
    {"metadata": []},
    {"regions": {}},
    {"regions": [[]]},
    {"regions": None},
    {"region": 1, "offset": 0},
    {"region": 1, "offset": -4096},
    {"region": 1, "offset": 1 << 62},
    {"region": 1, "offset": 4097},
    {"region": 1, "nbytes": 1 << 62, "shape": [1 << 62]},
    {"region": 1, "nbytes": -1},
    {"region": 1, "nbytes": 3},
    {"region": 1, "shape": [0] * 10_000},
    {"region": 1, "shape": [1 << 80]},
    {"region": 1, "shape": "12"},
    {"region": 1, "shape": None},
    {"region": 1, "dtype": "O"},
    {"region": 1, "dtype": "(9999999999,)f8"},
    {"region": 1, "dtype": 7},
    {"region": 1, "name": "r0"},
    {"region": 1, "name": ""},
    {"region": 1, "name": "x" * 2000},
    {"region": 1, "crc32c": ""},
    {"region": 1, "crc32c": "zz" * 8},
    {"region": 1, "crc32c": "00" * 1000},
    {"region": 1, "crc32c": " " * 16},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=str)
def test_hostile_manifest_is_refused(committed: Path, fields: dict[str, Any]) -> None:
    file = next(committed.glob("run/*/*.manifest"))
    original = file.read_bytes()
    try:
        file.write_bytes(signed(changed(body_of(committed), **fields)))
        assert refuses(committed)
    finally:
        file.write_bytes(original)


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"{}", b"[" * 100_000, b"1" * 100_000, b"\xff\xfe", b'{"byte_order":'],
    ids=lambda text: repr(text[:10]),
)
def test_text_that_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        manifest.parse(signed(text))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_change_of_a_field_is_refused_or_stays_inside(
    committed: Path, data: st.DataObject
) -> None:
    body = body_of(committed)
    target = data.draw(st.sampled_from([body, *body["regions"]]))
    key = data.draw(st.sampled_from(sorted(target)))
    target[key] = data.draw(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False),
            st.text(max_size=20),
            st.lists(st.integers(), max_size=3),
            st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
        )
    )
    try:
        found = manifest.parse(signed(body))
    except ValueError:
        return
    end = 0
    for stored in found.regions:
        assert end <= stored.offset
        end = stored.offset + stored.region.nbytes
    assert end <= found.data_bytes


def test_parsing_takes_memory_in_proportion_to_the_text(committed: Path) -> None:
    body = body_of(committed)
    body["regions"][1]["shape"] = [1 << 62]
    body["regions"][1]["nbytes"] = 1 << 62
    text = signed(body)
    tracemalloc.start()
    with pytest.raises(ValueError):
        manifest.parse(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 1 << 20


def test_manifest_is_text_that_json_reads(committed: Path) -> None:
    body = body_of(committed)

    assert body["byte_order"] == "little"
    assert [each["name"] for each in body["regions"]] == ["r0", "r1", "r2", "r3"]
    assert [each["offset"] % 4096 for each in body["regions"]] == [0, 0, 0, 0]
    assert body["metadata"] == {"a": 1}


def test_newer_format_is_named(committed: Path) -> None:
    text = next(committed.glob("run/*/*.manifest")).read_bytes()

    with pytest.raises(ValueError, match="its format is 3"):
        manifest.parse(text.replace(b"checkpoint 2 ", b"checkpoint 3 ", 1))


def as_format_1(path: Path, **fields: Any) -> bytes:
    """The manifest as it was written before versions had an identity."""
    body = {**body_of(path), **fields}
    del body["identity"]
    return signed(body).replace(b"checkpoint 2 ", b"checkpoint 1 ", 1)


def test_a_version_of_format_1_is_read_and_its_contents_are_its_identity(committed: Path) -> None:
    path = next(committed.glob("run/*/*.manifest"))
    written = manifest.parse(path.read_bytes())
    text = as_format_1(committed)
    copied = as_format_1(committed, data=f"{1:019d}-{5:016x}.data", written="", metadata={})
    body = body_of(committed)
    body["regions"][0]["crc32c"] = "0" * len(body["regions"][0]["crc32c"])
    other = as_format_1(committed, regions=body["regions"])

    path.write_bytes(text)

    found, copy = manifest.parse(text), manifest.parse(copied)
    assert found.identity == copy.identity
    assert len({found.identity, written.identity, manifest.parse(other).identity}) == 3
    with Directory(committed) as directory, directory.open("run", 1) as reader:
        reader.verify()


@pytest.mark.parametrize("identity", ["", "5" * 31, "G" * 32, 5, None])
def test_an_identity_that_is_none_is_refused(committed: Path, identity: object) -> None:
    with pytest.raises(ValueError):
        manifest.parse(signed({**body_of(committed), "identity": identity}))


def test_errors_of_reading_are_ours(committed: Path) -> None:
    with Directory(committed, writable=False) as directory:
        with pytest.raises(FlashwarpError):
            directory.open("run", 9)
        with directory.open("run", 1) as reader:
            check(reader, 1)
            assert reader.regions == tuple(regions_of(*SIZES))
