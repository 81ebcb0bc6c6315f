"""Let the kernel refuse system calls to this process, as container profiles do. x86-64 only.

A filter of a few BPF instructions, installed by prctl; there is no way back, so use it in a child.
"""

from __future__ import annotations

import ctypes
import platform
import struct

# Numbers of <asm/unistd_64.h>.
CALLS = {
    "mincore": 27,
    "madvise": 28,
    "mlock": 149,
    "sched_getaffinity": 204,
    "fadvise64": 221,
    "fallocate": 285,
    "preadv2": 327,
    "pwritev2": 328,
    "statx": 332,
    "memfd_create": 319,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "cachestat": 451,
    "fcntl": 72,
    "flock": 73,
}

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _RETURN = 0x20, 0x15, 0x25, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENT_1_OFFSET = 0, 4, 24
_AUDIT_ARCH_X86_64 = 0xC000003E
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def why_not() -> str:
    """Why no filter can be installed here; empty where one can."""
    if platform.machine() != "x86_64":
        return f"the filter is written for x86-64, this is {platform.machine()}"
    return ""


def refuse(names: list[str], error: int, command: int | None = None) -> None:
    """Answer these calls with `error` from now on; of fcntl, only one command."""
    steps = [_step(_LOAD, _ARCH_OFFSET), _step(_JUMP_EQUAL, _AUDIT_ARCH_X86_64, 1, 0)]
    steps += [_step(_RETURN, _ALLOW), _step(_LOAD, _NUMBER_OFFSET)]
    for name in names:
        if command is None:
            steps += [_step(_JUMP_EQUAL, CALLS[name], 0, 1), _step(_RETURN, _ERRNO | error)]
        else:
            steps += [_step(_JUMP_EQUAL, CALLS[name], 0, 4), _step(_LOAD, _ARGUMENT_1_OFFSET)]
            steps += [_step(_JUMP_EQUAL, command, 0, 1), _step(_RETURN, _ERRNO | error)]
            steps += [_step(_LOAD, _NUMBER_OFFSET)]
    steps += [_step(_RETURN, _ALLOW)]
    code = b"".join(steps)
    filters = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl{arguments[:2]}")


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
