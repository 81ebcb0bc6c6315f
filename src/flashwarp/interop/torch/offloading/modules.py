"""Which modules of a model are tables, and which of these can be offloaded."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from flashwarp.errors import ArgumentError
from flashwarp.interop.torch.offloading.table import ModelTable, weight_name
from flashwarp.interop.torch.offloading.weight import TableWeight


def _patterns(pattern: str | Sequence[str]) -> list[str]:
    patterns = [pattern] if isinstance(pattern, str) else pattern
    if (
        not isinstance(patterns, list | tuple | set)
        or not patterns
        or not all(isinstance(each, str) and each for each in patterns)
    ):
        raise ArgumentError(f"pattern={pattern!r} names no modules: give names, such as 'embed*'")
    return list(patterns)


def tables_of(model: torch.nn.Module, pattern: str | Sequence[str]) -> list[ModelTable]:
    """Return the tables that patterns name; those that share a parameter are one.

    Raises ArgumentError for a pattern that matches nothing, or something that is no table.
    """
    patterns = _patterns(pattern)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model is a torch.nn.Module, not {type(model).__name__}")
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, torch.nn.Module] = {}
    for pattern in patterns:
        found = {n: m for n, m in modules.items() if fnmatch.fnmatchcase(n, pattern)}
        if not found:
            _raise_no_match(pattern, modules)
        for name, module in found.items():
            chosen |= _tables_in(name, module)
    tables: dict[int, ModelTable] = {}
    for name, module in chosen.items():
        weight: Any = module.weight
        table = tables.setdefault(id(weight), ModelTable([], [], weight))
        table.names.append(name)
        if not any(module is each for each in table.modules):
            table.modules.append(module)
    return list(tables.values())


def _tables_in(name: str, module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the module if it is a table, else the tables that it contains."""
    inside = dict(module.named_modules(prefix=name, remove_duplicate=False))
    found = {n: m for n, m in inside.items() if _looks_up(m)}
    if not found:
        weight = getattr(module, "weight", None)
        if isinstance(weight, TableWeight):
            raise ArgumentError(f"{name!r} is offloaded already: close that first")
        raise ArgumentError(
            f"{name!r}, a {type(module).__name__}, is no embedding and contains none: a table has "
            "a parameter weight with two axes, which torch.nn.functional.embedding or "
            "embedding_bag looks up"
        )
    for each, table in found.items():
        _refuse_unsuitable(each, table)
    return found


def _looks_up(module: torch.nn.Module) -> bool:
    """Whether a module has a table of rows and looks them up."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return False
    code = getattr(type(module).forward, "__code__", None)
    return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or (
        code is not None and not {"embedding", "embedding_bag"}.isdisjoint(code.co_names)
    )


def _refuse_unsuitable(name: str, module: torch.nn.Module) -> None:
    if "weight" not in module._parameters:
        raise ArgumentError(
            f"the weight of {name!r} is no plain parameter (parametrized or computed): remove what "
            "computes it first"
        )
    if getattr(module, "max_norm", None) is not None:
        raise ArgumentError(f"{name!r} has max_norm=, which changes rows when they are looked up")
    if getattr(getattr(module, "_hf_hook", None), "offload", False):
        raise ArgumentError(
            f"accelerate moves the weight of {name!r} in and out of memory already: load the model "
            "without it on 'cpu' or 'disk' in device_map"
        )


def _raise_no_match(pattern: str, modules: Mapping[str, torch.nn.Module]) -> NoReturn:
    tables = [name for name, module in modules.items() if _looks_up(module)]
    near = difflib.get_close_matches(pattern.replace("*", ""), tables, 5, 0.0)
    has = f"the nearest tables are {', '.join(map(repr, near))}" if near else "it has no tables"
    raise ArgumentError(f"pattern {pattern!r} matches no module of the model: {has}")


def refuse_ties(model: torch.nn.Module, tables: Sequence[ModelTable]) -> None:
    """Raise ArgumentError if a weight is a parameter of other modules too."""
    owners: dict[tuple[object, ...], list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(_memory_of(parameter), []).append(name)
    for table in tables:
        mine = set(map(weight_name, table.names))
        others = [name for name in owners[_memory_of(table.weight)] if name not in mine]
        if others:
            raise ArgumentError(
                f"the weight of {table.name!r} is tied: it is {', '.join(others)} too, which would "
                "be left without it. Match all modules that look it up; a weight that is "
                "multiplied with, as that of an output layer, must be untied first"
            )


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is equal for tensors of the same memory; on the meta device, for one tensor."""
    if tensor.device.type == "meta":
        return ("meta", id(tensor))
    return (str(tensor.device), tensor.untyped_storage().data_ptr(), tensor.storage_offset())


def device_of(model: torch.nn.Module) -> str | None:
    """Return the device of its parameters; None if they are all on the meta device."""
    for tensor in model.parameters():
        if tensor.device.type != "meta":
            index = tensor.device.index
            return tensor.device.type if index is None else f"{tensor.device.type}:{index}"
    return None
