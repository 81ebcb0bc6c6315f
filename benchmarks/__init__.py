"""Benchmarks: what flashwarp reaches beside the ceilings of a machine, rivals and papers.

A benchmark is a folder here. Each part of it is a module with `run(...) -> Report`, and a line in
`BENCHES`; the part of the folder's own name is run where none is given. `run` takes `device` (text
or None) and `folder` (a Path for its files) if it needs them. Its other parameters have defaults
and become options of `python -m benchmarks NAME PART`, with the text in their `Annotated` as help.
"""

from __future__ import annotations

__all__ = ["BENCHES"]

BENCHES = {
    "arrays": {
        "arrays": "Rows, elements and files against the ceilings of this machine.",
        "defaults": "Page cache or O_DIRECT: the default choice against both.",
        "vectoradd": "Adding two vectors larger than memory, against tiles (BaM section 5.4).",
    },
    "kernels": {
        "hits": "Loads of resident elements against reference counts and plain memory.",
        "latency": "One miss that a thread or a warp waits for, beside the least it can cost.",
        "asynchronous": "How many warps fill the link, waiting for each block or reading ahead.",
        "ctc": "Computation against communication, waiting or reading ahead (AGILE section 4.2).",
        "registers": "Registers per thread through arrays and on plain memory (AGILE figure 12).",
    },
    "calls": {
        "calls": "One small gather, future or launch, beside what it replaces.",
        "neighbours": "What cold calls leave of a GPU to kernels of other streams.",
    },
    "first": {"first": "First calls of a process, restarts after a crash, and arrays at rest."},
    "files": {
        "files": "Files that kernels read and write, against plain memory (GeminiFS 6 to 10)."
    },
    "shared": {
        "shared": "A cache that processes share: hits of one and of each of two, and its memory."
    },
    "peers": {
        "peers": "One cache of several GPUs, beside plain loads over NVLink.",
        "ranks": "The same by a process for each GPU, beside WholeMemory.",
    },
    "sharded": {
        "sharded": "Rows dealt over processes, beside an all-to-all and sharding in torch alone."
    },
    "drives": {
        "scaling": "Random blocks by raw queues over 1 to 16 modelled drives.",
        "tiers": "A host-memory tier under the cache, and one to eight modelled drives.",
        "prices": "What drives cost beside memory, for data and reads (BaM table 2); a model.",
    },
    "graphs": {
        "bfs": "Breadth-first search on a graph larger than the cache (BaM figures 7 to 11).",
        "cc": "Connected components of a graph larger than the cache (BaM figures 7 to 11).",
        "spmv": "A sparse matrix times a vector, against plain memory (AGILE figure 11).",
    },
    "tables": {
        "tables": "Rows of a table larger than memory, in steps of a model, beside today's ways.",
        "ngrams": "N-gram embeddings by code of transformers, resident and left in their files.",
        "dlrm": "A recommender whose tables exceed the cache (AGILE figures 7 to 10).",
    },
    "pipelines": {
        "pipelines": "Batches and tiles that arrive while the device computes (CAM figures 1-16).",
        "workers": "Workers of the engine of batches: dynamic and fixed counts (CAM 12, 13).",
    },
    "checkpoints": {
        "checkpoints": "States written, and restored by hints (Score figures 5 and 6)."
    },
    "load": {"load": "A checkpoint loaded cold and warm, beside other loaders and the ceilings."},
    "activations": {
        "activations": "GPT-2 whose activations go to host memory and disk (GeminiFS figure 11b)."
    },
}
"""The parts of each benchmark, and what they measure, in a line."""
