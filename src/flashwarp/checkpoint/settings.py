"""Settings of a checkpointer beyond its arguments: one frozen record, with limits and reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashwarp._names import refuse, renamed
from flashwarp.checkpoint.directory.names import RANK_MAX
from flashwarp.checkpoint.eviction import policy_of
from flashwarp.checkpoint.hints import HINTS_MAX, PASSED_MAX
from flashwarp.config import SIZE_MAX, flag, integer, number, parse_bytes, time_limit_s
from flashwarp.errors import ArgumentError


@renamed
@dataclass(frozen=True)
class Settings:
    """Settings of a `Checkpointer`; ``config=`` takes one, or a dict with some of the fields.

    Parameters
    ----------
    timeout_s : float
        Limit of each wait, in seconds in which the process ran. Default: `Config.timeout_s`.
    transfer_memory : int or str
        Budget of pinned memory for transfers between a GPU and storage that pass the host cache by.
    eviction : str
        "score", or to compare "lru" or "fifo".
    discard_consumed : bool
        Discard each version once it was restored (condition 5 of the paper): its flushes need not
        end, and its room is free at once. For adjoint runs that read each version once.
    restart_prefetches : bool
        Whether the first restart begins prefetching as `prefetch_start` does.
    lookahead : int
        Hints that a prefetch looks ahead at most.
    hints_max, passed_max : int
        Bounds of the restore queue; see `hints.RestoreQueue`.
    retry_s : float
        Seconds after which a failed flush is tried again; doubled each time, up to a minute.
    read_only : bool
        Restore versions that another process writes, while it does; `checkpoint` is refused.
    remote_options : mapping
        For a URL as ``remote=``: arguments of `directory.RemoteDirectory`, such as ``endpoint``,
        ``region``, ``attempts`` and ``timeout_s``.
    ranks : int
        How many ranks share the folder and write each version together. From 2 on, all of them
        commit a version, or none does; see the page on checkpoints.
    votes : flashwarp.torch.StoreVotes, optional
        How these ranks agree if they share no folder. Default: by files in the folder.
    """

    timeout_s: float = field(default_factory=time_limit_s)
    transfer_memory: int | str = "128 MiB"
    eviction: str = "score"
    discard_consumed: bool = False
    restart_prefetches: bool = True
    lookahead: int = 4096
    hints_max: int = HINTS_MAX
    passed_max: int = PASSED_MAX
    retry_s: float = 1.0
    read_only: bool = False
    remote_options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    votes: Any = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "timeout_s", number("timeout_s", self.timeout_s, 1e-3, 1e6))
        put(self, "transfer_memory", parse_bytes(self.transfer_memory, "transfer_memory"))
        integer("transfer_memory", self.transfer_memory, 8192, SIZE_MAX)
        policy_of(self.eviction)
        flag("discard_consumed", self.discard_consumed)
        flag("restart_prefetches", self.restart_prefetches)
        flag("read_only", self.read_only)
        if not isinstance(self.remote_options, Mapping):
            raise ArgumentError(f"remote_options={self.remote_options!r} is no mapping")
        integer("ranks", self.ranks, 1, RANK_MAX + 1)
        if self.votes is not None and not hasattr(self.votes, "join"):
            raise ArgumentError(f"votes={self.votes!r} is no flashwarp.torch.StoreVotes")
        if self.votes is not None and self.read_only:
            raise ArgumentError("votes= is for ranks that write: a reader looks into the folder")
        integer("lookahead", self.lookahead, 0, HINTS_MAX)
        integer("hints_max", self.hints_max, 1, SIZE_MAX)
        integer("passed_max", self.passed_max, 1, SIZE_MAX)
        put(self, "retry_s", number("retry_s", self.retry_s, 1e-3, 1e6))

    @staticmethod
    def of(config: Settings | Mapping[str, object] | None) -> Settings:
        """Return settings from what a user passes as ``config=``."""
        if config is None:
            return Settings()
        if isinstance(config, Settings):
            return config
        if not isinstance(config, Mapping):
            raise ArgumentError(
                f"config= is of type {type(config).__name__}: pass a dict or "
                "flashwarp.checkpoint.settings.Settings"
            )
        for name in config:
            refuse("Settings", f"{name}=")
        known = {each.name for each in dataclasses.fields(Settings)}
        unknown = sorted(str(name) for name in set(config) - known)
        if unknown:
            raise ArgumentError(
                f"config has unknown settings {', '.join(unknown)}; there are "
                f"{', '.join(sorted(known))}"
            )
        return Settings(**config)  # type: ignore[arg-type]

    @property
    def transfer_bytes(self) -> int:
        """The budget of staging memory."""
        return parse_bytes(self.transfer_memory, "transfer_memory")
