"""Messages between a client and the owner of a shared cache: one datagram each, all bounded.

A message is four bytes with the length of a JSON object, the object, and a payload of numbers.
Descriptors may come with it. Nothing that arrives is trusted: sizes and types are checked here, and
values by whoever uses them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from flashwarp import errors
from flashwarp.errors import FlashwarpError, SharedCacheError

VERSION = 4
"""Of messages, and of the memory that both map: tags, frames and requests."""

MESSAGE_BYTES_MAX = 64 << 10
DESCRIPTORS_MAX = 32
_PEER = struct.Struct("3i")
_LENGTH = struct.Struct("<I")


@dataclass
class Message:
    """What one side says."""

    body: dict[str, Any]
    payload: bytes = b""
    descriptors: list[int] = field(default_factory=list)

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an integer of the body, within its limits; raises SharedCacheError."""
        value = self.body.get(name)
        if type(value) is not int or not low <= value <= high:
            raise SharedCacheError(
                f"a message has {name}={value!r:.99}, no integer between {low} and {high}"
            )
        return value

    def text(self, name: str, length_max: int = 4096) -> str:
        """Return a text of the body; raises SharedCacheError."""
        value = self.body.get(name)
        if not isinstance(value, str) or len(value) > length_max:
            raise SharedCacheError(f"a message has {name}={value!r:.99}, no text that fits")
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptors that nobody has taken."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def send(
    to: socket.socket,
    body: dict[str, Any],
    payload: bytes | memoryview = b"",
    descriptors: Sequence[int] = (),
) -> None:
    """Send one message, whole; raises OSError."""
    text = json.dumps(body).encode()
    data = b"".join((_LENGTH.pack(len(text)), text, payload))
    if len(data) > MESSAGE_BYTES_MAX:
        raise SharedCacheError(f"a message of {len(data)} bytes exceeds {MESSAGE_BYTES_MAX}")
    if descriptors:
        socket.send_fds(to, [data], list(descriptors))
    else:
        to.send(data)


def receive(source: socket.socket) -> Message | None:
    """Receive one message; returns None if the other side has closed or died.

    Raises OSError, and SharedCacheError for what is no message.
    """
    data, descriptors, flags, _ = socket.recv_fds(
        source, MESSAGE_BYTES_MAX + 1, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
    )
    message = Message({}, b"", descriptors)
    if not data:
        message.close()
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) > MESSAGE_BYTES_MAX:
            raise ValueError("it is too long")
        if len(data) < _LENGTH.size:
            raise ValueError(f"it has {len(data)} bytes")
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        if end > len(data):
            raise ValueError(f"its text should have {end - _LENGTH.size} bytes")
        body = json.loads(data[_LENGTH.size : end])
        if not isinstance(body, dict):
            raise ValueError("its text is no object")
    except (ValueError, RecursionError) as error:
        message.close()
        decoded = isinstance(error, UnicodeDecodeError | json.JSONDecodeError | RecursionError)
        why = "its text is no JSON" if decoded else error
        raise SharedCacheError(f"the other process sent what is no message: {why}") from None
    message.body, message.payload = body, data[end:]
    return message


def peer(of: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end; the process is 0 if this one cannot see it."""
    pid, uid, _ = _PEER.unpack(of.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def hello() -> dict[str, Any]:
    """Return what both sides say first, and what must be equal."""
    from importlib.metadata import version  # slow to import, and most programs share nothing

    return {"messages": VERSION, "flashwarp": version("flashwarp")}


def check_hello(message: Message, who: str) -> None:
    """Raise SharedCacheError unless the other side speaks as this one does."""
    mine = hello()
    theirs = {name: message.body.get(name) for name in mine}
    if theirs != mine:
        raise SharedCacheError(
            f"{who} runs flashwarp {theirs['flashwarp']!s:.99} (messages {theirs['messages']!s:.9})"
            f", this process {mine['flashwarp']} (messages {mine['messages']}): run the same "
            "version in both"
        )


# Errors travel by name, and are ours alone.
_NUMBERS = ("offset", "status", "holder")


def fail(error: Exception) -> dict[str, Any]:
    """Return an error as the body of an answer."""
    name = type(error).__name__
    if not isinstance(error, FlashwarpError):
        return {"error": "SharedCacheError", "message": f"the owner failed: {name}: {error}"[:4096]}
    body: dict[str, Any] = {"error": name, "message": str(error)[:4096]}
    if isinstance(error, OSError) and error.errno is not None:
        body["errno"] = error.errno
        body["message"] = str(error.strerror)[:4096]
        if isinstance(error.filename, str):
            body["filename"] = error.filename
    for each in _NUMBERS:
        value = getattr(error, each, None)
        if isinstance(value, int):
            body[each] = value
    return body


def error_of(message: Message) -> FlashwarpError:
    """Return the error that an answer carries."""
    name, text = message.text("error", 99), message.text("message")
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if kind is None or not issubclass(kind, FlashwarpError):
        return SharedCacheError(f"the owner failed: {name}: {text}")
    extra = {each: message.body[each] for each in _NUMBERS if type(message.body.get(each)) is int}
    try:
        if "errno" in message.body:
            filename = message.body.get("filename")
            made = kind(
                message.integer("errno", 0, 1 << 16),
                text,
                filename if isinstance(filename, str) else None,
                **extra,
            )
        else:
            made = kind(text)
    except TypeError:  # one that the owner's half of a shared cache does not raise
        return SharedCacheError(f"the owner failed: {name}: {text}")
    assert isinstance(made, FlashwarpError)
    return made
