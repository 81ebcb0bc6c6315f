"""Checkpoints of torch.distributed.checkpoint: staged by copy engines, crash-safe, checked.

    import torch.distributed.checkpoint as dcp
    import flashwarp.dcp

    stager = flashwarp.dcp.Stager(host_memory="16 GiB")
    saved = dcp.async_save(
        state, storage_writer=flashwarp.dcp.Writer(path), async_stager=stager
    )

The files are torch's own: ``dcp.load`` reads them without flashwarp, on any number of ranks.
`Reader` and `verify` compare checksums.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"flashwarp.dcp needs torch, which cannot be imported ({_error}): install it with: "
        "pip install 'flashwarp[torch]'"
    ) from _error

from flashwarp.interop.torch.dcp.checksums import verify
from flashwarp.interop.torch.dcp.reader import Reader
from flashwarp.interop.torch.dcp.stager import Stager
from flashwarp.interop.torch.dcp.writer import Writer

__all__ = ["Reader", "Stager", "Writer", "verify"]
