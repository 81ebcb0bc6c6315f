"""Making the file of a table: weights drawn in blocks by several threads, never held whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from flashwarp import _native, endings
from flashwarp.config import SIZE_MAX, choice, flag, integer, number
from flashwarp.errors import ArgumentError
from flashwarp.storage import files, npy
from flashwarp.table.record import Record, record_path
from flashwarp.table.update import RULES, Rule

Draw: TypeAlias = Callable[[int, int], npt.NDArray[np.float32]]
Initial: TypeAlias = Literal["normal", "uniform", "zeros"] | npt.NDArray[Any] | Draw

# Rows that a thread draws and writes at a time take this many bytes.
_BLOCK_BYTES = 16 << 20
_THREADS_MAX = 16

# The page cache holds what one call writes in folios as long as the call, up to megabytes, and ext4
# looks at each block of a folio when a line of it is written back: 25 us for a line of 512 bytes in
# a folio of a MiB, 1 us in one of a page (Linux 6.18).
_PIECE_BYTES = 4096

# Of a float32.
_MAX = 3.4028234663852886e38

# Rows begin at multiples of 16 bytes, so that kernels copy them in words of 16.
_WORD_ELEMENTS = 4


def rule_of(optimizer: str) -> Rule:
    """Return the rule with a name; AdamW keeps the state of Adam."""
    rules = RULES | {"adamw": RULES["adam"]}
    choice("optimizer", optimizer, list(rules))
    return rules[optimizer]


def create_table(
    path: str | os.PathLike[str],
    rows: int,
    dim: int,
    *,
    optimizer: str = "rowwise_adagrad",
    init: Initial = "normal",
    scale: float = 1.0,
    state: float = 0.0,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Make the file of an embedding table that is trained, and the record beside it.

    The file is a ``.npy`` file of float32. A row has `dim` weights, then the state of the
    optimizer, then zeros up to a multiple of 16 bytes.

    Parameters
    ----------
    path : path-like
        Where; the record is at this path with ``.training.json`` behind it.
    rows, dim : int
        Rows of the table, and weights of a row.
    optimizer : {"rowwise_adagrad", "sgd", "adagrad", "adam", "adamw"}
        Whose state the rows hold: 1, 0, `dim` or 2 `dim` elements. Adam and AdamW have the same.
    init : {"normal", "uniform", "zeros"}, array or callable
        How weights are drawn: normal with standard deviation `scale`, or uniform between -`scale`
        and `scale`. An array or a tensor has the weights. A callable is called as
        ``init(first, rows)``, by several threads, and returns an array of shape ``(rows, dim)``:
        the weights from row `first` on.
    scale : float
        See `init`.
    state : float
        Value of each element of state, as ``initial_accumulator_value`` of `torch.optim.Adagrad`.
    seed : int
        The same seed gives the same weights, with any number of threads.
    overwrite : bool
        Replace a table that is there and not open for writing.

    Raises
    ------
    ExistingFileError, MissingFileError, LockedError, PathError
        As `flashwarp.create`.
    ArgumentError
        For sizes, names or weights that cannot work.

    Notes
    -----
    Blocks until the file is durable. All rows are written, at the rate of the storage or of numpy's
    generators, whichever is lower. If `init` is "zeros" and `state` 0, nothing is written, and the
    file is sparse; a warning says if there is no room for all of it. Host memory: 16 MiB for each
    of up to 16 threads. The file appears whole, or a failed call or a crash leaves what was there,
    perhaps without its record; a table without a record is refused by optimizers with state.

    Examples
    --------
    >>> import flashwarp.torch
    >>> flashwarp.torch.create_table("items.npy", 10_000, 64, scale=0.1)
    """
    new = NewTable.of(rows, dim, optimizer, init, scale, state, seed)
    overwrite = flag("overwrite", overwrite)
    layout = npy.empty_layout((new.rows, new.width), np.float32)
    target = files.check_new(files.check_name(path), overwrite)
    with files.Draft(target, overwrite, lock=True) as draft:
        try:
            npy.write_empty(draft.descriptor, layout)
            draft.warn_of_room(layout.nbytes)
            new.write(draft.descriptor, layout.offset, range(new.rows))
            os.fsync(draft.descriptor)
        except OSError as error:
            raise files.write_error(error, target) from error
        # A record of an older table must not describe this one, not even after a crash.
        with contextlib.suppress(FileNotFoundError):
            Path(record_path(target)).unlink()
        draft.publish()
    new.record(new.rows).write(target)


@dataclass(frozen=True)
class NewTable:
    """What the rows of a new table are.

    Attributes
    ----------
    rule : Rule
        Whose state they hold.
    rows, dim, width : int
        Rows of the table, weights of a row, elements of a row.
    draw : callable, optional
        Draws the weights of so many rows from a first one on. Default: zeros.
    state : float
        Of each element of the optimizer's state.
    """

    rule: Rule
    rows: int
    dim: int
    width: int
    draw: Draw | None
    state: float

    @classmethod
    def of(
        cls,
        rows: int,
        dim: int,
        optimizer: str,
        init: Initial,
        scale: float,
        state: float,
        seed: int,
    ) -> Self:
        """Check the arguments of `create_table`; raises ArgumentError."""
        rule = rule_of(optimizer)
        rows, dim = integer("rows", rows, 1, SIZE_MAX), integer("dim", dim, 1, SIZE_MAX)
        width = -(-rule.width(dim) // _WORD_ELEMENTS) * _WORD_ELEMENTS
        scale, state = number("scale", scale, -_MAX, _MAX), number("state", state, -_MAX, _MAX)
        draw = _weights(init, scale, integer("seed", seed, 0, SIZE_MAX), (rows, dim))
        return cls(rule, rows, dim, width, draw, state)

    def record(self, rows: int) -> Record:
        """Return the record of a file that has so many of the rows."""
        return Record(self.rule.name, rows, self.dim, self.width)

    def write(self, descriptor: int, offset: int, rows: range) -> None:
        """Write a range of the rows to a file of zeros, from an offset on, by several threads."""
        if self.draw is None and not self.state:
            return
        # Blocks of the table and not of the file: they have the same weights in any file.
        block = max(1, _BLOCK_BYTES // (4 * self.width))
        threads = min(_THREADS_MAX, os.cpu_count() or 1)

        def write_block(first: int) -> None:
            begin, end = max(first, rows.start), min(first + block, rows.stop)
            content = self._block(first, end)[begin - first :]
            place = offset + (begin - rows.start) * self.width * 4
            _native.write_file(descriptor, place, content, piece_bytes=_PIECE_BYTES)

        with endings.Pool(threads, "flashwarp-table") as pool:
            firsts = range(rows.start // block * block, rows.stop, block)
            for written in [pool.submit(write_block, first) for first in firsts]:
                written.result()

    def _block(self, first: int, end: int) -> npt.NDArray[np.float32]:
        block = np.zeros((end - first, self.width), np.float32)
        if self.draw is not None:
            weights = np.asarray(self.draw(first, end - first))
            if weights.shape != (end - first, self.dim) or weights.dtype.kind not in "fiu":
                raise ArgumentError(
                    f"init gave shape {weights.shape} of {weights.dtype} for rows {first} to "
                    f"{end}, which have shape {(end - first, self.dim)}"
                )
            block[:, : self.dim] = weights
        block[:, self.dim : self.rule.width(self.dim)] = self.state
        return block


def _weights(init: Initial, scale: float, seed: int, shape: tuple[int, int]) -> Draw | None:
    """Return what draws the weights of some rows; None: zeros."""
    if hasattr(init, "detach") or isinstance(init, np.ndarray):
        return _weights_of(init, shape)
    if callable(init):
        return init
    if not isinstance(init, str) or init not in ("normal", "uniform", "zeros"):
        raise ArgumentError(
            f"init={init!r}: use 'normal', 'uniform', 'zeros', weights or a callable"
        )
    if init == "zeros":
        return None

    def draw(first: int, rows: int) -> npt.NDArray[np.float32]:
        # A generator for each block, so that threads need no order.
        random = np.random.Generator(np.random.Philox(key=[seed, first]))
        if init == "normal":
            return random.standard_normal((rows, shape[1]), np.float32) * np.float32(scale)
        return (random.random((rows, shape[1]), np.float32) * 2 - 1) * np.float32(scale)

    return draw


def _weights_of(given: Any, shape: tuple[int, int]) -> Draw:
    """Return what takes the weights of some rows from an array, or a tensor of torch."""

    def draw(first: int, rows: int) -> Any:
        try:
            if tuple(given.shape) != shape:
                raise TypeError(f"it has shape {tuple(given.shape)}, and the table {shape}")
            part = given[first : first + rows]
            # numpy takes no tensor that needs a gradient, and none in bfloat16.
            return part if isinstance(part, np.ndarray) else part.detach().cpu().float().numpy()
        except (RuntimeError, TypeError) as error:
            why = str(error).partition("\n")[0]
            raise ArgumentError(f"init of type {type(given).__name__}: {why}") from error

    draw(0, 1)
    return draw
