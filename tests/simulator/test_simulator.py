"""Device code under the simulator: schedules that must pass, and mistakes that must be found."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashwarp.errors import ArgumentError, CompileError
from simulator import exploration
from simulator.budget import SEEDS, new_seeds
from simulator.exploration import explore
from simulator.mutants import MUTANTS, Mutant
from simulator.simulate import build_program, mutated_text, simulate
from support.samples import EVERYTHING, sample

ALL_SEEDS = (0, 1 << 40)
# To compile them all takes minutes.
SAMPLED_MUTANTS = sample(list(MUTANTS), 24)
# A mutant is found within this much running on a slow machine: the rarest takes 35,000 schedules.
MUTANT_SECONDS = 240.0

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++"),
    pytest.mark.timeout(600 + SEEDS),
]


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    """Everything that the tests run, compiled two at a time."""
    build_program(None, width=1)
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [pool.submit(build_program, None, width=width) for width in (4, 32)]
        jobs += [
            pool.submit(
                build_program,
                None,
                width=mutant.width,
                mutant=mutant,
                policy=mutant.policy,
                scenario=mutant.scenario,
            )
            for mutant in map(MUTANTS.__getitem__, SAMPLED_MUTANTS)
        ]
        for job in jobs:
            job.result()


@pytest.mark.parametrize("mode", ["sc", "weak"])
@pytest.mark.parametrize("width", [1, 4, 32])
def test_every_promise_holds_in_every_schedule_of_the_budget(width: int, mode: str) -> None:
    result = simulate(width=width, mode=mode, seeds=new_seeds(width))

    assert result.failure == ""
    assert result.schedules > 0


# Each policy takes two programs of its own at each width. The one that obeys nothing shows most.
OTHERS = ["s3_fifo", "lru", "fifo", "sieve", "random"]
POLICIES = ["hostile", *(OTHERS if EVERYTHING else ())]
POLICY_WIDTHS = [4, *([1] if EVERYTHING else ())]


# What the policy has to do with: lines that come and go, and write-backs that fail.
@pytest.mark.parametrize("scenario", ["elements", "evict", "rows", "faults"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("width", POLICY_WIDTHS)
def test_every_promise_holds_under_every_policy(width: int, policy: str, scenario: str) -> None:
    result = simulate(scenario=scenario, policy=policy, width=width, seeds=new_seeds(width, 16))

    assert result.failure == ""
    assert result.schedules > 0


@pytest.mark.parametrize("scenario", ["pair", "ring"])
def test_no_schedule_with_one_preemption_is_left(scenario: str) -> None:
    result = simulate(
        scenario=scenario, mode="sc", strategy="exhaustive", preemptions=1, seeds=(0, 1)
    )

    assert result.failure == ""
    assert result.exhausted
    assert result.schedules > 500


# A prefetch that got no slot in time had killed the queue pair and told nobody: about one schedule
# in 100,000, of runs that nothing else failed. `prefetch_lost` finds it at once.
@pytest.mark.parametrize(
    ("scenario", "mode", "strategy", "seed"),
    [
        ("async_faults", "weak", "priority", 770_007_434),
        ("async_faults", "weak", "random", 780_033_166),
        ("stripe_faults", "sc", "priority", 810_005_783),
    ],
)
def test_seed_that_failed_before(scenario: str, mode: str, strategy: str, seed: int) -> None:
    result = simulate(scenario=scenario, mode=mode, strategy=strategy, seeds=(seed, seed + 1))

    assert result.failure == ""
    assert result.schedules == 1


# A wait for a line of replicas had run out, which marks the volume and no queue pair; the machine
# was checked as if the flush had waited all the same.
def test_seed_that_was_checked_as_if_nothing_had_run_out() -> None:
    seed = 20_261_122_000_032_229
    result = simulate(
        scenario="replicate_faults", width=32, mode="sc", strategy="random", seeds=(seed, seed + 1)
    )

    assert result.failure == ""


# The controller ends by blocking calls what the engine has moved in part, or has given back.
@pytest.mark.parametrize("scenario", ["faults", "files"])
def test_transfers_that_end_early_fail_no_access(scenario: str) -> None:
    result = simulate(scenario=scenario, faults="torn=100,wait=60", seeds=(0, 500))

    assert result.failure == ""
    assert result.schedules == 500


# Some of the mistakes were ours, before the simulator found them.
@pytest.mark.parametrize("name", SAMPLED_MUTANTS)
def test_mistake_is_found(name: str) -> None:
    mutant = MUTANTS[name]

    result = simulate(
        scenario=mutant.scenario,
        mode=mutant.mode,
        width=mutant.width,
        strategy=mutant.strategy,
        policy=mutant.policy,
        mutant=name,
        seeds=ALL_SEEDS,
        seconds=MUTANT_SECONDS,
    )

    assert not result.ok, f"{result.schedules} schedules do not show that {mutant.why}"


def test_exploration_runs_all_widths_from_a_seed_on() -> None:
    found = explore(200, jobs=2, first_seed=7)

    assert found.failures == []
    assert all(found.schedules[width] > 0 for width in (1, 4, 32))
    assert sum(found.schedules.values()) >= 200
    assert found.seeds[1][0] == 7


def test_exploration_goes_on_behind_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = build_program
    mutant = MUTANTS["failure-uncounted"]
    monkeypatch.setattr(
        exploration,
        "build_program",
        lambda *_, width: real(None, width=1, mutant=mutant, scenario=mutant.scenario),
    )

    found = explore(2000, jobs=2, first_seed=5)

    assert len(found.failures) > 1
    assert all("--scenario records" in report for report in found.failures)


def test_exploration_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at least one"):
        explore(0)


def test_every_mistake_can_be_made() -> None:
    for mutant in MUTANTS.values():
        assert mutated_text(mutant)


def test_mutant_whose_passage_has_changed_is_an_error() -> None:
    stale = Mutant("stale", "flashwarp/array.cuh", "no such passage", "", "", "elements")

    with pytest.raises(ArgumentError, match="occurs 0 times"):
        mutated_text(stale)


@pytest.mark.parametrize("mode", ["sc", "weak"])
def test_seed_gives_the_same_schedule_again(mode: str) -> None:
    def run(first: int) -> str:
        return simulate(width=4, mode=mode, seeds=(first, first + 8)).schedule_hash

    assert run(0) == run(0)
    assert run(0) != run(1000)


# A seed must say all: what went before it in the same process must not matter.
@pytest.mark.parametrize("strategy", ["random", "priority", "round-robin", "rival"])
def test_replay_command_repeats_the_failure(strategy: str) -> None:
    found = simulate(
        scenario="queue",
        mode="sc",
        strategy=strategy,
        mutant="entry-after-mark",
        seeds=(0, 100_000),
    )
    options = dict(re.findall(r"--(\w+) (\S+)", found.replay))
    first, last = options["seeds"].split(":")

    again = simulate(
        scenario=options["scenario"],
        width=int(options["width"]),
        mode=options["mode"],
        strategy=options["strategy"],
        mutant=options["mutant"],
        seeds=(int(first), int(last)),
    )

    assert not found.ok
    assert again.failure.splitlines()[:3] == found.failure.splitlines()[:3]


OWN_SCENARIO = """
#include "simulator/machine.h"
using namespace fw::simulator;

template <typename Add>
void count(Run& run, Add add) {
  Machine machine(run, Shape());
  auto* counter = machine.allocate<uint32_t>(1, "counter", Sharing::kAtomic);
  machine.launch([&](Thread&) { add(counter); });
  if (*counter != machine.shape().warps * kWidth) throw Failure("a count is lost\\n");
}

FW_SCENARIO(total, "every thread adds one to a counter") {
  count(run, [](uint32_t* counter) { fw::atomic::add_relaxed(counter, 1u); });
}

FW_SCENARIO(race, "the same, by a load and a store") {
  count(run, [](uint32_t* counter) {
    fw::atomic::store_relaxed(counter, fw::atomic::load_relaxed(counter) + 1);
  });
}
"""


def test_own_source_runs_under_the_scheduler_and_its_race_is_found(tmp_path: Path) -> None:
    source = tmp_path / "total.cpp"
    source.write_text(OWN_SCENARIO, encoding="utf-8")

    assert simulate(source, scenario="total", seeds=(0, 200)).ok
    result = simulate(source, scenario="race", seeds=(0, 200))

    assert "a count is lost" in result.failure
    assert f"--source {source}" in result.replay


def test_own_source_that_does_not_compile_says_why(tmp_path: Path) -> None:
    source = tmp_path / "total.cpp"
    source.write_text("no_such_thing x;", encoding="utf-8")

    with pytest.raises(CompileError, match="no_such_thing"):
        simulate(source)


OWN_POLICY = """
struct own_policy {
  static void on_hit(const fw::cache::geometry&, uint64_t, uint64_t) {}
  static void on_fill(fw::cache::set_view& lines, uint32_t way) { lines.hand = way; }
  // The way that was filled last may be pinned.
  static uint32_t choose_victim(fw::cache::set_view& lines) { return lines.hand; }
};
"""


def test_policy_of_a_user_runs_under_the_scheduler(tmp_path: Path) -> None:
    header = tmp_path / "own.h"
    header.write_text(OWN_POLICY, encoding="utf-8")

    found = simulate(scenario="evict", policy=f"{header}:own_policy", seeds=(0, 20))

    assert "a policy asked for a line or a way that it may not have" in found.failure
    assert f"--policy {header}:own_policy" in found.replay

    with pytest.raises(ArgumentError, match="does not exist"):
        simulate(policy=f"{tmp_path}/absent.h:own_policy")


def command_line(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).parent
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_command_line_runs_outside_the_checkout(tmp_path: Path) -> None:
    passed = command_line("--scenario", "ring", "--seeds", "0:20", folder=tmp_path)
    listed = command_line("--list", folder=tmp_path)
    refused = command_line("--width", "2", folder=tmp_path)

    assert (passed.returncode, passed.stderr) == (0, "")
    assert passed.stdout.startswith("width 1: 20 schedules, ")
    assert "ring" in listed.stdout
    assert all(f"mutant {name}: " in listed.stdout for name in MUTANTS)
    assert (refused.returncode, refused.stderr) == (1, "error: width 2: choose from 1, 4, 32\n")


def test_wrong_option_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match="choose from 1, 4, 32"):
        simulate(width=2)
    with pytest.raises(ArgumentError, match="no such scenario"):
        simulate(scenario="absent")
    with pytest.raises(ArgumentError, match="not a fault"):
        simulate(faults="gremlins=3")
