"""`register`: vLLM calls it in each of its processes, because flashwarp has an entry point for it.

Without ``FLASHWARP_VLLM_TABLES`` it does nothing, and imports nothing. With it, n-gram tables of
models stay in the checkpoint that it names. A version of vLLM that is not listed here is refused,
because the classes that hold these tables are no public interface, and change between versions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os

from flashwarp.config import parse_bytes
from flashwarp.errors import ArgumentError

KNOWN_VERSIONS = ("0.33.0",)

_TABLES = "FLASHWARP_VLLM_TABLES"
_HOST, _GPU = "FLASHWARP_VLLM_HOST_MEMORY", "FLASHWARP_VLLM_GPU_MEMORY"
_RENAMED = {"FLASHWARP_VLLM_RAM": _HOST, "FLASHWARP_VLLM_GPU": _GPU}

_ABSTRACT = "vllm.models.qwen4_exp.common.ngram_embedding"
# Who makes the tables, by classes that it has imported under these names.
_MAKER = "vllm.models.qwen4_exp.nvidia.ngram_embedding"
# Who reads the files of a checkpoint.
_READERS = (
    "vllm.model_executor.model_loader.weight_utils",
    "vllm.model_executor.model_loader.default_loader",
)
_MADE = ("Qwen4ExpPLEPinnedHostEmbedding", "Qwen4ExpPLEDeviceEmbedding")


def register() -> None:
    """Let vLLM leave the n-gram tables of Qwen4Exp models in their checkpoint.

    Its loader does not read their rows, if it is the one that vLLM uses by default.

    Does nothing unless the environment has ``FLASHWARP_VLLM_TABLES``, the folder of the checkpoint.
    ``FLASHWARP_VLLM_HOST_MEMORY`` and ``FLASHWARP_VLLM_GPU_MEMORY`` limit the memory of each table,
    as `host_memory` and `gpu_memory` of `flashwarp.torch.offload`. May be called several times.

    Raises
    ------
    ArgumentError
        If vLLM is of a version that this adapter does not know: its tables would silently be
        resident, or read wrongly. If a limit is no size, or has the name of an earlier version.
    """
    files = os.environ.get(_TABLES)
    if not files:
        return
    version = importlib.metadata.version("vllm")
    if version not in KNOWN_VERSIONS:
        raise ArgumentError(
            f"{_TABLES} is set, and vLLM is of version {version}, whose tables flashwarp does not "
            f"know: install {' or '.join(KNOWN_VERSIONS)}, or unset it"
        )
    for old, new in _RENAMED.items():
        if old in os.environ:
            raise ArgumentError(f"{old}={os.environ[old]!r} is now {new}: rename it")
    limits = {
        name: parse_bytes(os.environ.get(variable, default), variable)
        for name, variable, default in (
            ("host_memory", _HOST, "2 GiB"),
            ("gpu_memory", _GPU, "1 GiB"),
        )
    }
    maker = importlib.import_module(_MAKER)
    if getattr(maker, "flashwarp_tables", None) == (files, limits):
        return
    tables = importlib.import_module("flashwarp.interop.vllm.table")
    abstract = importlib.import_module(_ABSTRACT)
    loading = importlib.import_module("flashwarp.interop.vllm.loading")
    readers = [importlib.import_module(name) for name in _READERS]
    left = loading.Left()
    made = tables.table_class(abstract.Qwen4ExpPLEEmbedding, files, **limits, left=left)
    loading.leave(left, *readers)
    for name in _MADE:
        getattr(maker, name)  # one that is missing must not be added in silence
        setattr(maker, name, made)
    vars(maker)["flashwarp_tables"] = (files, limits)
