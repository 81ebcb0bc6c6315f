"""How training of tables ends: a clean close leaves a true record, and nothing else does."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch as fwt
from flashwarp import errors
from flashwarp.array.attachment import Attachment
from flashwarp.table.record import Record, record_path
from interop.test_training import ROWS, reopened, table, train


def step_of(optimizer):
    return next(iter(optimizer.state.values()))["step"]


def whole(folder, steps):
    """Return the rows after a training that never stopped."""
    with table(folder / "whole.npy", 4, "adam") as module:
        train(module, fwt.AdamW(module, lr=0.01), range(steps))
        return module.array[...]


def end_with_the_array(path):
    with fw.open(path, mode="r+", device="cpu", cache="8 KiB", line=512) as x:
        module = fwt.Embedding(x, dim=4)
        train(module, fwt.AdamW(module, lr=0.01), range(5))


def end_with_the_module(path):
    with reopened(path, 4) as module:
        train(module, fwt.AdamW(module, lr=0.01), range(5))


def end_after_the_optimizer_was_lost(path):
    module = reopened(path, 4)
    optimizer = fwt.AdamW(module, lr=0.01)
    train(module, optimizer, range(5))
    del optimizer
    gc.collect()
    module.close()


def end_by_an_exception(path):
    def stop():
        with reopened(path, 4) as module:
            train(module, fwt.AdamW(module, lr=0.01), range(5))
            raise KeyError

    with pytest.raises(KeyError):
        stop()


def end_of_the_program(path):
    program = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from interop import test_training as t
        module = t.reopened(sys.argv[2], 4)
        optimizer = t.AdamW(module, lr=0.01)
        t.train(module, optimizer, range(5))
    """
    tests = str(Path(__file__).parents[1])
    program = [sys.executable, "-c", textwrap.dedent(program), tests, str(path)]
    subprocess.run(program, check=True, timeout=120)


def end_with_the_array_lost(path):
    def lose():
        module = reopened(path, 4)
        train(module, fwt.AdamW(module, lr=0.01), range(5))
        del module
        gc.collect()

    with pytest.warns(ResourceWarning, match="was not closed"):
        lose()


@pytest.mark.parametrize(
    "end",
    [
        end_with_the_array,
        end_with_the_module,
        end_after_the_optimizer_was_lost,
        end_by_an_exception,
        end_of_the_program,
        end_with_the_array_lost,
    ],
)
def test_training_goes_on_after_a_clean_end(tmp_path, end):
    """Without a call of checkpoint, the table passed for one whose process was killed."""
    path = tmp_path / "t.npy"
    fwt.create_table(path, ROWS, 4, optimizer="adam")

    end(path)

    assert Record.read(path) == Record("adam", ROWS, 4, 12, 5, changing=False)
    with reopened(path, 4) as module:
        optimizer = fwt.AdamW(module, lr=0.01)
        assert step_of(optimizer) == 5
        train(module, optimizer, range(5, 8))
        np.testing.assert_array_equal(module.array[...], whole(tmp_path, 8))


def test_the_next_optimizer_of_an_open_table_goes_on(tmp_path):
    with table(tmp_path / "t.npy", 4, "adam") as module:
        train(module, fwt.AdamW(module, lr=0.01), range(5))
        optimizer = fwt.AdamW(module, lr=0.01)
        assert step_of(optimizer) == 5
        train(module, optimizer, range(5, 8))
        np.testing.assert_array_equal(module.array[...], whole(tmp_path, 8))
    assert Record.read(tmp_path / "t.npy").step == 8


def test_a_killed_table_says_at_which_step_it_goes_on(tmp_path):
    """What is copied here is what a process leaves that is killed now."""
    path, killed = tmp_path / "t.npy", tmp_path / "killed.npy"
    with table(path, 4, "adam") as module:
        optimizer = fwt.AdamW(module)
        train(module, optimizer, range(3))
        optimizer.checkpoint()
        train(module, optimizer, range(3, 4))
        shutil.copy(path, killed)
        shutil.copy(record_path(path), record_path(killed))

    with reopened(killed, 4) as module:
        match = r"was killed, or was closed after .* that failed.*after step 3, .*restore_table"
        with pytest.raises(errors.CheckpointError, match=match) as refused:
            fwt.AdamW(module)
        assert refused.value.step == 3
        with pytest.warns(
            UserWarning, match="goes on from step 3.*may be of later steps"
        ) as caught:
            optimizer = fwt.AdamW(module, accept_newer=True)
        assert caught[0].filename == __file__
        assert step_of(optimizer) == 3
    assert Record.read(killed).changing  # no step has followed


def test_a_step_that_failed_leaves_the_mark_on_all_its_tables(tmp_path):
    """Steps after it do not take the mark away; a checkpoint does."""
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    with table(paths[0], 4, "adam") as first, table(paths[1], 4, "adam") as second:
        optimizer = fwt.Adam([first, second])
        first.pending.append((torch.tensor([1]), torch.ones(1, 4)))
        second.pending.append((torch.tensor([ROWS]), torch.ones(1, 4)))
        with pytest.raises(errors.BoundsError):
            optimizer.step()
        train(first, optimizer, range(1))
    assert all(Record.read(path).changing for path in paths)

    with reopened(paths[0], 4) as module:
        with pytest.warns(UserWarning, match="step 0"):
            optimizer = fwt.Adam(module, accept_newer=True)
        module.pending.append((torch.tensor([ROWS]), torch.ones(1, 4)))
        with pytest.raises(errors.BoundsError):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.checkpoint()
        train(module, optimizer, range(2))
    assert Record.read(paths[0]) == Record("adam", ROWS, 4, 12, 3, changing=False)


def test_a_close_beside_a_step_waits_for_nothing_and_leaves_the_mark(tmp_path):
    module = table(tmp_path / "t.npy", 4)
    optimizer = fwt.SGD(module)
    train(module, optimizer, range(1))
    (trained,) = optimizer._tables.values()
    held, closed = threading.Event(), threading.Event()

    def step():
        with trained.progress.lock:
            held.set()
            closed.wait(60)

    thread = threading.Thread(target=step)
    thread.start()
    held.wait(60)
    module.close()
    closed.set()
    thread.join()
    assert Record.read(tmp_path / "t.npy").changing


def test_a_close_that_cannot_flush_leaves_the_mark(tmp_path, monkeypatch):
    module = table(tmp_path / "t.npy", 4)
    train(module, fwt.SGD(module), range(1))

    def fail(self):
        raise errors.StorageError(5, "the drive is gone")

    monkeypatch.setattr(Attachment, "flush", fail)
    with pytest.raises(errors.StorageError, match="the drive is gone"):
        module.close()
    assert Record.read(tmp_path / "t.npy").changing
