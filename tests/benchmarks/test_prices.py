"""Prices of drives beside memory: the arithmetic, what is refused, and the stored table."""

import json
from pathlib import Path

import pytest

from benchmarks.drives import prices
from flashwarp.errors import ArgumentError, PathError

ROOT = Path(__file__).parents[2]
MEASURED = str(ROOT / "results" / "scaling_h200.json")
MEMORY = {"name": "DIMM", "usd": 1000, "bytes": 1e11, "date": "2026-01", "source": "a shop"}
DRIVE = {"name": "drive", "usd": 500, "bytes": 1e12, "date": "2026-01", "source": "a shop"}


def stored(folder, **changes):
    """A file of prices with one drive, a little different."""
    path = folder / "prices.json"
    path.write_text(json.dumps({"memory": MEMORY, "drives": [{**DRIVE, **changes}]}))
    return str(path)


def measured(folder, link_m_s=1.0, **rates):
    """A stored run over modelled drives whose link moves so many million 4 KiB blocks."""
    rows = [{"name": f"1 modelled drive {model}, 4096 B random reads, synchronous",
             "value": value, "reference_name": "", "reference": 0.0}
            for model, value in rates.items()]  # fmt: skip
    link = {"name": "9 modelled drives, 4096 B random reads", "value": 0.9}
    rows.append({**link, "reference_name": "link", "reference": link_m_s})
    path = folder / "measured.json"
    path.write_text(json.dumps({"rows": rows}))
    return str(path)


def values(report):
    return {row.name: row.value for row in report.rows}


def test_gain_reads_and_drives_follow_from_prices_and_rates(tmp_path):
    rates = {"reads_per_s": {"4096": 300_000}, "rates_source": "its maker"}

    report = prices.run(stored(tmp_path, **rates), measured(tmp_path))

    found = values(report)
    assert found["DIMM: a GB"] == pytest.approx(10)
    assert found["drive: a GB"] == pytest.approx(0.5)
    assert found["drive: 1000 reads/s of 4096 bytes"] == pytest.approx(500 / 300)
    assert found["drive: to fill the link with 4096 bytes"] == 4
    line = dict(zip(prices.HEADINGS, report.settings["table"][-1], strict=True))
    # Four drives hold as much as 40 DIMMs.
    assert (line["gain"], line["their price"], line["as much memory"]) == (
        "20.0",
        "2,000",
        "40,000",
    )


def test_rate_that_was_reached_comes_before_the_model(tmp_path):
    path = stored(tmp_path, model="P5800X")

    reached = values(prices.run(path, measured(tmp_path, P5800X=1.0)))
    modelled = values(prices.run(path, measured(tmp_path)))

    assert reached["drive: 1000 reads/s of 4096 bytes"] == pytest.approx(0.5)
    assert modelled["drive: 1000 reads/s of 4096 bytes"] == pytest.approx(500 / 1500, rel=1e-3)


def test_drive_without_rates_has_its_price_alone(tmp_path):
    report = prices.run(stored(tmp_path), measured(tmp_path))

    assert [name for name in values(report) if name.startswith("drive")] == ["drive: a GB"]
    assert report.settings["table"][-1][4:] == [""] * 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": ""}, "'drive' has no 'source': a price needs its date and its source"),
        ({"date": None}, "'drive' has no 'date'"),
        ({"usd": -5}, "usd=-5"),
        ({"usd": "cheap"}, "usd='cheap'"),
        ({"reads_per_s": {"4096": 5}}, "rates without a 'rates_source'"),
        ({"model": "floppy"}, "no drive model 'floppy'"),
    ],
)
def test_bad_entries_are_refused(tmp_path, changes, message):
    with pytest.raises(ArgumentError, match=message):
        prices.run(stored(tmp_path, **changes), measured(tmp_path))


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(PathError, match="drives scaling --json FILE"):
        prices.run(measured=str(tmp_path / "missing.json"))
    text = tmp_path / "text.json"
    text.write_text("prices")
    with pytest.raises(ArgumentError, match="is no JSON"):
        prices.run(str(text), measured(tmp_path))
    text.write_text("[]")
    with pytest.raises(ArgumentError, match="holds a list"):
        prices.run(str(text), measured(tmp_path))
    text.write_text(json.dumps({"memory": MEMORY}))
    with pytest.raises(ArgumentError, match="names no drives"):
        prices.run(str(text), measured(tmp_path))
    text.write_text('{"rows": []}')
    with pytest.raises(ArgumentError, match="no 4 KiB reads that the link limits"):
        prices.run(measured=str(text))


def test_stored_and_shown_table_is_that_of_the_built_in_prices():
    table = prices.run(measured=MEASURED).settings["table"]

    assert json.loads((ROOT / "results" / "prices.json").read_text())["settings"]["table"] == table
    page = (ROOT / "docs" / "hardware.md").read_text()
    for line in table:
        assert f"| {' | '.join(line)} |".replace("|  ", "| ") in page
