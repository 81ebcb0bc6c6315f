"""Timing and reports, on which benchmarks stand."""

import re
import subprocess
from itertools import count

from flashwarp.device import resolve
from flashwarp.probe import report as report_module
from flashwarp.probe.report import Report, Row, provenance
from flashwarp.probe.timing import device_seconds, in_turns, median_of


def report_of(*rows):
    report = Report("Some", "cpu", {}, {})
    for row in rows:
        report.add(row)
    return report


def test_ways_take_turns_and_the_first_round_does_not_count():
    order, clock = [], count()

    def way(name):
        def measure():
            order.append(name)
            return float(next(clock))

        return measure

    medians = in_turns({"a": way("a"), "b": way("b")}, runs=3)

    assert order == ["a", "b"] * 4
    assert medians == {"a": 4.0, "b": 5.0}


def test_median_leaves_the_first_run_out():
    values = iter([100.0, 3.0, 1.0, 2.0])

    assert median_of(lambda: next(values), runs=3) == 2.0


def test_device_seconds_cover_the_launch():
    done = []

    seconds = device_seconds(resolve("cpu"), lambda: done.append(sum(range(100_000))))

    assert len(done) == 1
    assert 0 < seconds < 10


def git(folder, *words):
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True)


def test_commit_of_a_record_is_marked_where_the_sources_differ_from_it(tmp_path, monkeypatch):
    source = tmp_path / "report.py"
    source.write_text("1")
    monkeypatch.setattr(report_module, "__file__", str(source))
    monkeypatch.setenv("FLASHWARP_COMMIT", "abc-dirty")

    # An installed package inside another project: git does not know its file.
    git(tmp_path, "init")
    assert provenance("cpu")["commit"] == "abc-dirty"

    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "Begin")
    assert re.fullmatch("[0-9a-f]{12}", provenance("cpu")["commit"])

    source.write_text("2")
    assert re.fullmatch("[0-9a-f]{12}-dirty", provenance("cpu")["commit"])


def test_report_shows_the_figure_of_the_paper_where_there_is_one(capsys):
    report_of(Row("plain", 1.0, "s")).show()
    assert "paper" not in capsys.readouterr().out

    report_of(Row("plain", 1.0, "s"), Row("other", 2.0, "x", paper="1.88 [Fig. 4]")).show()
    shown = capsys.readouterr().out
    assert "paper" in shown
    assert "1.88 [Fig. 4]" in shown
