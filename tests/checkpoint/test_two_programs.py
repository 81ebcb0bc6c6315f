"""A program writes a history while another one reads it, with hints for what is still to come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from flashwarp.checkpoint.checkpointer import Checkpointer

VERSIONS = 40
COUNT = 4096

CONSUMER = """
import sys, time
import numpy as np
import flashwarp as fw
from flashwarp.errors import MissingVersionError

path, versions, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
state = np.zeros(count)
limit = time.monotonic() + 60
with fw.Checkpointer(path, "cpu", "64 KiB", "256 KiB", config={"read_only": True}) as history:
    history.protect("state", state)
    for version in range(versions):
        history.prefetch_enqueue(version)
    history.prefetch_start()
    print("ready", flush=True)
    for version in range(versions):
        while True:
            try:
                history.restart(version)
                break
            except MissingVersionError:  # it is not durable yet
                assert time.monotonic() < limit, f"version {version} has not come"
                time.sleep(0.005)
        assert (state == version + 1).all(), version
    card = history.stats.hints
assert card.honoured == versions and card.wrong == 0, card
print("read", versions, flush=True)
"""


def test_another_process_reads_a_history_while_it_grows(tmp_path: Path) -> None:
    state = np.zeros(COUNT)
    with Checkpointer(tmp_path, "cpu", "64 KiB", "256 KiB") as history:
        history.protect("state", state)
        with subprocess.Popen(
            [sys.executable, "-c", CONSUMER, str(tmp_path), str(VERSIONS), str(COUNT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as consumer:
            assert consumer.stdout is not None
            first = consumer.stdout.readline()
            for version in range(VERSIONS):
                state[:] = version + 1
                history.checkpoint(version)
            rest, problems = consumer.communicate(timeout=90)

    assert first == "ready\n", problems
    assert rest == f"read {VERSIONS}\n", problems
    assert consumer.returncode == 0
