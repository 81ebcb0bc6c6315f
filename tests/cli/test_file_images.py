"""`flashwarp file` makes images, shows and checks them, and converts them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flashwarp.cli import main as cli
from flashwarp.errors import ExistingFileError, FileFormatError, FlashwarpError
from flashwarp.file.gvdk import Gvdk


def run(*arguments: object) -> int:
    """Run the command, and return its exit code."""
    try:
        cli.run(["file", *map(str, arguments)])
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


def test_an_image_is_made_filled_and_taken_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plain = tmp_path / "a.gvdk", tmp_path / "plain"
    run("create", path, "20 KiB", "--capacity", "1 MiB", "--preallocate", "no")
    with Gvdk(path, writable=True) as image:
        image.write(5000, b"data")
    run("info", path, "--json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["type"], facts["size"], facts["capacity"]) == ("sparse", 20 << 10, 1 << 20)
    assert facts["written_since_sync"] == []
    run("info", path)
    assert "CRC-32C" in capsys.readouterr().out
    run("export", path, plain)
    assert plain.read_bytes() == bytes(5000) + b"data" + bytes((20 << 10) - 5004)
    with pytest.raises(ExistingFileError):
        run("export", path, plain)
    run("export", path, plain, "--overwrite")

    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    run("import", plain, tmp_path / "b.gvdk", "--key-file", key, "--read-only")
    with pytest.raises(FileFormatError, match="needs its key"):
        run("info", tmp_path / "b.gvdk")
    run("export", tmp_path / "b.gvdk", tmp_path / "again", "--key-file", key)
    assert (tmp_path / "again").read_bytes() == plain.read_bytes()


def test_damage_is_shown_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.gvdk"
    run("create", path, "1 MiB", "--preallocate", "no")
    with Gvdk(path, writable=True) as image:
        image.write(0, b"kept" * 5000)
    assert run("verify", path) == 0
    assert "clean" in capsys.readouterr().out
    content = bytearray(path.read_bytes())
    bitmap = content.rindex(b"GVBM")
    content[bitmap + 200] ^= 1
    path.write_bytes(content)

    assert run("verify", path) == 1
    assert "bitmap" in capsys.readouterr().out
    with pytest.raises(FlashwarpError, match="flashwarp file repair"):
        Gvdk(path)
    assert run("repair", path) == 0
    assert "bitmap" in capsys.readouterr().out
    assert run("verify", path) == 0
    with Gvdk(path) as image:
        assert image.read(0, 20_000) == b"kept" * 5000
