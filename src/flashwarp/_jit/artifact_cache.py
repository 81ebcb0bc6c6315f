"""Compiled device code, found by content: the same inputs never compile twice.

An entry is one file in a folder of this user's, published by an atomic rename, with a checksum
over its key and all that it holds: an entry that is torn, damaged or another key's reads as absent
and is built again. The folder has a size limit; the entries used longest ago go first. A folder
that others may write to is not used, nor one that cannot be written to: its entries are then kept
in memory, for this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import struct
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flashwarp import endings
from flashwarp._jit import private_folder
from flashwarp._jit.private_folder import UnsafeFolderError

_log = logging.getLogger(__name__)

LIMIT_BYTES = 512 << 20
"""Default limit of the cache folder. The built-in kernels take 2 to 3 MiB for each architecture."""

MEMORY_BYTES = 64 << 20
"""Limit of what is kept in memory where no folder can be used."""

# Entry: magic, SHA-256 of its key and of all that follows, length of the log, log, cubin.
_MAGIC = b"FWCUBIN2"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("<I")
_SUFFIX = ".fwcubin"
# A temporary file this old belongs to a process that died while it wrote.
_STALE_S = 3600.0


@dataclass(frozen=True)
class Entry:
    """The result of one compilation: the code and the compiler's log."""

    cubin: bytes
    log: str


@dataclass(frozen=True)
class FolderState:
    """Whether compiled code is kept on disk, for `flashwarp doctor`."""

    folder: Path | None
    used: bool
    why_not: str = ""
    advice: str = ""


def default_directory() -> Path | None:
    """$FLASHWARP_CACHE_DIR, or the user's cache folder as the XDG rules have it.

    None for a user without a home: neither $HOME nor an entry in the password database.
    """
    chosen = os.environ.get("FLASHWARP_CACHE_DIR")
    if chosen:
        return Path(chosen)
    # Relative names are invalid there, and the rules say to ignore them.
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        try:
            home = Path.home()
        except RuntimeError:
            return None
        if not home.is_absolute():
            return None
        caches = home / ".cache"
    return caches / "flashwarp" / "cubin"


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
        chosen = default_directory() if directory is None else directory
        self.directory = None if chosen is None else chosen.absolute()
        self.limit_bytes = limit_bytes

    def load(self, key: str) -> Entry | None:
        """Return the entry, or None where there is none that is whole."""
        try:
            with private_folder.opened(self._chosen(), create=False) as folder:
                entry = self._read(key, folder)
            if entry is not None:
                return entry
        except FileNotFoundError:
            pass
        except (OSError, UnsafeFolderError) as error:
            self._warn(error)
        return _memory.get(key)

    def publish(self, key: str, entry: Entry) -> bool:
        """Store the entry for later processes; False where it is kept in memory only."""
        try:
            with private_folder.opened(self._chosen(), create=True) as folder:
                _write(key, encode(key, entry), folder)
                self._trim(folder, keep=f"{key}{_SUFFIX}")
        except (OSError, UnsafeFolderError) as error:
            self._warn(error)
            _memory.put(key, entry)
            return False
        return True

    def state(self) -> FolderState:
        """Tell whether the folder can be used, without making it."""
        try:
            chosen = self._chosen()
            existing = next(each for each in (chosen, *chosen.parents) if each.exists())
            if existing == chosen:
                with private_folder.opened(chosen, create=False):
                    pass
            else:
                private_folder.check_place(existing)
        except (OSError, UnsafeFolderError) as error:
            return FolderState(self.directory, False, *_reason_and_advice(error))
        return FolderState(self.directory, True)

    def _chosen(self) -> Path:
        if self.directory is None:
            raise UnsafeFolderError(
                f"HOME is not set, and user {os.geteuid()} has no home in the password database",
                "let FLASHWARP_CACHE_DIR name a folder",
            )
        return self.directory

    def _warn(self, error: OSError | UnsafeFolderError) -> None:
        mine = object()
        if _warned.setdefault(self.directory, mine) is mine:
            where = f"the folder {self.directory} is not used: " if self.directory else ""
            _log.warning(
                "compiled code is kept in memory, for this process only: %s%s (%s)",
                where,
                *_reason_and_advice(error),
            )

    def _read(self, key: str, folder: int) -> Entry | None:
        name = f"{key}{_SUFFIX}"
        try:
            handle = private_folder.open_file(name, folder)
        except FileNotFoundError:
            return None
        except (OSError, UnsafeFolderError) as error:
            reason, _ = _reason_and_advice(error)
            _log.warning("%s in %s: compiling again", reason, self.directory)
            return None
        with os.fdopen(handle, "rb") as file:
            entry = decode(key, file.read())
            # The time of last use decides what goes first; a read-only folder keeps its old times.
            with contextlib.suppress(OSError):
                os.utime(handle)
        if entry is None:
            _log.warning("damaged entry %s in %s: compiling again", name, self.directory)
        return entry

    def _trim(self, folder: int, keep: str) -> None:
        """Remove the oldest entries beyond the limit, and what dead processes left behind."""
        entries: list[tuple[float, int, str]] = []
        with os.scandir(folder) as items:
            for item in items:
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if item.name.endswith(_SUFFIX):
                        entries.append((status.st_mtime, status.st_size, item.name))
                    elif item.name.endswith(".tmp") and status.st_mtime < time.time() - _STALE_S:
                        os.unlink(item.name, dir_fd=folder)
        total = sum(size for _, size, _ in entries)
        for _, size, name in sorted(entries):
            if total <= self.limit_bytes:
                return
            if name != keep:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                total -= size


def _write(key: str, content: bytes, folder: int) -> None:
    temporary = f"{key[:16]}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, f"{key}{_SUFFIX}", src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _reason_and_advice(error: OSError | UnsafeFolderError) -> tuple[str, str]:
    if isinstance(error, UnsafeFolderError):
        return str(error), error.advice
    where = f" ({error.filename})" if error.filename else ""
    advice = "make room or let FLASHWARP_CACHE_DIR name a folder that you can write to"
    return f"{error.strerror}{where}", advice


class _Memory:
    """Entries that no folder keeps, up to a limit: the ones used longest ago go first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: dict[str, Entry] = {}
        self._lock = endings.Lock()

    def get(self, key: str) -> Entry | None:
        entry = self._entries.get(key)
        if entry is not None:
            self.put(key, entry)  # as the one used last
        return entry

    def put(self, key: str, entry: Entry) -> None:
        endings.holding([self._lock], partial(self._put, key, entry))

    def _put(self, key: str, entry: Entry) -> None:
        self._entries.pop(key, None)
        self._entries[key] = entry
        total = sum(len(each.cubin) + len(each.log) for each in self._entries.values())
        for oldest in list(self._entries):
            if total <= self._limit_bytes or oldest == key:
                return
            gone = self._entries.pop(oldest)
            total -= len(gone.cubin) + len(gone.log)


_memory = _Memory(MEMORY_BYTES)
# Folders of which this process has said already that they are not used.
_warned: dict[Path | None, object] = {}


def encode(key: str, entry: Entry) -> bytes:
    """Return an entry as bytes."""
    log = entry.log.encode()
    body = _LENGTH.pack(len(log)) + log + entry.cubin
    return _MAGIC + _digest(key, body) + body


def _digest(key: str, body: bytes) -> bytes:
    return bytes.fromhex(content_key(key.encode(), body))


def decode(key: str, content: bytes) -> Entry | None:
    """Return the entry, or None for what is not whole, or has another key."""
    header = len(_MAGIC) + _DIGEST_BYTES
    digest, body = content[len(_MAGIC) : header], content[header:]
    if not content.startswith(_MAGIC) or _digest(key, body) != digest:
        return None
    if len(body) < _LENGTH.size:
        return None
    (log_bytes,) = _LENGTH.unpack_from(body)
    log_end = _LENGTH.size + log_bytes
    if log_end > len(body):
        return None
    return Entry(cubin=body[log_end:], log=body[_LENGTH.size : log_end].decode(errors="replace"))
