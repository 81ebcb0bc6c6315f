"""Counters of arrays on a GPU, on the fake driver: they are read beside whatever runs."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp.cache.structs import CountersStruct
from support import fake_cuda
from support.cuda_arrays import open_array
from support.fake_cuda import LAUNCH_FAILED, fake


def check_counters_are_read_while_kernels_run() -> None:
    with open_array() as x:
        volume = x._attachment.launcher.volume
        x.device.upload(volume.events.address + CountersStruct.hits.offset, b"\7" + bytes(7))
        fake().fake_hold(x.device.own_stream())

        (found,) = fw.observing.counters()["sums"]

        assert (found["hits"], found["device"], found["open"]) == (7, "cuda:0", 1)
        fake().fake_hold(0)
    assert fw.observing.counters()["sums"][0]["open"] == 0


def check_a_lost_gpu_is_left_out() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        fake().fake_fault(LAUNCH_FAILED)
        assert fw.observing.counters()["sums"] == []
        with pytest.raises(fw.errors.DeviceError):
            x.wait()
        x.close()
        fake().fake_fault(0)


test_cuda = fake_cuda.test_of(globals())
