"""Benchmarks that run from the installed package; each prints its ceiling and its alternatives.

A benchmark is a module here with `run(...) -> Report`, and a line in `BENCHES`. `run` takes
`device` (text or None) and `folder` (a Path for its files) if it needs them. Its other parameters
have defaults and become options of `flashwarp bench NAME`, with the text in their `Annotated` as
help.
"""

from __future__ import annotations

__all__ = ["BENCHES", "DEFAULT"]

DEFAULT = "first_light"

BENCHES = {
    "asynchronous": "How many warps fill the link, waiting for each block or reading ahead.",
    "first_light": "Rows, elements and files against the ceilings of this machine.",
    "calls": "One small gather, future or launch, beside what it replaces.",
    "files": "Files that kernels read and write, against plain memory (GeminiFS figures 6 to 10).",
    "shared": "A cache that processes share: hits of one and of each of two, and the memory taken.",
    "latency": "One miss that a thread or a warp waits for, beside the least that it can cost.",
    "defaults": "Page cache or O_DIRECT: the default choice against both.",
    "hits": "Loads of resident elements against reference counts and plain memory.",
    "scaling": "Random blocks by raw queues over 1 to 16 modelled drives.",
    "bfs": "Breadth-first search on a graph larger than the cache (BaM figures 7 to 11).",
    "cc": "Connected components of a graph larger than the cache (BaM figures 7 to 11).",
    "spmv": "A sparse matrix times a vector, against plain memory (AGILE figure 11).",
    "vectoradd": "Adding two vectors larger than memory, against tiles (BaM section 5.4).",
    "ctc": "Computation against communication, waiting or reading ahead (AGILE section 4.2).",
    "tables": "Rows of a table larger than memory, in steps of a model, beside what is done today.",
    "pipelines": "Batches and tiles that arrive while the device computes (CAM figures 1 to 16).",
    "ngrams": "N-gram embeddings by code of transformers, resident and left in their files.",
    "tiers": "A host-memory tier under the cache, and one to eight modelled drives.",
    "dlrm": "A recommender whose tables exceed the cache (AGILE figures 7 to 10).",
    "checkpoints": "A history of states written, and restored by hints (Score figures 5 and 6).",
    "workers": "Workers of the engine of batches: dynamic and fixed counts (CAM figures 12, 13).",
    "load": "A checkpoint loaded cold and warm, beside other loaders and the ceilings.",
    "activations": "GPT-2 whose activations go to host memory and disk (GeminiFS figure 11b).",
    "prices": "What drives cost beside memory, for data and for reads (BaM table 2); a model.",
    "registers": "Registers per thread through arrays and on plain memory (AGILE figure 12).",
}
"""What each module of this folder measures, in a line."""
