"""Misuse of every public object in every order; see `misuse`."""

from __future__ import annotations

import pytest

from edges import budget, misuse


@pytest.mark.timeout(600 + budget.MISUSE_SEQUENCES)
def test_misuse_ends_in_a_right_result_or_a_typed_error() -> None:
    first = budget.SEED * 1_000_000

    ran, failures = misuse.run(first, budget.MISUSE_SEQUENCES, failures_max=3)

    assert not failures, "\n\n".join(map(str, failures))
    assert ran == budget.MISUSE_SEQUENCES
