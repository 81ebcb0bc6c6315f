"""Remote stores: the same versions, requests that are tried again, and typed errors at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server
from versions import CHUNK, check, store

from flashwarp.checkpoint.directory import Directory, RemoteDirectory, copy_versions, remote
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DamagedVersionError,
    ExistingVersionError,
    ForkError,
    MissingVersionError,
    RemoteError,
    WaitTimeout,
)

obstore = pytest.importorskip("obstore")


def s3_options(server: S3Server) -> dict[str, Any]:
    return {
        "endpoint": server.endpoint,
        "client_options": {"allow_http": True, "timeout": "30s"},
        "skip_signature": True,
        "region": "us-east-1",
    }


@pytest.fixture(params=["memory", "file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteDirectory]:
    with contextlib.ExitStack() as held:
        options: dict[str, Any] = {}
        url = {"memory": "memory:///", "file": f"file://{tmp_path}/remote"}.get(request.param)
        if url is None:
            url = "s3://bucket/of/runs"
            options = s3_options(held.enter_context(S3Server()))
        yield held.enter_context(RemoteDirectory(url, **options))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Directory]:
    with Directory(tmp_path / "d", chunk_bytes=CHUNK) as made:
        for version in (1, 2, 3):
            store(made, version, 100, 0, 3 * CHUNK + 1)
        yield made


def test_versions_go_there_and_come_back(
    place: RemoteDirectory, source: Directory, tmp_path: Path
) -> None:
    store(source, 4, (17 << 20) + 3)

    assert copy_versions(source, place, "run").copied == [1, 2, 3, 4]

    assert (place.names(), place.ranks("run"), place.latest("run", verify=True)) == (
        ["run"],
        [0],
        4,
    )
    for version in place.versions("run"):
        with place.open("run", version) as reader:
            check(reader, version)
    with Directory(tmp_path / "back") as back:
        assert copy_versions(place, back, "run").copied == [1, 2, 3, 4]
        with back.open("run", 4) as reader:
            check(reader, 4)
    assert copy_versions(source, place, "run").there == [1, 2, 3, 4]


def test_discarded_version_and_leftovers_are_gone(
    place: RemoteDirectory, source: Directory
) -> None:
    copy_versions(source, place, "run")
    with place.open("run", 2) as reader:
        place.discard("run", 2)
        with pytest.raises(MissingVersionError):
            reader.read_into("r0", 0, bytearray(1))
    assert place.versions("run") == [1, 3]
    with pytest.raises(MissingVersionError):
        place.open("run", 2)
    with pytest.raises(MissingVersionError):
        place.discard("run", 2)
    obstore.delete(place._store, "run/rank-00000/0000000000000000003.manifest")
    assert place.remove_leftovers("run") == 1
    assert place.versions("run") == [1]


def test_damage_on_the_way_leaves_no_version(place: RemoteDirectory, source: Directory) -> None:
    data = next(source.path.glob("run/*/*2-*.data"))
    content = bytearray(data.read_bytes())
    content[CHUNK + 7] ^= 1
    data.write_bytes(content)

    done = copy_versions(source, place, "run")

    assert list(done.damaged) == [2]
    assert place.versions("run") == [1, 3]


def test_damage_there_is_found(place: RemoteDirectory, source: Directory) -> None:
    copy_versions(source, place, "run")
    found = [each["path"] for each in obstore.list(place._store).collect()]
    data = next(path for path in found if "3-" in path)
    content = bytearray(obstore.get(place._store, data).bytes())
    content[CHUNK + 7] ^= 1
    obstore.put(place._store, data, bytes(content))

    assert place.latest("run", verify=True) == 2
    with place.open("run", 3) as reader, pytest.raises(DamagedVersionError, match="checksum"):
        reader.load("r2")
    obstore.put(place._store, data, bytes(content[:-1]))
    with pytest.raises(DamagedVersionError, match="it has"):
        place.open("run", 3)


def test_version_that_is_there_is_not_stored_again(
    place: RemoteDirectory, source: Directory
) -> None:
    with source.open("run", 1) as reader:
        assert place.upload(reader)
        before = obstore.list(place._store).collect()
        assert not place.upload(reader)
        assert obstore.list(place._store).collect() == before


def test_a_put_whose_answer_was_lost_is_done_when_it_is_asked_again(
    place: RemoteDirectory, source: Directory, quick: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = place._obstore.put

    def put_without_answer(store: Any, path: str, *arguments: Any, **options: Any) -> Any:
        put(store, path, *arguments, **options)
        if path.endswith(".manifest"):
            raise OSError("the connection was lost")

    with source.open("run", 1) as reader:
        monkeypatch.setattr(place._obstore, "put", put_without_answer)
        with pytest.raises(RemoteError):
            place.upload(reader)
        monkeypatch.setattr(place._obstore, "put", put)
        assert not place.upload(reader)
        assert place.identity("run", 1) == reader.identity


def test_another_version_of_a_number_is_replaced_only_if_asked(
    place: RemoteDirectory, source: Directory
) -> None:
    with source.open("run", 1) as reader:
        place.upload(reader)
    source.discard("run", 1)
    store(source, 1, 5000)

    done = copy_versions(source, place, "run")
    with source.open("run", 1) as reader:
        with pytest.raises(ExistingVersionError):
            place.upload(reader)
        assert place.upload(reader, replace=True)
        identity = reader.identity

    assert (done.copied, done.there, done.others) == ([2, 3], [], [1])
    assert place.identity("run", 1) == identity
    with place.open("run", 1) as found:
        check(found, 1)
    names = [each["path"] for each in obstore.list(place._store).collect()]
    assert len([name for name in names if "0001-" in name]) == 1, "the old data is removed"


def test_growing_remote_history_is_followed(place: RemoteDirectory, source: Directory) -> None:
    copy_versions(source, place, "run", [1])
    follower = place.follow("run", timeout_s=0.3, poll_s=0.05)
    assert next(follower) == 1
    copy_versions(source, place, "run", [2])
    assert next(follower) == 2
    with pytest.raises(WaitTimeout):
        next(follower)


# Requests that fail.


class Flaky:
    """The functions of obstore, of which some calls fail."""

    def __init__(self, fails: Callable[[int], bool], error: Exception) -> None:
        self.calls = 0
        self._fails = fails
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self._fails(self.calls):
                raise self._error
            return getattr(obstore, name)(*arguments, **options)

        return call


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    return waits


def test_requests_are_tried_again_with_growing_waits(
    place: RemoteDirectory, source: Directory, quick: list[float]
) -> None:
    place._attempts = 5
    # Of each request, two attempts fail.
    place._obstore = Flaky(lambda call: call % 3 != 0, OSError("connection reset"))

    assert copy_versions(source, place, "run").copied == [1, 2, 3]

    place._obstore = obstore
    assert place.latest("run", verify=True) == 3
    assert len(quick) % 2 == 0
    assert all(0.05 <= wait <= 0.1 for wait in quick[::2])
    assert all(0.1 <= wait <= 0.2 for wait in quick[1::2])


def test_request_that_keeps_failing_is_a_typed_error(
    place: RemoteDirectory, source: Directory, quick: list[float]
) -> None:
    copy_versions(source, place, "run", [1])
    with place.open("run", 1) as reader:
        place._obstore = Flaky(lambda _: True, OSError("connection reset"))
        for act in (
            lambda: place.versions("run"),
            lambda: place.open("run", 1),
            lambda: reader.read_into("r0", 0, bytearray(1)),
            lambda: copy_versions(source, place, "run", [2]),
            lambda: place.discard("run", 1),
        ):
            quick.clear()
            with pytest.raises(RemoteError, match=r"attempt [15] of [15]: connection reset"):
                act()
            assert len(quick) == place._attempts - 1
    place._obstore = obstore
    assert place.versions("run") == [1]


def test_outage_is_no_damage(place: RemoteDirectory, source: Directory, quick: list[float]) -> None:
    copy_versions(source, place, "run")
    real = place._source
    place._source = lambda *_: place._ask("head", lambda: 1 / 0)  # type: ignore[method-assign]
    with pytest.raises(RemoteError):
        place.latest("run")
    place._source = real  # type: ignore[method-assign]
    assert place.latest("run") == 3


def test_refusal_is_not_tried_again(
    place: RemoteDirectory, source: Directory, quick: list[float]
) -> None:
    error = obstore.exceptions.PermissionDeniedError("no")
    place._obstore = flaky = Flaky(lambda _: True, error)
    with pytest.raises(RemoteError, match="attempt 1 of"):
        place.versions("run")
    assert (flaky.calls, quick) == (1, [])


@pytest.mark.parametrize("answers", [False, True], ids=["stalls", "breaks"])
def test_server_that_stalls_or_breaks_ends_in_time(answers: bool, source: Directory) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        if answers:
            server.close()
        port = 9 if answers else server.getsockname()[1]
        with RemoteDirectory(
            "s3://bucket/run",
            attempts=2,
            timeout_s=0.5,
            endpoint=f"http://127.0.0.1:{port}",
            client_options={"allow_http": True, "timeout": "300ms", "connect_timeout": "300ms"},
            skip_signature=True,
            region="us-east-1",
        ) as place:
            begin = time.monotonic()
            with pytest.raises(RemoteError):
                copy_versions(source, place, "run")

            assert time.monotonic() - begin < 20


def test_server_that_is_busy_is_asked_again_part_by_part(tmp_path: Path) -> None:
    with (
        S3Server() as server,
        RemoteDirectory("s3://bucket", **s3_options(server)) as place,
        Directory(tmp_path / "d") as source,
    ):
        store(source, 1, 30 << 20)
        server.fails = lambda number: number % 4 == 0
        assert copy_versions(source, place, "run").copied == [1]
        assert place.latest("run", verify=True) == 1
        assert sum("?uploads" in each for each in server.requests) <= 2
        server.fails = lambda number: True
        with pytest.raises(RemoteError, match="after 4 retries"):
            place.latest("run")


def test_forked_child_has_no_part_in_it(place: RemoteDirectory) -> None:
    child = os.fork()
    if child == 0:
        try:
            place.versions("run")
        except ForkError:
            os._exit(0)
        os._exit(1)

    assert os.waitpid(child, 0)[1] == 0


def test_bad_places_are_refused() -> None:
    for url in ("gopher://x", "not a url", ""):
        with pytest.raises(ArgumentError):
            RemoteDirectory(url)
    with pytest.raises(ArgumentError, match="for a URL"):
        RemoteDirectory(obstore.store.MemoryStore(), endpoint="x")
    place = RemoteDirectory(obstore.store.MemoryStore())
    place.close()
    with pytest.raises(ClosedError):
        place.versions("run")
