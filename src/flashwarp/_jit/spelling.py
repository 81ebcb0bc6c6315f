"""C++ types as compilers spell them in the signatures of kernels: names, parameters, elements."""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass

from flashwarp.errors import CompileError

# Both compilers have 64-bit long and long long; NVRTC's uint64_t is one, g++'s is the other.
NUMBERS = {
    "bool": "?",
    "char": "i1",
    "signed char": "i1",
    "unsigned char": "u1",
    "short": "i2",
    "unsigned short": "u2",
    "int": "i4",
    "unsigned int": "u4",
    "long": "i8",
    "unsigned long": "u8",
    "long long": "i8",
    "unsigned long long": "u8",
    "_Float16": "f2",
    "__half": "f2",
    "float": "f4",
    "double": "f8",
}
"""Types that are numbers, and their dtypes."""

_ARRAY = re.compile(r"fw::array<(?P<element>.+?)(?:, (?P<rank>\d+)u?)?>\Z")
_PIPELINE = re.compile(r"fw::pipeline<(?P<element>.+?)>\Z")
_CONST = re.compile(r" const(?= |\Z)")
_QUALIFIER = re.compile(r" (const|volatile)(?= |\Z)")


@dataclass(frozen=True)
class Elements:
    """The elements of an array, a pointer or a pipeline; `rank` is 0 but for an array."""

    type: str
    constant: bool
    rank: int
    of_pipeline: bool = False


def elements_of(text: str) -> Elements | None:
    """Tell what a parameter's type leads to; None for a value."""
    array, pipeline = _ARRAY.match(text), _PIPELINE.match(text)
    if pipeline is not None:
        element, rank = pipeline["element"].rstrip(), 0
    elif array is not None:
        element, rank = array["element"].rstrip(), int(array["rank"] or 1)
    elif text.endswith("*"):
        element, rank = text[:-1].rstrip(), 0
    else:
        return None
    constant = bool(_CONST.search(element))
    return Elements(_QUALIFIER.sub("", element), constant, rank, pipeline is not None)


@functools.cache
def demangle(symbol: str) -> str:
    """Return the C++ spelling of a kernel's symbol."""
    text: str = importlib.import_module("flashwarp._native").demangle(symbol)
    if not text:
        raise CompileError(
            f'kernel {symbol} is extern "C", so its name lacks its parameters: '
            f"write FW_KERNEL {symbol}(...)"
        )
    return text


def kernel_name(symbol: str) -> str:
    """Return the name of a kernel, with its namespaces."""
    return split_signature(demangle(symbol))[0]


def split_signature(signature: str) -> tuple[str, list[str]]:
    """Split the C++ spelling of a kernel into its name and the types of its parameters."""
    opens = _opening(signature)
    types = _split(signature[opens + 1 : -1])
    for text in types:
        if text.endswith("&"):
            raise CompileError(
                f"{signature} has a parameter that is a reference: kernels take values and pointers"
            )
    return signature[:opens].removeprefix("void "), types


def _opening(signature: str) -> int:
    """Find the parenthesis that opens the parameters."""
    depth = 0
    for position in range(len(signature) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(signature[position], 0)
        if depth == 0:
            return position
    raise CompileError(f"{signature} is no signature of a kernel")


def _split(types: str) -> list[str]:
    """Split at the commas outside of all brackets."""
    parts, depth, start = [], 0, 0
    for position, sign in enumerate(types):
        if sign in "<([":
            depth += 1
        elif sign in ">)]":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(types[start:position].strip())
            start = position + 1
    last = types[start:].strip()
    return [*parts, last] if last or parts else []
