"""Fields of the C++ structures that Python builds, as the compiler has laid them out.

`native/bind/layouts.cpp` lists the structures and their fields.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from flashwarp import _native

_TYPES = {
    "B": ctypes.c_uint8,
    "I": ctypes.c_uint32,
    "Q": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}

_layouts = functools.cache(_native.layouts)


def size_of(name: str) -> int:
    """Return the bytes of a C++ structure."""
    return _layouts()[name][0]


def fields_of(name: str, **nested: type[ctypes.Structure]) -> Sequence[tuple[str, Any]]:
    """Return the fields of a C++ structure for a class of ctypes.

    `nested` has the class of each field that is a structure, or an array of it. Without one, such a
    field is bytes. Padding is in fields that begin with "_".
    """
    size, members = _layouts()[name]
    fields: list[tuple[str, Any]] = []
    end = 0
    for member, offset, nbytes, code in [*members, ("", size, 0, "B")]:
        if offset > end:
            fields.append((f"_pad{end}", ctypes.c_uint8 * (offset - end)))
        end = offset + nbytes
        kind: Any = nested.get(member) or _TYPES[code or "B"]
        count = nbytes // ctypes.sizeof(kind)
        if count:
            fields.append((member, kind if count == 1 else kind * count))
    return fields
