"""Modelled drives, made slower for machines with a few cores, which cannot keep up with one."""

from __future__ import annotations

from dataclasses import replace

import flashwarp as fw

__all__ = ["modelled"]


def modelled(drive: str, slower: float = 1, seed: int = 1) -> fw.SSDModel:
    """Return a built-in model, its read ceilings divided by `slower`."""
    model = fw.SSDModel.named(drive, seed=seed)
    if slower == 1:
        return model
    return replace(
        model,
        name=f"{model.name}, ceilings divided by {slower:g}",
        read_iops=tuple((size, per_s / slower) for size, per_s in model.read_iops),
        read_bytes_per_s=model.read_bytes_per_s / slower,
    )
