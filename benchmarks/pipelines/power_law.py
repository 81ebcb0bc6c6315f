"""Graphs whose degrees follow a power law, made on the device in seconds."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["power_law"]

_EXPONENT = 0.6
_AT_A_TIME = 1 << 26


def power_law(
    vertices: int, degree: int, seed: int, place: str = "cpu"
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Draw a graph as compressed sparse rows: offsets, and the neighbours of all vertices.

    A vertex of rank r has a number of neighbours, and a chance to be one, that falls with
    ``r ** -0.6``; ranks are random. Every vertex has a neighbour. The mean degree is about
    `degree`.
    """
    torch: Any = importlib.import_module("torch")
    made = torch.Generator(place).manual_seed(seed)
    ranked = torch.randperm(vertices, generator=made, device=place)  # a vertex for each rank
    share = torch.arange(1, vertices + 1, dtype=torch.float64, device=place) ** -_EXPONENT
    degrees = torch.empty(vertices, dtype=torch.int64, device=place)
    degrees[ranked] = (share * (degree * vertices / share.sum())).long().clamp(1, vertices)
    offsets = torch.zeros(vertices + 1, dtype=torch.int64, device=place)
    torch.cumsum(degrees, 0, out=offsets[1:])
    neighbours = np.empty(int(offsets[-1]), np.int32)
    for first in range(0, len(neighbours), _AT_A_TIME):
        count = min(_AT_A_TIME, len(neighbours) - first)
        # The inverse of the sum of all chances up to a rank: u^(1 / (1 - exponent)).
        drawn = torch.rand(count, generator=made, device=place, dtype=torch.float64)
        rank = (drawn ** (1 / (1 - _EXPONENT)) * vertices).long().clamp(max=vertices - 1)
        neighbours[first : first + count] = ranked[rank].int().cpu().numpy()
    return offsets.cpu().numpy(), neighbours
