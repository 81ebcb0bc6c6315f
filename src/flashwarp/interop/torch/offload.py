"""`offload`: tables of a model that stay in its checkpoint, and are read row by row.

A module keeps its code, its place in the model and its name; only its parameter `weight` goes. What
takes its place, a `TableWeight`, has shape, dtype and device, and answers `torch.nn.functional.
embedding` from the storage. So subclasses of `torch.nn.Embedding` that scale or project their rows
go on doing so.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from flashwarp.array.array import Array
from flashwarp.array.opening import open as open_array
from flashwarp.cache.cache import LINE_BYTES_MIN, Cache, check_line
from flashwarp.config import cores, integer, parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.endings import Closing
from flashwarp.errors import (
    ArgumentError,
    CacheError,
    ClosedError,
    DtypeError,
    FileFormatError,
    ReadOnlyError,
)
from flashwarp.interop.torch.embedding import Embedding
from flashwarp.nvme.software import SoftwareController
from flashwarp.policy import Policy, resolve_policy
from flashwarp.storage.composite import Concatenated, Extent
from flashwarp.storage.files import open_for_reading
from flashwarp.storage.safetensors import Checkpoint, Tensor, read_checkpoint

__all__ = ["OffloadReport", "Offloaded", "TableReport", "TableWeight", "offload"]

# numpy's dtype of the stored bytes, and torch's of the numbers.
_STORED = {
    "F32": ("f4", torch.float32),
    "F16": ("f2", torch.float16),
    "BF16": ("u2", torch.bfloat16),
    "F8_E4M3": ("u1", torch.float8_e4m3fn),
    "F8_E5M2": ("u1", torch.float8_e5m2),
    "I8": ("i1", torch.int8),
}
# Of these, the dtypes whose rows are multiplied by scales, if the checkpoint has any.
_SCALED = ("F8_E4M3", "F8_E5M2", "I8")
_FLOATS = ("F32", "F16", "BF16")

# What libraries put before the name of a module, or leave out, without meaning another one.
_WRAPPERS = frozenset(
    ["module", "_orig_mod", "model", "base_model", "language_model", "text_model", "transformer"]
)

# Names of scales, after the name of their module.
_SCALE_NAMES = ("weight_scale", "weight_scale_inv", "weight.scale", "scale", "scales")

# Memory of an array on a GPU beside its lines: at most 8 MiB of missed lines, queues and counters.
_ARRAY_GPU_BYTES = 10 << 20
# Host memory of an array beside the buffers of its rings: records of errors, queues.
_ARRAY_HOST_BYTES = 1 << 20
# Of the cache itself, beside what grows with its lines.
_CACHE_BYTES = 1 << 20
# A tag and a word of the policy for each line, a word for each set.
_LINE_METADATA_BYTES = 8 + 4 + 4
_TIER_METADATA_BYTES = 8
# Its subsets are of whole lines.
_TIER_SPARE_LINES = 64

_PAGE_BYTES = 4096
_QUEUE_PAIRS = 32
_DEPTH_MIN, _DEPTH_MAX = 16, 256
_LINE_BYTES_AUTO_MAX = 4096
# Pairs of events that are kept until a GPU has passed them.
_TIMINGS_MAX = 256


def offload(
    model: torch.nn.Module,
    pattern: str | Sequence[str],
    files: Checkpoint,
    *,
    ram: int | str = "2 GiB",
    gpu: int | str = "1 GiB",
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
    ram : int or str
        Most bytes of host memory: pinned pages of files, buffers of rings, and a tier of lines that
        left the cache. Tables that fit are read in place. The kernel's page cache beyond that is
        not counted, since the kernel reclaims it. On the CPU device the cache counts here too.
    gpu : int or str
        Most bytes of GPU memory, for one cache that all tables share and what belongs to it.
    device : Device or str, optional
        Where rows are looked up. Default: where the parameters of the model are, else the first GPU
        that works, else the CPU.
    names : mapping, optional
        Names of tensors, or of several whose rows follow one another, by names of modules. Default:
        the module's name and ``.weight``, with or without the usual prefixes (``model.``,
        ``language_model.``), or its parts ``.shard_0.weight``, ``.shard_1.weight`` and so on.
    rows_per_step : int, optional
        Rows that a step looks up in all tables together, to be checked against `gpu` now. Longer
        lookups then pass their rows through the cache in turn. Default: each eager lookup is
        checked, and refused if the cache cannot hold its rows.
    line : int or str, optional
        Bytes of a line. Default: the least that holds the longest row, from 512 to 4096.
    policy : str or Policy
        Which line is evicted; see docs/policies.md.
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
        If `ram` or `gpu` is less than the tables need, or than `rows_per_step` does; the message
        has the number of bytes that suffice.

    Notes
    -----
    Nothing changes in the model if this raises. `state_dict` of the model has no entry for the
    tables; load other weights with ``strict=False``. Lookups give rows in the dtype that `weight`
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
    tables = _tables_of(model, _patterns(pattern))
    _refuse_ties(model, tables)
    _find_tensors(tables, read_checkpoint(files), names or {})
    where = resolve(_device_of(model) if device is None else device)
    need = _Need.of(tables, line)
    plan = _Plan(where, need, parse_bytes(ram, "ram"), parse_bytes(gpu, "gpu"), policy, immutable)
    if rows_per_step is not None:
        plan.check_rows(integer("rows_per_step", rows_per_step, 1, 1 << 40))
    plan.checks_lookups = rows_per_step is None
    with contextlib.ExitStack() as opened:
        cache, arrays = plan.open(tables, opened)
        offloaded = Offloaded(tables, cache, arrays, plan)
        opened.pop_all()
    return offloaded


# Which modules.


@dataclass
class _Table:
    """A table of the model, and where its rows lie."""

    names: list[str]
    """Of the modules that use it."""
    modules: list[torch.nn.Module]
    weight: torch.Tensor
    tensors: list[Tensor] = field(default_factory=list)
    """Whose rows follow one another."""
    scales: list[Tensor] = field(default_factory=list)
    """Those of `tensors`, if they have any."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def row_bytes(self) -> int:
        return self.tensors[0].nbytes // max(1, self.tensors[0].shape[0])

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pages that hold it, at most."""
        tensors = [*self.tensors, *self.scales]
        return sum(tensor.nbytes for tensor in tensors) + 2 * _PAGE_BYTES * len(tensors)

    @property
    def has_one_scale(self) -> bool:
        """Whether all rows are multiplied by one number."""
        return len(self.scales) == 1 and math.prod(self.scales[0].shape) == 1

    @property
    def array_count(self) -> int:
        """How many arrays it takes: one for the rows, and one for scales of rows."""
        return 2 if self.scales and not self.has_one_scale else 1

    def open(self, opened: contextlib.ExitStack, **options: Any) -> _Opened:
        """Open the rows, and the scales unless there is one."""
        rows = opened.enter_context(_open_rows(self.tensors, **options))
        if self.array_count == 1:
            return _Opened(rows, None)
        return _Opened(rows, opened.enter_context(_open_rows(self.scales, **options)))

    def scale(self, device: torch.device) -> torch.Tensor:
        """Read the one scale."""
        (tensor,) = self.scales
        with open_for_reading(tensor.path) as file:
            file.seek(tensor.offset)
            data = bytearray(file.read(tensor.nbytes))
        return torch.frombuffer(data, dtype=_STORED[tensor.dtype][1])[0].to(device)


@dataclass(frozen=True)
class _Opened:
    """The arrays of a table."""

    rows: Array
    scales: Array | None

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self.rows,) if self.scales is None else (self.rows, self.scales)


def _open_rows(tensors: Sequence[Tensor], **options: Any) -> Array:
    """Open tensors, whose rows follow one another, as an array."""
    first = tensors[0]
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    options |= {"dtype": _STORED[first.dtype][0], "shape": shape}
    if len(tensors) == 1:
        return open_array(first.path, offset=first.offset, **options)
    extents = [Extent(t.path, t.offset, t.nbytes) for t in tensors]
    return open_array(Concatenated(_joined(extents)), **options)


def _joined(extents: Sequence[Extent]) -> list[Extent]:
    """Join ranges of a file that follow one another, so that fewer files are open."""
    joined = [extents[0]]
    for extent in extents[1:]:
        last = joined[-1]
        if extent.path == last.path and extent.offset == last.offset + last.nbytes:
            joined[-1] = last._replace(nbytes=last.nbytes + extent.nbytes)
        else:
            joined.append(extent)
    return joined


def _patterns(pattern: str | Sequence[str]) -> list[str]:
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    if not patterns or not all(isinstance(each, str) and each for each in patterns):
        raise ArgumentError(f"pattern={pattern!r} names no modules: give names, such as 'embed*'")
    return patterns


def _tables_of(model: torch.nn.Module, patterns: Sequence[str]) -> list[_Table]:
    """Return the tables that the patterns name; those that share a parameter are one."""
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
    tables: dict[int, _Table] = {}
    for name, module in chosen.items():
        weight: Any = module.weight
        table = tables.setdefault(id(weight), _Table([], [], weight))
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
            "a parameter weight with two axes, which torch.nn.functional.embedding looks up"
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
    return isinstance(module, torch.nn.Embedding) or (
        code is not None and "embedding" in code.co_names
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


def _refuse_ties(model: torch.nn.Module, tables: Sequence[_Table]) -> None:
    """Raise ArgumentError if a weight is a parameter of other modules too."""
    owners: dict[tuple[object, ...], list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(_memory_of(parameter), []).append(name)
    for table in tables:
        mine = set(map(_weight_of, table.names))
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


def _device_of(model: torch.nn.Module) -> str | None:
    for tensor in model.parameters():
        if tensor.device.type != "meta":
            index = tensor.device.index
            return tensor.device.type if index is None else f"{tensor.device.type}:{index}"
    return None


# Which tensors.


def _find_tensors(
    tables: Sequence[_Table],
    checkpoint: Mapping[str, Tensor],
    given: Mapping[str, str | Sequence[str]],
) -> None:
    unknown = set(given) - {name for table in tables for name in table.names}
    if unknown:
        raise ArgumentError(f"names= has {sorted(unknown)}, which the pattern does not match")
    for table in tables:
        asked = next((given[name] for name in table.names if name in given), None)
        if asked is None:
            table.tensors = _tensors_named(table.names, checkpoint)
        else:
            wanted = [asked] if isinstance(asked, str) else list(asked)
            for name in wanted:
                if name not in checkpoint:
                    raise ArgumentError(f"the checkpoint has no {name!r}{_near(name, checkpoint)}")
            table.tensors = [checkpoint[name] for name in wanted]
        _check_tensors(table, checkpoint)


def _tensors_named(names: Sequence[str], checkpoint: Mapping[str, Tensor]) -> list[Tensor]:
    """Find the tensors of a table by the names of its modules."""
    for name in names:
        found = _whole(_weight_of(name), checkpoint) or _parts(name, checkpoint)
        if found:
            return found
    wanted = _weight_of(names[0])
    raise ArgumentError(
        f"the checkpoint has no tensor for {wanted!r}{_near(wanted, checkpoint)}; give its name, "
        f"names={{{names[0]!r}: ...}}"
    )


def _weight_of(module: str) -> str:
    return f"{module}.weight" if module else "weight"


def _whole(name: str, checkpoint: Mapping[str, Tensor]) -> list[Tensor]:
    if name in checkpoint:
        return [checkpoint[name]]
    bare = _bare(name)
    found = [tensor for each, tensor in checkpoint.items() if _bare(each) == bare]
    if len(found) > 1:
        raise ArgumentError(
            f"{len(found)} tensors could be {name!r}: {', '.join(t.name for t in found[:5])}; give "
            "the name of one by names="
        )
    return found


def _parts(name: str, checkpoint: Mapping[str, Tensor]) -> list[Tensor]:
    """Find the parts of a table that was split by rows, ``NAME.shard_0.weight`` and so on."""
    begin = re.escape(_bare(f"{name}.")) if name else ""
    pattern = re.compile(begin + r"(?:[a-z]+_)?([0-9]{1,9})\.weight")
    parts: dict[int, Tensor] = {}
    for each, tensor in checkpoint.items():
        match = pattern.fullmatch(_bare(each))
        if match is None:
            continue
        other = parts.setdefault(int(match[1]), tensor)
        if other is not tensor:
            raise ArgumentError(
                f"part {match[1]} of {name!r} could be {other.name} and {each}: give the names of "
                "all its parts by names="
            )
    missing = next((i for i in range(len(parts)) if i not in parts), None)
    if missing is not None:
        raise FileFormatError(
            f"the checkpoint has {len(parts)} parts of {name!r}, up to number {max(parts)}, but "
            f"not number {missing}"
        )
    return [parts[i] for i in range(len(parts))]


def _bare(name: str) -> str:
    """Return a name without the prefixes that do not tell modules apart."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


def _near(name: str, checkpoint: Mapping[str, Tensor]) -> str:
    if not checkpoint:
        return ", and no tensors at all"
    found = difflib.get_close_matches(name, list(checkpoint)[:10_000], 5, 0.3)
    return f"; near names are {', '.join(found)}" if found else ""


def _check_tensors(table: _Table, checkpoint: Mapping[str, Tensor]) -> None:
    first, rows = table.tensors[0], sum(tensor.shape[0] for tensor in table.tensors if tensor.shape)
    for tensor in table.tensors:
        if len(tensor.shape) != 2 or tensor.shape[1] != table.weight.shape[1]:
            raise FileFormatError(
                f"{tensor} has not rows of {table.weight.shape[1]} elements, as {table.name!r} has"
            )
        if tensor.dtype != first.dtype:
            raise FileFormatError(f"{tensor} has another dtype than {first}")
    if rows != table.weight.shape[0]:
        many = f" in {len(table.tensors)} parts" if len(table.tensors) > 1 else ""
        raise FileFormatError(
            f"{first} has {rows} rows{many}, and {table.name!r} has {table.weight.shape[0]}"
        )
    if rows == 0 or table.weight.shape[1] == 0:
        raise FileFormatError(f"{first} is empty")
    if first.dtype not in _STORED:
        raise DtypeError(
            f"{first}: rows of this dtype cannot be looked up, only {', '.join(_STORED)}"
        )
    if first.dtype in _SCALED:
        table.scales = _scales_of(table, checkpoint)


def _scales_of(table: _Table, checkpoint: Mapping[str, Tensor]) -> list[Tensor]:
    """Find the scales of a table's tensors."""
    found: list[Tensor] = []
    for tensor in table.tensors:
        base = tensor.name.removesuffix("weight")
        here = [checkpoint[base + n] for n in _SCALE_NAMES if base + n in checkpoint]
        if len(here) > 1:
            raise ArgumentError(f"{tensor} could have the scales {here[0]} or {here[1]}")
        found += here
    first = table.tensors[0]
    if not found and first.dtype == "I8":
        raise DtypeError(f"{first} has no scales, as {first.name}_scale: integers are no weights")
    if not found:
        return []
    if len(found) != len(table.tensors):
        raise FileFormatError(f"{first} has scales in {len(found)} of {len(table.tensors)} parts")
    if len(found) == 1 and math.prod(found[0].shape) == 1 and found[0].dtype in _FLOATS:
        return found
    for scales, tensor in zip(found, table.tensors, strict=True):
        one_each = len(scales.shape) in (1, 2) and scales.shape[0] == tensor.shape[0]
        if not one_each or scales.shape[1:] != found[0].shape[1:]:
            raise FileFormatError(f"{scales} has not a scale, or several, for each row of {tensor}")
        if scales.dtype not in ("F32", "F16") or scales.dtype != found[0].dtype:
            raise DtypeError(f"{scales}: scales of rows must be F32 or F16, all of one dtype")
    return found


# Within which limits.


@dataclass(frozen=True)
class _Need:
    """What the tables need of a cache."""

    arrays: int
    line_bytes: int
    lines_per_row: int
    """At most, of any table; scales take one more."""
    lines: int
    """Of all tables and their scales."""

    @classmethod
    def of(cls, tables: Sequence[_Table], line: int | str | None) -> _Need:
        longest = max(table.row_bytes for table in tables)
        if line is None:
            room = 1 << (longest - 1).bit_length()
            line_bytes = min(max(room, LINE_BYTES_MIN), _LINE_BYTES_AUTO_MAX)
        else:
            line_bytes = check_line(line)
        lines = max(_lines_of_a_row(table.row_bytes, line_bytes) for table in tables)
        arrays = sum(table.array_count for table in tables)
        held = [tensor for table in tables for tensor in (*table.tensors, *table.scales)]
        whole = sum(tensor.nbytes // line_bytes + 1 for tensor in held)
        return cls(arrays, line_bytes, lines + (arrays > len(tables)), whole)


def _lines_of_a_row(row_bytes: int, line_bytes: int) -> int:
    """Return how many lines a row touches at most."""
    latest = line_bytes - math.gcd(row_bytes, line_bytes)  # where in a line a row may begin
    return (latest + row_bytes - 1) // line_bytes + 1


class _Plan:
    """How the limits are divided."""

    def __init__(
        self,
        device: Device,
        need: _Need,
        ram: int,
        gpu: int,
        policy: str | Policy,
        immutable: bool,
    ) -> None:
        self.device, self.need, self.ram, self.gpu = device, need, ram, gpu
        self.policy = resolve_policy(policy)
        self.immutable = immutable
        self.checks_lookups = True
        self.ways = 4
        self.on_gpu = device.kind == "cuda"
        self.fixed = _CACHE_BYTES + need.arrays * _ARRAY_GPU_BYTES if self.on_gpu else 0
        self.depth = self._depth() if self.on_gpu else 0
        self.rings = need.arrays * self._ring_bytes(self.depth) if self.on_gpu else 0
        self.capacity = self._capacity(0)
        self.least = self.ways * need.line_bytes
        """Bytes of lines that the cache must have."""
        if self.capacity < self.least:
            self._refuse_gpu(self.bytes_for(self.least), "one set of the cache")

    def _ring_bytes(self, depth: int) -> int:
        return _ARRAY_HOST_BYTES + _QUEUE_PAIRS * depth * self.need.line_bytes

    def _depth(self) -> int:
        """Return the entries of a ring: at most half of the host memory is for buffers."""
        depth = _DEPTH_MAX
        while depth > _DEPTH_MIN and self.need.arrays * self._ring_bytes(depth) > self.ram // 2:
            depth //= 2
        least = self.need.arrays * self._ring_bytes(depth)
        if least > self.ram:
            raise CacheError(
                f"ram={self.ram} bytes are less than the buffers of {self.need.arrays} arrays "
                f"need: give at least {least} bytes"
            )
        return depth

    def _capacity(self, tier_bytes: int) -> int:
        """Return the bytes of lines that leave room for all the rest, and hold all at most."""
        limit = self.gpu if self.on_gpu else min(self.gpu, self.ram)
        limit -= self.fixed + tier_bytes // self.need.line_bytes * _TIER_METADATA_BYTES
        line = self.need.line_bytes
        # The number of sets is rounded down to an odd one.
        whole = self.need.lines + 2 * self.ways
        return min(max(0, limit // (line + _LINE_METADATA_BYTES)), whole) * line

    def bytes_for(self, capacity: int) -> int:
        """Return the limit that leaves `capacity` bytes of lines."""
        lines = -(-capacity // self.need.line_bytes)
        return self.fixed + lines * (self.need.line_bytes + _LINE_METADATA_BYTES)

    def _refuse_gpu(self, needed: int, what: str) -> NoReturn:
        limit = f"gpu={self.gpu}"
        if not self.on_gpu:
            limit = f"the least of ram={self.ram} and gpu={self.gpu}, for a cache on the CPU,"
        raise CacheError(f"{limit} bytes are less than {what} needs: give at least {needed} bytes")

    def check_rows(self, rows: int) -> None:
        """Raise CacheError if the cache cannot hold so many rows at a time."""
        lines = min(rows * self.need.lines_per_row, self.need.lines)
        least = (lines + 2 * self.ways) * self.need.line_bytes
        if self.capacity < least:
            needed = self.bytes_for(least)
            self._refuse_gpu(
                needed,
                f"a step of {rows} rows, each in up to {self.need.lines_per_row} lines of "
                f"{self.need.line_bytes} bytes,",
            )
        self.least = max(self.least, least)

    def open(
        self, tables: Sequence[_Table], opened: contextlib.ExitStack
    ) -> tuple[Cache, list[_Opened]]:
        """Open a cache and all tables: all in place if they fit, else all by rings."""
        pinned = sum(table.pinned_bytes for table in tables)
        if self.on_gpu and pinned + self.rings <= self.ram:
            with contextlib.ExitStack() as attempt:
                found = self._open(tables, attempt, self.ram - self.rings - pinned, None)
                if any(each.rows.controller.path == "in_place" for each in found[1]):
                    opened.enter_context(attempt.pop_all())
                    return found
        return self._open(tables, opened, self.ram - self.rings, "bounce")

    def _open(
        self, tables: Sequence[_Table], opened: contextlib.ExitStack, spare: int, path: Any
    ) -> tuple[Cache, list[_Opened]]:
        tier = self._tier(spare) if self.on_gpu else None
        self.capacity = self._capacity(tier or 0)
        cache = opened.enter_context(
            Cache(self.capacity, self.need.line_bytes, self.ways, self.policy, self.device, tier)
        )
        settings = {}
        if self.on_gpu:
            # They poll: more threads than cores, over all arrays, would wait for each other.
            threads = max(1, min(8, cores() // 2) // self.need.arrays)
            settings["controller"] = SoftwareController(
                _QUEUE_PAIRS, self.depth, threads, data_path=path
            )
        found = [
            table.open(opened, cache=cache, immutable=self.immutable, **settings)
            for table in tables
        ]
        return cache, found

    def _tier(self, spare: int) -> int | None:
        """Return the bytes of host memory below the cache; None if they are too few for one.

        It has no more lines than the tables, and its tags leave the cache what it must have.
        """
        line = self.need.line_bytes
        tier = min(spare, (self.need.lines + _TIER_SPARE_LINES) * line)
        while tier >= line and self._capacity(tier) < max(self.least, self._capacity(0) // 2):
            tier //= 2
        enough = tier >= self._capacity(tier) // self.ways + line
        return tier if enough else None


# In the place of a parameter.


class TableWeight:
    """The weight of an offloaded table: it has its shape, dtype and device, but no memory.

    `torch.nn.functional.embedding` looks its rows up. Any other function of torch raises
    ArgumentError, since it would need the whole table.

    Attributes
    ----------
    shape, dtype, device
        Of the rows that lookups return.
    requires_grad : bool
        Whether the parameter was to be trained. If so, a module in training refuses lookups while
        gradients are recorded; set it to False if the table is to stay as it is.
    """

    is_meta = False
    grad = None

    def __init__(self, table: _Table, arrays: _Opened, plan: _Plan, device: torch.device) -> None:
        dtype = table.weight.dtype
        stored = _STORED[table.tensors[0].dtype][1]
        scales: Any = table.scale(device) if table.has_one_scale else arrays.scales
        self.rows = Embedding(arrays.rows, scales=scales, dtype=dtype, stored=stored)
        self.name = table.name
        self.shape = torch.Size(table.weight.shape)
        self.dtype, self.device, self.ndim = dtype, device, 2
        self.requires_grad = bool(table.weight.requires_grad)
        self._module = table.modules[0]
        self._plan = plan
        self.clock = _Clock()
        self.closed = False

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look rows up, or refuse what torch was asked for."""
        del types
        if func is torch.nn.functional.embedding:
            found = args[1] if len(args) > 1 else (kwargs or {})["weight"]
            if isinstance(found, cls) and isinstance(args[0], torch.Tensor):
                return found.look_up(args[0])
        name = getattr(func, "__name__", repr(func))
        raise ArgumentError(
            f"{name} would need all rows of an offloaded table at once: only "
            "torch.nn.functional.embedding looks rows up"
        )

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids`, of any shape."""
        if self.closed:
            raise ClosedError(f"the table {self.name!r} was offloaded, and is closed")
        if self.requires_grad and self._module.training and torch.is_grad_enabled():
            raise ReadOnlyError(
                f"{self.name!r} is in training, and reads its rows from a checkpoint, which stays "
                "as it is: use model.eval(), torch.no_grad(), or set requires_grad of its weight "
                "to False"
            )
        rows: torch.Tensor
        if torch.compiler.is_compiling():
            rows = self.rows(ids)
            return rows
        if self._plan.checks_lookups:
            self._plan.check_rows(ids.numel())
        with self.clock.timed(ids):
            rows = self.rows(ids)
        return rows

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one length."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of axes."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return int(self.shape.numel())

    def element_size(self) -> int:
        """Return the bytes of an element of the rows that lookups return."""
        return int(self.dtype.itemsize)

    def __repr__(self) -> str:
        return f"TableWeight({self.name!r}, {list(self.shape)}, {self.dtype}, {self.device})"


class _Clock:
    """How long the eager lookups of a table took; waits for nothing."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._pending: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def timed(self, ids: torch.Tensor) -> Iterator[None]:
        """Time a lookup; on a GPU by events, outside of captures alone."""
        if not ids.is_cuda:
            begin = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - begin
            self.count += 1
            return
        # A look at an event would end the capture.
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        if len(self._pending) >= _TIMINGS_MAX:
            self._collect(wait=False)
        if len(self._pending) >= _TIMINGS_MAX:
            yield
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._pending.append((first, last))

    def _collect(self, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][1].query()):
            first, last = self._pending.pop(0)
            last.synchronize()
            self.seconds += first.elapsed_time(last) / 1e3
            self.count += 1

    def mean(self) -> float | None:
        """Return the mean seconds of a lookup, or None; waits for the GPU."""
        self._collect(wait=True)
        return self.seconds / self.count if self.count else None


@dataclass(frozen=True)
class TableReport:
    """Counts of one table since it was offloaded."""

    name: str
    rows: int
    row_bytes: int
    path: str
    """How its data moves: ``"in_place"``, ``"bounce"`` or ``"direct"``."""
    hits: int
    """Lines that lookups found in the cache."""
    misses: int
    bytes_looked_up: int
    """What lookups returned, in the dtype of the storage."""
    bytes_from_storage: int
    """Read from the files, through the page cache or past it."""
    bytes_from_host: int
    """Read from the tier in pinned host memory."""
    seconds_per_lookup: float | None
    """Mean of eager lookups; None if all were compiled or in graphs."""

    @property
    def hit_rate(self) -> float:
        """Share of lines that were in the cache; 0 before the first lookup."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


@dataclass(frozen=True)
class OffloadReport:
    """What the tables of a model did and hold."""

    tables: tuple[TableReport, ...]
    gpu_bytes: int
    """Of `gpu`, at most what the cache and its arrays take; on the CPU device 0."""
    ram_bytes: int
    """Of `ram`, at most what is pinned: pages of files, buffers and host tier; and the cache, on
    the CPU device."""

    @property
    def hit_rate(self) -> float:
        """Share of lines that were in the cache, over all tables."""
        hits = sum(table.hits for table in self.tables)
        accesses = hits + sum(table.misses for table in self.tables)
        return hits / accesses if accesses else 0.0

    @property
    def seconds_per_step(self) -> float | None:
        """Sum over the tables of the mean time of an eager lookup; None if there was none."""
        found = [t.seconds_per_lookup for t in self.tables if t.seconds_per_lookup is not None]
        return sum(found) if found else None

    def __str__(self) -> str:
        lines = [
            f"{len(self.tables)} tables, hit rate {self.hit_rate:.1%}, "
            f"{self.gpu_bytes} bytes of GPU memory, {self.ram_bytes} of host memory"
        ]
        step = self.seconds_per_step
        if step is not None:
            lines[0] += f", {step * 1e6:.1f} us a step"
        lines += [
            f"  {t.name}: {t.rows} rows of {t.row_bytes} bytes, {t.path}, hit rate "
            f"{t.hit_rate:.1%}, {t.bytes_looked_up} bytes looked up, {t.bytes_from_storage} from "
            f"storage, {t.bytes_from_host} from the host tier"
            for t in self.tables
        ]
        return "\n".join(lines)


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
        tables: Sequence[_Table],
        cache: Cache,
        arrays: Sequence[_Opened],
        plan: _Plan,
    ) -> None:
        self._closed = False
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

    def report(self) -> OffloadReport:
        """Return what the tables did since they were offloaded; waits for lookups that run."""
        if self._closed:
            raise ClosedError("the tables are closed: ask for the report before")
        reports = []
        for table, weight in zip(self._tables, self._weights, strict=True):
            array = self.tables[table.name]
            stats = array.stats
            reports.append(
                TableReport(
                    name=table.name,
                    rows=int(table.weight.shape[0]),
                    row_bytes=table.row_bytes,
                    path=array.controller.path,
                    hits=stats.hits,
                    misses=stats.misses,
                    bytes_looked_up=stats.bytes_used,
                    bytes_from_storage=stats.bytes_read,
                    bytes_from_host=stats.tier_hits * self.cache.line_bytes,
                    seconds_per_lookup=weight.clock.mean(),
                )
            )
        plan, held = self._plan, self.cache.capacity + self.cache.metadata_bytes
        pinned = sum(
            table.pinned_bytes
            for table in self._tables
            if self.tables[table.name].controller.path == "in_place"
        )
        host = plan.rings + self.cache.host_capacity + pinned
        return OffloadReport(
            tuple(reports),
            gpu_bytes=held + plan.fixed if plan.on_gpu else 0,
            ram_bytes=host if plan.on_gpu else held,
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
            weight.rows.close()
        self.cache.close()
        self._closed = True
        for table, weight in zip(self._tables, self._weights, strict=True):
            weight.closed = True
            trained = weight.requires_grad
            parameter = torch.nn.Parameter(table.weight, requires_grad=trained)
            for module in table.modules:
                if module.__dict__.get("weight") is weight:
                    del module.weight
                    module.register_parameter("weight", parameter)

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._plan.device.name
        return f"Offloaded({list(self.tables)}, {state})"
