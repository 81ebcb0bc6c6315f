"""What to do about errors that compilers report in kernels, in the words of the headers."""

from __future__ import annotations

import re

from flashwarp._jit.compiler import INCLUDE_DIR
from flashwarp.errors import CompileError

_HEADERS = {"FW_KERNEL": "array", "fw": "array", "array": "array", "file": "file", "batch": "batch"}
"""Which header has a name that kernels use."""

# By what a compiler says; g++, clang++ and NVRTC each have their words.
_HINTS = (
    (
        r"lvalue required|modifiable lvalue|expression is not assignable",
        "x[i] of an fw::array is a value: store with x.store(i, value)",
    ),
    (
        r"__global__\W does not name|unknown type name \W__global__",
        "a kernel that runs on both devices begins with FW_KERNEL name(...), without __global__",
    ),
    (
        r"\W(?:threadIdx|blockIdx|blockDim|gridDim)\W (?:was not|has not been) declared"
        r"|undeclared identifier \W(?:threadIdx|blockIdx|blockDim|gridDim)",
        "on both devices fw::base::thread_index() is the number of a thread, and "
        "fw::base::thread_count() says how many there are",
    ),
)
# Of g++ the first, of NVRTC the next two, of clang++ the last ones. Quotes differ by locale.
_MISSING = re.compile(
    r"\W(?P<gxx>\w+)\W (?:does not name|is not a member of \Wfw\W|has not been declared)"
    r'|(?:identifier|has no member) "(?P<nvrtc>\w+)"'
    r"|(?:unknown type name|undeclared identifier) \W(?P<type>\w+)"
    r"|no (?:template|type|member) named \W(?P<member>\w+)\W in namespace \Wfw\W"
)


def explained(error: CompileError, text: str) -> CompileError:
    """Return an error of a kernel's `text` without lines of our own headers, and with hints."""
    if not error.log:
        return error
    log = _without_headers(error.log)
    hints = [told for pattern, told in _HINTS if re.search(pattern, log)]
    for found in _MISSING.finditer(log):
        header = _HEADERS.get(found[found.lastgroup or 0])
        include = f'#include "flashwarp/{header}.cuh"'
        if header is not None and include not in text:
            hints.append(f"the source needs {include}")
    shown = str(error).replace(error.log, log)
    ends = "".join(f"\nhint: {hint}" for hint in dict.fromkeys(hints))
    return CompileError(shown + ends, error.log)


def _without_headers(log: str) -> str:
    """Leave out lines of our headers, but for what is wrong; the whole log stays in the error."""
    kept: list[str] = []
    ours = False
    for line in log.splitlines():
        if str(INCLUDE_DIR) in line or line.startswith("In file included from"):
            ours = True
            if ": error: " in line:
                kept.append("error: " + line.split(": error: ", 1)[1])
        elif not ours or not line.startswith(" "):
            ours = False
            kept.append(line)
    return "\n".join(kept)
