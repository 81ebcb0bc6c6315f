"""Partner copies: versions of a rank lie on its partner's folder too, sent by torch.distributed.

`Partners` is a second store of a `Checkpointer`. Each rank is client of the next rank and server of
the one before. Bytes go through host memory and gloo, whatever the other groups of the program use.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashwarp import endings
from flashwarp.checkpoint.directory import Catalog, Directory, VersionReader, VersionWriter
from flashwarp.checkpoint.directory.catalog import first_line
from flashwarp.checkpoint.directory.names import check_version
from flashwarp.checkpoint.region import Region
from flashwarp.config import number, time_limit_s
from flashwarp.errors import (
    ArgumentError,
    DamagedVersionError,
    FlashwarpError,
    MissingFileError,
    RemoteError,
)

_log = logging.getLogger(__name__)

_PIECE_BYTES = 8 << 20
_REQUEST, _REPLY = 1, 2
_Answer = tuple[dict[str, Any], Any]
# A server waits for its client as long as the program runs. The end of the client's process ends
# the wait, and so does the client's close.
_IDLE = timedelta(days=365)


class Partners(Catalog):
    """Copies of the versions of each rank in a folder of the next rank.

    Pass it as ``remote=`` to a `Checkpointer`: versions go there once they are durable, and a
    restart takes them from there if the rank's own files are gone or damaged.

    Parameters
    ----------
    path : path-like
        A folder of this process's node, for the copies of the rank before.
    group : ProcessGroup, optional
        The ranks. Default: all. Any backend will do.
    timeout_s : float, optional
        Limit of each transfer. Default: `Config.timeout_s`.

    Raises
    ------
    ArgumentError
        If torch.distributed is not initialised, or the group has one rank.
    LockedError
        If another process keeps copies of the same rank in this folder.

    Notes
    -----
    All ranks make it together, as they make a process group, and close it together. Thread-safe.
    A partner that fails or ends is a `RemoteError`; what is in the rank's own folder stays usable.
    """

    _when_forked = "{0!r} was made before fork(): only the parent can use it"
    _poll_s = 1.0

    def __init__(
        self, path: str | os.PathLike[str], group: Any = None, *, timeout_s: float | None = None
    ) -> None:
        super().__init__()
        timeout = timedelta(seconds=number("timeout_s", time_limit_s(timeout_s), 1e-3, 1e6))
        if not dist.is_initialized():
            raise ArgumentError("partners need torch.distributed.init_process_group first")
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        if len(ranks) < 2:
            raise ArgumentError(f"partners need at least two ranks, and the group has {len(ranks)}")
        place = ranks.index(dist.get_rank())
        self.rank = ranks[place]
        self._before, self._next = ranks[place - 1], ranks[(place + 1) % len(ranks)]
        self._kept = Directory(path, self._before)
        # The first waits for requests, the second for what must come in time.
        self._idle = dist.new_group(ranks, timeout=_IDLE, backend="gloo")
        self._busy = dist.new_group(ranks, timeout=timeout, backend="gloo")
        self._asking = endings.Lock()
        self._broken = ""
        self._timeout_s = timeout.total_seconds()
        self._writers: dict[tuple[str, int], VersionWriter] = {}
        self._server = endings.Thread(self._serve, "flashwarp-checkpoint-partner")
        self._server.start()

    # The store.

    def upload(self, reader: VersionReader, *, replace: bool = False) -> bool:
        """Store a version at the partner; every byte is checked here, and compared there."""
        if self._has(reader, replace):
            return False
        record = reader.manifest
        what = {"name": record.name, "version": record.version}
        regions = [
            [each.region.name, each.region.dtype, each.region.shape, each.region.nbytes]
            for each in record.regions
        ]
        kept = {"metadata": dict(record.metadata), "identity": record.identity}
        self._ask("begin", {**what, "regions": regions, **kept})
        try:
            piece = bytearray(_PIECE_BYTES)
            for stored in record.regions:
                for offset in range(0, stored.region.nbytes, _PIECE_BYTES):
                    view = memoryview(piece)[: min(_PIECE_BYTES, stored.region.nbytes - offset)]
                    reader.read_into(stored.region.name, offset, view)
                    where = {**what, "region": stored.region.name, "offset": offset}
                    self._ask("write", where, view)
            self._ask("commit", what)
        except BaseException:
            with contextlib.suppress(FlashwarpError):
                self._ask("abort", what)
            raise
        self._compare(reader)
        return True

    def _compare(self, reader: VersionReader) -> None:
        """Check that the partner has computed the checksums that this rank has."""
        record = reader.manifest
        path, kept = self._manifest(record.name, record.version, None)
        for mine, theirs in zip(record.regions, kept.regions, strict=True):
            same = (kept.chunk_bytes, kept.identity) == (record.chunk_bytes, record.identity)
            if not same or (mine.checksums != theirs.checksums).any():
                self.discard_all(record.name, [record.version])
                raise DamagedVersionError(path, "the partner has received other bytes")

    def discard_all(self, name: str, versions: Iterable[int]) -> list[int]:
        """Remove the partner's copies of several versions; return those that were there."""
        asked = [check_version(version) for version in versions]
        found, _ = self._ask("discard", {"name": name, "versions": asked})
        return [int(version) for version in found["removed"]]

    def close(self) -> None:
        """Wait until the rank before closes too, and end. May be called twice."""
        if self._closed or self._in_child:
            return
        with contextlib.suppress(FlashwarpError):
            self._ask("end", {})
        self._closed = True
        self._server.join(self._timeout_s)
        for writer in self._writers.values():
            writer.abort()
        self._kept.close()
        if self._server.is_alive():
            _log.warning("rank %d has not closed its partner copies in time", self._before)

    # What `Catalog` needs.

    def _listed(self, *folders: str) -> list[str]:
        return list(self._ask("list", {"parts": folders})[0]["names"])

    def _read(self, *parts: str) -> tuple[str, bytes]:
        found, data = self._ask("read", {"parts": parts})
        return found["path"], bytes(data)

    def _source(self, nbytes: int, *parts: str) -> _Kept:
        found, _ = self._ask("size", {"parts": parts})
        if found["nbytes"] != nbytes:
            raise DamagedVersionError(
                found["path"], f"it has {found['nbytes']} bytes, and {nbytes} were written"
            )
        return _Kept(self, parts, found["path"])

    def _run(self, act: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()  # one request at a time: threads would not make it faster
        try:
            done.set_result(act(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done

    # The client.

    def _ask(
        self, what: str, arguments: dict[str, Any], data: Any = b""
    ) -> tuple[dict[str, Any], bytearray]:
        self._check_usable()
        with self._asking:
            if self._broken:
                raise RemoteError(f"rank {self._next} keeps no copies any more: {self._broken}")
            try:
                self._send({"what": what, **arguments}, data, self._next, _REQUEST, self._idle)
                found, payload = self._receive(self._next, _REPLY, self._busy)
            except RuntimeError as error:  # of torch.distributed; the connection is lost then
                self._broken = first_line(error)
                raise RemoteError(
                    f"rank {self._next}, which keeps copies of rank {self.rank}, does not answer: "
                    f"{self._broken}"
                ) from error
        if found.get("missing"):
            raise MissingFileError(errno.ENOENT, "the partner has no such file", found["missing"])
        if found.get("failure"):
            raise RemoteError(f"rank {self._next} cannot keep a copy: {found['failure']}")
        return found, payload

    # The server.

    def _serve(self) -> None:
        try:
            while True:
                asked, data = self._receive(self._before, _REQUEST, self._busy, self._idle)
                ends = asked["what"] == "end"
                answer, payload = ({}, b"") if ends else self._answer({**asked, "data": data})
                self._send(answer, payload, self._before, _REPLY, self._busy)
                if ends:
                    return
        except RuntimeError as error:
            if not self._closed:
                _log.warning(
                    "rank %d sends no copies any more: %s", self._before, first_line(error)
                )

    def _answer(self, asked: dict[str, Any]) -> _Answer:
        try:
            found: _Answer = getattr(self, f"_answer_{asked['what']}")(asked)
            return found
        except MissingFileError as error:
            return {"missing": str(error)}, b""
        except (FlashwarpError, OSError) as error:
            return {"failure": f"{type(error).__name__}: {error}"}, b""

    def _answer_list(self, asked: dict[str, Any]) -> _Answer:
        return {"names": self._kept._listed(*asked["parts"])}, b""

    def _answer_read(self, asked: dict[str, Any]) -> _Answer:
        path, text = self._kept._read(*asked["parts"])
        return {"path": path}, text

    def _answer_size(self, asked: dict[str, Any]) -> _Answer:
        path = self._kept.path.joinpath(*asked["parts"])
        try:
            return {"path": f"rank {self.rank}: {path}", "nbytes": path.stat().st_size}, b""
        except FileNotFoundError as error:
            raise MissingFileError(errno.ENOENT, "no such file", str(path)) from error

    def _answer_range(self, asked: dict[str, Any]) -> _Answer:
        with open(self._kept.path.joinpath(*asked["parts"]), "rb") as file:
            return {}, os.pread(file.fileno(), asked["nbytes"], asked["offset"])

    def _answer_begin(self, asked: dict[str, Any]) -> _Answer:
        self._answer_abort(asked)
        regions = [
            Region(name, dtype, tuple(shape), n) for name, dtype, shape, n in asked["regions"]
        ]
        self._writers[_key(asked)] = self._kept.begin(
            *_key(asked),
            regions,
            replace=True,
            metadata=asked["metadata"],
            identity=asked["identity"],
        )
        return {}, b""

    def _answer_write(self, asked: dict[str, Any]) -> _Answer:
        self._writers[_key(asked)].write(asked["region"], asked["offset"], asked["data"])
        return {}, b""

    def _answer_commit(self, asked: dict[str, Any]) -> _Answer:
        self._writers[_key(asked)].commit()
        del self._writers[_key(asked)]
        return {}, b""

    def _answer_abort(self, asked: dict[str, Any]) -> _Answer:
        writer = self._writers.pop(_key(asked), None)
        if writer is not None:
            writer.abort()
        return {}, b""

    def _answer_discard(self, asked: dict[str, Any]) -> _Answer:
        return {"removed": self._kept.discard_all(asked["name"], asked["versions"])}, b""

    # Messages: two sizes, then JSON, then bytes.

    def _send(self, fields: dict[str, Any], data: Any, rank: int, tag: int, first: Any) -> None:
        text = bytearray(json.dumps(fields).encode())
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        sizes = torch.tensor([len(text), view.nbytes])
        dist.send(sizes, rank, group=first, tag=tag)
        dist.send(torch.frombuffer(text, dtype=torch.uint8), rank, group=self._busy, tag=tag)
        if view.nbytes:
            whole = view if not view.readonly else memoryview(bytearray(view))
            dist.send(torch.frombuffer(whole, dtype=torch.uint8), rank, group=self._busy, tag=tag)

    def _receive(
        self, rank: int, tag: int, group: Any, first: Any = None
    ) -> tuple[dict[str, Any], bytearray]:
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, rank, group=first or group, tag=tag)
        text, data = bytearray(int(sizes[0])), bytearray(int(sizes[1]))
        for each in (text, data):
            if each:
                dist.recv(torch.frombuffer(each, dtype=torch.uint8), rank, group=group, tag=tag)
        return json.loads(bytes(text)), data

    def __repr__(self) -> str:
        return f"Partners(of rank {self.rank}, on rank {self._next})"


class _Kept:
    """A data file at the partner."""

    def __init__(self, partners: Partners, parts: tuple[str, ...], path: str) -> None:
        self._partners = partners
        self._parts = parts
        self.path = path

    def read_into(self, offset: int, view: memoryview) -> None:
        asked = {"parts": self._parts, "offset": offset, "nbytes": view.nbytes}
        _, data = self._partners._ask("range", asked)
        if len(data) != view.nbytes:
            raise DamagedVersionError(
                self.path, f"{view.nbytes} bytes at {offset} were asked for, {len(data)} came"
            )
        view[:] = data

    def close(self) -> None:
        """Nothing is open."""


def _key(asked: dict[str, Any]) -> tuple[str, int]:
    return asked["name"], asked["version"]
