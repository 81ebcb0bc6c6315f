"""What comes over the socket of a shared cache, well meant or not, is checked."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.device import shared_memory
from flashwarp.errors import (
    BoundsError,
    FlashwarpError,
    LockedError,
    OwnerLostError,
    ReadOnlyError,
    SharedCacheError,
    StorageError,
)
from flashwarp.sharing import messages, names
from flashwarp.sharing.messages import Message

ROWS = np.arange(4000, dtype="i4").reshape(1000, 4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHWARP_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", ROWS)
    return tmp_path / "rows.npy"


@pytest.fixture
def owner() -> Iterator[fw.Cache]:
    with fw.Cache("64 KiB", shared="rows", device="cpu", line=512) as cache:
        yield cache


def works(path: Path) -> None:
    with fw.Cache(shared="rows") as cache, fw.open(path, cache=cache) as x:
        np.testing.assert_array_equal(x[...], ROWS)


def raw() -> socket.socket:
    client = names.reach("rows")
    assert client is not None
    client.settimeout(10)
    return client


def greeted() -> socket.socket:
    client = raw()
    messages.send(client, messages.hello())
    answer = messages.receive(client)
    assert answer is not None
    answer.close()
    return client


def ask(client: socket.socket, body: dict[str, Any], payload: bytes = b"") -> dict[str, Any]:
    messages.send(client, body, payload)
    answer = messages.receive(client)
    assert answer is not None
    return answer.body


def opened(client: socket.socket, file: Path, **changes: object) -> dict[str, Any]:
    status = file.stat()
    return ask(
        client,
        {
            "op": "open",
            "path": str(file),
            "offset": 128,
            "nbytes": ROWS.nbytes,
            "device": status.st_dev,
            "inode": status.st_ino,
            "writable": 0,
            **changes,
        },
    )


def test_noise_ends_the_connection_and_nothing_else(owner: fw.Cache, path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    random = np.random.default_rng(seed)
    hello = json.dumps(messages.hello()).encode()
    noises = [
        b"\0",
        b"\xff" * 4,
        struct.pack("<I", 5) + b"[1,2]",
        struct.pack("<I", 4) + b"null",
        struct.pack("<I", 1 << 31) + hello,
        struct.pack("<I", 60_000) + b"[" * 60_000,
        *(random.bytes(random.integers(1, 70_000)) for _ in range(40)),
    ]
    for noise in noises:
        for greets in (False, True):
            with greeted() if greets else raw() as client:
                client.send(noise)
                answer = messages.receive(client)
                if answer is not None:  # the reason, and then the end
                    assert answer.body["error"] == "SharedCacheError", f"seed {seed}"
                    assert messages.receive(client) is None

    works(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "rows.npy"}, "no absolute path"),
        ({"path": 7}, "no text"),
        ({"path": "/nowhere/at/all"}, "does not exist|No such file"),
        ({"path": "/dev/zero"}, "regular file"),
        ({"path": "a\0b"}, "absolute|null"),
        ({"offset": -1}, "offset=-1"),
        ({"offset": 1 << 62}, "offset|beyond"),
        ({"nbytes": 0}, "nbytes=0"),
        ({"nbytes": 1 << 62}, "bytes"),
        ({"nbytes": True}, "nbytes=True"),
        ({"nbytes": 1e3}, "nbytes=1000.0"),
        ({"inode": 1}, "another file in the owner's process"),
        ({"writable": 2}, "writable=2"),
    ],
)
def test_files_that_cannot_be_opened(
    owner: fw.Cache, path: Path, changes: dict[str, object], said: str
) -> None:
    with greeted() as client:
        body = opened(client, path, **changes)

        assert "error" in body
        assert issubclass(getattr(fw.errors, body["error"]), FlashwarpError)
        with pytest.raises(FlashwarpError, match=said):
            raise messages.error_of(Message(body))
        assert "array" in opened(client, path)  # the connection goes on
    works(path)


def test_an_array_may_be_closed_again_by_whom_a_signal_has_kept_the_answer_from(
    owner: fw.Cache, path: Path
) -> None:
    with greeted() as client:
        number = opened(client, path)["array"]

        answers = [ask(client, {"op": "close", "array": number}) for _ in range(2)]

    assert answers == [{}, {}]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"op": "drop", "dirty": 5}, SharedCacheError),
        ({"op": "flush", "array": 99}, SharedCacheError),
        ({"op": "flush", "array": "1"}, SharedCacheError),
        ({"op": "read"}, SharedCacheError),
        ({"op": "why"}, SharedCacheError),
        ({"op": "nonsense"}, SharedCacheError),
        ({"op": None}, SharedCacheError),
        ({}, SharedCacheError),
    ],
)
def test_messages_out_of_bounds(
    owner: fw.Cache, path: Path, body: dict[str, object], error: type[Exception]
) -> None:
    with greeted() as client:
        array = opened(client, path)["array"]

        assert ask(client, {"array": array, **body})["error"] == error.__name__
    works(path)


READ, STORE, PREFETCH = 1, 2, 3


def table(cache: fw.Cache) -> tuple[np.ndarray, np.ndarray]:
    """The bell of a client's table of requests, and a row of words for each slot."""
    client = cache._client
    assert client is not None
    # A bell, and then the slots: state, operation, begin, bytes, status.
    count = 16 * (1 + client.facts.slots)
    words = np.frombuffer((ctypes.c_uint32 * count).from_address(client.mapped.address), "u4")
    return words[:1], words[16:].reshape(-1, 16)


def move(cache: fw.Cache, operation: int, begin: int, nbytes: int, memory: np.ndarray) -> int:
    client = cache._client
    assert client is not None
    bell, slots = table(cache)
    slots[0, 1] = operation
    slots[0, 2:6] = np.array([begin, nbytes], "u8").view("u4")
    slots[0, 0] = 1
    bell[0] += 1
    end = time.monotonic() + 10
    while slots[0, 0]:
        assert time.monotonic() < end, "nobody has answered"
        time.sleep(0.001)
    buffers = client.mapped.address + client.facts.requests_bytes - len(slots) * 512
    if operation == READ:
        ctypes.memmove(memory.ctypes.data, buffers, min(nbytes, 512))
    return int(slots[0, 6])


@pytest.mark.parametrize(
    ("operation", "begin", "nbytes", "error"),
    [
        (READ, 0, 512, None),
        (READ, 31 * 512, 128, None),  # the last line, of 31 whole ones and a part
        (READ, 7, 3, None),
        (READ, 0, 0, BoundsError),
        (READ, 0, 513, BoundsError),
        (READ, 15_999, 2, BoundsError),
        (READ, 16_000, 1, BoundsError),
        (READ, 1 << 62, 8, BoundsError),
        (READ, (1 << 64) - 1, (1 << 64) - 1, BoundsError),
        (STORE, 0, 16, ReadOnlyError),
        (PREFETCH, 0, 16_000, None),
        (PREFETCH, 0, 0, None),
        (PREFETCH, 15_999, (1 << 64) - 1, None),
        (PREFETCH, 1 << 62, 1, None),
    ],
)
def test_requests_out_of_bounds(
    owner: fw.Cache,
    path: Path,
    operation: int,
    begin: int,
    nbytes: int,
    error: type[Exception] | None,
) -> None:
    memory = np.zeros(1024, "u1")
    with fw.Cache(shared="rows") as cache, fw.open(path, cache=cache) as x:
        failed = move(cache, operation, begin, nbytes, memory) != 0

        assert failed == (error is not None)
        if error is not None:
            assert isinstance(x._attachment.asking.why(), error)
        elif operation == READ:
            expected = ROWS.view("u1").reshape(-1)[begin : begin + nbytes]
            np.testing.assert_array_equal(memory[:nbytes], expected)
    works(path)


def test_noise_in_the_table_of_requests(owner: fw.Cache, path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    random = np.random.default_rng(seed)
    with fw.Cache(shared="rows") as cache, fw.open(path, cache=cache) as x:
        bell, slots = table(cache)
        for _ in range(50):
            slots[:, 1] = random.integers(0, 5, len(slots))
            slots[:, 2:6] = random.integers(0, 1 << 32, (len(slots), 4))
            slots[::2, 2:6] %= 700
            slots[::2, [3, 5]] = 0
            slots[:, 0] = random.integers(0, 3, len(slots))
            bell[0] += 1

        slots[:, 0] = 0
        with fw.Cache(shared="rows") as again, fw.open(path, cache=again) as y:
            np.testing.assert_array_equal(y[...], ROWS, err_msg=f"seed {seed}")
        np.testing.assert_array_equal(x[...], ROWS)


def test_client_of_another_version(owner: fw.Cache, path: Path) -> None:
    with raw() as client:
        messages.send(client, {**messages.hello(), "flashwarp": "9.9"})
        answer = messages.receive(client)

    assert answer is not None
    with pytest.raises(SharedCacheError, match=r"a client runs flashwarp 9\.9.*same version"):
        raise messages.error_of(answer)
    works(path)


def test_another_user(owner: fw.Cache, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(messages, "peer", lambda _: (os.getpid(), os.geteuid() + 1))
        with pytest.raises(SharedCacheError, match="belongs to user"):
            fw.Cache(shared="rows")
        with raw() as client:
            answer = messages.receive(client)
            assert answer is not None
            assert "the client is of user" in answer.body["message"]
    works(path)


def answering(name: str, *answers: tuple[dict[str, Any], list[int]]) -> threading.Thread:
    """Listen as an owner that says these things."""
    lock = names.OwnerLock.take(name)
    assert lock is not None
    server = names.listen(name)

    def run() -> None:
        with server, server.accept()[0] as client:
            for body, descriptors in answers:
                messages.receive(client)
                messages.send(client, body, descriptors=descriptors)
        lock.release()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


FACTS = {
    "kind": "cpu",
    "device": "cpu",
    "policy": "clock",
    "line": 4096,
    "ways": 4,
    "sets": 1,
    "host_memory": 0,
    "metadata_bytes": 8192,
    "tags": 4096,
    "frames_bytes": 16384,
    "frames": 0,
    "slots": 2,
}


REQUESTS_BYTES = _native.request_bytes(FACTS["slots"], FACTS["line"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flashwarp": "0.0.1"}, "the owner of 'rows' runs flashwarp 0.0.1"),
        ({"messages": 99}, "messages 99"),
        ({"cache": None}, "did not describe"),
        ({"cache": {**FACTS, "line": "4096"}}, "did not describe"),
        ({"cache": {**FACTS, "line": 4097}}, "no cache that can be"),
        ({"cache": {**FACTS, "sets": 5}}, "no cache that can be"),
        ({"cache": {**FACTS, "tags": 8192}}, "no cache that can be"),
        ({"cache": {**FACTS, "slots": 0}}, "no cache that can be"),
        ({"cache": {**FACTS, "frames": 4096}}, "no cache that can be"),
        ({"cache": {**FACTS, "metadata_bytes": 1 << 60}}, "no cache that can be"),
        ({"cache": {**FACTS, "device": "gpu of mars"}}, "lies on another device"),
        ({"cache": {**FACTS, "frames_bytes": 1 << 30}}, "bytes of memory with the seals"),
        ({}, ""),
    ],
)
def test_owner_that_cannot_be_trusted(changes: dict[str, Any], said: str) -> None:
    made = [
        shared_memory.create(FACTS[name], read_only=True)[0]
        for name in ("metadata_bytes", "frames_bytes")
    ]
    made.append(shared_memory.create(REQUESTS_BYTES, read_only=False)[0])
    thread = answering("rows", ({**messages.hello(), "cache": FACTS, **changes}, made))
    if said:
        with pytest.raises(SharedCacheError, match=said):
            fw.Cache(shared="rows", device="cpu")
    else:
        fw.Cache(shared="rows").close()
    thread.join(10)
    for each in made:
        os.close(each)


def test_memory_that_could_be_cut_is_not_mapped() -> None:
    plain = os.memfd_create("plain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 1 << 20)
    made = [plain, plain, plain]
    thread = answering("rows", ({**messages.hello(), "cache": FACTS}, made))

    with pytest.raises(SharedCacheError, match="that nobody can cut"):
        fw.Cache(shared="rows")

    thread.join(10)
    os.close(plain)


def test_owner_that_answers_nonsense(path: Path) -> None:
    made = [
        shared_memory.create(FACTS[name], read_only=True)[0]
        for name in ("metadata_bytes", "frames_bytes")
    ]
    made.append(shared_memory.create(REQUESTS_BYTES, read_only=False)[0])
    thread = answering(
        "rows",
        ({**messages.hello(), "cache": FACTS}, made),
        ({"array": 1, "line_begin": 1 << 40, "slot": 0, "epoch": 0}, []),
    )
    with fw.Cache(shared="rows") as cache:
        with pytest.raises(SharedCacheError, match="line_begin=1099511627776"):
            fw.open(path, cache=cache)
        thread.join(10)
        with pytest.raises(OwnerLostError, match="has gone"):
            fw.open(path, cache=cache)
    for each in made:
        os.close(each)


def test_exported_memory_cannot_be_written_or_cut(owner: fw.Cache) -> None:
    assert owner._owner is not None
    _, descriptors = owner._owner.greet(0)
    for descriptor in descriptors[:2]:
        for change in (
            lambda d=descriptor: os.pwrite(d, b"x", 0),
            lambda d=descriptor: os.ftruncate(d, 0),
        ):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(FlashwarpError, match="Operation not permitted"):
            shared_memory.map_memory(descriptor, 4096, writable=True)


@pytest.mark.parametrize(
    "error",
    [
        StorageError(5, "transfer failed", "/x", offset=4096, status=0x281),
        LockedError(11, "is open", "/x", holder=77),
        BoundsError("index 5 is out of bounds"),
        SharedCacheError("no"),
    ],
)
def test_errors_travel(error: FlashwarpError) -> None:
    body = json.loads(json.dumps(messages.fail(error)))

    found = messages.error_of(Message(body))

    assert type(found) is type(error)
    assert str(found) == str(error)
    for name in ("offset", "status", "holder", "errno", "filename"):
        assert getattr(found, name, None) == getattr(error, name, None)


def test_errors_that_do_not_travel() -> None:
    body = messages.fail(ZeroDivisionError("x"))
    assert type(messages.error_of(Message(body))) is SharedCacheError
    for name in ("SystemExit", "annotations", "__doc__", "RankError"):
        found = messages.error_of(Message({"error": name, "message": "x"}))
        assert type(found) is SharedCacheError


def test_an_owner_that_dies_before_it_greets_is_no_owner(path: Path) -> None:
    server = names.listen("rows")

    def die() -> None:
        client, _ = server.accept()
        server.close()
        client.close()

    dying = threading.Thread(target=die, daemon=True)
    dying.start()
    with fw.Cache("64 KiB", shared="rows", device="cpu") as cache:
        assert cache.owned
        works(path)
    dying.join(10)
    assert not dying.is_alive()
