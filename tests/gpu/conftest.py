"""The GPU of a module's tests, with a context of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import flashwarp as fw


@pytest.fixture(scope="module")
def device() -> Iterator[fw.device.CudaDevice]:
    with fw.device.CudaDevice(0) as found:
        yield found
