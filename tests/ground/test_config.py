"""Sizes as people write them, and settings from the environment."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashwarp as fw
from flashwarp import config, device
from flashwarp.config import parse_bytes
from flashwarp.errors import ArgumentError, FlashwarpError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4 KiB", 4096),
        ("4k", 4096),
        ("1kb", 1000),
        (" 1.5 MiB ", 3 << 19),
        ("0.5b", 0),
        ("0.1 GiB", 107374182),
        # A float in between made it 9007199254740992.
        ("9007199254740993", (1 << 53) + 1),
        (7, 7),
    ],
)
def test_size_is_exact(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    # The last two overflowed a float, and a C++ integer.
    "text",
    ["", "KiB", "-1", "4 parsecs", "1e3", "1.", ".5", "0x10", -1, True, "9" * 400, 1 << 63],
)
def test_size_that_is_none(text: int | str) -> None:
    with pytest.raises(ArgumentError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Accepted once: waits that end at once, a NaN of memory.
        ("timeout_s", "-1"),
        ("timeout_s", "nan"),
        ("timeout_s", "inf"),
        ("in_place_budget", "nan"),
        ("async_calls", "0"),
        ("drain_blocks", "256"),
        ("look_ahead", "-1"),
        ("review_bytes", "much"),
    ],
)
def test_setting_that_cannot_work_names_its_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"FLASHWARP_{name.upper()}"
    monkeypatch.setenv(variable, value)

    with pytest.raises(ArgumentError, match=f"{variable}='{value}'"):
        config.current()


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "2.5")
    monkeypatch.setenv("FLASHWARP_LOOK_AHEAD", "32")

    held = config.current()

    assert (held.timeout_s, held.look_ahead) == (2.5, 32)
    assert held.async_calls == config.Config().async_calls


@pytest.mark.parametrize(
    "value", [bytes(1 << 22), "x" * (1 << 22), list(range(1 << 18)), {"x": "y" * 9999}]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda value: fw.open(value, device="cpu"),
        lambda value: fw.create(value, "f4", 3, device="cpu"),
        lambda value: fw.Checkpointer(value, "cpu", "1 MiB", "1 MiB"),
        lambda value: fw.open(__file__, value, device="cpu"),
        lambda value: fw.open(__file__, dtype=value, device="cpu"),
        lambda value: fw.open(__file__, dtype="u1", device="cpu", cache=value),
        lambda value: config.integer("rows", value),
        lambda value: config.number("scale", value, 0, 1),
        lambda value: config.flag("overwrite", value),
    ],
)
def test_large_value_is_not_printed(call: Callable[[Any], object], value: Any) -> None:
    """The contents of a file, given as its path, were printed: 160 MB of escapes for 40 MB."""
    with pytest.raises(FlashwarpError) as caught:
        call(value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("TIMEOUT", "TIMEOUT_S"), ("CACHEDIR", "CACHE_DIR"), ("DRAIN_BLOCK", "DRAIN_BLOCKS")],
)
def test_misspelt_setting_is_named(wrong: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FLASHWARP_{wrong}", "1")
    config.warn_of_misspelt.cache_clear()
    expected = f"_{wrong} is no setting.*mean FLASHWARP_{right}\\?"
    with pytest.warns(UserWarning, match=expected) as told:
        assert device.resolve("cpu") is device.resolve("cpu")
    assert len(told) == 1


def test_no_variable_of_this_tree_is_taken_for_a_misspelt_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path(__file__).parents[2]
    files = [*root.glob("tests/**/*.py"), *root.glob("benchmarks/**/*.py"), root / "Makefile"]
    files.remove(Path(__file__))
    text = "".join(file.read_text() for file in files)
    for name in set(re.findall(r"FLASHWARP_[A-Z0-9_]*[A-Z0-9]", text)):
        monkeypatch.setenv(name, "1")
    config.warn_of_misspelt.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.warn_of_misspelt()
