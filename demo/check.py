"""The demo's word for "wrong": what was computed, where it differs, and by how much.

A check never passes by default: arrays are compared element by element, NaN equal to NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashwarp.errors import FlashwarpError

__all__ = ["CheckFailed", "check_equal"]


class CheckFailed(FlashwarpError, AssertionError):
    """A result of the demo differs from the reference; the message says where."""


def check_equal(what: str, got: Any, expected: Any) -> None:
    """Raise `CheckFailed` unless both have the same shape and the same value everywhere."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        raise CheckFailed(f"{what}: shape {got.shape}, expected {expected.shape}")
    floating = got.dtype.kind == "f" and expected.dtype.kind == "f"
    if np.array_equal(got, expected, equal_nan=floating):
        return
    different = got != expected
    if floating:
        different &= ~(np.isnan(got) & np.isnan(expected))
    at = tuple(int(i) for i in np.argwhere(different)[0])
    raise CheckFailed(
        f"{what}: {int(different.sum())} of {got.size} values differ; the first is at index "
        f"{list(at)}: got {got[at]!r}, expected {expected[at]!r}"
    )
