"""Which tensors of a checkpoint hold the rows of a table, and their scales."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence

from flashwarp.errors import ArgumentError, DtypeError, FileFormatError
from flashwarp.interop.torch.offloading.table import (
    PACKED,
    SCALES,
    STORED,
    ModelTable,
    read_number,
    weight_name,
)
from flashwarp.storage.safetensors import Tensor

# Of these, the dtypes whose rows are multiplied by scales, if the checkpoint has any.
_SCALED = ("F8_E4M3", "F8_E5M2", "I8", *PACKED)
# And those that mean nothing without.
_SCALED_ALWAYS = ("I8", *PACKED)

# Rows and columns that share a scale in checkpoints whose scales are fewer than rows.
_BLOCK = (128, 128)

# What multiplies the scales of a packed table, or divides them, after the name of its module.
_FACTORS = {"weight_scale_2": "global_scale", "weight_global_scale": "global_divisor"}

# Of packed numbers, after the name of their module.
_PACKED_SUFFIX = "_packed"

# What libraries put before the name of a module, or leave out, without meaning another one.
_WRAPPERS = frozenset(
    ["module", "_orig_mod", "model", "base_model", "language_model", "text_model", "transformer"]
)

# Names of scales, after the name of their module.
_SCALE_NAMES = ("weight_scale", "weight_scale_inv", "weight.scale", "scale", "scales")


def find_tensors(
    tables: Sequence[ModelTable],
    checkpoint: Mapping[str, Tensor],
    given: Mapping[str, str | Sequence[str]],
) -> None:
    """Find where the rows and the scales of each table lie; raises what `offload` raises.

    `given` has names of tensors, by names of modules.
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(f"names={given!r}: give names of tensors by names of modules")
    unknown = set(given) - {name for table in tables for name in table.names}
    if unknown:
        raise ArgumentError(
            f"names= has {sorted(map(str, unknown))}, which the pattern does not match"
        )
    for table in tables:
        asked = next((given[name] for name in table.names if name in given), None)
        if asked is None:
            table.tensors = _tensors_named(table.names, checkpoint)
        else:
            wanted = [asked] if isinstance(asked, str) else asked
            if not isinstance(wanted, list | tuple) or not wanted:
                raise ArgumentError(
                    f"names= has {asked!r} for {table.name!r}: give the name of a tensor, or a list"
                )
            for name in wanted:
                if not isinstance(name, str) or name not in checkpoint:
                    near = _near(str(name), checkpoint)
                    raise ArgumentError(f"the checkpoint has no {name!r}{near}")
            table.tensors = [checkpoint[name] for name in wanted]
        _check_tensors(table, checkpoint)


def _tensors_named(names: Sequence[str], checkpoint: Mapping[str, Tensor]) -> list[Tensor]:
    """Find the tensors of a table by the names of its modules."""
    for name in names:
        whole = weight_name(name)
        found = (
            _whole(whole, checkpoint)
            or _whole(whole + _PACKED_SUFFIX, checkpoint)
            or _parts(name, checkpoint)
        )
        if found:
            return found
    wanted = weight_name(names[0])
    raise ArgumentError(
        f"the checkpoint has no tensor for {wanted!r}{_near(wanted, checkpoint)}; give its name, "
        f"names={{{names[0]!r}: ...}}"
    )


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
    pattern = re.compile(begin + r"(?:[a-z]+_)?([0-9]{1,9})\.weight(?:_packed)?")
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


def _check_tensors(table: ModelTable, checkpoint: Mapping[str, Tensor]) -> None:
    first, rows = table.tensors[0], sum(tensor.shape[0] for tensor in table.tensors if tensor.shape)
    for tensor in table.tensors:
        numbers = 2 if tensor.dtype == "U8" else 1
        if numbers == 2 and tensor.shape[1:] == table.weight.shape[1:]:
            raise DtypeError(
                f"{tensor}: bytes cannot be looked up, unless each has two numbers of 4 bits"
            )
        if len(tensor.shape) != 2 or tensor.shape[1] * numbers != table.weight.shape[1]:
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
    if first.dtype not in STORED:
        raise DtypeError(
            f"{first}: rows of this dtype cannot be looked up, only {', '.join(STORED)}"
        )
    if first.dtype in _SCALED:
        table.scales = _scales_of(table, checkpoint)


def _scales_of(table: ModelTable, checkpoint: Mapping[str, Tensor]) -> list[Tensor]:
    """Find the scales of a table's tensors."""
    found: list[Tensor] = []
    for tensor in table.tensors:
        base = _base(tensor)
        here = [checkpoint[base + n] for n in _SCALE_NAMES if base + n in checkpoint]
        if len(here) > 1:
            raise ArgumentError(f"{tensor} could have the scales {here[0]} or {here[1]}")
        found += here
    first = table.tensors[0]
    if not found and first.dtype in _SCALED_ALWAYS:
        raise DtypeError(f"{first} has no scales, as {first.name}_scale: integers are no weights")
    if not found:
        return []
    if len(found) != len(table.tensors):
        raise FileFormatError(f"{first} has scales in {len(found)} of {len(table.tensors)} parts")
    for scales in found:
        if scales.dtype not in SCALES or scales.dtype != found[0].dtype:
            raise DtypeError(f"{scales}: scales must be {', '.join(SCALES)}, all of one dtype")
    if first.dtype in PACKED:
        table.factors = _factors_of(table, found[0], checkpoint)
    if len(found) == 1 and math.prod(found[0].shape) == 1:
        return found
    if _are_blocks(table, found):
        table.scale_block = _BLOCK
        return found
    for scales, tensor in zip(found, table.tensors, strict=True):
        one_each = len(scales.shape) in (1, 2) and scales.shape[0] == tensor.shape[0]
        alike = scales.shape[1:] == found[0].shape[1:]
        blocks = math.prod(scales.shape[1:])
        if not (one_each and alike and blocks) or table.weight.shape[1] % blocks:
            raise FileFormatError(
                f"{scales} has not a scale, or several, for each row of {tensor}, nor one for each "
                f"{_BLOCK[0]} x {_BLOCK[1]}"
            )
    return found


def _base(tensor: Tensor) -> str:
    return tensor.name.removesuffix(_PACKED_SUFFIX).removesuffix("weight")


def _are_blocks(table: ModelTable, found: Sequence[Tensor]) -> bool:
    """Whether each scale is that of a block of several rows, which lie in one part."""
    high, wide = _BLOCK
    for scales, tensor in zip(found, table.tensors, strict=True):
        rows, dim = tensor.shape[0], table.weight.shape[1]
        last = tensor is table.tensors[-1]
        if scales.shape != (-(-rows // high), -(-dim // wide)) or (rows % high and not last):
            return False
    return True


def _factors_of(
    table: ModelTable, scales: Tensor, checkpoint: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the factor of a packed table beside its scales; all of its parts have one."""
    factors: set[tuple[str, float]] = set()
    for tensor in table.tensors:
        for name, meaning in _FACTORS.items():
            number = checkpoint.get(_base(tensor) + name)
            if number is None:
                continue
            if math.prod(number.shape) != 1 or number.dtype != "F32":
                raise FileFormatError(f"{number} is not one number of F32")
            factors.add((meaning, float(read_number(number))))
    if len(factors) > 1:
        raise FileFormatError(
            f"{table.tensors[0]} has {len(factors)} different factors of the whole table, and one "
            "table has one"
        )
    if not factors and scales.dtype == "F8_E4M3":
        raise FileFormatError(
            f"{table.tensors[0]} has neither {' nor '.join(_FACTORS)}, and NVFP4 is nothing without"
        )
    return dict(factors)
