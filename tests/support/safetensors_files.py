"""Safetensors files of torch's tensors, as the library of the format writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8", torch.uint8: "U8", torch.int64: "I64",
}  # fmt: skip


def save(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    spelled: Mapping[str, tuple[str, list[int]]] | None = None,
    shift: int = 0,
) -> Path:
    """Write a file, whose data begins `shift` bytes behind a multiple of 16.

    `spelled` has dtypes and shapes that torch has not.
    """
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        held = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        own = _NAMES[tensor.dtype], list(tensor.shape)
        dtype, shape = (spelled or {}).get(name, own)
        places = [len(data), len(data) + len(held)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": places}
        data += held
    text = json.dumps(header).encode()
    text += b" " * ((shift - 8 - len(text)) % 16)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path
