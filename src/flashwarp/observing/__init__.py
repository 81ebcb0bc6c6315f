"""Seeing what happens: counters of a process, who may ask for them, and ranges for profilers.

Nothing here runs until somebody asks: counters are read where arrays keep them anyway. See
docs/observing.md.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from flashwarp import _names

if _TYPE_CHECKING:
    from flashwarp.observing.counting import counters
    from flashwarp.observing.prometheus import Collector, register

__all__ = ["Collector", "counters", "register"]

__getattr__, __dir__ = _names.later(
    __name__,
    {
        "Collector": "observing.prometheus",
        "counters": "observing.counting",
        "register": "observing.prometheus",
    },
)
