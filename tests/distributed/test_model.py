"""Random programs beside numpy: FLASHWARP_SHARDED_PROGRAMS of them, from FLASHWARP_SHARDED_SEED on.

A failure names its program: run that one alone with the seed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from distributed import model

PROGRAMS = int(os.environ.get("FLASHWARP_SHARDED_PROGRAMS", "4"))
SEED = int(os.environ.get("FLASHWARP_SHARDED_SEED", "1"))


@pytest.mark.parametrize("seed", range(SEED, SEED + PROGRAMS))
def test_all_ranks_read_what_numpy_has(pool: Any, tmp_path: Path, seed: int) -> None:
    program = model.Program(seed)
    for segment, ranks in enumerate(program.ranks):
        if segment:
            before = program.ranks[segment - 1]
            most = ranks if program.shared else max(before, ranks)
            pool.run(most, model.deal, tmp_path, program.shared, ranks)
        pool.run(ranks, model.run, tmp_path, seed, segment)
