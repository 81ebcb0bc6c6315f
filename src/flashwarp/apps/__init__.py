"""Refuses what moved from here, and names its place."""

raise ModuleNotFoundError(
    "flashwarp.apps is gone: flashwarp.apps.graphs is flashwarp.graphs; sorting and gemm are the "
    "examples sort_file.py and matmul_files.py, and gnn is a benchmark, in flashwarp's checkout",
    name=__name__,
)
