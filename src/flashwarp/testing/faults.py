"""Storages that fail on purpose, as a plan says that one line of text holds.

`Faulty` goes around any storage. The faults are drawn from a seed per operation number, so a run
whose operations come in the same order fails in the same way.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import cast

from flashwarp import _native
from flashwarp.errors import ArgumentError
from flashwarp.storage import File, Storage

OPERATIONS = ("read", "write", "flush", "discard", "write_zeroes", "any")
_TRANSFERS = ("read", "write")

# Kinds besides the errors, and the operations that they can happen to.
_KINDS = {
    "torn": ("write",),
    "short": _TRANSFERS,
    "flip": ("read",),
    "hang": OPERATIONS,
    "delay": OPERATIONS,
}
_ERRORS = {name.lower(): number for number, name in errno.errorcode.items()}

# The most that one fault may take, so that no plan makes a test wait for ever.
_DELAY_US_MAX = 10_000_000
_TEXT_MAX = 10_000
_NUMBER_MAX = 1 << 63


@dataclass(frozen=True)
class Fault:
    """One rule: which operations fail, and how. All conditions that are given must hold.

    Attributes
    ----------
    operation : str
        "read", "write", "flush", "discard", "write_zeroes" or "any".
    kind : str
        The name of an errno value in small letters, such as "eio", "enospc" or "enodata" (a file
        that was truncated); "torn", a write of which whole sectors at the front land before EIO;
        "short", a transfer that the kernel ends early without an error; "flip", a wrong bit in what
        is read; "delay"; "hang", no answer until the controller stops.
    probability : float
        Share of the operations.
    numbers : tuple of int
        Only the n-th operations, from 1 on, counted for each kind of operation (for "any": over
        all). Empty: every one.
    span : tuple of int, optional
        Only operations that touch bytes [first, last) of the storage.
    delay_us : int
        Of a "delay", at most 10 s.

    Raises
    ------
    ArgumentError
        For what cannot be, such as a torn read.
    """

    operation: str
    kind: str
    probability: float = 1.0
    numbers: tuple[int, ...] = ()
    span: tuple[int, int] | None = None
    delay_us: int = 0

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ArgumentError(f"{self.operation!r} is none of {', '.join(OPERATIONS)}")
        if self.kind not in _KINDS and self.kind not in _ERRORS:
            raise ArgumentError(f"{self.kind!r} is no errno name and none of {', '.join(_KINDS)}")
        if self.operation not in _KINDS.get(self.kind, OPERATIONS):
            raise ArgumentError(f"{self.kind!r} happens to {' and '.join(_KINDS[self.kind])} only")
        if not 0 <= self.probability <= 1:
            raise ArgumentError(f"a probability of {self.probability}")
        if any(not 1 <= n <= _NUMBER_MAX for n in self.numbers):
            raise ArgumentError(f"operations are counted from 1 on, not {self.numbers}")
        if self.span is not None and not 0 <= self.span[0] < self.span[1] <= _NUMBER_MAX:
            raise ArgumentError(f"bytes [{self.span[0]}, {self.span[1]}) are none")
        if (self.kind == "delay") != (self.delay_us != 0) or self.delay_us < 0:
            raise ArgumentError(f"{self.kind!r} with a delay of {self.delay_us} us")
        if self.delay_us > _DELAY_US_MAX:
            raise ArgumentError(f"a delay of {self.delay_us} us: at most {_DELAY_US_MAX}")

    def __str__(self) -> str:
        words = [self.operation, f"delay={self.delay_us}us" if self.delay_us else self.kind]
        if self.probability != 1:
            words.append(f"p={self.probability!r}")
        if self.numbers:
            words.append("n=" + ",".join(map(str, self.numbers)))
        if self.span is not None:
            words.append(f"bytes={self.span[0]}-{self.span[1]}")
        return " ".join(words)

    @property
    def native(self) -> tuple[str, str, int, int, float, list[int], int, int]:
        """The rule as the native storage takes it."""
        error = _ERRORS.get(self.kind, 0)
        first, last = self.span or (0, (1 << 64) - 1)
        kind = "error" if error else self.kind
        numbers = list(self.numbers)
        return self.operation, kind, error, self.delay_us, self.probability, numbers, first, last


@dataclass(frozen=True)
class FaultPlan:
    """A seed and the faults that are drawn from it; the first one that an operation meets counts.

    `str` and `parse` turn it into one line of text and back::

        seed=7; read eio p=0.01; write enospc n=3,5; any delay=200us p=0.1; read flip bytes=0-4096

    Examples
    --------
    >>> from flashwarp.testing import FaultPlan
    >>> plan = FaultPlan.parse("seed=7; write enospc n=3")
    >>> plan.faults[0].numbers
    (3,)
    >>> str(plan)
    'seed=7; write enospc n=3'
    """

    seed: int = 0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.seed < _NUMBER_MAX:
            raise ArgumentError(f"a seed of {self.seed}: 0 to 2^63 - 1")

    def __str__(self) -> str:
        return "; ".join([f"seed={self.seed}", *map(str, self.faults)])

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Read what `str` writes; a plan without a seed has seed 0.

        Raises
        ------
        ArgumentError
            Naming the part that is no rule.
        """
        if len(text) > _TEXT_MAX:
            raise ArgumentError(f"a plan of {len(text)} characters: at most {_TEXT_MAX}")
        parts = [part.strip() for part in text.split(";") if part.strip()]
        seed = 0
        if parts and (match := re.fullmatch(r"seed=([0-9]{1,19})", parts[0])):
            seed = int(match[1])
            parts = parts[1:]
        return cls(seed, tuple(_parse_fault(part) for part in parts))


_VALUES = {
    "p": r"([0-9.eE+-]{1,30})",
    "n": r"([0-9]{1,19}(?:,[0-9]{1,19})*)",
    "bytes": r"([0-9]{1,19}-[0-9]{1,19})",
    "delay": r"([0-9]{1,19})us",
}


def _parse_fault(text: str) -> Fault:
    operation, *words = text.split()
    kinds = [word for word in words if "=" not in word]
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            continue
        match = re.fullmatch(_VALUES.get(name, r"(?!)"), value)
        if match is None or name in values:
            raise ArgumentError(f"{word!r} in the fault {text!r}: p=, n=, bytes= or delay=, once")
        values[name] = match[1]
    if len(kinds) + ("delay" in values) != 1:
        raise ArgumentError(f"{text!r} is no fault: write an operation and what happens to it")
    try:
        probability = float(values.get("p", "1"))
    except ValueError:
        raise ArgumentError(f"p={values['p']} in the fault {text!r} is no number") from None
    first, _, last = values.get("bytes", "").partition("-")
    return Fault(
        operation,
        kinds[0] if kinds else "delay",
        probability,
        tuple(int(n) for n in values["n"].split(",")) if "n" in values else (),
        (int(first), int(last)) if last else None,
        int(values.get("delay", "0")),
    )


class Faulty(Storage):
    """A storage that fails as a plan says, around one that does not.

    Parameters
    ----------
    storage : Storage
        Where the bytes are. It stays the caller's.
    plan : FaultPlan or str
        What fails; `inject` changes it later.
    blocking : bool
        Around a `File`, the faults happen in the controller's I/O engine, where EINTR, EAGAIN,
        short and late results are met. True: in blocking calls, as around every other storage.
        There a hang is an ETIMEDOUT, and what a storage itself tries again has no effect.

    Notes
    -----
    Thread-safe. Operations are numbered in the order in which they arrive; with several threads or
    several commands in flight that order is not the program's.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> from flashwarp.testing import Faulty
    >>> storage = Faulty(fw.storage.Memory("64 KiB"), "read eio n=1")
    >>> with fw.open(storage, "r", "i4", device="cpu") as x:
    ...     try:
    ...         x[0]
    ...     except fw.errors.StorageError as error:
    ...         print("errno", error.errno)
    ...     int(x[0])
    errno 5
    0
    """

    def __init__(
        self, storage: Storage, plan: FaultPlan | str = "", *, blocking: bool = False
    ) -> None:
        self.inner = storage
        self.plan = _plan_of(plan)
        rules = [fault.native for fault in self.plan.faults]
        super().__init__(
            _native.FaultyStorage(storage.native, self.plan.seed, rules, bool(blocking))
        )
        self.blocking = blocking or not isinstance(storage, File)

    @property
    def path(self) -> str | None:
        """The file behind it, when there is one."""
        return self.inner.path

    @property
    def native(self) -> _native.FaultyStorage:
        """The C++ storage, for the controller; ClosedError after `close`."""
        return cast("_native.FaultyStorage", super().native)

    def inject(self, plan: FaultPlan | str) -> None:
        """Follow another plan from now on; operations are counted from 1 again."""
        self.plan = _plan_of(plan)
        self.native.inject(self.plan.seed, [fault.native for fault in self.plan.faults])

    def heal(self) -> None:
        """Fail no more."""
        self.inject(FaultPlan())

    def hits(self) -> tuple[int, ...]:
        """How many operations each fault of the plan has hit."""
        return tuple(self.native.hits())

    def operations(self) -> dict[str, int]:
        """How many operations of each kind there were since the plan was given."""
        return self.native.operations()


def _plan_of(plan: FaultPlan | str) -> FaultPlan:
    return FaultPlan.parse(plan) if isinstance(plan, str) else plan
