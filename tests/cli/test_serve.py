"""`flashwarp serve`: the cache that it owns, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
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
