"""Replacement on a GPU: one module a policy, the same victims as the models, nothing broken."""

from __future__ import annotations

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.cache.cache import Cache
from flashwarp.device import CudaDevice
from flashwarp.policy import POLICIES, Policy
from policy.test_policies import (
    HOSTILE,
    LINE,
    NEWEST,
    TOUCH,
    array_of,
    lru_fill,
    lru_hit,
    lru_victim,
    use,
)
from support.policy_models import SetAssociative

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", POLICIES)
def test_one_row_at_a_time_hits_as_in_the_model(device: CudaDevice, policy: str) -> None:
    model = SetAssociative(policy, 3, 4)
    lines = np.random.default_rng(5).zipf(1.3, 200) % 40

    with Cache(12 * LINE, LINE, 4, policy, device) as cache, array_of(40, cache) as x:
        for line in lines.tolist():
            assert x.gather(np.array([line]))[0, 0] == line
        hits = x.stats.hits

    assert hits == sum(model.access(line) for line in lines.tolist())


def test_hostile_policy_is_refused_and_breaks_nothing(device: CudaDevice) -> None:
    with (
        Cache(15 * 4 * LINE, LINE, 4, Policy("hostile", HOSTILE), device) as cache,
        array_of(300, cache, writable=True) as x,
    ):
        use(x, 2)

        assert cache.refusals > 0


def test_policy_in_python_does_what_it_says(device: CudaDevice) -> None:
    lines = np.random.default_rng(6).zipf(1.3, 200) % 40
    ours = Policy.from_python(
        "python_lru", on_hit=lru_hit, on_fill=lru_fill, choose_victim=lru_victim
    )

    def hits(policy: str | Policy) -> int:
        with Cache(12 * LINE, LINE, 4, policy, device) as cache, array_of(40, cache) as x:
            for line in lines:
                x.gather(np.array([line]))
            return x.stats.hits

    assert hits(ours) == hits("lru")


def test_kernel_of_ones_own_has_its_policy(device: CudaDevice) -> None:
    newest = Policy("newest", NEWEST, keeps_words=False)
    touch = fw.compile(TOUCH, device, policy=newest)["touch"]
    out = device.empty_array((1,), np.int64)

    with (
        Cache(4 * LINE, LINE, 4, newest, device) as cache,
        array_of(10, cache, writable=True) as x,
    ):
        for line in (0, 1, 2, 3, 4, 0):
            touch(x, line * LINE // 8, out)
            x.wait()

            assert out.copy_to_host()[0] == line
        assert x.stats.misses == 5
    with (
        Cache(4 * LINE, LINE, 4, "sieve", device) as cache,
        array_of(10, cache, writable=True) as x,
        pytest.raises(fw.errors.ArgumentError, match="policy='sieve'"),
    ):
        touch(x, 0, out)
