"""Built-in and custom replacement policies; mirrors `cache/policy.cuh`.

A policy decides which line of a set makes room. It is compiled into device code. So a cache names
its policy, and code that uses the cache is compiled with the same policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from flashwarp.errors import CacheError

__all__ = ["CLOCK", "POLICIES", "REFERENCED", "Policy", "resolve_policy"]

REFERENCED = 1 << 59
"""The mark of a hit in a tag word: `tag::kReferenced`."""

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Policy:
    """A custom replacement policy, in C++; `from_python` makes one from Python functions.

    Parameters
    ----------
    name : str
        The struct that `source` defines, in no namespace.
    source : str
        Device code that runs on GPUs and on the CPU: a struct with the static functions `on_hit`,
        `on_fill` and `choose_victim`, as ``flashwarp/cache/policy.cuh`` describes them. That header
        is included before it.
    keeps_words : bool
        Whether it uses the 32-bit word of each line that `fw::cache::policy_word` finds.
    shared_by_gpus : bool
        Whether kernels are compiled for caches that GPUs share, ``fw.Cache(peers=...)``: arrays on
        such a cache have a policy that says so, ``x.cache.policy``, and kernels need it.
    asks_owner : bool
        Whether kernels are compiled for arrays of clients of shared caches, which mark nothing, and
        ask the owner for what is absent. The library chooses it by itself.

    Notes
    -----
    The policy is compiled when the first kernel runs: with NVRTC for a GPU, with g++ or clang++ for
    the CPU device. No answer of it can break the cache: if it chooses a way that cannot be evicted,
    the cache takes another one and counts the refusal in `Cache.refusals`. Reads and stores by the
    methods of `fw::cache::set_view` and `fw::cache::hit_view` are checked and counted in the same
    way. Its functions must end, and nothing checks what they do with pointers.

    Examples
    --------
    The most recently filled way goes first:

    >>> import flashwarp as fw
    >>> newest = fw.policy.Policy("newest", '''
    ... struct newest {
    ...   FW_DEVICE static void on_hit(const fw::cache::geometry&, uint64_t, uint64_t) {}
    ...   FW_DEVICE static void on_fill(fw::cache::set_view& s, uint32_t way) { s.hand = way; }
    ...   FW_DEVICE static uint32_t choose_victim(fw::cache::set_view& s) { return s.hand; }
    ... };
    ... ''', keeps_words=False)
    >>> newest.name
    'newest'
    """

    name: str
    source: str
    keeps_words: bool = True
    shared_by_gpus: bool = False
    """Whether its caches lie in the memory of several GPUs, of which each runs kernels on them."""
    asks_owner: bool = False
    """Whether kernels may take arrays of clients, whose lines only the owner may mark."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise CacheError(
                f"a policy has the name of its C++ struct, and {self.name!r} is no such name"
            )
        if self.name in _BUILT_IN and self.source:
            raise CacheError(f"flashwarp has a policy {self.name!r}: give yours another name")
        if not self.source and self.name not in _BUILT_IN:
            raise CacheError(f"policy {self.name!r} has no source")

    @classmethod
    def from_python(
        cls,
        name: str,
        *,
        choose_victim: Callable[..., object],
        on_fill: Callable[..., object] | None = None,
        on_hit: Callable[..., object] | None = None,
        keeps_words: bool = True,
    ) -> Policy:
        """Make a policy from Python functions, which are translated to C++ and compiled.

        Parameters
        ----------
        name : str
            An identifier.
        choose_victim : function of (lines)
            Returns the number of a way of the set. Its bit must be set in ``lines.candidates``.
        on_fill : function of (lines, way), optional
            Called when a fill has taken a way.
        on_hit : function of (cache, way, seen), optional
            Called when a line is used; `way` counts in the whole cache, `seen` is its tag word.
        keeps_words : bool
            As for `Policy`.

        Notes
        -----
        docs/caches.md lists what the functions may use. Their numbers are unsigned and have 64
        bits. This call reads their source; they are never called. They cannot break the cache. A
        way that does not exist reads as 0 and is not stored to, and a call whose loops make more
        than 16384 rounds is ended. `Cache.refusals` counts both.

        Raises
        ------
        CompileError
            When the source cannot be translated; the message names the line.

        Examples
        --------
        >>> import flashwarp as fw
        >>> def lowest(lines):
        ...     return lowest_bit(lines.candidates)
        >>> fw.policy.Policy.from_python("lowest", choose_victim=lowest)  # doctest: +SKIP
        Policy('lowest')
        """
        from flashwarp.policy.python import policy_source

        return cls(
            name, policy_source(name, on_hit, on_fill, choose_victim, keeps_words), keeps_words
        )

    @property
    def built_in(self) -> bool:
        """Whether it is one of flashwarp's own."""
        return not self.source

    @property
    def struct(self) -> str:
        """The C++ name of its struct."""
        return f"::fw::cache::{self.name}_policy" if self.built_in else f"::{self.name}"

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler options that select it; none for the default policy."""
        chosen: tuple[str, ...] = ()
        if self.name != "clock" or self.asks_owner:
            struct = f"::fw::cache::unmarked<{self.struct}>" if self.asks_owner else self.struct
            chosen = (f"-DFW_POLICY={struct}",)
        if not (self.built_in or self.keeps_words):
            chosen += ("-DFW_POLICY_WORDS=0",)
        if self.shared_by_gpus:
            chosen += ("-DFW_SYSTEM_SCOPE=1",)
        return (*chosen, "-DFW_ASKS_OWNER=1") if self.asks_owner else chosen

    @property
    def for_clients(self) -> Policy:
        """The same in kernels that may take arrays of clients of shared caches."""
        return replace(self, asks_owner=True)

    @property
    def prelude(self) -> str:
        """The text that comes before all other device code."""
        if self.built_in:
            return ""
        header = "flashwarp/cache/policy.cuh"
        return f'#include "{header}"\n#line 1 "policy {self.name}"\n{self.source}\n'

    def __repr__(self) -> str:
        flags = [name for name in ("shared_by_gpus", "asks_owner") if getattr(self, name)]
        return f"Policy({', '.join([repr(self.name), *(f'{each}=True' for each in flags)])})"


# By name: whether it keeps words.
_BUILT_IN = {
    "clock": False,
    "lru": True,
    "fifo": True,
    "sieve": True,
    "s3_fifo": True,
    "random": False,
}

POLICIES = {name: Policy(name, "", keeps) for name, keeps in _BUILT_IN.items()}
"""flashwarp's own policies, by name."""

CLOCK = POLICIES["clock"]
"""The default."""


def resolve_policy(policy: str | Policy) -> Policy:
    """Return the policy that the user names.

    Raises CacheError for a name that does not exist.
    """
    if isinstance(policy, Policy):
        return policy
    found = POLICIES.get(policy) if isinstance(policy, str) else None
    if found is None:
        raise CacheError(f"policy={policy!r} is none of {', '.join(POLICIES)}, nor a Policy")
    return found
