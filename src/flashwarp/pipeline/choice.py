"""The choice of a pipeline's route."""

from __future__ import annotations

from collections.abc import Callable

from flashwarp.array.array import Array
from flashwarp.config import integer
from flashwarp.device import CudaDevice
from flashwarp.errors import ArgumentError, RouteError
from flashwarp.pipeline.engine import BatchEngine
from flashwarp.pipeline.engines import why_no_engine
from flashwarp.pipeline.host import Host
from flashwarp.pipeline.in_place import InPlace
from flashwarp.pipeline.route import Route
from flashwarp.pipeline.staged import Staged

_SMS_MAX = 1024


def choose_route(
    array: Array,
    make: Callable[..., BatchEngine],
    sms: int | None,
    workers: int | tuple[int, int] | None,
    timeout_s: float,
) -> Route:
    """Choose from what the caller asks for, and from how the array's rows can be reached.

    `make` makes the engine of the routes whose rows host threads move.
    """
    if not isinstance(array.device, CudaDevice):
        return Host(array, timeout_s, None if workers is None else make)
    most = None if sms is None else integer("sms", sms, 0, _SMS_MAX)
    asked = "sms=0" if most == 0 else "workers= is given" if workers is not None else ""
    refused = why_no_engine(array)
    if asked and most:
        raise ArgumentError(
            f"sms={most} lets warps move the rows, and workers= host threads: give one"
        )
    if asked and refused:
        raise RouteError(f"{asked}, but {refused}: leave it out, and a few warps pull rows")
    if not asked and (refused or most or array.service.route == "in_place"):
        return InPlace(array, most, timeout_s, refused)
    return Staged(array, timeout_s, make, asked or "the rows are not read in place")
