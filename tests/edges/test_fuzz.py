"""Damaged and hostile input of every parser: a typed error or success, within bounds, never else.

Each parser gets `FUZZ_EXAMPLES` examples, the same in each run: real input,
mutations of it, and input made of parts that are valid one by one. A failure prints the example.
"""

from __future__ import annotations

import io
import resource
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import flashwarp as fw
from flashwarp import _native, config
from flashwarp._jit import artifact_cache
from flashwarp.errors import ArgumentError, FlashwarpError
from flashwarp.storage import Memory, npy
from flashwarp.testing import FaultPlan
from flashwarp.testing.rings import LBA, AlignedMemory, Host, Ring
from support.samples import FUZZ_EXAMPLES

# The process may not grow by more over all examples.
GROWTH_KIB_MAX = 256 << 10


def fuzz(
    examples: st.SearchStrategy[Any], check: Callable[[Any], None], known: Sequence[Any] = ()
) -> None:
    """Check known examples, then as many new ones as the budget says."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for example in known:
        check(example)
    run = hypothesis.given(examples)(check)
    run = settings(
        max_examples=FUZZ_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(run)
    hypothesis.seed(1)(run)()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KIB_MAX


def mutations(corpus: Sequence[bytes], tokens: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Byte strings near those of the corpus."""
    place = st.floats(0, 1, exclude_max=True)
    edit = st.one_of(
        st.tuples(st.just("set"), place, st.binary(min_size=1, max_size=1)),
        st.tuples(st.just("insert"), place, st.sampled_from(list(tokens)) | st.binary(max_size=8)),
        st.tuples(st.just("delete"), place, st.integers(1, 40)),
        st.tuples(st.just("repeat"), place, st.integers(1, 40)),
        st.tuples(st.just("cut"), place, st.none()),
    )

    def apply(base: bytes, edits: list[tuple[str, float, Any]]) -> bytes:
        data = bytearray(base)
        for kind, where, what in edits:
            i = int(where * len(data))
            if kind == "set":
                data[i : i + 1] = what
            elif kind == "insert":
                data[i:i] = what
            elif kind == "delete":
                del data[i : i + what]
            elif kind == "repeat":
                data[i:i] = data[i : i + what]
            else:
                del data[i:]
        return bytes(data)

    return st.builds(apply, st.sampled_from(list(corpus)), st.lists(edit, min_size=1, max_size=6))


# .npy headers.


def npy_of(array: Any, version: tuple[int, int] | None = None) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a version is younger than needed
        np.lib.format.write_array(buffer, np.asanyarray(array), version)
    return buffer.getvalue()


def npy_with(header: str, version: int = 1, data: bytes = bytes(64)) -> bytes:
    text = header.encode("utf-8" if version == 3 else "latin1", "replace")
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


NPY = [
    npy_of(np.arange(12.0).reshape(3, 4)),
    npy_of(np.arange(6, dtype=">i2")),
    npy_of(np.float32(2.5)),
    npy_of(np.zeros((0, 5))),
    npy_of(np.zeros(3, "i4,f8,S5")),
    npy_of(np.zeros(2, [("pos", "<f4", (2, 3)), ("t", "M8[ns]")])),
    npy_of(np.asfortranarray(np.ones((3, 4)))),
    npy_of(np.array(["a", "bcd"])),
    npy_of(np.arange(5), (2, 0)),
    npy_of(np.zeros(2, [("größe", "<i4")]), (3, 0)),
    npy_of(np.zeros(2, [("名", "<i4")]), (3, 0)),
]
NPY_TOKENS = [
    *(b"'descr':", b"'<f8'", b"'|O'", b"'V0'", b"(", b")", b"[", b"]", b"{", b"}", b",", b"-1"),
    *(b"9" * 30, b"1e9", b"True", b"None", b"lambda:0", b"\x00", b"\n", b"\\", b"'", b"# ", b"L"),
    *(b"((" * 200, b"[" * 3000, b"-" * 3000, b"\xff\xff", b"'\\ud800'", b"b''", b"1_0", b"0x7f"),
]
descrs = st.recursive(
    st.sampled_from(
        [
            "<f8",
            ">i4",
            "|b1",
            "|O",
            "|V7",
            "|S3",
            "<U2",
            "<M8[ns]",
            "|V0",
            "<U999999999",
            "f",
            "",
            "x",
        ]
    )
    | st.text(max_size=5)
    | st.integers(),
    lambda inner: (
        st.lists(st.tuples(st.text(max_size=3), inner), max_size=3)
        | st.tuples(inner, st.lists(st.integers(-1, 1 << 40), max_size=3).map(tuple))
        | st.lists(st.tuples(st.text(max_size=3), inner, st.integers(-1, 99)), max_size=2)
    ),
    max_leaves=6,
)
lengths = st.sampled_from([-1, 0, 1, 2, 8, 1 << 31, 1 << 62, 1 << 64, True, 2.0, None, "3"])
shapes = st.lists(lengths | st.integers(), max_size=4).map(tuple) | lengths
headers = st.builds(
    lambda descr, fortran, shape, version, more: npy_with(
        repr({"descr": descr, "fortran_order": fortran, "shape": shape} | more), version
    ),
    descrs,
    st.booleans() | st.integers() | st.none(),
    shapes,
    st.sampled_from([1, 1, 2, 3, 4, 255]),
    st.just({}) | st.dictionaries(st.text(max_size=5), st.integers(), max_size=1),
)


def test_npy_headers(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            layout = npy.read_layout(str(path))
        except FlashwarpError:
            return
        assert all(type(n) is int and n >= 0 for n in layout.shape)
        assert layout.offset + layout.nbytes <= len(data), "bytes beyond the end of the file"
        assert not layout.dtype.hasobject
        with fw.open(path, device="cpu", line=512, cache=2048) as x:
            # A single element comes as a scalar, which is in the machine's byte order.
            got = np.asarray(x[...], layout.dtype)
        expected = np.load(path, allow_pickle=False)
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        # numpy does not copy padding between fields.
        assert layout.dtype.names is not None or got.tobytes() == expected.tobytes()

    fuzz(mutations(NPY, NPY_TOKENS) | headers, check, NPY)


# Text.

PLANS = ["seed=7; read eio p=0.01; write enospc n=3,5; any delay=200us p=0.1; read flip bytes=0-9"]


def test_fault_plans() -> None:
    def check(data: bytes) -> None:
        text = data.decode("latin1")
        try:
            plan = FaultPlan.parse(text)
        except ArgumentError:
            return
        assert FaultPlan.parse(str(plan)) == plan
        # What parses can be injected.
        storage = _native.MemoryStorage(memory.address, memory.nbytes, True, memory)
        rules = [fault.native for fault in plan.faults]
        faulty = _native.FaultyStorage(storage, plan.seed, rules, True)
        assert faulty.nbytes == memory.nbytes

    memory = AlignedMemory(4096)
    tokens = [b"p=", b"n=", b"bytes=", b"delay=", b";", b"=", b"9" * 25, b"1e999", b"nan", b"-"]
    fuzz(
        mutations([plan.encode() for plan in PLANS], tokens),
        check,
        [plan.encode() for plan in PLANS],
    )


SIZES = ["4096", "4 KiB", "2 GiB", " 1.5 MiB ", "0", "7b", "1tb"]


def test_sizes() -> None:
    def check(text: str) -> None:
        try:
            size = config.parse_bytes(text)
        except ArgumentError:
            return
        assert type(size) is int
        assert size >= 0
        assert config.parse_bytes(size) == size
        if text.strip().isdecimal() and text.isascii():
            assert size == int(text), "whole bytes are exact"

    near = mutations([size.encode() for size in SIZES], [b"9" * 400, b".", b"e5", b"KiB", b"\xb2"])
    fuzz(st.text(max_size=12) | near.map(lambda data: data.decode("latin1")), check, SIZES)


def test_settings_from_the_environment() -> None:
    names = [f"FLASHWARP_{name.upper()}" for name in config.Config.__dataclass_fields__]

    def check(example: tuple[str, str]) -> None:
        name, value = example
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(name, value)
            try:
                held = config.current()
            except ArgumentError:
                return
            with fw.open(Memory(8192), "r+", "i8", device="cpu", line=512, cache=4096) as x:
                assert held.timeout_s > 0
                x[3] = 1
                assert x[3] == 1

    values = (
        st.integers().map(str)
        | st.floats().map(str)
        | st.text(
            st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]),
            max_size=9,
        )
    )
    fuzz(st.tuples(st.sampled_from(names), values), check, [(n, "-1") for n in names])


# Files that the library keeps.


def test_compiled_code_on_disk(tmp_path: Path) -> None:
    cache = artifact_cache.ArtifactCache(tmp_path)
    entry = artifact_cache.Entry(cubin=b"\x7fELF" * 20, log="größe: 4")
    whole = artifact_cache.encode("key", entry)
    start = len(artifact_cache._MAGIC) + 32

    def check(example: tuple[bytes, bool]) -> None:
        data, sign = example
        if sign:  # as somebody would who means it
            body = data[start:]
            data = artifact_cache._MAGIC + artifact_cache._digest("key", body) + body
        (tmp_path / "key.fwcubin").write_bytes(data)
        loaded = cache.load("key")
        assert loaded is None or sign or loaded == entry

    near = mutations([whole], [b"\xff" * 8, bytes(8)]) | st.binary(max_size=80)
    fuzz(st.tuples(near, st.booleans()), check, [(whole, False), (whole, True), (b"", True)])
    assert cache.publish("key", entry)
    assert cache.load("key") == entry


# Commands and PRP entries, as the controller meets them.

CANARY = 0xA5
REGION = 64 * 1024
NAMESPACE = 32 * 1024 + 100
STATUSES = {0x000, 0x001, 0x002, 0x004, 0x00B, 0x013, 0x020, 0x080}


class HostileHost:
    """A controller whose memory and namespace lie between canaries."""

    def __init__(self) -> None:
        self.buffer = AlignedMemory(REGION + 8192)
        self.buffer.view[:] = CANARY
        self.base = self.buffer.address + 4096
        self.held = AlignedMemory(NAMESPACE + 8192)
        self.held.view[:] = CANARY
        self.storage = _native.MemoryStorage(self.held.address + 4096, NAMESPACE, True, self.held)
        self.host = Host(
            self.storage,
            regions=[(self.base, REGION)],
            page_bytes=4096,
            max_transfer_bytes=16384,
            admin=True,
            depth=8,
        )

    @property
    def region(self) -> np.ndarray:
        return self.buffer.view[4096 : 4096 + REGION]

    def run(self, queue: int, fields: dict[str, int]) -> int:
        ring = self.host.rings[queue]
        ring.write(fields.pop("opcode"), 77, **fields)
        ring.ring()
        got = self.host.wait(ring)
        assert got.cid == 77
        for _ in range(3):
            self.host.poll()
        assert ring.consume() is None, "one completion a command"
        return got.status

    def check_canaries(self) -> None:
        for memory, nbytes in ((self.buffer, REGION), (self.held, NAMESPACE)):
            around = np.concatenate((memory.view[:4096], memory.view[4096 + nbytes :]))
            assert (around == CANARY).all(), "bytes were written that no command may name"


addresses = st.one_of(
    st.integers(0, REGION // 4096 + 1).map(lambda page: ("region", page * 4096)),
    st.integers(0, REGION // 8).map(lambda word: ("region", word * 8)),
    st.integers(-9000, REGION + 9000).map(lambda byte: ("region", byte)),
    st.integers(0, NAMESPACE // LBA + 2).map(lambda lba: ("namespace", lba * LBA)),
    st.sampled_from([0, 1, 4096, 2**63, 2**64 - 1, 2**64 - 4096]).map(lambda n: ("nowhere", n)),
)
blocks = st.sampled_from([0, 1, 7, 15, 31, 32, 65, 0xFFFF]) | st.integers(0, 0xFFFF)
commands = st.fixed_dictionaries(
    {
        "opcode": st.sampled_from([0, 1, 2, 2, 1, 6, 8, 9]) | st.integers(0, 255),
        "flags": st.just(0) | st.integers(0, 255),
        "nsid": st.sampled_from([1, 1, 1, 1, 0, 2, 0xFFFFFFFF]),
        "prp1": addresses,
        "prp2": addresses,
        "cdw10": st.integers(0, NAMESPACE // LBA + 2) | st.integers(0, 2**32 - 1),
        "cdw11": st.sampled_from([0, 0, 0, 4, 2**32 - 1]),
        "cdw12": st.builds(
            lambda n, high: n | high, blocks, st.sampled_from([0, 0x40000000, 0xFFFF0000])
        ),
    }
)


def test_commands_and_prp_lists() -> None:
    hostile = HostileHost()

    def absolute(address: tuple[str, int]) -> int:
        kind, offset = address
        bases = {"region": hostile.base, "namespace": hostile.storage.mapped_base, "nowhere": 0}
        return (bases[kind] + offset) % 2**64

    def check(example: tuple[list[tuple[str, int]], int, int, dict[str, Any]]) -> None:
        entries, place, queue, command = example
        fields = dict(command)
        words = hostile.region.view("<u8")
        listed = words[place : place + len(entries)]
        listed[:] = [absolute(entry) for entry in entries[: len(listed)]]
        fields["prp1"], fields["prp2"] = absolute(fields["prp1"]), absolute(fields["prp2"])
        assert hostile.run(queue, fields) in STATUSES
        hostile.check_canaries()

    lists = st.lists(addresses, max_size=12)
    place = st.sampled_from([0, 510, 511, 512, 1023, REGION // 8 - 1])
    fuzz(st.tuples(lists, place, st.sampled_from([1, 1, 1, 0]), commands), check)
    assert hostile.host.read(0, 1, prp1=hostile.base) == 0
    hostile.host.controller.stop()


def test_doorbells() -> None:
    memory = AlignedMemory(NAMESPACE)
    storage = _native.MemoryStorage(memory.address, NAMESPACE, True, memory)

    def check(values: list[tuple[bool, int]]) -> None:
        with Host(storage, depth=8, queues=2, buffer_nbytes=65536) as host:
            bad, good = host.rings
            assert isinstance(bad, Ring)
            for is_cq, value in values:
                bad.bells[16 if is_cq else 0] = value
                for _ in range(4):
                    host.poll()
            assert host.do(2, good, lba=0, blocks=1) == 0
            assert host.controller.stats["queues"][bad.id] < 200

    value = st.integers(0, 9) | st.sampled_from([2**31, 2**32 - 1])
    fuzz(st.lists(st.tuples(st.booleans(), value), max_size=12), check)
