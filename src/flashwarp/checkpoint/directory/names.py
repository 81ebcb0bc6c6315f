"""Names of checkpoints, and of the files of their versions; the same on disks and remote stores.

A version of a rank has two files, ``NAME/rank-RRRRR/VVVVVVVVVVVVVVVVVVV.manifest`` and
``...-ID.data``. Names that flashwarp did not give are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError
from flashwarp.storage import files

RANK_MAX = 99_999
_VERSION_DIGITS = 19  # of 2^63 - 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RANK = re.compile(r"rank-([0-9]{5})")
_IDENTITY = re.compile("[0-9a-f]{32}")
DATA = re.compile(r"([0-9]{19})-[0-9a-f]{16}\.data")
"""Names of data files."""


def check_name(name: object) -> str:
    """Return the name of a checkpoint, which names a folder too; raises ArgumentError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name)[:120]
        raise ArgumentError(
            f"the name {shown} of a checkpoint is not 1 to 100 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return name


def check_version(version: object) -> int:
    """Return the number of a version; raises ArgumentError."""
    return integer("version", version, 0, SIZE_MAX)


def check_rank(rank: object) -> int:
    """Return a rank; raises ArgumentError."""
    return integer("rank", rank, 0, RANK_MAX)


def rank_of_process(rank: int | None) -> int:
    """Return a rank; if none is given, that of the environment's ``RANK``, or 0."""
    if rank is not None:
        return check_rank(rank)
    text = os.environ.get("RANK", "0")
    if not text.isdecimal():
        raise ArgumentError(f"the environment has RANK={text!r}: pass rank=")
    return check_rank(int(text))


def rank_folder(rank: int) -> str:
    """Return the folder of a rank below that of the name."""
    return f"rank-{rank:05d}"


def rank_of(folder: str) -> int | None:
    """Return the rank whose folder it is, or None."""
    match = _RANK.fullmatch(folder)
    return int(match[1]) if match else None


def manifest_name(version: int) -> str:
    """Return the name of the manifest of a version."""
    return f"{version:0{_VERSION_DIGITS}d}.manifest"


def discarded_name(version: int) -> str:
    """Return the name of the note that a version was discarded, which other stores may have."""
    return f"{version:0{_VERSION_DIGITS}d}.discarded"


def data_name(version: int, number: int) -> str:
    """Return the name of a data file; `number` of 64 bits tells apart those of one version."""
    return f"{version:0{_VERSION_DIGITS}d}-{number:016x}.data"


def identity_of(identity: object = None) -> str:
    """Return the identity of a version, 32 hexadecimal digits; without one, a new one."""
    if identity is None:
        return os.urandom(16).hex()
    if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        raise ArgumentError(f"{repr(identity)[:80]} is no identity: 32 hexadecimal digits are")
    return identity


def data_version(name: str) -> int | None:
    """Return the version that a data file belongs to, or None for another file."""
    match = DATA.fullmatch(name)
    return int(match[1]) if match else None


def listed(folder: Path) -> list[str]:
    """Return the names in a folder; none if there is no folder."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise files.path_error(error, str(folder), writable=False) from error


def versions_among(names: Iterable[str], ending: str = "manifest") -> list[int]:
    """Return the versions whose manifests, or notes, are among the names of files, ascending."""
    matches = map(re.compile(rf"([0-9]{{19}})\.{ending}").fullmatch, names)
    return sorted(v for match in matches if match and (v := int(match[1])) <= SIZE_MAX)
