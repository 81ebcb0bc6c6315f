"""Replacement policies by name; mirrors `cache/policy.cuh`.

A policy decides which line of a set makes room. It is compiled into device code, so a cache says
which one it has, and code that uses the cache is compiled with the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashwarp.errors import ArgumentError

__all__ = ["POLICIES", "Policy", "resolve_policy"]


@dataclass(frozen=True)
class Policy:
    """A replacement policy: what device code calls it, and what a cache keeps for it.

    Attributes
    ----------
    name : str
        What ``Cache(policy=...)`` takes.
    struct : str
        The C++ struct with `on_hit`, `on_fill` and `choose_victim`, with its namespaces.
    keeps_words : bool
        Whether it needs a 32-bit word for each line.
    """

    name: str
    struct: str
    keeps_words: bool

    @property
    def define(self) -> str:
        """The compiler's option that chooses it."""
        return f"-DFW_POLICY={self.struct}"


def _built_in(name: str, keeps_words: bool) -> Policy:
    return Policy(name, f"::fw::cache::{name}_policy", keeps_words)


POLICIES = {
    policy.name: policy
    for policy in (
        _built_in("clock", False),
        _built_in("lru", True),
        _built_in("fifo", True),
        _built_in("sieve", True),
        _built_in("s3_fifo", True),
        _built_in("random", False),
    )
}
"""Those that flashwarp brings, by name."""


def resolve_policy(policy: str | Policy) -> Policy:
    """Return the policy that a user means.

    Raises ArgumentError for a name that does not exist.
    """
    if isinstance(policy, Policy):
        return policy
    found = POLICIES.get(policy)
    if found is None:
        raise ArgumentError(f"policy={policy!r} is none of {', '.join(POLICIES)}, nor a Policy")
    return found
