"""Batches of rows: the same ones for any number of workers, in every order, and misused."""

from __future__ import annotations

import itertools
import os
import pickle

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch.utils.data import DataLoader, RandomSampler, get_worker_info

import flashwarp as fw
import flashwarp.torch
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    DtypeError,
    ForkError,
    IndexDtypeError,
    StorageError,
)
from flashwarp.testing import Faulty

# Of more workers than cores, and of a fork beside threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

ROWS, WIDTH = 1000, 24


@pytest.fixture
def features():
    return np.random.default_rng(7).random((ROWS, WIDTH), np.float32)


@pytest.fixture
def arrays(tmp_path, features):
    np.save(tmp_path / "x.npy", features)
    np.save(tmp_path / "y.npy", np.arange(ROWS))
    with (
        fw.open(tmp_path / "x.npy", device="cpu", cache="16 KiB", line=512) as x,
        fw.open(tmp_path / "y.npy", device="cpu") as y,
    ):
        yield x, y


def labels_of(loader):
    return [labels.tolist() for _, labels in loader]


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def in_workers(loader, workers, method="fork", **options):
    context = method if workers else None
    return DataLoader(
        loader, batch_size=None, num_workers=workers, multiprocessing_context=context, **options
    )


# Orders.


@pytest.mark.parametrize("depth", [1, 2, 64])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_every_row_once(arrays, features, shuffle, depth):
    loader = fw.torch.Loader(arrays, 96, shuffle=shuffle, depth=depth)

    batches = list(loader)

    assert [len(labels) for _, labels in batches] == [96] * 10 + [40]
    assert len(loader) == 11
    labels = torch.cat([labels for _, labels in batches])
    assert torch.equal(labels.sort().values, torch.arange(ROWS))
    assert torch.equal(labels, torch.arange(ROWS)) != shuffle
    for rows, labels in batches:
        np.testing.assert_array_equal(rows.numpy(), features[labels.numpy()])


def test_last_batch_is_left_out_if_asked(arrays):
    loader = fw.torch.Loader(arrays, 96, drop_last=True)

    assert [len(labels) for labels in labels_of(loader)] == [96] * 10
    assert len(loader) == 10


def test_seed_and_epoch_decide_the_order(arrays):
    def order(seed, epoch):
        loader = fw.torch.Loader(arrays, 100, shuffle=True, seed=seed)
        loader.set_epoch(epoch)
        return labels_of(loader)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


@pytest.mark.parametrize(
    "rows", [[5, 3, -1], torch.tensor([5, 3, 999]), np.array([5, 3, 999], "u2")]
)
def test_some_rows_in_an_order_of_the_caller(arrays, rows):
    assert labels_of(fw.torch.Loader(arrays, 2, rows=rows)) == [[5, 3], [999]]


def test_some_rows_in_random_order(arrays):
    loader = fw.torch.Loader(arrays, 10, rows=range(0, ROWS, 10), shuffle=True)

    found = joined(labels_of(loader))

    assert found != sorted(found)
    assert sorted(found) == list(range(0, ROWS, 10))


class Told(list):
    def set_epoch(self, epoch):
        self[:] = [epoch, epoch + 1]


def test_sampler_decides_the_order_and_is_told_the_epoch(arrays):
    loader = fw.torch.Loader(arrays, 2, sampler=Told([0, 0]))
    loader.set_epoch(8)

    assert labels_of(loader) == [[8, 9]]
    assert len(loader) == 1


def test_random_sampler_of_torch_leaves_torchs_random_numbers_alone(arrays):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    found = labels_of(fw.torch.Loader(arrays, 100, sampler=RandomSampler(range(ROWS))))

    assert torch.equal(torch.rand(3), expected)
    assert sorted(joined(found)) == list(range(ROWS))


def test_batches_have_the_form_of_the_arrays(arrays):
    x, y = arrays

    assert next(iter(fw.torch.Loader(x, 8))).shape == (8, WIDTH)
    assert isinstance(next(iter(fw.torch.Loader([x], 8))), tuple)
    batch = next(iter(fw.torch.Loader({"x": x, "y": y}, 8)))
    assert {name: tuple(part.shape) for name, part in batch.items()} == {"x": (8, WIDTH), "y": (8,)}


def test_batches_are_the_callers_to_keep(arrays, features):
    batches = list(fw.torch.Loader(arrays, 100))

    assert len({rows.data_ptr() for rows, _ in batches}) == 10
    np.testing.assert_array_equal(torch.cat([rows for rows, _ in batches]).numpy(), features)


@pytest.mark.parametrize("width", [0, 1])
def test_rows_without_elements(tmp_path, width):
    np.save(tmp_path / "x.npy", np.ones((10, width), "f4"))
    with fw.open(tmp_path / "x.npy", device="cpu") as x:
        loader = fw.torch.Loader(x, 4)
        for workers in (0, 2):
            shapes = [tuple(batch.shape) for batch in in_workers(loader, workers)]
            assert shapes == [(4, width), (4, width), (2, width)]


def test_epoch_without_rows(arrays):
    assert labels_of(fw.torch.Loader(arrays, 4, rows=[])) == []


# Workers.


@pytest.mark.parametrize(
    ("workers", "method"), [(1, "fork"), (2, "fork"), (3, "fork"), (2, "spawn")]
)
def test_workers_give_the_same_batches_in_the_same_order(arrays, features, workers, method):
    loader = fw.torch.Loader(arrays, 96, shuffle=True, seed=3)
    loader.set_epoch(4)
    expected = labels_of(loader)

    found = in_workers(loader, workers, method)

    assert len(found) == 11
    for number, (rows, labels) in enumerate(found):
        assert labels.tolist() == expected[number]
        assert rows.is_shared()
        np.testing.assert_array_equal(rows.numpy(), features[labels.numpy()])
    assert number == 10


def test_workers_that_persist_see_the_epoch(arrays):
    loader = fw.torch.Loader(arrays, 96, shuffle=True)
    found = in_workers(loader, 2, persistent_workers=True)
    for epoch in (0, 1, 5):
        loader.set_epoch(epoch)
        assert labels_of(found) == labels_of(loader)


def test_workers_give_one_order_of_a_random_sampler(arrays):
    loader = fw.torch.Loader(arrays, 96, sampler=RandomSampler(range(ROWS)))

    assert labels_of(in_workers(loader, 3)) == labels_of(loader)


class Where(fw.torch.Loader):
    """Says which process makes a batch."""

    def __iter__(self):
        for _, labels in super().__iter__():
            info = get_worker_info()
            yield os.getpid(), -1 if info is None else info.id, labels.tolist()


def test_batches_are_made_by_the_workers_in_turn(arrays):
    found = list(in_workers(Where(arrays, 100), 3))

    assert [worker for _, worker, _ in found] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert os.getpid() not in {pid for pid, _, _ in found}
    assert len({pid for pid, _, _ in found}) == 3


def test_parent_reads_while_workers_do(arrays, features):
    x, _ = arrays
    for rows, labels in in_workers(fw.torch.Loader(arrays, 100), 2):
        np.testing.assert_array_equal(x.gather(labels.numpy()), rows.numpy())


def test_writable_array_is_refused_in_a_worker(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((100, 4)))
    with (
        fw.open(tmp_path / "x.npy", "r+", device="cpu") as x,
        pytest.raises(ForkError, match="mode='r'"),
    ):
        list(in_workers(fw.torch.Loader(x, 10), 1))


# Going on.


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_goes_on_where_a_state_says(arrays, workers):
    def loader():
        return fw.torch.Loader(arrays, 96, shuffle=True, seed=3)

    first = loader()
    first.set_epoch(2)
    batches = iter(first)
    taken = [next(batches)[1].tolist() for _ in range(3)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = loader()
    second.load_state_dict(state)
    first.set_epoch(2)

    assert state == {"epoch": 2, "batch": 3}
    assert taken + labels_of(in_workers(second, workers)) == labels_of(first)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_after_a_peek_has_all_batches(arrays, workers):
    loader = fw.torch.Loader(arrays, 300)

    next(iter(in_workers(loader, workers)))

    assert joined(labels_of(in_workers(loader, workers))) == list(range(ROWS))


def test_an_inner_loop_takes_nothing_from_the_outer_one(arrays):
    loader = fw.torch.Loader(arrays, 300)
    states = []
    for outer, _ in enumerate(loader, 1):
        assert joined(labels_of(loader)) == list(range(ROWS))
        states.append((outer, loader.state_dict()["batch"]))

    assert states == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert loader.state_dict()["batch"] == 0


def test_state_is_that_of_the_iteration_that_handed_out_last(arrays):
    loader = fw.torch.Loader(arrays, 100)
    for number, _ in enumerate(loader):
        if number == 3:
            break
    assert loader.state_dict() == {"epoch": 0, "batch": 4}

    next(iter(loader))
    assert loader.state_dict() == {"epoch": 0, "batch": 1}

    batches = iter(loader)
    next(batches)
    loader.load_state_dict({"epoch": 1, "batch": 8})
    assert sum(1 for _ in batches) == 9
    assert loader.state_dict() == {"epoch": 1, "batch": 8}
    assert len(labels_of(loader)) == 2


def test_workers_do_not_know_what_was_handed_out(arrays):
    loader = fw.torch.Loader(arrays, 100)
    loader.set_epoch(2)
    labels_of(in_workers(loader, 2))

    with pytest.raises(ArgumentError, match="'epoch': 2, 'batch': count"):
        loader.state_dict()

    loader.set_epoch(3)
    assert loader.state_dict() == {"epoch": 3, "batch": 0}


def test_iteration_that_ends_begins_anew(arrays):
    loader = fw.torch.Loader(arrays, 500)
    loader.load_state_dict({"epoch": 0, "batch": 1})

    assert [len(labels_of(loader)) for _ in range(3)] == [1, 2, 2]


def test_iteration_that_is_left_leaves_nothing_behind(arrays):
    for _ in fw.torch.Loader(arrays, 10, depth=8):
        break

    assert arrays[1][3] == 3


def test_failure_of_a_batch_that_nobody_takes_is_not_raised_later(tmp_path):
    np.arange(64 * ROWS, dtype="i8").tofile(tmp_path / "x")
    with (
        Faulty(fw.storage.File(tmp_path / "x"), "read eio") as storage,
        fw.open(storage, dtype="i8", device="cpu", cache="8 KiB", line=512) as x,
    ):
        batches = iter(fw.torch.Loader(x, 64, depth=4))
        with pytest.raises(StorageError):
            next(batches)
        storage.heal()

        assert x[5] == 5


# Misuse.


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"batch_size": 2.5}, {"shuffle": 1}, {"drop_last": None}, {"seed": -1},
     {"depth": 0}, {"depth": 65}, {"rows": [[1]]}, {"sampler": [1], "rows": [1]},
     {"sampler": [1], "shuffle": True}],
)  # fmt: skip
def test_options_that_make_no_sense(arrays, options):
    with pytest.raises(ArgumentError):
        fw.torch.Loader(arrays, **{"batch_size": 4, **options})


@pytest.mark.parametrize("row", [ROWS, -ROWS - 1])
def test_rows_out_of_bounds(arrays, row):
    with pytest.raises(BoundsError, match=str(row)):
        fw.torch.Loader(arrays, 4, rows=[0, row])
    with pytest.raises(BoundsError, match=str(row)):
        list(fw.torch.Loader(arrays, 4, sampler=[0, row]))


@pytest.mark.parametrize("rows", [[1.5], ["a"], [True]])
def test_rows_that_are_no_integers(arrays, rows):
    with pytest.raises(IndexDtypeError):
        fw.torch.Loader(arrays, 4, rows=rows)


@pytest.mark.parametrize("given", [None, [], {}, np.zeros(3), [np.zeros(3)], "x"])
def test_what_are_no_arrays(given):
    with pytest.raises(ArgumentError, match="give a flashwarp"):
        fw.torch.Loader(given, 4)


def test_arrays_that_do_not_fit_together(tmp_path, arrays):
    np.save(tmp_path / "short.npy", np.zeros(3))
    np.save(tmp_path / "text.npy", np.array(["a", "b"]))
    np.save(tmp_path / "one.npy", np.array(3.0))
    with (
        fw.open(tmp_path / "short.npy", device="cpu") as short,
        fw.open(tmp_path / "text.npy", device="cpu") as text,
        fw.open(tmp_path / "one.npy", device="cpu") as one,
        fw.open(tmp_path / "y.npy", device=fw.device.CpuDevice(1)) as elsewhere,
    ):
        with pytest.raises(ArgumentError, match="lengths"):
            fw.torch.Loader((arrays[0], short), 4)
        with pytest.raises(DtypeError):
            fw.torch.Loader(text, 1)
        with pytest.raises(ArgumentError, match="axes"):
            fw.torch.Loader(one, 1)
        with pytest.raises(ArgumentError, match="several devices"):
            next(iter(fw.torch.Loader((arrays[0], elsewhere), 4)))


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 1}, {"epoch": 1, "batch": -1}, {"epoch": 0, "n": 1}]
)
def test_states_of_something_else(arrays, state):
    with pytest.raises(ArgumentError):
        fw.torch.Loader(arrays, 4).load_state_dict(state)


def test_a_state_that_is_refused_changes_nothing(arrays):
    loader = fw.torch.Loader(arrays, 4)
    with pytest.raises(ArgumentError):
        loader.load_state_dict({"epoch": 3, "batch": -1})
    assert loader.state_dict() == {"epoch": 0, "batch": 0}
