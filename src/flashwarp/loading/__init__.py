"""Whole files into tensors: `load` reads safetensors checkpoints and .npy files in parallel.

`contents` finds what lies where, `places` makes the tensors or takes the caller's, and `moving`
brings the bytes from one to the other.
"""

from flashwarp.loading.load import load

__all__ = ["load"]
