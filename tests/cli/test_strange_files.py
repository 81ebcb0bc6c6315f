"""Commands that read what others have written: any file ends in one typed error that names it."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.cli.main import run
from flashwarp.errors import FlashwarpError
from flashwarp.trace import Trace

COMMANDS: dict[str, Callable[[Path], Any]] = {
    "trace replay": lambda path: run(["trace", "replay", str(path)]),
    "trace compare": lambda path: run(
        ["trace", "compare", "--policies", "clock", "--sizes", "32", str(path)]
    ),
    "trace record": lambda path: run(["trace", "record", str(path), "o.npz", "--row-bytes", "64"]),
    "trace record of": lambda path: run(
        ["trace", "record", "i.npy", "o.npz", "--rows-of", str(path)]
    ),
    "report": lambda path: run(["report", str(path), "-o", "o.html"]),
    "tune": lambda path: run(["tune", str(path), "-o", "o.json"]),
    "tune by a trace": lambda path: run(["tune", "rows.npy", "--trace", str(path), "-o", "o.json"]),
    "open with a profile": lambda path: fw.open("rows.npy", profile=path, device="cpu").close(),
}

ROW = {"name": "a", "value": 1.0, "unit": "s"}
COMPARISON = {"trace": "x", "accesses": 1, "footprint": 3, "ways": 8}
JSON: list[Any] = [
    *([1], 3, None, "text", {}, {"rows": []}, {"rows": "x"}, {"rows": [1]}, {"rows": [{}]}),
    *({"rows": [{**ROW, name: None}]} for name in ROW),
    *({"rows": [{**ROW, **more}]} for more in ({"reference": 2}, {"checked": "x"}, {"unit": [1]})),
    {"rows": [{**ROW, "value": 10**400}]},
    {"comparisons": [COMPARISON]},
    {"comparisons": [{**COMPARISON, "footprint": 0, "capacities": [1], "hit_rates": {"a": [1]}}]},
    {"comparisons": [{**COMPARISON, "capacities": [1, 2], "hit_rates": {"a": [1]}}]},
    *({"settings": each} for each in (1, {}, {"version": 9}, {"version": 1, "shape": 3})),
]

# Of decoders, and of the objects that they make.
RAW = ("JSONDecode", "codec", "Expecting", "KeyError", "TypeError", "magic string", "pickle.load",
       "zip file", "attribute", "subscript", "iterable", "NoneType")  # fmt: skip


def strange_files(folder: Path) -> list[Path]:
    """Make what is no trace, no record and no profile, and no table without a dtype either."""
    good = folder / "good.npz"
    Trace(np.arange(500) % 97, 512, "x").save(good)
    content = good.read_bytes()
    found = {
        "empty": b"",
        "junk": random.Random(3).randbytes(3000),
        "text": b"hello\nworld\n",
        "latin": b'{"rows": "\xe9"}',
        "wide": '{"rows": []}'.encode("utf-16"),
        "half": b'{"rows": [{"na',
        "deep": b"[" * 100_000,
        "digits": b"9" * 10_000,
        "mark": b"PK",
        "cut.npz": content[: len(content) // 2],
        "cut-behind.npz": content[:-5],
        **{f"{number}.json": json.dumps(each).encode() for number, each in enumerate(JSON)},
    }
    for name, each in found.items():
        (folder / name).write_bytes(each)
    np.savez(folder / "other.npz", a=1)
    np.savez(folder / "later.npz", version=2, lines=np.arange(3), line_bytes=512, name="x")
    np.savez(folder / "worded.npz", version="x", lines=np.arange(3), line_bytes=512, name="x")
    np.savez(folder / "floats.npz", version=1, lines=np.ones(3), line_bytes=512, name="x")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "dangling").symlink_to("nowhere")
    good.unlink()
    return [*folder.iterdir(), folder / "absent", folder / "text" / "x", Path("/dev/zero")]


@pytest.mark.parametrize("command", COMMANDS)
def test_any_other_file_is_one_typed_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    np.save("rows.npy", np.ones((100, 16), "f4"))
    np.save("i.npy", np.arange(10))
    (tmp_path / "strange").mkdir()

    for path in strange_files(tmp_path / "strange"):
        with pytest.raises(FlashwarpError) as raised, redirect_stdout(io.StringIO()):
            COMMANDS[command](path)

        told = str(raised.value)
        assert str(path) in told
        assert "\n" not in told
        assert not any(each in told for each in RAW), told
    assert sorted(os.listdir()) == ["i.npy", "rows.npy"]


@pytest.mark.parametrize("seed", range(20))
def test_a_trace_with_changed_bytes_is_read_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    path, chosen = tmp_path / "t.npz", random.Random(seed)
    Trace(np.arange(500) % 97, 512, "x").save(path)
    content = bytearray(path.read_bytes())
    for _ in range(chosen.randint(1, 8)):
        content[chosen.randrange(len(content))] = chosen.randrange(256)
    path.write_bytes(content)

    try:
        run(["trace", "replay", str(path)])
        told = capsys.readouterr().out
    except FlashwarpError as error:
        told = str(error)

    assert str(path) in told or "accesses hit" in told
    assert not any(each in told for each in RAW)
