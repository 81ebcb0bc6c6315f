"""`flashwarp serve`: the cache that it owns, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import OwnerLostError, SharedCacheError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHWARP_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def serve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from flashwarp.cli.main import main; main()"]
    command += ["serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with serve("rows", "1 MiB", "--line", "512", "--policy", "sieve") as process:
        assert process.stdout is not None
        assert str(folder) in process.stdout.readline()
        yield process
        process.kill()


def test_programs_share_what_is_served(server: subprocess.Popen[str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000))

    with fw.Cache(shared="rows") as cache:
        assert (cache.line_bytes, cache.owned) == (512, False)
        with fw.open(tmp_path / "x.npy", "r+", cache=cache) as x:
            x[3] = 5
            assert x[2:4].tolist() == [2, 5]
            server.send_signal(signal.SIGINT)  # flushes, and closes the arrays of clients
            assert server.wait(20) == 128 + signal.SIGINT
            with pytest.raises(OwnerLostError):
                x.gather([1])
            with pytest.raises(OwnerLostError):
                x.close()
    assert np.load(tmp_path / "x.npy")[3] == 5


def test_a_name_is_served_once(server: subprocess.Popen[str]) -> None:
    with serve("rows", "1 MiB", "--line", "512", "--policy", "sieve") as second:
        _, told = second.communicate(timeout=30)

    assert second.returncode == 1
    assert f"process {server.pid} owns the shared cache 'rows' already" in told


def test_other_settings_are_refused(server: subprocess.Popen[str]) -> None:
    with serve("rows", "2 MiB") as second:
        _, told = second.communicate(timeout=30)

    assert second.returncode == 1
    assert "of 512 bytes" in told
    with pytest.raises(SharedCacheError):
        fw.Cache("2 MiB", shared="rows")


def test_statistics_are_printed_and_given_to_prometheus(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is an extra")
    np.save(tmp_path / "x.npy", np.arange(1000))

    with serve("rows", "1 MiB", "--metrics", "0", "--every", "0.1") as server:
        assert server.stdout is not None
        assert str(folder) in server.stdout.readline()
        metrics = server.stdout.readline().split()[-1]
        with fw.Cache(shared="rows") as cache, fw.open(tmp_path / "x.npy", cache=cache) as x:
            x.gather([1, 2])
            with urllib.request.urlopen(metrics, timeout=20) as answer:
                assert b'flashwarp_open{device="cpu"' in answer.read()
            told = [server.stdout.readline() for _ in range(6)]
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=20)

    assert any("client" in line for line in told)
    assert any(line.startswith("pid") for line in told)


def test_a_number_that_is_no_port_is_refused() -> None:
    with serve("rows", "1 MiB", "--metrics", "70000") as process:
        _, told = process.communicate(timeout=30)

    assert process.returncode == 1
    assert "--metrics 70000 is no port" in told
