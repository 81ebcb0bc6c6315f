"""File systems on loop devices, for tests of what lies on block devices. Needs root, and programs.

Nothing here imports flashwarp.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_LIMIT_S = 60

# xfs needs 300 MiB; the image is sparse.
_IMAGE_BYTES = 320 << 20
_PARTITION_START = 1 << 20

_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-b", "4096"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}


@dataclass(frozen=True)
class Mounted:
    """A file system on a loop device."""

    kind: str
    folder: Path
    device: Path
    """With the file system: the loop device, or its partition."""
    image: Path
    """The file behind the loop device."""


def call(*command: str | Path) -> str:
    """Return what a program prints; skip the test if there is no such program."""
    if not shutil.which(str(command[0]), path=_PATH):
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "PATH": _PATH, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode != 0:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr or done.stdout}")
    return done.stdout


@contextmanager
def mounted(
    kind: str, scratch: Path, *options: str, partition: bool = False, mount: str = "rw"
) -> Iterator[Mounted]:
    """Make a file system and mount it; skip the test where that is not allowed."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("loop devices need root, and a machine that has them")
    image = scratch / "image"
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    try:
        loop = Path(call("losetup", "--find", "--show", image).strip())
    except OSError as error:
        pytest.skip(f"no loop device: {error}")
    try:
        device = loop.with_name(f"{loop.name}p1") if partition else loop
        if partition:
            sectors = (_IMAGE_BYTES - _PARTITION_START) // 512
            call("addpart", loop, "1", str(_PARTITION_START // 512), str(sectors))
        call(*_MAKE[kind], *options, device)
        folder = scratch / "mounted"
        folder.mkdir()
        try:
            call("mount", "-t", kind, "-o", mount, device, folder)
        except OSError as error:
            pytest.skip(f"no mount: {error}")
        try:
            yield Mounted(kind, folder, device, image)
        finally:
            call("umount", "--lazy", folder)
    finally:
        if partition:  # which would stay for the next user of the loop device
            with suppress(OSError):
                call("delpart", loop, "1")
        call("losetup", "--detach", loop)
        image.unlink()
