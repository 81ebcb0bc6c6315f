"""What optimizers of tables are given, by callers and by backwards: groups, rates, gradients.

All of it is checked before any row changes; errors say what cannot be used, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashwarp.config import number
from flashwarp.errors import ArgumentError, CaptureError, DtypeError, IndexDtypeError
from flashwarp.interop.torch.gradients import capture_of
from flashwarp.interop.torch.operators import check_plain
from flashwarp.table.progress import Progress
from flashwarp.table.update import RowUpdate

# What a float32 can be; rates are such.
_RATE_MAX = 3.4028234663852886e38
# Keys of a group beside its rates: those of ours, and those that schedulers add.
_GROUP_KEYS = frozenset({"tables", "initial_lr"})


@dataclass(eq=False)
class Trained:
    """A table: its module, its updates, and how far it is trained."""

    module: torch.nn.Module
    update: RowUpdate
    progress: Progress


def _several(tables: object) -> list[object]:
    """Return modules or groups as a list; raises ArgumentError for what holds none."""
    if isinstance(tables, torch.nn.Module | dict):
        return [tables]
    if not isinstance(tables, Iterable) or isinstance(tables, torch.Tensor):
        raise ArgumentError(f"tables={tables!r}: give modules, or groups of them")
    return list(tables)


def groups_of(tables: object, defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return groups with lists of modules of tables, from what a caller gives."""
    groups: list[dict[str, Any]] = []
    alone: list[torch.nn.Module] = []
    for each in _several(tables):
        if isinstance(each, dict):
            known = _GROUP_KEYS | defaults.keys()
            if "tables" not in each or not known >= each.keys():
                raise ArgumentError(
                    f"a group has 'tables', and may have {', '.join(sorted(known))}; this one has "
                    f"{', '.join(map(repr, each)) or 'nothing'}"
                )
            inside = [t for m in _several(each["tables"]) for t in _tables_in(m)]
            groups.append({**each, "tables": inside})
        else:
            alone += _tables_in(each)
    if alone:
        groups.insert(0, {"tables": alone})
    if not groups:
        raise ArgumentError("no table: give modules as flashwarp.torch.Embedding")
    return groups


def _tables_in(module: object) -> list[torch.nn.Module]:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"a table is a module of torch, not {type(module).__name__}: give the module, or a "
            "model with tables inside, not its parameters"
        )
    found = [each for each in module.modules() if hasattr(each, "pending")]
    if not found:
        raise ArgumentError(
            f"{type(module).__name__} has no table of flashwarp: give the module of the table, or "
            "a model with one inside"
        )
    return found


def capture_of_step(table: Trained, rate: float | torch.Tensor) -> int | None:
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


def check_pending(table: Trained) -> None:
    """Raise unless all that is pending are ids and gradients of their rows."""
    table.update.array._turns.check_usable()
    device, dim = table.update.array.device, table.update.dim
    for each in table.module.pending:
        pair = each if isinstance(each, tuple | list) else ()
        if len(pair) != 2 or not all(isinstance(part, torch.Tensor) for part in pair):
            raise ArgumentError(
                f"pending has an entry of type {type(each).__name__}: it has pairs of tensors, ids "
                "and gradients"
            )
        ids, values = pair
        check_plain(ids=ids, gradients=values)
        if ids.dtype not in (torch.int64, torch.int32):
            raise IndexDtypeError(f"pending ids have dtype {ids.dtype}: use int64 or int32")
        if not values.dtype.is_floating_point:
            raise DtypeError(f"pending gradients have dtype {values.dtype}: use float32")
        if values.shape != (ids.numel(), dim):
            raise ArgumentError(
                f"gradients of shape {tuple(values.shape)} for {ids.numel()} ids and {dim} weights"
            )
        if values.device.type != device.kind or values.device.index not in (None, device.ordinal):
            raise ArgumentError(f"gradients on {values.device}, and the table on {device.name}")
        if ids.device != values.device:
            raise ArgumentError(f"gradients on {values.device}, and their ids on {ids.device}")


def joined(table: Trained) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all ids and gradients that are pending, contiguous, on the table's device."""
    pending = table.module.pending
    ids = torch.cat([ids.reshape(-1).to(torch.int64) for ids, _ in pending])
    values = torch.cat([values.to(torch.float32) for _, values in pending])
    return ids, values


def check_rates(group: Mapping[str, Any]) -> None:
    """Raise ArgumentError for rates of a group that no step can use."""
    rate = group.get("lr", 0.0)
    if isinstance(rate, torch.Tensor):
        check_plain(lr=rate)
        real = rate.dtype.is_floating_point and rate.device.type != "meta"
        # What a GPU has is not looked at, since that would wait for it.
        if not real or rate.numel() != 1 or (not rate.is_cuda and not 0 <= rate <= _RATE_MAX):
            raise ArgumentError(f"lr={rate}: as a tensor, it is one float of 0 or more")
    else:
        number("lr", rate, 0, _RATE_MAX)
    number("eps", group.get("eps", 0.0), 0, _RATE_MAX)
    number("weight_decay", group.get("weight_decay", 0.0), 0, _RATE_MAX)
    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ArgumentError(f"betas={betas!r}: use two numbers of at least 0 and below 1")
    for beta in betas:
        if number("betas", beta, 0, 1) == 1:
            raise ArgumentError(f"betas={betas!r}: use two numbers of at least 0 and below 1")


def has_step(state: object) -> bool:
    """Whether the state of a table has the number of its steps."""
    step = state.get("step") if isinstance(state, Mapping) else None
    return (
        isinstance(step, torch.Tensor)
        and step.device.type != "meta"
        and step.numel() == 1
        and step.dtype == torch.int64
    )


def save_extra(extra: object, path: Path) -> None:
    """Save what a checkpoint has beside its tables."""
    try:
        with open(path, "wb") as file:  # whose errors are those of the system, unlike torch's own
            torch.save(extra, file)
    except OSError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"torch.save cannot save extra= ({error!r}): give a dict of tensors"
        ) from error
