"""Containers and sandboxes refuse system calls: everything works without them, or says which."""

from __future__ import annotations

import re

import pytest

from edges import nursery, seccomp
from support.samples import sample

pytestmark = pytest.mark.skipif(bool(seccomp.why_not()), reason=seccomp.why_not())

# Names of calls, and what has to be said of their absence by `explain` or by the doctor.
REFUSED = {
    "io_uring_setup": r"thread-pool: io_uring_setup refused: {error}",
    "io_uring_enter": r"thread-pool: io_uring_enter refused: {error}",
    "io_uring_register": "",
    "mincore": r"\d% of the file is in the page cache",
    "cachestat": r"\d% of the file is in the page cache",
    "mincore cachestat": r"is unknown \(mincore: .*",
    "cachestat preadv2 fadvise64": "",
    "io_uring_setup pwritev2": r"thread-pool: io_uring_setup refused: {error}",
    "fallocate": "",
    "statx": "",
    "memfd_create": "",
    "madvise mlock": "",
    "sched_getaffinity": "",
    "flock": "",
}

USE = """
from edges import seccomp
import errno

rows = np.arange(64 * 256, dtype="i4").reshape(256, 64)
np.save("rows.npy", rows)
seccomp.refuse({names!r}.split(), errno.{error})
for direct in (None, False, True):
    with fw.open("rows.npy", "r+", device="cpu", o_direct=direct, cache="16 KiB") as x:
        index = np.random.default_rng(1).integers(0, 256, 500)
        assert (x.gather(index) == rows[index]).all()
        x.scatter(index, rows[index] + 1)
        x.flush()
        rows[index] += 1
        x.drop_cache()
        assert (x[...] == rows).all()
        pending = x.scatter_async(slice(0, 4), -1), x.gather_async(slice(8, 12))
        rows[:4] = -1
        assert (pending[1].result() == rows[8:12]).all()
        if direct is None:
            print(x.explain())
    assert (np.load("rows.npy") == rows).all()
with fw.storage.File("rows.npy", writable=True) as file:
    file.write_zeroes(4096, 512)
    file.discard(8192, 512)
    assert file.read(4096, 512) == bytes(512)
"""

REFUSED_LATER = """
from edges import seccomp
import errno

rows = np.arange(64 * 256, dtype="i4").reshape(256, 64)
np.save("rows.npy", rows)
device = fw.device.CpuDevice(1)  # the filter is of this thread
x = fw.open("rows.npy", "r+", device=device, o_direct=True, cache="16 KiB")
index = np.random.default_rng(1).integers(0, 256, 500)
assert (x.gather(index) == rows[index]).all()
seccomp.refuse(["io_uring_enter"], errno.EPERM)
assert (x.gather(index[::-1]) == rows[index[::-1]]).all()
x.scatter(index, rows[index] + 1)
print(x.explain())
x.close()
rows[index] += 1
assert (np.load("rows.npy") == rows).all()
"""


SAMPLED_REFUSED = sample(list(REFUSED), 2)


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
@pytest.mark.parametrize("names", SAMPLED_REFUSED)
def test_arrays_work_without(run_program: nursery.Run, names: str, error: str) -> None:
    outcome = run_program(nursery.Program(names, USE.format(names=names, error=error)))

    assert (outcome.status, outcome.err) == (0, ""), outcome
    assert re.search(REFUSED[names].format(error=error), outcome.out), outcome


def test_a_ring_that_is_refused_while_it_is_used_hands_its_commands_on(
    run_program: nursery.Run,
) -> None:
    outcome = run_program(nursery.Program("later", REFUSED_LATER))

    assert (outcome.status, outcome.err) == (0, ""), outcome
    assert "then by blocking calls: io_uring_enter refused: EPERM" in outcome.out


def test_the_demo_runs_without_knowing_the_page_cache(run_program: nursery.Run) -> None:
    code = """
from pathlib import Path
from edges import seccomp
import errno
from demo import features
from demo.progress import Steps
seccomp.refuse(["mincore", "cachestat", "fadvise64"], errno.EPERM)
size = features.FeatureSize(4096, 1024, 2 << 20, (1, 256), 0.01, 256, 4)
result = features.run(Path("."), size, fw.device.CpuDevice(2), Steps(None))
assert "how much of it stayed is unknown" in result.cold_note, result.cold_note
"""
    outcome = run_program(nursery.Program("demo", code, 60))

    assert (outcome.status, outcome.err) == (0, ""), outcome


def test_the_doctor_says_what_is_refused(run_program: nursery.Run) -> None:
    code = """
from edges import seccomp
import errno, sys
seccomp.refuse(["mincore", "cachestat", "io_uring_enter"], errno.EPERM)
from flashwarp.cli.main import main
sys.argv = ["flashwarp", "doctor"]
main()
"""
    outcome = run_program(nursery.Program("doctor", code))

    assert outcome.status == 0, outcome
    assert "io_uring_enter refused: EPERM" in outcome.out
    assert "page cache view" in outcome.out
    assert "not possible" in outcome.out


def test_the_doctor_says_that_only_the_slower_way_to_ask_is_left(run_program: nursery.Run) -> None:
    code = """
from edges import seccomp
import errno, sys
seccomp.refuse(["cachestat"], errno.ENOSYS)
from flashwarp.cli.main import main
sys.argv = ["flashwarp", "doctor"]
main()
"""
    outcome = run_program(nursery.Program("doctor", code))

    assert outcome.status == 0, outcome
    text = " ".join(outcome.out.split())
    assert "by mincore, because cachestat failed: Function not implemented" in text, outcome
