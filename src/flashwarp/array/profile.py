"""Profiles: what `flashwarp tune` has chosen for a file, and `open(profile=)` uses.

A profile is the record of a run of `flashwarp tune`; its settings name the file by size and shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashwarp.cache.cache import Cache
from flashwarp.errors import ArgumentError, FileFormatError, FlashwarpError
from flashwarp.nvme.software import SoftwareController
from flashwarp.storage import containers
from flashwarp.storage.files import PathLike, check_name

VERSION = 1
"""Of profiles. Another one is refused, because its settings may mean something else."""


@dataclass(frozen=True)
class Profile:
    """Settings for an array of this dtype and shape; what is None stays the default."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    cache: int | None = None
    line: int | None = None
    policy: str = "clock"
    o_direct: bool | None = None
    threads: int | None = None
    version: int = VERSION

    @classmethod
    def load(cls, path: PathLike) -> Profile:
        """Read what `flashwarp tune` has stored.

        Raises MissingFileError, and FileFormatError for what is no profile of this version.
        """
        name, wanted = check_name(path), "a profile of `flashwarp tune`"
        found = containers.read_json(name, wanted)
        try:
            settings = found["settings"]
            version = settings["version"]
            if version == VERSION:
                made = cls(**{**settings, "shape": tuple(settings["shape"])})
                made.options()  # raises for what no cache or controller can have
                return made
        except (ValueError, KeyError, TypeError, FlashwarpError) as error:
            why = error if isinstance(error, FlashwarpError) else "its settings are not such"
            raise FileFormatError(f"{name} is not {wanted}: {why}") from error
        raise FileFormatError(
            f"{name} is a profile of version {version}, and this flashwarp reads version "
            f"{VERSION}: run `flashwarp tune` again"
        )

    def options(self) -> dict[str, Any]:
        """Return the arguments of `open` that it stands for."""
        found: dict[str, Any] = {"o_direct": self.o_direct, "line": self.line}
        if self.cache is not None:
            found |= {"cache": Cache(self.cache, self.line or 4096, policy=self.policy)}
            del found["line"]  # the cache has it
        if self.threads is not None:
            found["controller"] = SoftwareController(threads=self.threads)
        return found

    def check(self, path: object, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str) -> None:
        """Raise ArgumentError if it is of another file, or of another kind of device."""
        mine, theirs = (self.dtype, self.shape), (dtype.str, shape)
        if mine != theirs:
            raise ArgumentError(
                f"the profile is of a file of dtype {mine[0]} and shape {mine[1]}, and {path} has "
                f"{theirs[0]} and {theirs[1]}: run `flashwarp tune` on it, or leave profile= out"
            )
        if self.device != kind:
            raise ArgumentError(
                f"the profile was made on device {self.device!r}, and the array opens on {kind!r}: "
                f"run `flashwarp tune --device {kind}`, or leave profile= out"
            )
