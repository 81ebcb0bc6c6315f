"""`flashwarp tune`, and the profiles that it stores: what they choose, and what is refused."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.array.profile import Profile
from flashwarp.cli.main import run
from flashwarp.errors import ArgumentError, FileFormatError, MissingFileError, PathError
from flashwarp.trace import Trace, record, trace_of_indices, tune
from flashwarp.trace.tune import _choose, _Costs

FACTS = {"dtype": "<f4", "shape": [512, 64], "device": "cpu"}
CHOSEN = {**FACTS, "cache": 1 << 20, "line": 512, "policy": "sieve", "version": 1}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.arange(512 * 64, dtype="f4").reshape(512, 64))
    return tmp_path / "x.npy"


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_COST_S", 0.01)
    monkeypatch.setattr(tune, "_LINES", (512, 4096))


def stored(folder: Path, **changes: Any) -> Path:
    settings = {name: each for name, each in {**CHOSEN, **changes}.items() if each is not None}
    (folder / "p.json").write_text(json.dumps({"settings": settings}))
    return folder / "p.json"


def test_a_choice_is_printed_stored_and_used(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fw.open(table, device="cpu") as x, record(x) as seen:
        for first in range(0, 256, 32):
            x.gather(np.arange(first, first + 32))
    seen.trace().save(tmp_path / "t.npz")

    run(["tune", str(table), "--trace", str(tmp_path / "t.npz"), "--cache-max", "64 KiB"])

    told = capsys.readouterr().out
    assert "the choice, predicted" in told
    assert "the choice, measured" in told
    assert told.lstrip().startswith(("chosen: cache ", "the defaults stay: no candidate was "))
    assert not {"None", "target", "checked"} & set(re.findall(r"\w+", told))
    profile = f"{table}.profile.json"
    assert profile in told
    with fw.open(table, device="cpu", profile=profile) as x:
        assert x.cache.capacity <= 64 << 10
        assert x[3, 5] == 3 * 64 + 5


@pytest.mark.parametrize("gain", [0.51, 1.5])
def test_the_verdict_comes_first_whether_or_not_a_candidate_gained(
    table: Path, monkeypatch: pytest.MonkeyPatch, gain: float
) -> None:
    def rate(_: object, profile: Profile) -> float:
        return 100.0 if profile.cache is None and profile.line is None else 100.0 * gain

    monkeypatch.setattr(tune._Runs, "rows_per_s", rate)

    chosen, report = tune.tune(table)

    stays = "the defaults stay: no candidate was 3 % faster when measured (best: cache "
    assert report.title.startswith("chosen: cache " if gain > 1 else stays)
    assert f"measured {gain:.2f}" in report.title
    assert (chosen.cache is None) == (gain < 1)


def test_the_line_that_fits_a_row_is_a_candidate_of_its_own(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(_: object, profile: Profile) -> float:
        return 200.0 if profile.cache is None and profile.line == 512 else 100.0

    monkeypatch.setattr(tune._Runs, "rows_per_s", rate)

    chosen, report = tune.tune(table)

    assert (chosen.cache, chosen.line) == (None, 512)
    assert report.title == "chosen: line 512 B: measured 2.00 times the rows/s of the defaults"


def test_raw_files_and_tensors_take_the_options_of_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.arange(512 * 64, dtype="f4").tofile(tmp_path / "x.raw")

    run(["tune", str(tmp_path / "x.raw"), "--dtype", "float32", "--shape", "512,64"])

    assert "dtype='float32', shape=(512, 64), profile=" in capsys.readouterr().out
    profile = tmp_path / "x.raw.profile.json"
    with fw.open(
        tmp_path / "x.raw", dtype="float32", shape=(512, 64), device="cpu", profile=profile
    ) as x:
        assert x[3, 5] == 3 * 64 + 5
    with pytest.raises(SystemExit):
        run(["tune", str(tmp_path / "x.raw"), "--shape", "512,x"])


def test_a_profile_that_no_file_can_take_is_refused_before_the_work(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashwarp.trace.tune.tune", lambda *_, **__: pytest.fail("it measured"))
    monkeypatch.setattr("os.access", lambda *_: False)  # no modes of files hold for root

    with pytest.raises(PathError, match="name another by -o"):
        run(["tune", str(table)])


def test_costs_decide_line_route_and_size() -> None:
    # Rows of 512 bytes, one in eight: long lines move what nobody reads.
    rows = np.tile(np.arange(0, 800, 8), 20)
    costs = _Costs(1e-7, {(512, False): 2e-6, (512, True): 1e-6, (4096, False): 8e-6})
    base = Profile("<f4", (800, 128), "cpu", cache=1 << 20, line=4096)

    chosen, seconds = _choose(base, rows, 512, costs)

    assert (chosen.line, chosen.o_direct) == (512, True)
    assert 100 * 512 <= (chosen.cache or 0) <= 200 * 512, "no larger than what the rows need"
    assert seconds == pytest.approx(100 * 1e-6 + 1900 * 1e-7, rel=0.2)


def test_a_policy_must_gain_to_be_chosen() -> None:
    scans = np.r_[np.tile(np.arange(60), 3), np.arange(100, 400), np.tile(np.arange(60), 3)]
    costs = _Costs(1e-7, {(512, False): 1e-5})
    base = Profile("<f4", (512, 128), "cpu", cache=80 * 512, line=512)

    chosen, _ = _choose(base, np.tile(scans, 10), 512, costs)
    alike, _ = _choose(base, np.arange(400), 512, costs)

    assert chosen.policy != "clock"
    assert alike.policy == "clock"


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        (Trace(np.empty(0, np.int64), 4096, "none"), "empty"),
        (trace_of_indices([999], 256), "beyond|touches line 62"),
        (Trace(np.array([1]), 512, "<flashwarp.Array y.npy shape=(9,) dtype=int8 >"), "y.npy"),
    ],
    ids=["empty", "beyond the end", "of another array"],
)
def test_traces_of_other_files_are_refused(table: Path, trace: Trace, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        tune.tune(table, trace)


def test_what_has_no_rows_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.float32(1))
    with pytest.raises(ArgumentError, match="has no rows"):
        tune.tune(tmp_path / "x.npy")


def test_a_profile_gives_what_is_not_given(table: Path, tmp_path: Path) -> None:
    profile = stored(tmp_path, o_direct=False, threads=1)

    with fw.open(table, device="cpu", profile=profile) as x:
        assert (x.cache.line_bytes, x.cache.policy.name) == (512, "sieve")
        assert x.service.describe()["threads"] == 1
        again = pickle.loads(pickle.dumps(x))
        assert again[7].tolist() == x[7].tolist()
        assert again.cache.policy.name == "sieve"
        again.close()
    with fw.open(table, device="cpu", profile=profile, cache="64 KiB", line="4 KiB") as x:
        assert (x.cache.line_bytes, x.cache.policy.name) == (4096, "clock")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shape": [512, 32]}, r"\(512, 32\).*has <f4 and \(512, 64\): run `flashwarp tune`"),
        ({"dtype": "<f8"}, "<f8"),
        ({"device": "cuda"}, "made on device 'cuda'"),
    ],
)
def test_profiles_of_other_files_and_devices_are_refused(
    table: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ArgumentError, match=told):
        fw.open(table, device="cpu", profile=stored(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 2}, "version 2, and this flashwarp reads version 1"),
        ({"cache": -1}, "negative"),
        ({"line": 513}, "513"),
        ({"policy": "best"}, "best"),
        ({"threads": 0}, "threads=0"),
        ({"colour": 1}, "its settings are not such"),
        ({"shape": None}, "its settings are not such"),
    ],
)
def test_what_no_profile_can_have_is_refused(
    table: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(FileFormatError, match=told):
        fw.open(table, device="cpu", profile=stored(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings": 1}', "\0"])
def test_other_files_are_no_profiles(table: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(FileFormatError, match=r"p is .*not a profile of `flashwarp tune`"):
        fw.open(table, device="cpu", profile=tmp_path / "p")
    with pytest.raises(PathError, match="is a directory"):
        fw.open(table, device="cpu", profile=tmp_path)
    with pytest.raises(MissingFileError):
        fw.open(table, device="cpu", profile=tmp_path / "absent")
