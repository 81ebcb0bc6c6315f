"""Updates of rows by gradients, against the same rules in float64."""

from __future__ import annotations

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import errors
from flashwarp.table.update import RULES, Gradients, Rates, RowUpdate
from flashwarp.testing import Faulty

RATES = Rates(0.1, 1e-8, 0.1, 0.001)


def stepped(table, dim, rule, ids, gradients, padding=None):
    """The table after a step, computed in float64 from sums of the gradients of each row."""
    total = np.zeros((len(table), dim))
    np.add.at(total, ids, gradients.astype("f8"))
    hit = np.isin(np.arange(len(table)), ids) & (np.arange(len(table)) != padding)
    new = table.astype("f8")
    weights, first, second = new[:, :dim], new[:, dim : 2 * dim], new[:, 2 * dim : 3 * dim]
    if rule == "sgd":
        weights -= RATES.rate * total
    elif rule == "adagrad":
        first += total**2
        weights -= RATES.rate * total / (np.sqrt(first) + RATES.epsilon)
    elif rule == "rowwise_adagrad":
        new[:, dim] += (total**2).mean(1)
        weights -= RATES.rate * total / (np.sqrt(new[:, dim : dim + 1]) + RATES.epsilon)
    else:
        first += (total - first) * RATES.mean_rate
        second += (total**2 - second) * RATES.square_rate
        weights -= RATES.rate * first / (np.sqrt(second) + RATES.epsilon)
    return np.where(hit[:, None], new, table).astype("f4")


def run(up, ids, gradients, rates=RATES):
    order = np.argsort(ids, kind="stable")
    ordered = np.ascontiguousarray(ids[order], np.int64)
    sums = np.empty_like(gradients)
    copies = np.empty(up.copies_bytes(len(ids)), np.uint8)
    places = (each.ctypes.data for each in (ordered, order, gradients, sums, copies))
    up.launch(Gradients(*places, len(ids)), rates, None)


def table_of(random, rows, dim, rule):
    table = random.standard_normal((rows, RULES[rule].width(dim))).astype("f4")
    table[:, dim:] = np.abs(table[:, dim:]) + 0.1
    return table


def opened(table, device="cpu", **options):
    memory = fw.storage.Memory(bytearray(table.tobytes()))
    return fw.open(memory, "r+", "f4", table.shape, device=device, **options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim", [1, 3, 16, 64, 200, 2500])
def test_steps_equal_the_rule(rule, dim):
    """Rows of every kind: several in a line, across lines, and of several lines; the table is
    larger than its cache, so rows are evicted and written back meanwhile."""
    random = np.random.default_rng(dim)
    rows = 300
    expected = table_of(random, rows, dim, rule)
    with opened(expected, cache="32 KiB") as x:
        up = RowUpdate(x, dim, RULES[rule], padding=7)
        for _ in range(3):
            count = int(random.integers(1, 700))
            # A third of the ids are one row, so that its sum goes over chunks.
            ids = np.where(random.random(count) < 0.3, 5, random.integers(0, rows, count))
            gradients = random.standard_normal((count, dim)).astype("f4")
            run(up, ids, gradients)
            expected = stepped(expected, dim, rule, ids, gradients, padding=7)
            np.testing.assert_allclose(x[...], expected, rtol=1e-4, atol=1e-4)
            expected = x[...]


def test_rows_of_one_line_are_updated_by_many_threads():
    """Every row of a few lines in each step: each thread stores to lines that others store to."""
    random = np.random.default_rng(1)
    table = np.zeros((256, 4), "f4")
    ids = np.tile(np.arange(256), 8)
    with fw.device.CpuDevice(4) as device, opened(table, device, cache="64 KiB") as x:
        up = RowUpdate(x, 4, RULES["sgd"])
        for _ in range(200):
            run(up, random.permutation(ids), np.ones((len(ids), 4), "f4"), Rates(1.0))

        assert (x[...] == -200 * 8).all()


def test_evicted_lines_lose_no_update_of_their_other_rows():
    table = np.zeros((4096, 16), "f4")
    random = np.random.default_rng(2)
    expected = table.copy()
    with fw.device.CpuDevice(4) as device, opened(table, device, cache="16 KiB", line=512) as x:
        up = RowUpdate(x, 16, RULES["sgd"])
        for _ in range(30):
            ids = random.integers(0, 4096, 500)
            run(up, ids, np.ones((500, 16), "f4"), Rates(1.0))
            np.subtract.at(expected, ids, 1)

        assert x.stats.evictions > 500
        np.testing.assert_array_equal(x[...], expected)


def test_the_same_step_gives_the_same_bits():
    random = np.random.default_rng(3)
    table = table_of(random, 100, 33, "adam")
    ids = random.integers(0, 9, 5000)
    gradients = random.standard_normal((5000, 33)).astype("f4")
    results = []
    for threads in (1, 3):
        with fw.device.CpuDevice(threads) as device, opened(table, device) as x:
            run(RowUpdate(x, 33, RULES["adam"]), ids, gradients)
            results.append(x[...].tobytes())

    assert results[0] == results[1]


def test_ids_out_of_bounds_raise_and_change_nothing_else():
    """A negative id is out of bounds too: it would be a second name of a row."""
    table = np.zeros((10, 4), "f4")
    for bad in (10, -1, 1 << 40):
        with opened(table) as x:
            up = RowUpdate(x, 4, RULES["sgd"])
            with pytest.raises(errors.BoundsError, match=str(bad)):
                run(up, np.array([2, bad, 9]), np.ones((3, 4), "f4"), Rates(1.0))

            assert x[:, 0].tolist() == [0, 0, -1, 0, 0, 0, 0, 0, 0, -1]


def test_rows_that_cannot_be_read_keep_their_state():
    table = np.ones((64, 300), "f4")  # most rows lie in two lines
    storage = Faulty(fw.storage.Memory(bytearray(table.tobytes())))
    with fw.open(storage, "r+", "f4", table.shape, device="cpu", cache="64 KiB") as x:
        up = RowUpdate(x, 150, RULES["adagrad"])
        storage.inject("read eio")
        with pytest.raises(errors.StorageError):
            run(up, np.arange(8), np.ones((8, 150), "f4"))
        assert sum(storage.hits())
        storage.heal()

        np.testing.assert_array_equal(x[...], table)
        run(up, np.arange(8), np.ones((8, 150), "f4"))
        assert (x[:8, 150:] == 2).all()


def test_tables_that_cannot_be_trained_are_refused():
    table = np.zeros((10, 8), "f4")
    memory = fw.storage.Memory(bytearray(table.tobytes()))
    with (
        fw.open(memory, "r", "f4", (10, 8), device="cpu") as x,
        pytest.raises(errors.ReadOnlyError, match="r\\+"),
    ):
        RowUpdate(x, 8, RULES["sgd"])
    with (
        opened(table) as x,
        pytest.raises(errors.ArgumentError, match=r"16 elements.*has 8.*create_table"),
    ):
        RowUpdate(x, 8, RULES["adagrad"])
    with (
        opened(table.reshape(10, 2, 4)) as x,
        pytest.raises(errors.ArgumentError, match="two axes"),
    ):
        RowUpdate(x, 8, RULES["sgd"])
    with (
        fw.open(memory, "r+", "i4", (10, 8), device="cpu") as x,
        pytest.raises(errors.DtypeError, match="float32"),
    ):
        RowUpdate(x, 8, RULES["sgd"])
    with pytest.raises(errors.ArgumentError, match="ndarray"):
        RowUpdate(table, 8, RULES["sgd"])
