"""Steps of optimizers on the rows of a table: rules, what a row holds, and launches.

Mirrors `kernels/update.cuh`. Knows addresses and sizes; the caller owns the tensors.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np

from flashwarp.array.array import Array
from flashwarp.array.turns import in_turns
from flashwarp.device.layouts import fields_of
from flashwarp.errors import ArgumentError, DtypeError, ReadOnlyError, SharedCacheError
from flashwarp.launch.rows import RowParams

# Rows in several lines are updated by copies, one for each warp. The kernel has at most 16 warps on
# a multiprocessor, twice `Device.warps_at_once`.
_WARPS_MIN = 256
_WARPS_OF_A_BLOCK = 8


@dataclass(frozen=True)
class Rule:
    """How an optimizer changes a row.

    Attributes
    ----------
    name : str
        As files name it.
    number : int
        `kernels::update_rule`.
    per_weight : int
        Elements of state for each weight of a row.
    per_row : int
        Elements of state for each row.
    """

    name: str
    number: int
    per_weight: int = 0
    per_row: int = 0

    def width(self, dim: int) -> int:
        """Count the elements of a row with so many weights."""
        return dim * (1 + self.per_weight) + self.per_row


RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", 0),
        Rule("adagrad", 1, per_weight=1),
        Rule("rowwise_adagrad", 2, per_row=1),
        Rule("adam", 3, per_weight=2),
    )
}


class SumParams(ctypes.Structure):
    """Mirror of `kernels::sum_params`."""

    _fields_ = fields_of("sum_params")


class UpdateParams(ctypes.Structure):
    """Mirror of `kernels::update_params`."""

    _fields_ = fields_of("update_params", rows=RowParams)


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step in device memory, by address.

    Attributes
    ----------
    ids : int
        Rows as int64, in ascending order.
    order : int
        Where the gradient of each is, as int64.
    values : int
        Gradients of float32, `count` rows of the table's weights.
    sums : int
        Room for as many.
    copies : int
        Room of `RowUpdate.copies_bytes`.
    count : int
        How many.
    """

    ids: int
    order: int
    values: int
    sums: int
    copies: int
    count: int


@dataclass(frozen=True)
class Rates:
    """The constants of a step.

    Attributes
    ----------
    rate, epsilon : float
        Learning rate, and what is added to a root before it divides.
    mean_rate, square_rate : float
        How far Adam's means move towards the gradient and its square.
    scale : int
        Address of a factor of `rate` as float32, behind which is one of `decay`; or 0.
    decay : float
        For "sgd" and "adam": the part of a weight that goes before the step.
    """

    rate: float
    epsilon: float = 0.0
    mean_rate: float = 0.0
    square_rate: float = 0.0
    scale: int = 0
    decay: float = 0.0


class RowUpdate:
    """The updates of one table by one rule.

    Parameters
    ----------
    array : Array
        The table: rows of float32, the weights first, the state behind them.
    dim : int
        Weights of a row.
    rule : Rule
        What a step does.
    padding : int, optional
        A row that no step changes.

    Raises
    ------
    ReadOnlyError, DtypeError, ArgumentError, SharedCacheError
        If the table cannot be trained so.
    """

    def __init__(self, array: Array, dim: int, rule: Rule, padding: int | None = None) -> None:
        if not isinstance(array, Array):
            raise ArgumentError(f"a table is a flashwarp.Array, not {type(array).__name__}")
        array._turns.check_usable()
        if not array.writable:
            raise ReadOnlyError('the table is read-only: open it with mode="r+" to train it')
        if not array.cache.owned:
            raise SharedCacheError(
                "rows of a shared cache change by what they are only in the process of its owner: "
                "train the table there, or with a cache that is not shared"
            )
        if array.dtype != np.dtype(np.float32):
            raise DtypeError(f"the table has dtype {array.dtype}: training needs float32")
        if array.ndim != 2:
            raise ArgumentError(f"a table has two axes, rows and elements, not {array.shape}")
        if array.shape[1] < rule.width(dim):
            raise ArgumentError(
                f"{rule.name} on {dim} weights needs rows of {rule.width(dim)} elements, and the "
                f"table has {array.shape[1]}: make it by flashwarp.torch.create_table"
            )
        self.array = array
        self.dim = dim
        self.rule = rule
        self._padding = (1 << 64) - 1 if padding is None else padding
        self._launcher = array._attachment.launcher
        self._warps = max(_WARPS_MIN, 2 * array.device.warps_at_once)

    def copies_bytes(self, count: int) -> int:
        """Return how many bytes `Gradients.copies` needs, 0 if every row lies in one line."""
        if self._launcher.lines_per_row == 1:
            return 0
        warps = min(self._warps, count) + _WARPS_OF_A_BLOCK
        return warps * self.array.shape[1] * self.array.dtype.itemsize

    def launch(self, step: Gradients, rates: Rates, stream: int | None) -> None:
        """Update the rows that `step` names, each once.

        Parameters
        ----------
        step : Gradients
            Unchanged until the work is done.
        rates : Rates
            Of this step.
        stream : int or None
            Where the work is queued on a GPU; may be captured. None on the CPU device, where the
            call ends with the work.

        Raises
        ------
        StorageError
            If lines could not be read; their rows keep their old weights and state. With a stream,
            the array's next call raises it.
        BoundsError
            In the same way, if an id is negative or too large. All other rows are updated.
        """
        launch = functools.partial(self._launch_in_turn, step, rates, stream)
        in_turns([(self.array, True)], launch)

    def _launch_in_turn(self, step: Gradients, rates: Rates, stream: int | None) -> None:
        array, launcher = self.array, self._launcher
        array._turns.begin()
        array._turns.join_launch(stream)
        if stream is not None:
            array.device.order(None, stream)  # our own uploads come first
        sums = SumParams(step.ids, step.order, step.values, step.sums, step.count, self.dim)
        update = UpdateParams(
            sums=step.sums,
            scale=rates.scale,
            padding=self._padding,
            rule=self.rule.number,
            width=self.dim,
            rate=rates.rate,
            epsilon=rates.epsilon,
            mean_rate=rates.mean_rate,
            square_rate=rates.square_rate,
            decay=rates.decay,
        )
        tail = bytes(update)[ctypes.sizeof(RowParams) :]
        launcher.update(step.ids, step.count, step.copies, tail, bytes(sums), self._warps, stream)
        if stream is None:
            array._attachment.finish("an update", None)
