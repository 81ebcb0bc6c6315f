"""What a program loses without closing it is closed: no thread, file, mapping or lock is left."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import flashwarp as fw
from edges.interrupts import Left
from flashwarp import endings
from flashwarp.errors import DeviceError

ROWS = np.arange(64 * 16.0).reshape(64, 16)


def use_array() -> None:
    x = fw.open("rows.npy", "r+", device="cpu", cache="16 KiB", line=512)
    x[:8] = 2 * ROWS[:8]


def use_pipeline(workers: int | None = None) -> None:
    x = fw.open("rows.npy", "r+", device="cpu", cache="16 KiB", line=512)
    pipeline = fw.Pipeline(x, 8, workers=workers, library="numpy")
    pipeline.prefetch(range(8, 16))
    pipeline.write_back(range(8), 2 * ROWS[:8])


def use_tiles() -> None:
    x = fw.open("rows.npy", "r+", device="cpu", cache="16 KiB", line=512)
    tiles = fw.Pipeline.tiles(x, 8, writable=True, library="numpy")
    next(tiles)[:] = 2 * ROWS[:8]


def use_checkpointer() -> None:
    checkpointer = fw.Checkpointer("versions", "cpu", "64 KiB", "256 KiB", "remote")
    checkpointer.protect("rows", ROWS)
    checkpointer.checkpoint(len(checkpointer.versions()))


def use_owner() -> None:
    fw.Cache("64 KiB", shared="lost", device="cpu", line=512)


def use_client() -> None:
    with fw.Cache("64 KiB", shared="lost", device="cpu", line=512):
        client = fw.Cache(shared="lost")
        x = fw.open("rows.npy", "r+", cache=client)
        x[:8] = 2 * ROWS[:8]
        x.flush()


def use_file() -> None:
    file = fw.File.create("log.bin", 0, capacity="64 KiB", device="cpu", overwrite=True)
    file.append(b"lines")


@pytest.mark.parametrize(
    "use",
    [
        use_array, use_pipeline, lambda: use_pipeline(1), use_tiles, use_checkpointer, use_owner,
        use_client, use_file,
    ],
    ids=["array", "pipeline", "workers", "tiles", "checkpointer", "owner", "client", "file"],
)  # fmt: skip
def test_what_is_lost_is_closed(
    use: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHWARP_RUNTIME_DIR", str(tmp_path))
    np.save("rows.npy", ROWS)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        use()  # the first use starts what a process keeps
        steady = Left.settled()
        use()
        steady.check()

    if use in (use_array, use_tiles, use_client):
        assert (np.load("rows.npy")[:8] == 2 * ROWS[:8]).all()


def test_a_lost_checkpointer_names_itself_and_keeps_its_versions(tmp_path: Path) -> None:
    checkpointer = fw.Checkpointer(tmp_path, "cpu", "64 KiB", "256 KiB")
    checkpointer.protect("rows", ROWS)
    saved = checkpointer.checkpoint(1)

    with pytest.warns(ResourceWarning, match="<Checkpointer at .* was not closed"):
        del checkpointer
    saved.result(60)
    left = Left.settled()

    with fw.Checkpointer(tmp_path, "cpu", "64 KiB", "256 KiB") as again:
        assert again.versions() == [1]
    left.check()


def test_an_array_that_only_a_lost_pipeline_held_closes_without_the_garbage_collector(
    tmp_path: Path,
) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    x = fw.open(tmp_path / "rows.npy", "r+", device="cpu", cache="16 KiB", line=512)
    x[:8] = 2 * ROWS[:8]
    attachment = x._attachment
    pipeline = fw.Pipeline(x, 8, library="numpy")

    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del x, pipeline
            end = time.monotonic() + 60
            while not attachment.closed and time.monotonic() < end:
                time.sleep(0.01)
    finally:
        gc.enable()

    assert attachment.closed
    assert (np.load(tmp_path / "rows.npy")[:8] == 2 * ROWS[:8]).all()


@pytest.mark.parametrize("client", [False, True])
def test_cache_closes_behind_the_thread_that_closes_a_lost_array(
    client: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", ROWS)
    with fw.Cache("64 KiB", shared="behind", device="cpu", line=512) as owner:
        cache = fw.Cache(shared="behind") if client else owner
        held = [fw.open("rows.npy", "r+", cache=cache)]
        held[0][:8] = 2 * ROWS[:8]
        # As in the middle of a call.
        with cache.turn, pytest.warns(ResourceWarning, match="was not closed"):
            held.clear()
        cache.close()
    assert (np.load("rows.npy")[:8] == 2 * ROWS[:8]).all()


def test_statement_begins_wherever_a_signal_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", ROWS)
    begun = []

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "__enter__":
            raise KeyboardInterrupt

    def use(cache: fw.Cache) -> None:
        x = fw.open("rows.npy", "r+", cache=cache)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with x:
                begun.append(x)
                raise KeyboardInterrupt
        finally:
            sys.settrace(before)

    with (
        fw.Cache("16 KiB", device="cpu", line=512) as cache,
        pytest.raises(KeyboardInterrupt) as raised,
    ):
        use(cache)
    assert begun
    assert raised.tb is not None  # it holds its frames until here


@pytest.mark.parametrize(
    ("error", "times"), [(KeyboardInterrupt(), 2), (DeviceError("a failure of its own"), 1)]
)
def test_statement_closes_wherever_a_signal_comes(error: BaseException, times: int) -> None:
    class Thing(endings.Closing):
        calls = 0

        def close(self) -> None:
            self.calls += 1
            if self.calls == 1:  # as before its first line
                raise error

    thing = Thing()
    with pytest.raises(type(error)) as raised, thing:
        pass
    assert raised.value is error
    assert thing.calls == times
