"""Every tunable with its unit and default, and sizes as people write them.

Each field of `Config` can be set by an environment variable of the same name in capitals with the
prefix ``FLASHWARP_``; arguments of calls win over both.
"""

from __future__ import annotations

import functools
import numbers
import operator
import os
import re
import reprlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from flashwarp.errors import ArgumentError

__all__ = [
    "SIZE_MAX",
    "Config",
    "brief",
    "choice",
    "cores",
    "current",
    "flag",
    "integer",
    "number",
    "parse_bytes",
    "time_limit_s",
    "warn_of_misspelt",
]

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS[_prefix] = _UNITS[f"{_prefix}ib"] = 1 << 10 * _power
    _UNITS[f"{_prefix}b"] = 1000**_power

SIZE_MAX = (1 << 63) - 1
"""Most bytes of anything: what a signed offset of a file can name."""


_SHOWN = 200


def brief(value: object) -> str:
    """Return the `repr` of a value for a message, cut where people stop reading."""
    if isinstance(value, str | bytes | bytearray) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}... of {len(value)}"
    if isinstance(value, list | tuple | set | frozenset | dict) and len(value) > _SHOWN:
        return reprlib.repr(value)
    text = repr(value)
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]}..."


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return an integer argument; floats, bools and text are refused.

    Raises ArgumentError, which names the argument, its value and its limits. If a limit is None,
    there are no limits.
    """
    found = _integer(value)
    limited = low is not None and high is not None
    if found is None or (limited and not low <= found <= high):  # type: ignore[operator]
        limits = f" between {low} and {high}" if limited else ""
        raise ArgumentError(f"{name}={brief(value)} is not an integer{limits}")
    return found


def number(name: str, value: object, low: float, high: float) -> float:
    """Return a numeric argument as a float, within its limits; raises as `integer` does."""
    real = isinstance(value, int | float | numbers.Real) and not isinstance(value, bool)
    if not real or not low <= value <= high:  # type: ignore[operator]
        raise ArgumentError(f"{name}={brief(value)} is not a number between {low:g} and {high:g}")
    return float(value)  # type: ignore[arg-type]


def flag(name: str, value: object) -> bool:
    """Return an argument that must be True or False, of Python or numpy; raises ArgumentError."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise ArgumentError(f"{name}={brief(value)} is neither True nor False")
    return bool(value)


def choice(name: str, value: object, options: Sequence[str]) -> None:
    """Check that a name is one of `options`; raises ArgumentError, which lists them."""
    if not isinstance(value, str) or value not in options:
        raise ArgumentError(f"{name}={brief(value)} is none of {', '.join(map(repr, options))}")


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def parse_bytes(size: int | str, name: str = "") -> int:
    """Return a size in bytes from an int or a text such as ``"4 MiB"``.

    Raises
    ------
    ArgumentError
        When the text has no number or an unknown unit, when the size is negative or beyond 2^63,
        and for anything but an integer or text. It names the argument `name`.

    Examples
    --------
    >>> parse_bytes("4 KiB")
    4096
    """
    found = _integer(size)
    if found is None:
        pattern = r"\s*([0-9]{1,20})(?:\.([0-9]{1,20}))?\s*([A-Za-z]*)\s*"
        match = re.fullmatch(pattern, size) if isinstance(size, str) else None
        if match is None or match[3].lower() not in _UNITS:
            text = f"{name}={brief(size)}" if name else brief(size)
            raise ArgumentError(f"{text} is not a size: write bytes as an int, or e.g. '4 KiB'")
        # Exact, as a float would not be from 2^53 on.
        decimals = match[2] or ""
        found = int(match[1] + decimals) * _UNITS[match[3].lower()] // 10 ** len(decimals)
    if not 0 <= found <= SIZE_MAX:
        what = "negative" if found < 0 else f"more than {SIZE_MAX}"
        raise ArgumentError(f"{name or 'a size'} of {found} bytes is {what}")
    return found


def cores() -> int:
    """Return how many cores this process may use; all cores if a sandbox hides the number."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 1


N = TypeVar("N", int, float)


def _setting(default: N, low: float, high: float) -> N:
    """Declare a field of `Config` with its limits; those of rings are the specification's."""
    declared: N = field(default=default, metadata={"limits": (low, high)})
    return declared


@dataclass(frozen=True)
class Config:
    """Defaults of the library."""

    timeout_s: float = _setting(120.0, 1e-3, 1e6)
    """Seconds in which the process runs, after which a wait fails that has no limit of its own: for
    a stream, a copy, a batch, a version of a checkpoint, or bytes of a file. The longest of these
    move as much as a GPU holds, and 100 GiB at 3 GB/s take 36 s. Kernels give a command up after a
    quarter, so that a call on the host ends with the command's error; see `command_timeout_s`."""

    in_place_budget: float = _setting(0.5, 0, 1)
    """Share of the host's available memory, of the machine and of the process's control groups,
    that all files together may pin which this process has mapped in place. Beyond that, files are
    read through the rings."""

    in_place_residency: float = _setting(0.9, 0, 1e9)
    """Least share of a file that must be in the page cache for the file to be mapped in place."""

    page_cache_share: float = _setting(1.0, 0, 1)
    """Share of the host's available memory that the pages of one file may take; a larger file is
    read and written with O_DIRECT. The default is 1, because the page cache is still faster if a
    small part of the pages finds no room."""

    review_bytes: int = _setting(16 << 20, 0, SIZE_MAX)
    """Bytes read from a file before the choice between page cache and O_DIRECT is reviewed, and
    between reviews. 0: never, so the choice made at open stays."""

    copy_cached: int = _setting(1, 0, 1)
    """1: copy bytes of a file that are in the page cache from a mapping. This takes half the time
    of a system call, and needs a SIGBUS handler for the process. 0: use system calls."""

    look_ahead: int = _setting(64, 0, 1 << 20)
    """Rows that a CPU thread has in flight ahead of the row that it copies, if storage is slow."""

    key_bytes: int = _setting(64 << 20, 1, SIZE_MAX)
    """Most bytes of rows that ``x[key]`` reads or stores at a time, beside the selection itself, if
    the key selects parts of rows. A longer row is read alone."""

    asarray_bytes: int = _setting(1 << 30, 0, SIZE_MAX)
    """Most bytes of an array that ``numpy.asarray(x)`` reads, because library code calls it without
    the user's knowledge. ``x[...]`` has no such limit."""

    async_calls: int = _setting(64, 1, 4096)
    """Most asynchronous calls of one array in flight; a further call waits until one has ended."""

    drain_blocks: int = _setting(-1, -1, 255)
    """Thread blocks of a ``gather``, ``scatter`` or ``prefetch`` that wait for the storage on a
    GPU, after all blocks have served what is in the cache; two to a multiprocessor. More blocks
    have more commands in flight, and leave other streams fewer multiprocessors. -1: by the storage,
    2 for each disk, 8 for files that host threads copy, none for modelled drives and rows below 256
    bytes. 0: all blocks wait, as many as the GPU runs."""

    host_optimization: int = _setting(3, 0, 3)
    """Level at which C++ kernels and policies are compiled for the CPU device. A policy takes
    about twice as long at 3 as at 1, and that only once: compiled code is kept."""

    publish: int = _setting(1, 0, 1)
    """1: other processes of the user may ask this one for its counters, as `flashwarp top` does.
    This takes a thread that sleeps until then, and a socket. 0: nobody can ask."""

    nvtx: int = _setting(0, 0, 1)
    """1: mark calls as ranges for NVIDIA's profilers, from the import of the library on; needs the
    extra `nvtx`."""

    progress: int = _setting(0, 0, 1)
    """1: what lasts shows its progress on stderr, if that is a terminal: graphs that are built, and
    images and checkpoints that are copied or checked. The command line always does."""

    @property
    def command_timeout_s(self) -> float:
        """Seconds after which a kernel gives a command up, a quarter of `timeout_s`.

        A drive that takes longer than the default is broken: the NVMe driver of Linux gives up
        after 30 s too.
        """
        return self.timeout_s / 4

    def __post_init__(self) -> None:
        for each in fields(self):
            check = integer if isinstance(each.default, int) else number
            check(each.name, getattr(self, each.name), *each.metadata["limits"])


_PREFIX = "FLASHWARP_"
_DEFAULTS = Config()
_VARIABLES = {each.name: f"{_PREFIX}{each.name.upper()}" for each in fields(Config)}

# What other modules read from the environment; the plugin of vLLM refuses its names of old itself.
_OTHERS = (
    *("CACHE_DIR", "RUNTIME_DIR", "CUBINS", "IO_ENGINE", "COMMIT"),
    *("VLLM_TABLES", "VLLM_HOST_MEMORY", "VLLM_GPU_MEMORY", "VLLM_RAM", "VLLM_GPU"),
)
# By difflib, of names without the prefix: TIMEOUT is 0.88 like TIMEOUT_S.
_LIKENESS_MIN = 0.75


def current(*names: str) -> Config:
    """Return the defaults, with the values that environment variables override.

    Parameters
    ----------
    *names : str
        The fields that the caller reads; default all. Each takes about a microsecond, which counts
        in a call that moves a few rows. Other fields have their defaults.

    Raises
    ------
    ArgumentError
        When a variable does not parse, or its value cannot work.
    """
    texts = tuple(
        (name, text)
        for name in names or _VARIABLES
        if (text := os.environ.get(_VARIABLES[name])) is not None
    )
    return _parsed(texts) if texts else _DEFAULTS


@functools.cache
def warn_of_misspelt() -> None:
    """Warn once of variables of the environment that look like a setting and are none."""
    known = [*(name.upper() for name in _VARIABLES), *_OTHERS]
    names = (each.removeprefix(_PREFIX) for each in os.environ if each.startswith(_PREFIX))
    for name in (each for each in names if each not in known):
        import difflib  # most programs have no strangers

        if near := difflib.get_close_matches(name, known, 1, _LIKENESS_MIN):
            warnings.warn(
                f"{_PREFIX}{name} is no setting, and changes nothing: did you mean "
                f"{_PREFIX}{near[0]}?",
                stacklevel=2,
            )


# Calls that move a few rows read the same variables each time.
@functools.lru_cache(maxsize=64)
def _parsed(texts: tuple[tuple[str, str], ...]) -> Config:
    changes: dict[str, Any] = {}
    for name, text in texts:
        variable = _VARIABLES[name]
        kind: type[Any] = type(getattr(_DEFAULTS, name))
        try:
            changes[name] = kind(text)
            replace(_DEFAULTS, **{name: changes[name]})
        except ArgumentError as error:
            raise ArgumentError(f"{variable}={text!r}: {error}") from None
        except ValueError:
            raise ArgumentError(f"{variable}={text!r} is not {kind.__name__}") from None
    return replace(_DEFAULTS, **changes)


def time_limit_s(timeout_s: float | None = None) -> float:
    """Return the limit of a wait: what a call was given, or else the setting."""
    return current("timeout_s").timeout_s if timeout_s is None else timeout_s
