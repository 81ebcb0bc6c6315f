"""A checkpointer with a second store by a URL: there and back, without the folder, with outages."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("obstore", reason="obstore is not installed")

from checkpoint.directory.s3_server import S3Server
from checkpoint.faults import WAIT_S, Opener
from checkpoint.test_checkpointer import COUNT, assert_restores, history, until
from flashwarp.errors import ArgumentError, DamagedVersionError, MissingVersionError, RemoteError


def s3(endpoint: str, **options: Any) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "client_options": {"allow_http": True, "timeout": "1s", "connect_timeout": "1s"},
        "skip_signature": True,
        "region": "us-east-1",
        **options,
    }


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(params=["memory", "file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> dict[str, Any]:
    if request.param == "s3":
        options = s3(server.endpoint)
        return {"remote": "s3://bucket/of/runs", "config": {"remote_options": options}}
    return {"remote": {"memory": "memory:///", "file": f"file://{tmp_path}/store"}[request.param]}


def damage(folder: Path, version: int) -> None:
    data = next(folder.rglob(f"{version:019d}-*.data"))
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)


def test_versions_go_to_a_url_and_come_back(
    opened: Opener, tmp_path: Path, place: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = opened("16 KiB", "16 KiB", **place)
    state = history(checkpointer, 4)
    checkpointer.wait(tier="remote")
    assert checkpointer.stats.uploads == 4

    damage(tmp_path / "versions", 0)
    next((tmp_path / "versions").rglob(f"{1:019d}.manifest")).unlink()

    for version in range(4):
        assert_restores(checkpointer, state, version)
    assert caplog.text.count("is fetched from the remote store") == 2
    checkpointer.discard(1)
    with pytest.raises(MissingVersionError):
        checkpointer.restart(1)


@pytest.mark.parametrize("kind", ["file", "s3", "folder"])
def test_a_run_goes_on_from_the_remote_store_alone(
    opened: Opener, tmp_path: Path, server: S3Server, kind: str
) -> None:
    place: dict[str, Any] = {
        "file": {"remote": f"file://{tmp_path}/store"},
        "folder": {"remote": tmp_path / "store"},
        "s3": {"remote": "s3://bucket/r", "config": {"remote_options": s3(server.endpoint)}},
    }[kind]
    with opened(**place) as first:
        history(first, 4)
        first.wait(tier="remote")
    shutil.rmtree(tmp_path / "versions")

    second = opened(**place)
    assert second.test() == 3
    state = np.zeros(COUNT)
    second.protect("state", state)
    for version in (3, 1, 0, 2):
        second.prefetch_enqueue(version)
    for version in (3, 1, 0, 2):
        assert_restores(second, state, version)
    state[:] = 5
    second.checkpoint(4)
    second.wait(tier="remote")
    assert second.stats.uploads == 1, "what was there is not stored again"
    second.discard(0)
    second.close()

    shutil.rmtree(tmp_path / "versions")
    assert opened(**place).versions() == [1, 2, 3, 4]


def test_versions_of_a_remote_that_was_away_are_found_when_it_is_back(
    opened: Opener, tmp_path: Path, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    options = s3(server.endpoint, attempts=1, timeout_s=1)
    place: dict[str, Any] = {"remote": "s3://bucket/r", "config": {"remote_options": options}}
    with opened(**place) as first:
        history(first, 2)
    shutil.rmtree(tmp_path / "versions")
    server.fails = lambda _: True
    second = opened(**place)
    assert second.test() is None
    assert "the versions of 'default' in the remote store are not known" in caplog.text

    server.fails = lambda _: False

    assert second.test() == 1
    assert second.versions() == [0, 1]


def test_what_the_remote_has_not_stays_damaged(opened: Opener, tmp_path: Path) -> None:
    with opened() as first:
        history(first, 1)
    damage(tmp_path / "versions", 0)

    with pytest.raises(DamagedVersionError):
        opened(remote="memory:///").restart(0)


@pytest.mark.parametrize("outage", ["fails", "stalls"])
def test_a_remote_that_fails_or_stalls_leaves_the_other_tiers_usable(
    opened: Opener, server: S3Server, outage: str
) -> None:
    with socket.socket() as silent:  # takes connections, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        endpoint = server.endpoint
        if outage == "stalls":
            endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = s3(endpoint, attempts=2, timeout_s=2)
        options["client_options"]["timeout"] = "0.3s"
        server.fails = lambda _: True
        checkpointer = opened(
            "32 KiB",
            "32 KiB",
            remote="s3://bucket/r",
            config={"remote_options": options, "retry_s": 0.05},
        )
        state = history(checkpointer, 8)
        checkpointer.wait()
        with pytest.raises(RemoteError, match=r"bucket/r failed in"):
            checkpointer.wait(tier="remote", timeout_s=WAIT_S)
        for version in range(8):
            assert_restores(checkpointer, state, version)
        assert checkpointer.versions() == list(range(8))

        if outage == "fails":
            server.fails = lambda _: False

            def uploaded() -> bool:
                # Not counted: of an upload whose answer was lost, the next try finds the files.
                try:
                    checkpointer.wait(tier="remote", timeout_s=WAIT_S)
                except RemoteError:  # of the last try, which a wait repeats
                    return False
                return True

            until(uploaded, "uploads are tried again")
            assert sum(key.endswith(".manifest") for key in server.objects) == 8
            checkpointer.close()
        else:
            with pytest.raises(RemoteError):
                checkpointer.close(timeout_s=WAIT_S)


def test_bad_remotes_are_refused(opened: Opener, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="remote_options are for a URL"):
        opened(remote=tmp_path / "x", config={"remote_options": {"region": "x"}})
    with pytest.raises(ArgumentError, match="remote_options=5 is no mapping"):
        opened(config={"remote_options": 5})
    with pytest.raises(ArgumentError, match="obstore cannot use 'nonsense://x'"):
        opened(remote="nonsense://x")
