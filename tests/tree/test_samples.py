"""Which part of a long list `make test` takes; see `samples`."""

from __future__ import annotations

import pytest

from support import samples


def test_a_sample_is_the_same_again_and_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "EVERYTHING", False)
    items = [f"case {i}" for i in range(100)]

    taken = samples.sample(items, 7)

    assert taken == samples.sample(items, 7) == sorted(taken, key=items.index)
    assert len(taken) == 15
    assert len(set(taken) & set(samples.sample(items[1:], 7))) >= 14
    assert len(samples.sample(items[:2], 12)) == 1


def test_everything_is_all_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "EVERYTHING", True)

    assert samples.sample("abc", 3) == ["a", "b", "c"]
