"""What a drive carries is recognised by its first and last bytes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flashwarp.storage import signatures

NBYTES = 8 << 20


def found_on(image: bytes) -> list[str]:
    head, tail = image[: signatures.HEAD_BYTES], image[-signatures.TAIL_BYTES :]
    return signatures.found_in(head, tail, len(image))


def made_by(folder: Path, *command: str) -> bytes:
    """The image that a program writes; a path is appended to its arguments."""
    if shutil.which(command[0], path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        pytest.skip(f"{command[0]} is not installed")
    file = folder / "image"
    file.write_bytes(bytes(NBYTES))
    environment = {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
    subprocess.run([*command, str(file)], check=True, capture_output=True, env=environment)
    return file.read_bytes()


def test_blank_drive_carries_nothing() -> None:
    assert found_on(bytes(NBYTES)) == []


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("mke2fs", "-q", "-F", "-t", "ext4"), "ext2, ext3 or ext4"),
        (("mke2fs", "-q", "-F", "-t", "ext2"), "ext2, ext3 or ext4"),
        (("mkswap"), "swap space"),
    ],
)
def test_what_programs_make_is_recognised(
    command: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    assert name in found_on(made_by(tmp_path, *command))


def test_partition_table_is_recognised_at_both_ends(tmp_path: Path) -> None:
    if shutil.which("sfdisk", path="/usr/sbin:/sbin") is None:
        pytest.skip("sfdisk is not installed")
    file = tmp_path / "image"
    file.write_bytes(bytes(NBYTES))
    command = ["/usr/sbin/sfdisk", "--quiet", str(file)]
    subprocess.run(command, input=b"label: gpt\nsize=1MiB\n", check=True, capture_output=True)
    image = file.read_bytes()

    assert "a GPT partition table" in found_on(image)
    # Its copy at the end is enough.
    assert "a GPT partition table" in found_on(bytes(1 << 20) + image[1 << 20 :])


def test_small_drive_is_looked_at_once() -> None:
    assert found_on(bytes(4096)) == []
