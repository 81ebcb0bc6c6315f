"""Public names: those that are imported when they are first used, and those of earlier versions.

A name, member or argument of an earlier version is refused by a RenamedError, which has the new
name. Nothing here makes an old name work.
"""

from __future__ import annotations

import functools
import sys
import threading  # noqa: F401 - only then does the main thread note its end, see endings.py
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

__all__ = ["OLD", "later", "refuse", "renamed"]

OLD: dict[str, dict[str, str]] = {
    "flashwarp": {
        "BlockMap": "flashwarp.file.BlockMap",
        "CpuDevice": "flashwarp.device.CpuDevice",
        "CudaDevice": "flashwarp.device.CudaDevice",
        "Explanation": "flashwarp.explanation.Explanation",
        "Kernel": "flashwarp.program.Kernel",
        "MappedFile": "flashwarp.file.MappedFile",
        "Policy": "flashwarp.policy.Policy",
        "Program": "flashwarp.program.Program",
        "SSDModel": "flashwarp.nvme.SSDModel",
        "ShareTable": "flashwarp.array.ShareTable",
        "SoftwareController": "flashwarp.nvme.SoftwareController",
        "Stats": "flashwarp.array.Stats",
        "VfioController": "flashwarp.nvme.VfioController",
    },
    "flashwarp.errors": {"DataPathError": "RouteError"},
    "flashwarp.transfer": {"Ticket": "Copy"},
    # Waiting: `wait` blocks the host, and `before` makes a stream wait.
    "Array": {"controller": "service", "synchronize": "wait"},
    "CopyEngine": {"copy_batch": "copy_pieces", "synchronize": "wait"},
    "Device": {"synchronize": "wait"},
    "Event": {"wait_on": "before"},
    "Future": {"wait_on": "before"},
    "Pipeline": {"synchronize": "take", "write_back_synchronize": "reclaim"},
    # `flush` makes durable.
    "File": {"sync": "flush"},
    "Gvdk": {"sync": "flush"},
    # How bytes travel; ways are those of caches.
    "Explanation": {
        "array": 'facts["array"]',
        "cache": 'facts["cache"]',
        "controller": "Array.service.describe()",
        "device": 'facts["device"]',
        "host_threads": 'facts["host_threads"]',
        "multiprocessors": 'facts["multiprocessors"]',
        "path": "route",
        "ranges": 'facts["ranges"]',
        "storage": 'facts["storage"]',
        "way": "route",
    },
    "Gatherer": {"file_way": "file_engine"},
    "Service": {"path": "route"},
    "SoftwareController": {"data_path=": "route="},
    "Ticket": {"way": "route"},
    "VfioController": {"data_path=": "route="},
    # Memory.
    "Cache": {"host_capacity": "host_memory", "host_capacity=": "host_memory="},
    "Checkpointer": {"gpu_cache=": "gpu_memory=", "host_cache=": "host_memory="},
    "File.create": {"prefetch=": "read_ahead="},
    "File.open": {"prefetch=": "read_ahead="},
    "Offloaded": {"report": "stats"},
    "Settings": {"staging=": "transfer_memory="},
    "Stager": {"budget=": "host_memory="},
    "read_config": {"gpu_cache=": "gpu_memory=", "host_cache=": "host_memory="},
    "load": {"staging=": "host_memory="},
    "offload": {"gpu=": "gpu_memory=", "ram=": "host_memory="},
    "offload_activations": {"host=": "host_memory="},
}
"""By module, class or function: new names of old members, and of old arguments ("name=")."""

T = TypeVar("T", bound=Callable[..., Any])


def later(
    package: str, places: Mapping[str, str], rooms: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that imports names at their first use.

    `places` has the module of each name, below flashwarp; `rooms` are modules themselves.
    """

    def get(name: str) -> object:
        if name in places:
            found: object = getattr(import_module(f"flashwarp.{places[name]}"), name)
        elif name in rooms:
            found = import_module(f"{package}.{name}")
        else:
            imports = sys._getframe(1).f_code.co_name == "_handle_fromlist"
            # `from package import name` would put an error of its own in an AttributeError's place.
            if imports and name in OLD.get(package, {}):
                raise ImportError(_moved(package, name), name=package)
            refuse(package, name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, *rooms})

    return get, names


def refuse(owner: str, name: str) -> None:
    """Raise RenamedError if a member of `owner`, or an argument "name=", was renamed."""
    if name in OLD.get(owner, {}):
        error = import_module("flashwarp.errors").RenamedError  # which needs this module
        raise error(_moved(owner, name))


def _moved(owner: str, name: str) -> str:
    return f"{owner}{'()' if name.endswith('=') else ''}: {name} is now {OLD[owner][name]}"


def renamed(thing: T) -> T:
    """Refuse old arguments and members of a class, or old arguments of a function; see `OLD`."""
    owner = thing.__qualname__
    if not isinstance(thing, type):
        checked: T = _with_arguments(owner, thing)
        return checked
    if any(name.endswith("=") for name in OLD[owner]):
        thing.__init__ = _with_arguments(owner, thing.__init__)  # type: ignore[misc]
    if any(not name.endswith("=") for name in OLD[owner]):
        _with_members(owner, thing)
    return thing


def _with_arguments(owner: str, call: Any) -> Any:
    @functools.wraps(call)
    def checked(*given: Any, **named: Any) -> Any:
        for name in named:
            refuse(owner, f"{name}=")
        return call(*given, **named)

    return checked


def _with_members(owner: str, made: Any) -> None:
    # Python asks it for what an object lacks.
    inner = getattr(made, "__getattr__", object.__getattribute__)

    def get(self: object, name: str) -> Any:
        refuse(owner, name)
        return inner(self, name)

    made.__getattr__ = get
