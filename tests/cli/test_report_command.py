"""`flashwarp report`: each kind of input as one page that needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is an extra")

from flashwarp.cli.main import run
from flashwarp.errors import ArgumentError, FileFormatError, MissingFileError
from flashwarp.trace import Trace, compare, make
from flashwarp.trace.compare import save

ROW = {"name": "a <b> gather", "value": 1.5, "unit": "GB/s", "reference_name": "memmap"}
ROW |= {"reference": 3.0, "ratio": 0.5, "checked": True, "note": ""}


def page_of(source: Path, *options: str) -> str:
    output = source.with_suffix(".html")
    run(["report", str(source), "-o", str(output), *options])
    return output.read_text()


def of_json(folder: Path, content: object) -> str:
    (folder / "x.json").write_text(json.dumps(content))
    return page_of(folder / "x.json")


def needs_nothing_else(page: str) -> bool:
    """No script, no style sheet or picture of others; names of XML are no addresses."""
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]*)""", page)
    return "<script" not in page and all(each.startswith(("#", "data:")) for each in links)


def test_a_trace_is_plots_of_hit_rates_lines_and_popularity(tmp_path: Path) -> None:
    make("zipf", accesses=2000).save(tmp_path / "t.npz")

    page = page_of(tmp_path / "t.npz", "--accesses", "1000")

    assert page.count("<svg") == 3
    assert page.index("the best policy here") < page.index("<svg")
    assert "<h2>Lines used over time: line number by access" in page
    assert "the first 1,000 are shown" in page
    assert "s3_fifo" in page
    assert "flashwarp: 0.1.0" in page  # of the versions
    assert needs_nothing_else(page)
    assert "prefers-color-scheme: dark" in page


def test_rows_of_a_benchmark_stand_beside_their_references(tmp_path: Path) -> None:
    best = {**ROW, "name": "best", "value": 6.0, "ratio": 2.0}
    content = {"title": "Gathers", "machine": {"cpu": "c"}, "command": "x", "rows": [best, ROW]}

    page = of_json(tmp_path, content)

    assert "<title>Gathers</title>" in page
    assert "The lowest ratio is 0.50: a &lt;b&gt; gather, to memmap." in page
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings[0] == "Ratio of each to what it is compared with, lowest first"
    assert headings[1:] == ["Measured, in GB/s", "All measurements", "How it came about"]
    assert page.count("<svg") == 2
    assert "a &lt;b&gt; gather" in page
    assert "<b>" not in page
    assert "cpu: c" in page
    assert needs_nothing_else(page)


def test_comparisons_are_drawn(tmp_path: Path) -> None:
    save([compare(make("loop", accesses=500), capacities=[64])], tmp_path / "c.json", command="x y")

    page = page_of(tmp_path / "c.json")

    assert "<h2>Hit rate by size of the cache, %: loop" in page
    assert re.search(r"Of loop.*, a cache of 56 lines hits [\d.]+% with \w+, the best policy", page)
    assert "x y" in page


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("{", FileFormatError, "cut short or damaged, not a trace of"),
        ("no run", FileFormatError, "text, not a trace of"),
        ("", FileFormatError, "empty, not a trace of"),
        ("{}", FileFormatError, "without anything to show, not a trace of"),
        ("[]", FileFormatError, "without anything to show, not a trace of"),
        ('{"rows": [{"name": 1}]}', FileFormatError, "rows, but not as this version"),
        ('{"comparisons": [{}]}', FileFormatError, "comparisons, but not as this version"),
        (None, MissingFileError, "no such file"),
    ],
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, text: str | None, error: type[Exception], told: str
) -> None:
    if text is not None:
        (tmp_path / "x.json").write_text(text)

    with pytest.raises(error, match=told):
        page_of(tmp_path / "x.json")
    assert not (tmp_path / "x.html").exists()


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    Trace(np.empty(0, np.int64), 4096, "none").save(tmp_path / "t.npz")

    with pytest.raises(ArgumentError, match="empty"):
        page_of(tmp_path / "t.npz")
