"""Optimizers of torch for tables in a storage: they update only the rows that a step has used."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flashwarp.array.array import Array
from flashwarp.errors import ArgumentError, CaptureError, CheckpointError
from flashwarp.interop.torch.gradients import capture_of
from flashwarp.table import checkpoint
from flashwarp.table.record import Record
from flashwarp.table.update import RULES, Gradients, Rates, RowUpdate, Rule

__all__ = ["SGD", "Adagrad", "Adam", "RowWiseAdagrad"]


# The newest optimizer of each table. Two would apply the same gradients twice.
_owners: weakref.WeakKeyDictionary[Array, weakref.ref[_TableOptimizer]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(eq=False)
class _Trained:
    """A table: its module, its updates, its file, and what the record beside the file says."""

    module: torch.nn.Module
    update: RowUpdate
    path: str | None
    record: Record | None
    marked: bool = False  # the record says that rows change


class _TableOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """What the optimizers of tables share; `step`, `zero_grad` and `checkpoint` are of all."""

    _rule: Rule

    def __init__(self, tables: object, defaults: dict[str, Any], accept_newer: bool) -> None:
        _check_rates(defaults)
        groups = [
            {**{k: v for k, v in group.items() if k != "tables"}, "modules": group["tables"]}
            for group in _groups_of(tables)
        ]
        self._tables: dict[torch.Tensor, _Trained] = {}
        self._captured = False
        ready = []
        for group in groups:
            _check_rates({**defaults, **group})
            params = []
            for module in group.pop("modules"):
                table = self._open(module, accept_newer)
                # Groups of torch have parameters. A table has none, so an empty one stands for it.
                param = torch.nn.Parameter(torch.empty(0), requires_grad=False)
                self._tables[param] = table
                params.append(param)
            ready.append({**group, "params": params})
        super().__init__(ready, defaults)
        for param, table in self._tables.items():
            step = 0 if table.record is None else table.record.step
            self.state[param]["step"] = self._on_device(table, torch.tensor(step))
            _owners[table.module.array] = weakref.ref(self)

    def _open(self, module: torch.nn.Module, accept_newer: bool) -> _Trained:
        array, dim = module.array, int(module.embedding_dim)
        if any(array is table.module.array for table in self._tables.values()):
            raise ArgumentError("a table appears twice: give it once, by one module")
        if module.scales is not None:
            raise ArgumentError("a table with scales cannot be trained: its rows are quantised")
        if len(module.rows) != array.shape[0]:
            raise ArgumentError(
                f"a table of the rows {module.rows} of an array of {array.shape[0]} cannot be "
                "trained: open all of its rows"
            )
        update = RowUpdate(array, dim, self._rule, module.padding_idx)
        path = array._attachment.storage.path
        # The process may change its folder later.
        path = os.path.realpath(path) if path else None
        record = None if path is None else Record.read(path)
        if path is not None:
            self._check_record(path, record, array.shape, dim, accept_newer)
        return _Trained(module, update, path, record)

    def _check_record(
        self,
        path: str,
        record: Record | None,
        shape: tuple[int, ...],
        dim: int,
        accept_newer: bool,
    ) -> None:
        if record is None:
            if self._rule.width(1) == 1:
                return  # rows without state need none
            raise CheckpointError(
                f"{path} has no record of an optimizer, so its rows have no state: make the table "
                "by flashwarp.torch.create_table"
            )
        if record.optimizer != self._rule.name:
            raise CheckpointError(
                f"the rows of {path} hold the state of {record.optimizer!r}, not of "
                f"{self._rule.name!r}: use that optimizer, or make a new table from its weights",
                record.step,
            )
        if (record.rows, record.width, record.dim) != (*shape, dim):
            raise CheckpointError(
                f"the record of {path} describes {record.rows} rows of {record.width} elements, "
                f"{record.dim} of them weights; the module has {shape[0]} of {shape[1]}, {dim}",
                record.step,
            )
        if record.changing and not accept_newer:
            raise CheckpointError(
                f"{path} was being trained when its process ended: some rows are newer than its "
                f"last checkpoint, after step {record.step}. Restore it by "
                "flashwarp.torch.restore_table, or go on with it by accept_newer=True",
                record.step,
            )

    # Steps.

    def _rates(self, group: dict[str, Any]) -> dict[str, float]:  # noqa: ARG002 - a rule's own
        """Return the constants of `Rates` besides the learning rate."""
        return {}

    def _correction(
        self,
        group: dict[str, Any],  # noqa: ARG002
        step: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return a factor of the learning rate that depends on the step."""
        return None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows whose gradients `backward` has noted since `zero_grad`.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss again, as torch's optimizers take it.

        Returns
        -------
        The closure's result, or None.

        Raises
        ------
        BoundsError, StorageError
            On the CPU device. On a GPU, the next call on the array raises them. Rows without an
            error are updated.
        PathError
            If the record beside the table cannot be marked as changing. Then no row has changed.
        CaptureError
            If a learning rate on the host is captured; if gradients come from a capture and the
            step is not part of it, because replays would give them to no optimizer; and if a
            captured step would take gradients from outside, whose memory replays must not read.
            No row has changed then.
        ArgumentError
            If a newer optimizer trains one of the tables, or gradients do not fit.

        Notes
        -----
        Gradients of the same row are added up first. On a GPU the call waits for nothing, works in
        the order of torch's current stream, and can be captured in a CUDA graph; a learning rate
        that is a tensor may then change between replays. The first step after a checkpoint blocks
        for two fsyncs, to mark the record beside each table.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_owner()
        updates = [
            (self._tables[param], group, self.state[param])
            for group in self.param_groups
            for param in group["params"]
            if self._tables[param].module.pending
        ]
        # Before any row changes.
        captures = [_capture_of_step(table, group["lr"]) for table, group, _ in updates]
        self._captured = self._captured or any(each is not None for each in captures)
        for update in updates:
            self._update(*update)
        return loss

    def _check_owner(self) -> None:
        for table in self._tables.values():
            owner = _owners.get(table.module.array)
            if owner is None or owner() is not self:
                raise ArgumentError(
                    f"a newer optimizer trains the table {table.path or 'in memory'}, and both "
                    "would apply the same gradients: use the newer one"
                )

    def _update(self, table: _Trained, group: dict[str, Any], state: dict[str, Any]) -> None:
        ids, values = _joined(table)
        self._mark(table)
        state["step"].add_(1)
        count = ids.numel()
        if count == 0:
            return
        stream = None
        if values.is_cuda:
            stream = int(torch.cuda.current_stream(values.device).cuda_stream)
        ids, order = torch.sort(ids, stable=True)  # equal ids: always the same sum
        sums = torch.empty_like(values)
        copies = values.new_empty(table.update.copies_bytes(count) // 4)
        rate, scale = group["lr"], self._correction(group, state["step"])
        if isinstance(rate, torch.Tensor):
            scale = rate if scale is None else scale * rate.to(scale.device)
            rate = 1.0
        if scale is not None:
            scale = scale.to(values.device, torch.float32)
        step = Gradients(
            ids.data_ptr(),
            order.data_ptr(),
            values.data_ptr(),
            sums.data_ptr(),
            copies.data_ptr(),
            count,
        )
        address = 0 if scale is None else scale.data_ptr()
        table.update.launch(step, Rates(rate, scale=address, **self._rates(group)), stream)

    def _mark(self, table: _Trained) -> None:
        """Say in the record, before any row can reach the file, that rows may be newer."""
        if table.marked or table.path is None or table.record is None:
            return
        replace(table.record, changing=True).write(table.path)
        table.marked = True

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - as torch names it
        """Forget the gradients that `backward` has noted."""
        for table in self._tables.values():
            table.module.pending.clear()

    # Checkpoints.

    def checkpoint(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        extra: object = None,
        last: bool = False,
    ) -> Path | None:
        """Make the tables durable as they are after the steps so far, and copy them if asked.

        Parameters
        ----------
        folder : path-like, optional
            Where the copy goes, in a new folder ``step-N``: the file of each table, its record,
            `extra` as ``extra.pt``, and ``checkpoint.json``, which names them. Default: no copy.
        extra : object, optional
            What `torch.save` can save, such as the `state_dict` of the dense part of the model.
        last : bool
            No replay of a CUDA graph with a step follows. Without it, once a step was captured, the
            records go on to say that rows change.

        Returns
        -------
        pathlib.Path or None
            The new folder.

        Raises
        ------
        ArgumentError
            For `extra` without `folder`, for `folder` if a table lies in no file of its own, and if
            a newer optimizer trains one of the tables.
        StorageError, BoundsError
            As `Array.flush`: then there is no checkpoint, and the records stay as they were.
        ExistingFileError, PathError
            If the folder cannot be made, or has no room.
        CaptureError
            During the capture of a CUDA graph.

        Notes
        -----
        Blocks until all steps have ended and everything is durable; synchronise streams on which
        graphs with steps are replayed first. The new folder appears whole,
        with all tables as they are after the same step, or not at all. A file system with shared
        blocks (XFS, btrfs) copies in milliseconds; others copy every byte. Without `folder`, a
        later crash leaves rows that are newer than the checkpoint, and no way back to it.
        """
        self._check_owner()
        if folder is None and extra is not None:
            raise ArgumentError("extra= is saved in a folder: give folder= too")
        if folder is not None and not all(
            table.path is not None and table.record is not None for table in self._tables.values()
        ):
            raise ArgumentError(
                "a table without a record is copied by nobody: make it by create_table, or call "
                "checkpoint() without a folder"
            )
        for table in self._tables.values():
            table.module.array.flush()
        saved, records = [], []
        for param, table in self._tables.items():
            if table.path is None or table.record is None:
                continue
            now = replace(table.record, step=int(self.state[param]["step"]), changing=False)
            saved.append(checkpoint.Table(table.path, now))
            records.append((table, table.path, now))
        made = None
        if folder is not None:
            write = None if extra is None else lambda path: torch.save(extra, path)
            newest = max(each.record.step for each in saved)
            made = checkpoint.save(folder, newest, saved, write)
        changing = self._captured and not last
        for table, path, now in records:
            replace(now, changing=changing).write(path)
            table.record, table.marked = now, changing
        return made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that are added later: a table is given when the optimizer is made."""
        params = param_group["params"]
        if not all(param in self._tables for param in params):
            raise ArgumentError("tables are given when the optimizer is made, not added later")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load learning rates and the number of steps. The rows' state is in the table."""
        super().load_state_dict(state_dict)
        for param, table in self._tables.items():
            self.state[param]["step"] = self._on_device(table, self.state[param]["step"])

    def _on_device(self, table: _Trained, step: torch.Tensor) -> torch.Tensor:
        device = table.module.array.device
        place = "cpu" if device.kind == "cpu" else f"cuda:{device.ordinal}"
        return step.to(place, torch.int64)


def _groups_of(tables: object) -> list[dict[str, Any]]:
    """Return groups with lists of modules of tables, from what a caller gives."""
    given = [tables] if isinstance(tables, (torch.nn.Module, dict)) else tables
    if not isinstance(given, Iterable):
        raise ArgumentError(f"tables={tables!r}: give modules, or groups of them")
    groups: list[dict[str, Any]] = []
    alone: list[torch.nn.Module] = []
    for each in given:
        if isinstance(each, dict):
            if "tables" not in each:
                raise ArgumentError(f"a group has 'tables', and this one {sorted(each)}")
            inside = each["tables"]
            inside = [inside] if isinstance(inside, torch.nn.Module) else inside
            groups.append({**each, "tables": [t for m in inside for t in _tables_in(m)]})
        else:
            alone += _tables_in(each)
    if alone:
        groups.insert(0, {"tables": alone})
    if not groups:
        raise ArgumentError("no table: give modules as flashwarp.torch.Embedding")
    return groups


def _tables_in(module: object) -> list[torch.nn.Module]:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"a table is a module of torch, not {type(module).__name__}")
    found = [each for each in module.modules() if hasattr(each, "pending")]
    if not found:
        raise ArgumentError(
            f"{type(module).__name__} has no table of flashwarp: give the module of the table, or "
            "a model with one inside"
        )
    return found


def _capture_of_step(table: _Trained, rate: float | torch.Tensor) -> int | None:
    """Return the capture that a step becomes part of, or None; raises CaptureError if it cannot."""
    pending = table.module.pending
    now = capture_of(table.update.array.device, pending[0][1])
    for each in pending:
        noted = getattr(each, "capture", None)
        if noted == now:
            continue
        if noted is not None:
            raise CaptureError(
                "gradients of a table come from a backward in the capture of a CUDA graph, and the "
                "step is not in that capture, so replays would give them to no optimizer: capture "
                "the step behind the backward, or neither (torch.compile without "
                'mode="reduce-overhead"), and drop them by zero_grad()'
            )
        raise CaptureError(
            "gradients of a table come from a backward outside of the capture, and replays of the "
            "step would read them when they are gone: call zero_grad() and backward() in the "
            "capture"
        )
    if now is not None and isinstance(rate, torch.Tensor) and not rate.is_cuda:
        raise CaptureError(
            "a step whose lr is a tensor on the host cannot become part of a CUDA graph: put it "
            "on the GPU"
        )
    return now


def _joined(table: _Trained) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all ids and gradients that are pending, contiguous, on the table's device."""
    pending = table.module.pending
    device, dim = table.update.array.device, table.update.dim
    for ids, values in pending:
        if values.shape != (ids.numel(), dim):
            raise ArgumentError(
                f"gradients of shape {tuple(values.shape)} for {ids.numel()} ids and {dim} weights"
            )
        if values.device.type != device.kind or values.device.index not in (None, device.ordinal):
            raise ArgumentError(f"gradients on {values.device}, and the table on {device.name}")
    ids = torch.cat([ids.reshape(-1).to(torch.int64) for ids, _ in pending])
    values = torch.cat([values.to(torch.float32) for _, values in pending])
    return ids, values


def _check_rates(group: dict[str, Any]) -> None:
    for name in ("lr", "eps"):
        value = group.get(name, 0.0)
        if not isinstance(value, torch.Tensor) and not value >= 0:
            raise ArgumentError(f"{name}={value}: use 0 or more")
    for beta in group.get("betas", ()):
        if not 0 <= beta < 1:
            raise ArgumentError(f"betas={group['betas']}: use two of at least 0 and below 1")


class SGD(_TableOptimizer):
    """Stochastic gradient descent, as `torch.optim.SGD` without momentum does it.

    Parameters
    ----------
    tables : Module, or list of Module or dict
        Modules of tables, or models with them inside; or groups, dicts with "tables" and their own
        learning rate.
    lr : float or Tensor
        Learning rate. Schedulers of torch change it.
    accept_newer : bool
        Go on with a table whose process ended between checkpoints.

    Raises
    ------
    ReadOnlyError, DtypeError, ArgumentError
        If a table was opened for reading, has another dtype than float32, or rows that are too
        short.
    CheckpointError
        If the rows hold the state of another optimizer, or are newer than the last checkpoint.
    """

    _rule = RULES["sgd"]

    def __init__(
        self, tables: object, lr: float | torch.Tensor = 1e-3, *, accept_newer: bool = False
    ) -> None:
        super().__init__(tables, {"lr": lr}, accept_newer)


class Adagrad(_TableOptimizer):
    """Adagrad with a state for each weight, as `torch.optim.Adagrad` on sparse gradients does it.

    Parameters
    ----------
    tables, accept_newer
        As for `SGD`.
    lr : float or Tensor
        Learning rate.
    eps : float
        Added to the root of the sum of squares.

    Notes
    -----
    `create_table` sets the initial sums of squares, by ``state=``.
    """

    _rule = RULES["adagrad"]

    def __init__(
        self,
        tables: object,
        lr: float | torch.Tensor = 1e-2,
        *,
        eps: float = 1e-10,
        accept_newer: bool = False,
    ) -> None:
        super().__init__(tables, {"lr": lr, "eps": eps}, accept_newer)

    def _rates(self, group: dict[str, Any]) -> dict[str, float]:
        return {"epsilon": group["eps"]}


class RowWiseAdagrad(Adagrad):
    """Adagrad with one state for each row: the sum over steps of the gradient's mean square.

    Parameters
    ----------
    tables, lr, accept_newer
        As for `SGD`.
    eps : float
        Added to the root of the state.
    """

    _rule = RULES["rowwise_adagrad"]

    def __init__(
        self,
        tables: object,
        lr: float | torch.Tensor = 1e-2,
        *,
        eps: float = 1e-8,
        accept_newer: bool = False,
    ) -> None:
        super().__init__(tables, lr, eps=eps, accept_newer=accept_newer)


class Adam(_TableOptimizer):
    """Adam that changes only rows with gradients, as `torch.optim.SparseAdam`.

    Parameters
    ----------
    tables, accept_newer
        As for `SGD`.
    lr : float or Tensor
        Learning rate.
    betas : (float, float)
        How much of the mean and of the mean square each step keeps.
    eps : float
        Added to the root of the mean square.

    Notes
    -----
    The correction of bias counts the steps of the table, not those of a row. The moments of a row
    do not decay in steps that do not use it.
    """

    _rule = RULES["adam"]

    def __init__(
        self,
        tables: object,
        lr: float | torch.Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        accept_newer: bool = False,
    ) -> None:
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps}, accept_newer)

    def _rates(self, group: dict[str, Any]) -> dict[str, float]:
        first, second = group["betas"]
        return {"epsilon": group["eps"], "mean_rate": 1 - first, "square_rate": 1 - second}

    def _correction(self, group: dict[str, Any], step: torch.Tensor) -> torch.Tensor:
        first, second = group["betas"]
        count = step.to(torch.float64)
        return torch.sqrt(1 - second**count) / (1 - first**count)
