"""Stores and a sampler for PyG (torch_geometric), over arrays and graphs larger than memory.

import flashwarp as fw, flashwarp.pyg
from torch_geometric.loader import NodeLoader

features = fw.pyg.FeatureStore({"x": fw.open("x.npy"), "y": fw.open("y.npy")})
loader = NodeLoader(
(features, fw.pyg.GraphStore(graph)), fw.pyg.NeighborSampler(graph, (25, 10)),
input_nodes=train, batch_size=1024, shuffle=True,
)
"""

from __future__ import annotations

try:
    import torch_geometric as _torch_geometric  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"flashwarp.pyg needs torch_geometric, which cannot be imported ({_error}): install it "
        "with: pip install 'flashwarp[pyg]'"
    ) from _error

from flashwarp.interop.pyg.features import FeatureStore
from flashwarp.interop.pyg.graphs import GraphStore, NeighborSampler

__all__ = ["FeatureStore", "GraphStore", "NeighborSampler"]
