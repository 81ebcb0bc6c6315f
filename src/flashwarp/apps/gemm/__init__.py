"""Products of matrices that exceed the memory of a GPU."""

from flashwarp.apps.gemm.gemm import multiply

__all__ = ["multiply"]
