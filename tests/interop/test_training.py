"""Training of tables by torch: the optimizers, their checkpoints, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch
from flashwarp import errors
from flashwarp.table.record import Record
from flashwarp.torch import SGD, Adagrad, Adam, AdamW, RowWiseAdagrad

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

ROWS = 400
OPTIMIZERS = {
    "sgd": (SGD, torch.optim.SGD),
    "adagrad": (Adagrad, torch.optim.Adagrad),
    "adam": (Adam, torch.optim.SparseAdam),
}


def table(path, dim, optimizer="sgd", **options):
    """Make a table and open it, 400 rows behind a cache of 8 KiB."""
    fw.torch.create_table(path, ROWS, dim, optimizer=optimizer, **options)
    return reopened(path, dim)


def reopened(path, dim):
    return fw.torch.Embedding(path, mode="r+", device="cpu", cache="8 KiB", line=512, dim=dim)


def weights(module):
    return module.array[...][:, : module.embedding_dim]


def train(module, optimizer, steps, seed=0):
    """Steps on a loss of random rows, each step the same for the same number."""
    for step in range(steps.start, steps.stop):
        ids = torch.from_numpy(np.random.default_rng([seed, step]).integers(0, ROWS, (8, 20)))
        optimizer.zero_grad()
        rows = module(ids)
        slope = torch.linspace(-1, 1, rows.shape[-1])
        ((rows - slope) ** 2).mean().backward()
        optimizer.step()


def test_modules_of_a_model_freeze_its_tables(tmp_path):
    with table(tmp_path / "t.npy", 5) as frozen:
        model = torch.nn.Sequential(frozen, torch.nn.Linear(5, 1))

        for each in model.modules():
            each.requires_grad_(False)

        assert not model(torch.tensor([1, 2])).requires_grad


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", [5, 32, 100])
def test_training_equals_torch(tmp_path, name, dim):
    """With repeated rows, a padding row, two lookups a step, and a schedule."""
    ours, theirs = OPTIMIZERS[name]
    fw.torch.create_table(tmp_path / "t.npy", ROWS, dim, optimizer=name)
    module = fw.torch.Embedding(
        tmp_path / "t.npy", mode="r+", device="cpu", cache="8 KiB", line=512, dim=dim, padding_idx=3
    )
    reference = torch.nn.Embedding(ROWS, dim, sparse=True, padding_idx=3)
    with torch.no_grad():
        reference.weight.copy_(torch.from_numpy(weights(module)))
    pairs = []
    for each, made in ((module, ours(module, lr=0.1)), (reference, None)):
        optimizer = made or theirs(each.parameters(), lr=0.1)
        pairs.append((each, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)))
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        ids = torch.randint(0, ROWS, (7, 30), generator=generator)
        ids[0], ids[1] = 3, 9
        for each, optimizer, schedule in pairs:
            optimizer.zero_grad()
            loss = (each(ids) * torch.arange(1, dim + 1)).pow(2).mean() + each(ids[2]).sum()
            loss.backward()
            optimizer.step()
            schedule.step()

    assert module.array.stats.evictions > 0
    np.testing.assert_allclose(
        weights(module), reference.weight.detach().numpy(), rtol=1e-5, atol=2e-5
    )
    module.close()


@pytest.mark.parametrize("rate", [float, torch.tensor])
@pytest.mark.parametrize(
    ("ours", "theirs", "name", "options"),
    [  # eps comes before the correction of bias here, and behind it in torch's AdamW
        (SGD, torch.optim.SGD, "sgd", {}),
        (AdamW, torch.optim.AdamW, "adam", {"eps": 1e-12}),
    ],
)
def test_weight_decay_equals_torch(tmp_path, ours, theirs, name, options, rate):
    """Steps that use all rows, as torch decays all; then one that leaves the other rows alone."""
    module = table(tmp_path / "t.npy", 12, name)
    reference = torch.nn.Embedding(ROWS, 12)
    with torch.no_grad():
        reference.weight.copy_(torch.from_numpy(weights(module)))
    ids = torch.randperm(2 * ROWS, generator=torch.Generator().manual_seed(0)) % ROWS
    pairs = [
        (module, ours(module, lr=rate(0.05), weight_decay=0.3, **options)),
        (reference, theirs(reference.parameters(), lr=rate(0.05), weight_decay=0.3, **options)),
    ]
    for _ in range(6):
        for each, optimizer in pairs:
            optimizer.zero_grad()
            (each(ids) * torch.arange(1, 13)).pow(2).mean().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9

    before = weights(module)
    np.testing.assert_allclose(before, reference.weight.detach(), rtol=1e-5, atol=2e-5)
    pairs[0][1].zero_grad()
    module(ids[:1]).sum().backward()
    pairs[0][1].step()
    changed = (weights(module) != before).any(1)
    assert changed.nonzero()[0].tolist() == [int(ids[0])]
    with pytest.raises(errors.ArgumentError, match="weight_decay"):
        ours(module, weight_decay=-1)
    module.close()


def test_row_wise_adagrad_equals_its_rule(tmp_path):
    module = table(tmp_path / "t.npy", 6, "rowwise_adagrad", state=0.5)
    expected = module.array[...].astype("f8")
    optimizer = RowWiseAdagrad(module, lr=0.3)
    for step in range(5):
        ids = torch.tensor([1, 4, 1, step])
        gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        module.pending.append((ids, gradient))
        optimizer.step()
        optimizer.zero_grad()
        for row in sorted({*ids.tolist()}):
            sum_ = gradient[ids == row].double().sum(0).numpy()
            expected[row, 6] += (sum_**2).mean()
            expected[row, :6] -= 0.3 * sum_ / (np.sqrt(expected[row, 6]) + 1e-8)

    np.testing.assert_allclose(module.array[...], expected, rtol=1e-5, atol=1e-6)
    module.close()


def test_gradients_stay_until_zero_grad(tmp_path):
    """As in torch: a second step without `zero_grad` uses the same gradients again."""
    module = table(tmp_path / "t.npy", 4, init="zeros")
    optimizer = SGD(module, lr=1.0)
    module(torch.tensor([7])).sum().backward()
    optimizer.step()
    module(torch.tensor([7])).sum().backward()
    optimizer.step()
    assert weights(module)[7].tolist() == [-3.0] * 4
    optimizer.zero_grad()
    optimizer.step()

    assert weights(module)[7].tolist() == [-3.0] * 4
    module.close()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_buffer_of_ids_may_be_used_again_before_the_step(tmp_path, dtype):
    with table(tmp_path / "t.npy", 4, init="zeros") as module:
        optimizer = SGD(module, lr=1.0)
        ids = torch.empty(2, dtype=dtype)
        for batch in ((3, 5), (5, 7)):
            ids.copy_(torch.tensor(batch))
            module(ids).sum().backward()
        optimizer.step()

        assert weights(module)[[3, 5, 7, 0], 0].tolist() == [-1, -2, -1, 0]


def test_groups_have_their_own_rates_and_models_are_searched(tmp_path):
    first, second = (table(tmp_path / f"{n}.npy", 4, init="zeros") for n in "ab")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), second)
    optimizer = SGD([first, {"tables": model, "lr": torch.tensor(0.5)}], lr=2.0)
    (first(torch.tensor([1])).sum() + second(torch.tensor([1])).sum()).backward()

    assert optimizer.step(lambda: 5.0) == 5.0
    assert weights(first)[1, 0] == -2.0
    assert weights(second)[1, 0] == -0.5
    first.close()
    second.close()


def test_half_precision_gradients_are_added_up_as_float32(tmp_path):
    module = table(tmp_path / "t.npy", 4, init="zeros")
    module.pending.append((torch.full((4096,), 2), torch.ones(4096, 4, dtype=torch.float16)))
    SGD(module, lr=1.0).step()
    assert weights(module)[2, 0] == -4096
    module.close()


def test_an_empty_batch_is_a_step(tmp_path):
    module = table(tmp_path / "t.npy", 4, "adam")
    optimizer = Adam(module)
    before = weights(module)
    module.pending.append((torch.empty(0, dtype=torch.int64), torch.empty(0, 4)))
    optimizer.step()
    assert next(iter(optimizer.state.values()))["step"] == 1
    np.testing.assert_array_equal(weights(module), before)
    module.close()


# What is refused.


def test_read_only_tables_are_refused(tmp_path):
    fw.torch.create_table(tmp_path / "t.npy", ROWS, 4, optimizer="sgd")
    module = fw.torch.Embedding(tmp_path / "t.npy", device="cpu", dim=4)
    with pytest.raises(errors.ReadOnlyError, match="r\\+"):
        SGD(module)
    module.close()


def test_tables_with_scales_are_refused(tmp_path):
    fw.torch.create_table(tmp_path / "t.npy", ROWS, 4, optimizer="sgd")
    scales = torch.ones(ROWS)
    with (
        fw.torch.Embedding(tmp_path / "t.npy", scales=scales, mode="r+", device="cpu") as module,
        pytest.raises(errors.ArgumentError, match="scales"),
    ):
        SGD(module)


def test_bags_are_trained(tmp_path):
    fw.torch.create_table(tmp_path / "t.npy", ROWS, 8, optimizer="adagrad")
    with fw.open(tmp_path / "t.npy", "r+", device="cpu", cache="16 KiB") as array:
        module = fw.torch.EmbeddingBag(array, mode="sum", dim=8)
        reference = torch.nn.EmbeddingBag(ROWS, 8, mode="sum", sparse=True)
        with torch.no_grad():
            reference.weight.copy_(torch.from_numpy(weights(module)))
        ids, offsets = torch.arange(60) % 25, torch.tensor([0, 4, 4, 31])
        for each, optimizer in (
            (module, Adagrad(module)),
            (reference, torch.optim.Adagrad(reference.parameters())),
        ):
            for _ in range(3):
                optimizer.zero_grad()
                each(ids, offsets).pow(2).sum().backward()
                optimizer.step()

        np.testing.assert_allclose(
            weights(module), reference.weight.detach().numpy(), rtol=1e-5, atol=1e-6
        )


def test_a_second_trainer_is_refused(tmp_path):
    module = table(tmp_path / "t.npy", 4)
    with pytest.raises(errors.LockedError):
        reopened(tmp_path / "t.npy", 4)
    script = """
        import sys
        import flashwarp.torch
        from flashwarp.errors import LockedError
        try:
            flashwarp.torch.Embedding(sys.argv[1], mode="r+", device="cpu")
        except LockedError:
            print("refused")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "t.npy"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "refused"
    module.close()


def test_other_optimizers_and_dimensions_are_refused(tmp_path):
    module = table(tmp_path / "t.npy", 4, "adam")
    for other in (SGD, Adagrad, RowWiseAdagrad):
        with pytest.raises(errors.CheckpointError, match="state of 'adam'"):
            other(module)
    module.close()
    module = reopened(tmp_path / "t.npy", 3)
    with pytest.raises(errors.CheckpointError, match="4 of them weights; the module has 400 of 12"):
        Adam(module)
    module.close()


def test_weights_of_a_table_with_state_are_told_from_it(tmp_path):
    fw.torch.create_table(tmp_path / "t.npy", ROWS, 6, optimizer="adamw")

    with pytest.raises(errors.ArgumentError, match=r"6 weights.*give dim=6, or dim=20 to read"):
        fw.torch.Embedding(tmp_path / "t.npy", mode="r+", device="cpu")

    with reopened(tmp_path / "t.npy", 6) as module:
        assert AdamW(module).state_dict()
    with reopened(tmp_path / "t.npy", 20) as module:
        assert module.embedding_dim == 20
    fw.torch.create_table(tmp_path / "plain.npy", ROWS, 8, optimizer="sgd")
    with reopened(tmp_path / "plain.npy", None) as module:
        assert module.embedding_dim == 8


def test_a_plain_file_is_trained_without_state_only(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros((ROWS, 8), "f4"))
    module = reopened(tmp_path / "t.npy", 4)
    with pytest.raises(errors.CheckpointError, match="create_table"):
        Adagrad(module)
    optimizer = SGD(module, lr=1.0)
    module(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert optimizer.checkpoint() is None
    with pytest.raises(errors.ArgumentError, match="record"):
        optimizer.checkpoint(tmp_path / "c")
    assert np.load(tmp_path / "t.npy")[1].tolist() == [-1.0] * 4 + [0.0] * 4
    assert sorted(os.listdir(tmp_path)) == ["t.npy"]
    module.close()


def test_wrong_arguments_are_refused(tmp_path):
    module = table(tmp_path / "t.npy", 4, "adam")
    for tables in ([{"modules": module}], [module, module]):
        with pytest.raises(errors.ArgumentError):
            Adam(tables)
    optimizer = Adam(module)
    with pytest.raises(errors.ArgumentError, match="not added later"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(errors.ArgumentError, match="folder="):
        optimizer.checkpoint(extra={})
    module.close()


def test_the_newest_optimizer_trains_a_table(tmp_path):
    """Two would apply the same gradients."""
    module = table(tmp_path / "t.npy", 4, init="zeros")
    older, newer = SGD(module, lr=1.0), SGD(module, lr=2.0)
    module(torch.tensor([7])).sum().backward()
    for call in (older.step, older.checkpoint):
        with pytest.raises(errors.ArgumentError, match="a newer optimizer trains the table"):
            call()
    newer.step()
    assert weights(module)[7, 0] == -2
    del newer
    with pytest.raises(errors.ArgumentError, match="a newer optimizer"):
        older.step()
    module.close()


def test_some_rows_of_an_array_are_not_trained(tmp_path):
    """Their ids would be other rows."""
    with table(tmp_path / "t.npy", 4) as module:
        part = fw.torch.Embedding(module.array, rows=range(5, 9))
        with pytest.raises(errors.ArgumentError, match="range\\(5, 9\\) of an array of 400"):
            SGD(part)


@pytest.fixture
def capture(monkeypatch):
    """Stand for captures, which the CPU device has none of: a cell with the number of one."""
    number = [None]
    for where in ("gradients", "steps"):
        name = f"flashwarp.interop.torch.{where}.capture_of"
        monkeypatch.setattr(name, lambda *_: number[0])
    return number


@pytest.mark.parametrize(
    ("backward", "step"),
    [(None, 1), (1, None), (1, 2), (None, None), (1, 1)],
)
def test_gradients_stay_in_their_capture(tmp_path, capture, backward, step):
    fw.torch.create_table(tmp_path / "other.npy", ROWS, 4, optimizer="sgd", init="zeros")
    with (
        table(tmp_path / "t.npy", 4, init="zeros") as module,
        reopened(tmp_path / "other.npy", 4) as other,
    ):
        optimizer = SGD([other, module], lr=1.0)
        capture[0] = step
        other(torch.tensor([3])).sum().backward()
        capture[0] = backward
        module(torch.tensor([3])).sum().backward()
        capture[0] = step
        if step == backward:
            optimizer.step()
            assert weights(module)[3, 0] == -1
            return
        with pytest.raises(errors.CaptureError, match=r"zero_grad\(\)"):
            optimizer.step()
        assert not weights(other).any()  # all tables are checked before the first changes
        optimizer.zero_grad()
        optimizer.step()
        module(torch.tensor([3])).sum().backward()
        optimizer.step()
        assert weights(module)[3, 0] == -1


def test_ids_out_of_bounds_raise(tmp_path):
    module = table(tmp_path / "t.npy", 4, init="zeros")
    optimizer = SGD(module, lr=1.0)
    module.pending.append((torch.tensor([ROWS, 3]), torch.ones(2, 4)))
    with pytest.raises(errors.BoundsError, match="400"):
        optimizer.step()
    assert weights(module)[3, 0] == -1
    module.close()


# Checkpoints.


def test_record_says_whether_rows_change(tmp_path):
    path = tmp_path / "t.npy"
    module = table(path, 4, "adam")
    optimizer = Adam(module)
    assert not Record.read(path).changing
    train(module, optimizer, range(3))
    assert Record.read(path) == Record("adam", ROWS, 4, 12, 0, changing=True)
    assert optimizer.checkpoint() is None
    assert Record.read(path) == Record("adam", ROWS, 4, 12, 3, changing=False)
    np.testing.assert_array_equal(np.load(path), module.array[...])
    module.close()


def test_training_resumes_with_the_same_bits(tmp_path):
    whole = table(tmp_path / "whole.npy", 12, "adam")
    train(whole, Adam(whole, lr=0.05), range(10))
    expected = whole.array[...]
    whole.close()

    module = table(tmp_path / "t.npy", 12, "adam")
    optimizer = Adam(module, lr=0.05)
    train(module, optimizer, range(4))
    made = optimizer.checkpoint(tmp_path / "c", extra={"optimizer": optimizer.state_dict()})
    train(module, optimizer, range(4, 7))
    module.close()
    fw.torch.restore_table(made / "0-t.npy", tmp_path / "t.npy", overwrite=True)
    module = reopened(tmp_path / "t.npy", 12)
    optimizer = Adam(module)
    optimizer.load_state_dict(torch.load(made / "extra.pt")["optimizer"])
    train(module, optimizer, range(4, 10))

    np.testing.assert_array_equal(module.array[...], expected)
    module.close()


def test_records_follow_a_table_by_any_name(tmp_path, monkeypatch):
    """A table that was opened by a link and a relative path, after which the folder changes."""
    (tmp_path / "data").mkdir()
    table(tmp_path / "data" / "t.npy", 4).close()
    (tmp_path / "link.npy").symlink_to(tmp_path / "data" / "t.npy")
    monkeypatch.chdir(tmp_path)
    module = reopened("link.npy", 4)
    optimizer = SGD(module, lr=1.0)
    monkeypatch.chdir("/")
    train(module, optimizer, range(2))
    optimizer.checkpoint(tmp_path / "c")

    assert Record.read(tmp_path / "data" / "t.npy").step == 2
    assert os.listdir(tmp_path / "c" / "step-000000000002")
    assert sorted(os.listdir(tmp_path)) == ["c", "data", "link.npy"]
    module.close()


def test_a_failed_checkpoint_leaves_the_record(tmp_path):
    module = table(tmp_path / "t.npy", 4)
    optimizer = SGD(module, lr=1.0)
    train(module, optimizer, range(2))
    (tmp_path / "c").write_text("a file")
    with pytest.raises(errors.PathError):
        optimizer.checkpoint(tmp_path / "c")
    assert Record.read(tmp_path / "t.npy").changing
    assert Record.read(tmp_path / "t.npy").step == 0
    module.close()


TRAINER = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import flashwarp.torch
    from interop import test_training as t
    folder = Path(sys.argv[2])
    module = t.reopened(folder / "t.npy", 12)
    optimizer = flashwarp.torch.Adagrad(module, lr=0.05)
    for step in range(10_000):
        t.train(module, optimizer, range(step, step + 1))
        print(step + 1, flush=True)
        if step % 3 == 2:
            optimizer.checkpoint(folder / "c")
"""


@pytest.mark.parametrize("delay_ms", [0, 3, 40])
def test_killed_training_goes_on_from_its_last_checkpoint(tmp_path, delay_ms):
    """A process is killed between or within checkpoints. Each whole checkpoint has the bits of its
    step. In the table itself, each element is one that a step since the checkpoint has stored."""
    path = tmp_path / "t.npy"
    fw.torch.create_table(path, ROWS, 12, optimizer="adagrad", seed=3)
    tests = str(Path(__file__).parents[1])
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), tests, str(tmp_path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert trainer.stdout is not None
    for line in trainer.stdout:
        if int(line) == 8:
            break
    time.sleep(delay_ms / 1000)
    trainer.send_signal(signal.SIGKILL)
    rest, _ = trainer.communicate(timeout=60)
    done = max([8, *map(int, rest.split())])
    left, record = np.load(path), Record.read(path)

    made = sorted(each for each in os.listdir(tmp_path / "c") if each.startswith("step-"))
    steps = [int(each.removeprefix("step-")) for each in made]
    assert steps[:2] == [3, 6]
    assert record.step in steps[-2:]  # the record follows the checkpoint
    assert record.changing or record.step == done

    # Every state since the record's checkpoint, from a training that was not killed.
    fw.torch.create_table(tmp_path / "u.npy", ROWS, 12, optimizer="adagrad", seed=3)
    module = reopened(tmp_path / "u.npy", 12)
    optimizer = Adagrad(module, lr=0.05)
    states = {}
    for step in range(done + 1):
        train(module, optimizer, range(step, step + 1))
        states[step + 1] = module.array[...]
    module.close()
    for step, name in zip(steps, made, strict=True):
        np.testing.assert_array_equal(np.load(tmp_path / "c" / name / "0-t.npy"), states[step])
    possible = np.stack([states[step] for step in range(record.step, done + 2)])
    assert (possible == left).any(0).all()

    if record.changing:
        module = reopened(path, 12)
        killed = rf"was killed, or was closed after .*after step {record.step}, and how many"
        with pytest.raises(errors.CheckpointError, match=killed):
            Adagrad(module)
        module.close()
    last = tmp_path / "c" / made[-1] / "0-t.npy"
    assert fw.torch.restore_table(last, path, overwrite=True) == steps[-1]
    module = reopened(path, 12)
    train(module, Adagrad(module, lr=0.05), range(steps[-1], done + 1))
    np.testing.assert_array_equal(module.array[...], states[done + 1])
    module.close()
