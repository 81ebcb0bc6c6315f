"""Copies of versions to another directory or a remote store, checked on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flashwarp.checkpoint.directory.catalog import Catalog
from flashwarp.checkpoint.directory.directory import Directory
from flashwarp.checkpoint.directory.remote import RemoteDirectory
from flashwarp.errors import (
    DamagedVersionError,
    ExistingVersionError,
    MissingVersionError,
)


@dataclass
class Copied:
    """What `copy_versions` did.

    Attributes
    ----------
    copied, there, others : list of int
        Versions that were copied; those that were at the target before; and those in whose place
        the target has another version of the same number.
    damaged : dict of int to str
        Versions that were not copied, and what is wrong with them.
    nbytes : int
        Bytes of the regions that were copied.
    """

    copied: list[int] = field(default_factory=list)
    there: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    nbytes: int = 0


def copy_versions(
    source: Catalog,
    target: Directory | RemoteDirectory,
    name: str,
    versions: Iterable[int] | None = None,
) -> Copied:
    """Copy versions of a checkpoint by the target's rank.

    Parameters
    ----------
    source : Directory or RemoteDirectory
        Where they are.
    target : Directory or RemoteDirectory
        Where they go. A version appears there when it is complete, as if it were committed there.
    name : str
        The checkpoint.
    versions : iterable of int, optional
        Which ones; default all. They are copied in this order, the oldest first by default.

    Returns
    -------
    Copied
        What is at the target already is left as it is. Damaged versions are not copied.

    Raises
    ------
    MissingVersionError
        If a version that was asked for does not exist. Of all versions, those that are discarded
        meanwhile are left out.
    StorageError, PathError, RemoteError
        If a transfer failed.

    Notes
    -----
    Blocks. Takes 32 MiB of memory. Every byte is checked when it is read, and each checksum again
    when it is written.
    """
    asked = versions is not None
    wanted = list(versions) if versions is not None else source.versions(name, target.rank)
    done = Copied()
    for version in wanted:
        try:
            with source.open(name, version, rank=target.rank) as reader:
                stored = target.upload(reader)
        except MissingVersionError:
            if asked:
                raise
        except ExistingVersionError:
            done.others.append(version)
        except DamagedVersionError as error:
            done.damaged[version] = str(error)
        else:
            (done.copied if stored else done.there).append(version)
            done.nbytes += reader.nbytes if stored else 0
    return done
