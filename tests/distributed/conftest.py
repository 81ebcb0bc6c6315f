"""One set of ranks for the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("torch", reason="torch is not installed")
    from distributed.pool import Pool

    made = Pool(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()
