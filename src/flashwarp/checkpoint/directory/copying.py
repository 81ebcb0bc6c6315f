"""Copies of versions to another directory or a remote store, checked on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from flashwarp import endings
from flashwarp.checkpoint.directory.buffers import page_aligned
from flashwarp.checkpoint.directory.catalog import Catalog
from flashwarp.checkpoint.directory.directory import Directory
from flashwarp.checkpoint.directory.reader import VersionReader
from flashwarp.checkpoint.directory.remote import RemoteDirectory
from flashwarp.checkpoint.directory.writer import VersionWriter
from flashwarp.errors import (
    DamagedVersionError,
    ExistingVersionError,
    MissingVersionError,
)

__all__ = ["Copied", "copy_versions"]

_PIECE_BYTES = 8 << 20
_PIECES_IN_FLIGHT = 4


@dataclass
class Copied:
    """What `copy_versions` did.

    Attributes
    ----------
    copied, there : list of int
        Versions that were copied, and those that were at the target before.
    damaged : dict of int to str
        Versions that were not copied, and what is wrong with them.
    nbytes : int
        Bytes of the regions that were copied.
    """

    copied: list[int] = field(default_factory=list)
    there: list[int] = field(default_factory=list)
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
        A version that is at the target already is left as it is. Damaged versions are not copied.

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
    there = set(target.versions(name))
    done = Copied()
    for version in wanted:
        if version in there:
            done.there.append(version)
            continue
        try:
            with source.open(name, version, rank=target.rank) as reader:
                if isinstance(target, Directory):
                    _copy(reader, target)
                else:
                    target.upload(reader)
        except MissingVersionError:
            if asked:
                raise
        except ExistingVersionError:
            done.there.append(version)
        except DamagedVersionError as error:
            done.damaged[version] = str(error)
        else:
            done.copied.append(version)
            done.nbytes += reader.nbytes
    return done


def _copy(reader: VersionReader, target: Directory) -> None:
    with target.begin(
        reader.name, reader.version, reader.regions, metadata=reader.metadata
    ) as writer:
        with endings.Pool(_PIECES_IN_FLIGHT, "flashwarp-copy") as pool:
            pending: list[Future[None]] = []
            with contextlib.ExitStack() as after_error:
                after_error.callback(lambda: [each.cancel() for each in pending])
                for name, offset, nbytes in _pieces(reader):
                    if len(pending) == _PIECES_IN_FLIGHT:
                        pending.pop(0).result()
                    pending.append(pool.submit(_copy_piece, reader, writer, name, offset, nbytes))
                for each in pending:
                    each.result()
        writer.commit()


def _pieces(reader: VersionReader) -> Iterator[tuple[str, int, int]]:
    step = max(_PIECE_BYTES, reader.manifest.chunk_bytes)
    for region in reader.regions:
        for offset in range(0, region.nbytes, step):
            yield region.name, offset, min(step, region.nbytes - offset)


def _copy_piece(
    reader: VersionReader, writer: VersionWriter, name: str, offset: int, nbytes: int
) -> None:
    memory = page_aligned(nbytes)
    reader.read_into(name, offset, memory)
    writer.write(name, offset, memory)
