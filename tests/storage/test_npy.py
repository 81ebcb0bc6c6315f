"""The .npy format: headers that are unusual, and headers that lie."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import DtypeError, FileFormatError
from flashwarp.storage.npy import read_layout


def write(path: Path, header: str, version: int = 1) -> str:
    text = header.encode("utf-8" if version == 3 else "latin1")
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + text + bytes(64))
    return str(path)


def described(descr: object, shape: object) -> str:
    return repr({"descr": descr, "fortran_order": False, "shape": shape})


@pytest.mark.parametrize("name", ["größe", "名前", "\U0001f600", "it's", "a\\u0041"])
def test_names_of_fields_in_every_script(tmp_path: Path, name: str) -> None:
    """Version 3 was read as version 2, and its names came out as other letters."""
    records = np.array([(1, 2.5), (3, 4.5)], [(name, "<i4"), ("x", "<f8")])
    file = io.BytesIO()
    np.lib.format.write_array(file, records, (3, 0) if not name.isascii() else None)
    (tmp_path / "x.npy").write_bytes(file.getvalue())

    with fw.open(tmp_path / "x.npy", device="cpu") as x:
        assert x.dtype == records.dtype
        assert (x[...] == records).all()


@pytest.mark.parametrize(
    "header",
    [
        # Negative, so that any file was long enough.
        described("<f8", (-1,)),
        described("<f8", (-(2**62), 2)),
        described("<f8", (True, 2)),
        described("<f8", 3),
        described("<f8", (2.0,)),
        # More than memory, a machine word, and Python's own parser can hold.
        described("<f8", (2**64,)),
        described("|V9999999999999", (1,)),
        "(" * 3000,
        "-" * 5000 + "1",
        "{" + "'a':1," * 100 + "}",
        "{[]: 1}",
        described({}, (1,)),
        described([("a", "<i4"), ("a", "<i4")], (1,)),
        described([("a",)], (1,)),
    ],
    ids=lambda header: header[:40],
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_header_that_lies(tmp_path: Path, header: str, version: int) -> None:
    with pytest.raises((FileFormatError, DtypeError)):
        read_layout(write(tmp_path / "x.npy", header, version))


@pytest.mark.parametrize("version", [0, 4, 255])
def test_version_of_the_future(tmp_path: Path, version: int) -> None:
    """It was read as version 2, whatever it was."""
    path = write(tmp_path / "x.npy", described("<f8", (1,)), version)
    with pytest.raises(FileFormatError, match=rf"\({version}, 0\)"):
        read_layout(path)


@pytest.mark.filterwarnings("ignore:Stored array in format 2.0")
@pytest.mark.parametrize("fields", [400, 4000])
def test_records_of_many_fields(tmp_path: Path, fields: int) -> None:
    """A header of more than 10,000 bytes was refused with advice for numpy.load."""
    records = np.ones(3, [(f"field_{number:06d}", "<f4") for number in range(fields)])
    np.save(tmp_path / "x.npy", records)

    with fw.open(tmp_path / "x.npy", device="cpu") as x:
        assert x.dtype == records.dtype
        assert x[1] == records[1]


@pytest.mark.parametrize("version", [2, 3])
def test_header_of_unbounded_length(tmp_path: Path, version: int) -> None:
    path = write(tmp_path / "x.npy", described("<f8", (1,)) + " " * (1 << 18), version)
    with pytest.raises(FileFormatError, match=r"at most 262144 are read.*offset="):
        read_layout(path)


@pytest.mark.parametrize("text", ["(" * 30_000, "-" * 60_000 + "1", "a" + ".a" * 30_000])
def test_long_header_that_no_parser_can_hold(tmp_path: Path, text: str) -> None:
    with pytest.raises(FileFormatError):
        read_layout(write(tmp_path / "x.npy", text, 2))


def test_dtype_that_is_an_array(tmp_path: Path) -> None:
    """numpy moves its axes into the shape, so that shape and rows no longer fitted together."""
    with pytest.raises(DtypeError, match="last ones of the shape"):
        read_layout(write(tmp_path / "x.npy", described(("<f8", (2,)), (3,))))
    with pytest.raises(DtypeError, match=r"use float64 and make its axes \(2,\)"):
        fw.create(tmp_path / "y.npy", ("<f8", (2,)), 3, device="cpu")
