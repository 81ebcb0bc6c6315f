"""A process that has imported what tests use, and forks itself for those that need one each.

That takes a tenth of what Python takes to start and to import the same.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

# The rest of flashwarp is imported at its first use. None of these loads CUDA's driver.
_IMPORTED = (
    "pytest",
    "flashwarp.array.opening",
    "flashwarp.checkpoint.checkpointer",
    "flashwarp.checkpoint.directory.writer",
    "flashwarp.observing.endpoint",
    "flashwarp.pipeline.pipeline",
    "flashwarp.sharing.listener",
    "support.cuda_arrays",
)


@functools.cache
def server() -> Any:
    """The context of multiprocessing whose processes are forked from it.

    They end without what the interpreter does at its end.
    """
    context = multiprocessing.get_context("forkserver")
    # It passes over in silence what it does not find.
    assert all(map(importlib.util.find_spec, _IMPORTED))
    context.set_forkserver_preload(list(_IMPORTED))
    # It takes no path from this process.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        forkserver.ensure_running()
    return context
