"""Compiled device code on disk, found by content: the same inputs never compile twice.

An entry is one file, published by an atomic rename, with a checksum over everything it holds: a
torn or damaged entry reads as absent and is built again. The folder has a size limit; the entries
used longest ago go first. A folder that cannot be written only means compiling again next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

LIMIT_BYTES = 512 << 20
"""Default limit of the cache folder. The built-in kernels take 2 to 3 MiB for each architecture."""

# Entry: magic, SHA-256 of all that follows it, length of the log, log, cubin.
_MAGIC = b"FWCUBIN1"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("<I")
_SUFFIX = ".fwcubin"
# A temporary file this old belongs to a process that died while it wrote.
_STALE_S = 3600.0


@dataclass(frozen=True)
class Entry:
    """What one compilation gave: the cubin and the compiler's log."""

    cubin: bytes
    log: str


def default_directory() -> Path:
    """$FLASHWARP_CACHE_DIR, or the user's cache folder as the XDG rules have it."""
    chosen = os.environ.get("FLASHWARP_CACHE_DIR")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "flashwarp" / "cubin"


def content_key(*parts: bytes) -> str:
    """Make a key from the contents of all inputs; different lists of parts never share one."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


class ArtifactCache:
    """A folder of entries. Any number of processes may use one folder at a time."""

    def __init__(self, directory: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self.directory = default_directory() if directory is None else directory
        self.limit_bytes = limit_bytes

    def path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def load(self, key: str) -> Entry | None:
        """Return the entry, or None where there is none that is whole."""
        path = self.path(key)
        try:
            entry = _decode(path.read_bytes())
        except OSError:
            return None
        if entry is None:
            _log.warning("damaged entry %s: compiling again", path)
            return None
        # The time of last use decides what goes first; a read-only folder keeps its old times.
        with contextlib.suppress(OSError):
            os.utime(path)
        return entry

    def publish(self, key: str, entry: Entry) -> bool:
        """Store the entry for later processes; False where the folder cannot be written."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(key, _encode(entry))
            self._trim(keep=self.path(key))
        except OSError as error:
            _log.info("compiled code is not kept: %s", error)
            return False
        return True

    def _write(self, key: str, content: bytes) -> None:
        handle, temporary = tempfile.mkstemp(
            prefix=f"{key[:16]}.", suffix=".tmp", dir=self.directory
        )
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(temporary).replace(self.path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise

    def _trim(self, keep: Path) -> None:
        """Remove the oldest entries beyond the limit, and what dead processes left behind."""
        entries: list[tuple[float, int, Path]] = []
        for item in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = item.stat()
                if item.suffix == _SUFFIX:
                    entries.append((status.st_mtime, status.st_size, item))
                elif item.suffix == ".tmp" and status.st_mtime < time.time() - _STALE_S:
                    item.unlink()
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit_bytes:
                return
            if path != keep:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                total -= size


def _encode(entry: Entry) -> bytes:
    log = entry.log.encode()
    body = _LENGTH.pack(len(log)) + log + entry.cubin
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(content: bytes) -> Entry | None:
    header = len(_MAGIC) + _DIGEST_BYTES
    digest, body = content[len(_MAGIC) : header], content[header:]
    if not content.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        return None
    if len(body) < _LENGTH.size:
        return None
    (log_bytes,) = _LENGTH.unpack_from(body)
    log_end = _LENGTH.size + log_bytes
    if log_end > len(body):
        return None
    return Entry(cubin=body[log_end:], log=body[_LENGTH.size : log_end].decode(errors="replace"))
