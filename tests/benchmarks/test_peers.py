"""The benchmark of GPUs that share a cache, on GPUs of a driver without any."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

from benchmarks.peers import peers
from flashwarp.errors import ArgumentError
from support import fake_cuda, host_kernels
from support.fake_cuda import fake


def all_rows_are_right() -> None:
    fake().fake_devices(2, 1)
    host_kernels.gpu()
    report = peers.run(2, "4 MiB", "4 KiB,512", "256 KiB", 1 << 10)
    assert len(report.rows) == 22
    assert report.wrong == []


def one_gpu_is_refused() -> None:
    fake().fake_devices(1, 1)
    with pytest.raises(ArgumentError, match="needs two"):
        peers.run()


@pytest.mark.parametrize("program", [all_rows_are_right, one_gpu_is_refused])
def test_peers(program, tmp_path):
    fake_cuda.run(program, fake_cuda.build(tmp_path))
