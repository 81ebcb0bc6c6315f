"""How an array shows itself: `repr`, and the table in notebooks."""

from __future__ import annotations

import html.parser
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import StorageError

ODD_NAME = "<b>a & b</b>.npy"


class Table(html.parser.HTMLParser):
    """The rows of a table, by their headings, and its caption as the row without a heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: dict[str, str] = {}
        self._tags: list[str] = []
        self._heading = ""
        self.feed(text)
        self.close()
        assert self._tags == [], "a tag is not closed"

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in {"table", "caption", "tbody", "tr", "th", "td"}, "text became markup"
        self._tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._tags[-1] == "th":
            self._heading = data
        else:
            self.rows[self._heading] = data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "<i>"
    folder.mkdir()
    name = folder / ODD_NAME.replace("/", "-")
    with name.open("wb") as file:
        np.save(file, np.zeros((6, 4), np.float32))
    return name


def table_of(x: fw.Array) -> dict[str, str]:
    return Table(x._repr_html_()).rows


def test_representations_have_the_same_facts(path: Path) -> None:
    with fw.open(path, "r+", device="cpu", cache="64 KiB") as x:
        table, line = table_of(x), repr(x)

    assert table[""] == "flashwarp.Array"
    assert (table["shape"], table["dtype"], table["bytes"]) == ("(6, 4)", "float32", "96")
    assert table["path"] == str(path)
    for fact in (f"shape={table['shape']}", f"dtype={table['dtype']}", table["path"], "'cpu'"):
        assert fact in line
    assert table["device"].startswith("cpu")


def test_table_says_how_the_data_moves(path: Path) -> None:
    with fw.open(path, "r+", device="cpu", cache="64 KiB") as x:
        x[0] = 1
        x.flush()
        x.drop_cache()
        x[...]
        x[...]
        table, explained, stats = table_of(x), x.explain(), x.stats

        assert table["route"].startswith(f"{explained.route}: ")
        assert table["cache"] == explained.facts["cache"]
        assert table["hits"] == f"{stats.hits} ({stats.hit_rate:.1%})"
        assert table["misses"] == str(stats.misses)
        assert table["read"] == f"{stats.bytes_read} bytes in {stats.commands} commands"
        assert table["written"] == f"{stats.bytes_written} bytes"
        assert stats.bytes_written > 0


def test_closed_array_says_so(path: Path) -> None:
    x = fw.open(path, device="cpu", cache=fw.Cache("64 KiB"))
    x.close()

    table = table_of(x)

    assert table[""] == "flashwarp.Array, closed"
    assert table["path"] == str(path)
    assert set(table) == {"", "shape", "dtype", "bytes", "path"}
    assert repr(x).startswith("<closed flashwarp.Array ")


def test_table_opens_no_unpickled_array(path: Path) -> None:
    with fw.open(path, device="cpu") as x:
        sent = pickle.dumps(x)
    path.unlink()

    again = pickle.loads(sent)

    assert table_of(again) == {
        "": "flashwarp.Array, unopened",
        "shape": "(6, 4)",
        "dtype": "float32",
        "bytes": "96",
    }
    assert repr(again).startswith("<unopened flashwarp.Array ")
    again.close()

    assert table_of(again)[""] == "flashwarp.Array, closed"
    assert repr(again).startswith("<closed flashwarp.Array ")


def test_a_name_that_would_move_the_cursor_is_shown_with_escapes(tmp_path: Path) -> None:
    name = tmp_path / "a\n\x1b[31mb.npy"
    np.save(name, np.arange(3))

    with fw.open(name, device="cpu") as x:
        assert repr(str(name)) in repr(x)
        assert table_of(x)["path"] == repr(str(name))


def test_array_in_memory_has_a_table() -> None:
    with fw.open(fw.storage.Memory("4 KiB"), "r+", "i8", device="cpu") as x:
        assert table_of(x)["path"] == "in memory"
        assert " in memory " in repr(x)


def test_failure_while_reading_counters_is_a_row(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise StorageError(5, "no <counters>")

    with fw.open(path, device="cpu") as x:
        with monkeypatch.context() as patch:
            patch.setattr(x._attachment, "stats", fail)
            table = table_of(x)

        assert "no <counters>" in table["error"]
        assert table["shape"] == "(6, 4)"


@pytest.mark.parametrize(("mode", "state"), [("r", "unopened"), ("r+", "of another process")])
def test_table_of_a_parents_array_asks_nothing_of_it(path: Path, mode: str, state: str) -> None:
    with fw.open(path, mode, device="cpu") as x:
        child = os.fork()
        if child == 0:
            os._exit(0 if table_of(x)[""] == f"flashwarp.Array, {state}" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_table_needs_no_optional_package(path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('IPython', 'torch', 'cupy', 'rich', 'pandas', 'cuda'):\n"
        "    sys.modules[name] = None\n"
        "import flashwarp as fw\n"
        "with fw.open(sys.argv[1], device='cpu') as x:\n"
        "    assert x._repr_html_().startswith('<table>')\n"
    )

    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=60)
