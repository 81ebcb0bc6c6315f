"""What benchmarks share: rows, what is left out, and options."""

import pytest

from benchmarks.base import Record, by_kind, bytes_of
from flashwarp.device import resolve


@pytest.fixture
def record():
    return Record("Some", "cpu", {}, {})


def test_a_row_stands_beside_what_it_is_compared_with(record):
    record.row("a", 3.0, "GB/s", "the disk", 4.0, 0.7, True, "1.0 (Fig. 1)", "warm", 4096)

    (row,) = record.rows
    assert (row.ratio, row.target, row.checked) == (0.75, 0.7, True)
    assert (row.paper, row.note, row.footprint) == ("1.0 (Fig. 1)", "warm", 4096)


def test_what_would_begin_too_late_is_left_out_by_name(record, capsys):
    assert not record.is_late("first")

    record.end_in(-1)

    assert record.is_late("second")
    assert record.settings["left out"] == {"second": "no time was left"}
    assert "left out: second: no time was left" in capsys.readouterr().out


def test_options_that_are_not_given_depend_on_the_device():
    cpu = resolve("cpu")

    assert by_kind(cpu, 0, 64, 2) == 2
    assert by_kind(cpu, 7, 64, 2) == 7
    assert bytes_of(cpu, "", "4 GiB", "1 MiB") == 1 << 20
    assert bytes_of(cpu, "2 MiB", "4 GiB", "1 MiB") == 2 << 20
