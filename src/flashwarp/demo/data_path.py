"""How the demo's arrays travel, in one line."""

from __future__ import annotations

import flashwarp as fw

__all__ = ["data_path_of"]


def data_path_of(array: fw.Array) -> str:
    """Tell in one line how the bytes of `array` travel."""
    told = array.explain()
    engine = told.controller.get("engine", "none")
    return f"data path {told.path}: {told.reason}; engine: {engine}"
