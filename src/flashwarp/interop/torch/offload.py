"""`offload`: tables of a model that stay in its checkpoint, and are read row by row.

A module keeps its code, its place in the model and its name; only its parameter `weight` goes. What
takes its place, a `TableWeight`, has shape, dtype and device, and answers `embedding` and
`embedding_bag` of `torch.nn.functional` from the storage. So subclasses of `torch.nn.Embedding`
that scale or project their rows go on doing so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from flashwarp._names import renamed
from flashwarp.cache.cache import Cache
from flashwarp.config import flag, integer, parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.endings import Closing
from flashwarp.errors import ClosedError
from flashwarp.interop.torch.offloading.modules import device_of, refuse_ties, tables_of
from flashwarp.interop.torch.offloading.plan import Need, Plan
from flashwarp.interop.torch.offloading.stats import OffloadStats, TableStats
from flashwarp.interop.torch.offloading.table import ModelTable, OpenedTable
from flashwarp.interop.torch.offloading.tensors import find_tensors
from flashwarp.interop.torch.offloading.weight import TableWeight
from flashwarp.policy import Policy
from flashwarp.storage.safetensors import Checkpoint, Tensor, read_checkpoint


@renamed
def offload(
    model: torch.nn.Module,
    pattern: str | Sequence[str],
    files: Checkpoint,
    *,
    host_memory: int | str = "2 GiB",
    gpu_memory: int | str = "1 GiB",
    device: Device | str | None = None,
    names: Mapping[str, str | Sequence[str]] | None = None,
    rows_per_step: int | None = None,
    line: int | str | None = None,
    policy: str | Policy = "clock",
    immutable: bool = False,
) -> Offloaded:
    """Let embedding tables of a model stay in its checkpoint, within limits of memory.

    The parameter `weight` of each table is removed from the model, and its memory is free. Lookups
    then read rows from the safetensors files as they are: nothing is copied or converted before.

    Parameters
    ----------
    model : torch.nn.Module
        Loaded, or on the meta device.
    pattern : str or sequence of str
        Names of modules, with ``*`` and ``?`` as in `fnmatch`; ``*`` matches dots too. A module
        that contains tables stands for all of them.
    files : path-like or sequence of path-like
        The checkpoint: its folder, its index, or its ``.safetensors`` files.
    host_memory : int or str
        Most bytes of host memory: pinned pages of files, buffers of rings, and a tier of lines that
        left the cache. Tables that fit are read in place. The kernel's page cache beyond that is
        not counted, since the kernel reclaims it. On the CPU device the cache counts here too.
    gpu_memory : int or str
        Most bytes of GPU memory, for one cache that all tables share and what belongs to it.
    device : Device or str, optional
        Where rows are looked up. Default: where the parameters of the model are, else cuda:0 if
        it works, else the CPU.
    names : mapping, optional
        Names of tensors, or of several whose rows follow one another, by names of modules. Default:
        the module's name and ``.weight``, with or without the usual prefixes (``model.``,
        ``language_model.``), or its parts ``.shard_0.weight``, ``.shard_1.weight`` and so on.
    rows_per_step : int, optional
        Rows that a step looks up in all tables together, to be checked against `gpu_memory` now.
        Longer lookups then pass their rows through the cache in turn. Default: each eager lookup
        is checked, and refused if the cache cannot hold its rows.
    line : int or str, optional
        Bytes of a line. Default: the least that holds the longest row, from 512 to 4096.
    policy : str or Policy
        Which line is evicted; see docs/caches.md.
    immutable : bool
        Your promise that nobody writes the files meanwhile, as for `flashwarp.open`.

    Returns
    -------
    Offloaded
        Close it, or use it in a ``with`` statement.

    Raises
    ------
    ArgumentError
        If no module matches, or one that does is no table; if a table is used as a matrix elsewhere
        (tied weights); if no tensor, or more than one, has its name.
    FileFormatError, MissingFileError
        If the checkpoint is damaged or incomplete, or its tensor has another shape than the module.
    DtypeError
        If rows of the tensor's dtype cannot be looked up.
    CacheError
        If `host_memory` or `gpu_memory` is less than the tables need, or than `rows_per_step` does;
        the message has the number of bytes that suffice.

    Notes
    -----
    Nothing changes in the model if this raises. `state_dict` of the model raises CopyError, because
    it would lack the tables: `Offloaded.rest` is the state without them. Load other weights with
    ``strict=False``. Lookups give rows in the dtype that `weight`
    had, and no gradient: a table that required one refuses lookups in training. Streams, graphs and
    errors are as for `flashwarp.torch.gather`.

    Examples
    --------
    >>> import json, torch, flashwarp.torch
    >>> entry = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}
    >>> head = json.dumps({"model.ngrams.weight": entry}).encode()
    >>> rows = torch.arange(6.0).numpy().tobytes()
    >>> with open("x.safetensors", "wb") as file:
    ...     _ = file.write(len(head).to_bytes(8, "little") + head + rows)
    >>> with torch.device("meta"):
    ...     model = torch.nn.ModuleDict({"ngrams": torch.nn.Embedding(3, 2)}).eval()
    >>> with flashwarp.torch.offload(model, "ngrams", "x.safetensors", device="cpu"):
    ...     model["ngrams"](torch.tensor([2, 0])).tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    """
    tables = tables_of(model, pattern)
    refuse_ties(model, tables)
    find_tensors(tables, read_checkpoint(files), {} if names is None else names)
    where = resolve(device_of(model) if device is None else device)
    need = Need.of(tables, line)
    limits = parse_bytes(host_memory, "host_memory"), parse_bytes(gpu_memory, "gpu_memory")
    plan = Plan(where, need, *limits, policy, flag("immutable", immutable))
    if rows_per_step is not None:
        plan.check_rows(integer("rows_per_step", rows_per_step, 1, 1 << 40))
    plan.checks_lookups = rows_per_step is None
    with contextlib.ExitStack() as opened:
        cache, arrays = plan.open(tables, opened)
        offloaded = Offloaded(model, tables, cache, arrays, plan)
        opened.pop_all()
    return offloaded


@renamed
class Offloaded(Closing):
    """The tables of a model that `offload` left in its checkpoint.

    Attributes
    ----------
    tables : dict of str to Array
        The array of each module, for `Array.stats`, `explain` or `prefetch`.
    cache : Cache
        Of all of them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tables: Sequence[ModelTable],
        cache: Cache,
        arrays: Sequence[OpenedTable],
        plan: Plan,
    ) -> None:
        self._closed = False
        self._model = model
        self._arrays = [array for each in arrays for array in each.arrays]
        self._plan = plan
        self._tables = list(tables)
        self.cache = cache
        self.tables = {n: a.rows for t, a in zip(tables, arrays, strict=True) for n in t.names}
        device = torch.device(plan.device.name)
        self._weights = [
            TableWeight(table, opened, plan, device)
            for table, opened in zip(tables, arrays, strict=True)
        ]
        for table, weight in zip(tables, self._weights, strict=True):
            # Its memory goes as soon as nobody else holds the parameter.
            table.weight = table.weight.detach().to("meta")
            for module in table.modules:
                del module._parameters["weight"]
                module.weight = weight
        for module in model.modules():
            if _weights_in(module):  # torch freezes `parameters`, which leave the tables out
                module.requires_grad_ = partial(_requires_grad, module)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the checkpoint that hold the rows."""
        return [tensor for table in self._tables for tensor in table.tensors]

    def rest(self) -> dict[str, Any]:
        """Return the `state_dict` of the model without offloaded tables.

        Save it beside the checkpoint, which has their rows; or fill its tensors, which are those of
        the model, by ``flashwarp.load(files, into=offloaded.rest())``.
        """
        weights = _weights_in(self._model)
        try:
            for each in weights:
                each.left_out = True
            return dict(self._model.state_dict())
        finally:
            for each in weights:
                each.left_out = False

    @property
    def stats(self) -> OffloadStats:
        """What the tables did since they were offloaded; waits for lookups that run."""
        if self._closed:
            raise ClosedError("the tables are closed: ask for the stats before")
        tables = []
        for table, weight in zip(self._tables, self._weights, strict=True):
            array = self.tables[table.name]
            counts = array.stats
            tables.append(
                TableStats(
                    name=table.name,
                    rows=int(table.weight.shape[0]),
                    row_bytes=table.row_bytes,
                    route=array.service.route,
                    hits=counts.hits,
                    misses=counts.misses,
                    bytes_looked_up=counts.bytes_used,
                    bytes_from_storage=counts.bytes_read,
                    bytes_from_host=counts.tier_hits * self.cache.line_bytes,
                    seconds_per_lookup=weight.clock.mean(),
                )
            )
        plan, held = self._plan, self.cache.capacity + self.cache.metadata_bytes
        pinned = sum(
            table.pinned_bytes
            for table in self._tables
            if self.tables[table.name].service.route == "in_place"
        )
        host = plan.rings + self.cache.host_memory + pinned
        return OffloadStats(
            tuple(tables),
            gpu_bytes=held + plan.fixed if plan.on_gpu else 0,
            host_bytes=host if plan.on_gpu else held,
        )

    def close(self) -> None:
        """Close the tables. Their modules have a parameter on the meta device again.

        Load the checkpoint to use them: `offload` does not keep what it has removed. May be called
        twice. Raises CaptureError while a CUDA graph reads a table: lose the graph, and call it
        again.
        """
        if self._closed:
            return
        for array in self._arrays:
            array.close()
        for weight in self._weights:
            weight.close()
        self.cache.close()
        self._closed = True
        for table, weight in zip(self._tables, self._weights, strict=True):
            trained = weight.requires_grad
            parameter = torch.nn.Parameter(table.weight, requires_grad=trained)
            for module in table.modules:
                if module.__dict__.get("weight") is weight:
                    del module.weight
                    module.register_parameter("weight", parameter)
        for module in self._model.modules():
            own = module.__dict__.get("requires_grad_")
            if getattr(own, "func", None) is _requires_grad and not _weights_in(module):
                del module.requires_grad_

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._plan.device.name
        return f"Offloaded({list(self.tables)}, {state})"


def _weights_in(module: torch.nn.Module) -> list[TableWeight]:
    held = [each.__dict__.get("weight") for each in module.modules()]
    return [each for each in held if isinstance(each, TableWeight)]


def _requires_grad(module: torch.nn.Module, requires_grad: bool = True) -> torch.nn.Module:
    """Do as `requires_grad_` of a module does, for its offloaded tables too."""
    type(module).requires_grad_(module, requires_grad)
    for weight in _weights_in(module):
        weight.requires_grad_(requires_grad)
    return module
