"""The caller's own kernels: compiled, checked, launched."""

from typing import TYPE_CHECKING

from flashwarp import _names

if TYPE_CHECKING:
    from flashwarp.program.compiling import Kernel, Program

__all__ = ["Kernel", "Program"]

__getattr__, __dir__ = _names.later(
    __name__,
    {
        "Kernel": "program.compiling",
        "Program": "program.compiling",
    },
)
