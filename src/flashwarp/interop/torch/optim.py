"""Optimizers of torch for tables in a storage: they update only the rows that a step has used."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.checkpoint.nested import note_rows
from flashwarp.config import flag
from flashwarp.errors import (
    ArgumentError,
    CheckpointError,
    CopyError,
)
from flashwarp.interop.torch.operators import torch_device
from flashwarp.interop.torch.steps import (
    Trained,
    capture_of_step,
    check_pending,
    check_rates,
    groups_of,
    has_step,
    joined,
    save_extra,
)
from flashwarp.storage import files
from flashwarp.table import checkpoint
from flashwarp.table.progress import Progress, settle
from flashwarp.table.record import Record
from flashwarp.table.update import RULES, Gradients, Rates, RowUpdate, Rule

# The newest optimizer of each table. Two would apply the same gradients twice.
_owners: weakref.WeakKeyDictionary[Array, weakref.ref[_TableOptimizer]] = (
    weakref.WeakKeyDictionary()
)


class _TableOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """What the optimizers of tables share; `step`, `zero_grad` and `checkpoint` are of all."""

    _rule: Rule

    def __init__(self, tables: object, defaults: dict[str, Any], accept_newer: bool) -> None:
        accept_newer = flag("accept_newer", accept_newer)
        check_rates(defaults)
        groups = groups_of(tables, defaults)
        self._tables: dict[torch.Tensor, Trained] = {}
        self._captured = False
        self._complete = False
        ready = []
        for group in groups:
            check_rates({**defaults, **group})
            params = []
            for module in group.pop("tables"):
                table = self._open(module, accept_newer)
                # Groups of torch have parameters. A table has none, so an empty one stands for it.
                param = torch.nn.Parameter(torch.empty(0), requires_grad=False)
                self._tables[param] = table
                params.append(param)
            ready.append({**group, "params": params})
        super().__init__(ready, defaults)
        self._complete = True
        for param, table in self._tables.items():
            record = table.progress.record
            step = 0 if record is None else record.step
            self.state[param]["step"] = self._on_device(table, torch.tensor(step))
            _owners[table.module.array] = weakref.ref(self)

    def _open(self, module: torch.nn.Module, accept_newer: bool) -> Trained:
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
        settle(array._attachment)
        record = None if path is None else Record.read(path)
        if path is not None:
            self._check_record(path, record, array.shape, dim, accept_newer)
        return Trained(module, update, Progress(array._attachment, path, record))

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
        if not record.changing:
            return
        if not accept_newer:
            raise CheckpointError(
                f"{path} was being trained when its process was killed, or was closed after a "
                "step or a flush that failed: some rows are newer than its last checkpoint, after "
                f"step {record.step}, and how many steps followed is lost. Restore it by "
                "flashwarp.torch.restore_table, or go on with it from that step by "
                "accept_newer=True",
                record.step,
            )
        warnings.warn(
            f"the training of {path} goes on from step {record.step}, that of its last checkpoint, "
            "but weights, moments and other state of its rows may be of later steps",
            stacklevel=5,  # who has made the optimizer
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
        for two fsyncs, to mark the record beside each table. Closing the array, or the end of the
        program, flushes the table and writes the present step to the record, as `checkpoint` does
        without a folder: unless a step was under way or has failed, or a CUDA graph may replay one.
        """
        if closure is not None and not callable(closure):
            raise ArgumentError(f"closure={closure!r} cannot be called: give a function, or None")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_owner()
        for table in self._tables.values():
            table.module._collect()
        updates = [
            (self._tables[param], group, self.state[param])
            for group in self.param_groups
            for param in group["params"]
            if self._tables[param].module.pending
        ]
        # Before any row changes.
        for table, group, _ in updates:
            check_rates(group)
            check_pending(table)
        captures = [capture_of_step(table, group["lr"]) for table, group, _ in updates]
        self._captured = self._captured or any(each is not None for each in captures)
        locks = [table.progress.lock for table, _, _ in updates]
        endings.holding(locks, functools.partial(self._update_all, updates))
        return loss

    def _update_all(self, updates: list[tuple[Trained, dict[str, Any], dict[str, Any]]]) -> None:
        for table, _, state in updates:
            table.progress.step = state["step"]
            table.progress.mark()
        # A step that failed before stays noted until the next checkpoint.
        whole = [table.progress for table, _, _ in updates if not table.progress.failed]
        for progress in whole:
            progress.failed = True
        for update in updates:
            self._update(*update)
        for progress in whole:
            progress.failed = False

    def _check_owner(self) -> None:
        for table in self._tables.values():
            owner = _owners.get(table.module.array)
            if owner is None or owner() is not self:
                raise ArgumentError(
                    f"a newer optimizer trains the table {table.progress.path or 'in memory'}, and "
                    "both would apply the same gradients: use the newer one"
                )

    def _update(self, table: Trained, group: dict[str, Any], state: dict[str, Any]) -> None:
        ids, values = joined(table)
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
        factor: Any = 1.0
        if isinstance(rate, torch.Tensor):
            factor, rate = rate.reshape(()), 1.0
            scale = factor if scale is None else scale * factor.to(scale.device)
        if scale is not None:
            # Of the rate and, behind it, of the decay, which no bias is corrected of.
            scale = torch.stack([scale.reshape(()), scale.new_ones(()) * factor])
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
        decay = rate * group.get("weight_decay", 0.0)
        rates = Rates(rate, scale=address, decay=decay, **self._rates(group))
        table.update.launch(step, rates, stream)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - as torch names it
        """Forget the gradients that `backward` has noted."""
        for table in self._tables.values():
            table.module._forget()

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
        last = flag("last", last)
        if folder is not None:
            folder = files.check_name(folder)
        if folder is None and extra is not None:
            raise ArgumentError("extra= is saved in a folder: give folder= too")
        progresses = [table.progress for table in self._tables.values()]
        if folder is not None and not all(each.path and each.record for each in progresses):
            raise ArgumentError(
                "a table without a record is copied by nobody: make it by create_table, or call "
                "checkpoint() without a folder"
            )
        for table in self._tables.values():
            table.module.array.flush()
        saved = []
        for param, table in self._tables.items():
            table.progress.step = self.state[param]["step"]
            if table.progress.path and table.progress.record:
                now = checkpoint.Table(table.progress.path, table.progress.now())
                saved.append((table.progress, now))
        made = None
        if folder is not None:
            write = None if extra is None else functools.partial(save_extra, extra)
            tables = [now for _, now in saved]
            newest = max(each.record.step for each in tables)
            made = checkpoint.save(folder, newest, tables, write)
        changing = self._captured and not last
        for progress, now in saved:
            progress.note(now.record, changing)
        return made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that are added later: a table is given when the optimizer is made."""
        if self._complete:
            raise ArgumentError("tables are given when the optimizer is made, not added later")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return learning rates and the number of steps. The rows' state is in the table."""
        state: Any = OrderedDict(super().state_dict())
        state._metadata = {"": {}}  # as that of modules, which have it for what they lack
        note_rows(state._metadata[""])
        found: dict[str, Any] = state
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load learning rates and the number of steps. The rows' state is in the table.

        Raises ArgumentError, and changes nothing, for what `state_dict` of an optimizer of this
        kind for as many tables has not returned.
        """
        self._check_state_dict(state_dict)
        super().load_state_dict(state_dict)
        for param, table in self._tables.items():
            self.state[param]["step"] = self._on_device(table, self.state[param]["step"])

    def _check_state_dict(self, state_dict: object) -> None:
        found = dict(state_dict) if isinstance(state_dict, Mapping) else {}
        states: Any = found.get("state")
        groups: Any = found.get("param_groups")
        numbers: list[object] = []
        fits = isinstance(states, Mapping) and isinstance(groups, list)
        if fits and len(groups) == len(self.param_groups):
            for own, group in zip(self.param_groups, groups, strict=True):
                listed: Any = group.get("params") if isinstance(group, Mapping) else None
                fits = fits and isinstance(listed, list) and len(listed) == len(own["params"])
                if fits:
                    numbers += listed
                    earlier = {"weight_decay": 0.0, **group}  # states made before there was one
                    check_rates({name: earlier.get(name) for name in self.defaults if name in own})
        steps = [states.get(each) for each in numbers if isinstance(each, int | str)]
        if not steps or len(steps) != len(self._tables) or not all(map(has_step, steps)):
            raise ArgumentError(
                f"the state_dict is not one of {type(self).__name__} for {len(self._tables)} "
                f"tables in {len(self.param_groups)} groups: give what its state_dict() returned"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles."""
        raise CopyError(
            "an optimizer of tables cannot be copied or pickled, because two would apply the same "
            "gradients: save its state_dict(), and make it again where you need it"
        )

    def _on_device(self, table: Trained, step: torch.Tensor) -> torch.Tensor:
        return step.to(torch_device(table.module.array.device), torch.int64)


class SGD(_TableOptimizer):
    """Stochastic gradient descent, as `torch.optim.SGD` without momentum does it.

    Parameters
    ----------
    tables : Module, or list of Module or dict
        Modules of tables, or models with them inside; or groups, dicts with "tables" and their own
        learning rate.
    lr : float or Tensor
        Learning rate. Schedulers of torch change it.
    weight_decay : float
        Times `lr`, the part of a weight that goes in each step. Rows that a step does not use stay.
    accept_newer : bool
        Go on with a table whose process was killed between checkpoints, from the step of the last
        one; a warning names it.

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
        self,
        tables: object,
        lr: float | torch.Tensor = 1e-3,
        *,
        weight_decay: float = 0.0,
        accept_newer: bool = False,
    ) -> None:
        super().__init__(tables, {"lr": lr, "weight_decay": weight_decay}, accept_newer)


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


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`, for the rows that a step uses.

    Parameters
    ----------
    tables, lr, betas, eps, accept_newer
        As for `Adam`, whose tables it trains too.
    weight_decay : float
        Times `lr`, the part of a weight that goes in each step. Rows that a step does not use stay.

    Notes
    -----
    `eps` is added before the bias is corrected, as `torch.optim.SparseAdam` does.
    """

    def __init__(
        self,
        tables: object,
        lr: float | torch.Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        accept_newer: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _TableOptimizer.__init__(self, tables, defaults, accept_newer)
