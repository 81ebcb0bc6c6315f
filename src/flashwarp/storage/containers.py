"""Containers, known by their first bytes, whose bytes are not the numbers in them.

Opened as raw numbers they would give garbage without an error. Each refusal says how to get at the
numbers. A caller that gives `offset=` knows where they begin, so nothing is refused.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
from typing import Any, NoReturn

import numpy as np

from flashwarp.errors import ArgumentError, FileFormatError
from flashwarp.storage import files

NPY_MAGIC = b"\x93NUMPY"
"""How every .npy file begins."""

HEAD_BYTES = 4096
"""How much of a file `refuse_container` looks at."""

_ARRAYS = "read its arrays with its own library, and save each with numpy.save"
_DECOMPRESS = "decompress it first"
_DECODE = "decode it first, and save the result with numpy.save"
_HDF5 = (
    "for a contiguous dataset give the place of its data, offset=h5py.File(path)[name].id."
    "get_offset(), with its dtype and shape; save any other with numpy.save"
)
_NPZ = "save what is needed of it, numpy.save(..., numpy.load(path)[name])"
_SAFETENSORS = (
    "give the name of one of its tensors, tensor=; a name that it lacks lists what it has"
)

# By the bytes at the beginning. Raw numbers begin with a mark of three bytes by chance, in one of
# millions of files. So every message names the way out.
_MAGIC: tuple[tuple[bytes | tuple[bytes, ...], str, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer and not the data", "run git lfs pull"),
    (b"PAR1", "a Parquet file", "read its columns with pyarrow, and save each with numpy.save"),
    (b"ARROW1\0\0", "an Arrow (Feather) file", "read its columns with pyarrow, and save each"),
    (b"FEA1", "a Feather file", "read its columns with pyarrow, and save each with numpy.save"),
    (b"ORC", "an ORC file", "read its columns with pyarrow, and save each with numpy.save"),
    (b"Obj\1", "an Avro file", _ARRAYS),
    (b"\x1f\x8b\x08", "compressed with gzip", _DECOMPRESS),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", _DECOMPRESS),
    (b"\xfd7zXZ\0", "compressed with xz", _DECOMPRESS),
    (b"\x04\x22\x4d\x18", "compressed with lz4", _DECOMPRESS),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _DECOMPRESS),
    (b"SQLite format 3\0", "an SQLite database", "select what is needed, and save it"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image", _DECODE),
    (b"\xff\xd8\xff", "a JPEG image", _DECODE),
    ((b"GIF87a", b"GIF89a"), "a GIF image", _DECODE),
    ((b"II*\0", b"MM\0*"), "a TIFF image", _DECODE),
    (b"%PDF-", "a PDF document", _DECODE),
    (b"\x7fELF", "a program", _DECODE),
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", "a PyTorch file", _ARRAYS),
    ((b"\x80\x04\x95", b"\x80\x05\x95"), "a pickle", _ARRAYS),
    (b"GGUF", "a GGUF model", _ARRAYS),
    (b"MATLAB 5.0 MAT-file", "a MATLAB file", _ARRAYS),
    (b"SIMPLE  =", "a FITS file", _ARRAYS),
    ((b"CDF\1", b"CDF\2", b"CDF\5"), "a netCDF file", _ARRAYS),
)

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_ZIP_MAGICS = (b"PK\3\4", b"PK\5\6")

_TEXT_FILE = (
    "text",
    "parse it, as with numpy.loadtxt or pandas.read_csv, and save the result with numpy.save, or "
    "in pieces with flashwarp.create",
)
_JSON_FILE = "JSON text", "read it with json.load, and save each array with numpy.save"

# By the end of a name, if the bytes say nothing.
_NAMED = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "text"),
    **dict.fromkeys((".json", ".jsonl"), "JSON text"),
    **dict.fromkeys((".arrow", ".feather"), "an Arrow (Feather) file"),
    **dict.fromkeys((".h5", ".hdf5"), "an HDF5 file"),
    **dict.fromkeys((".pt", ".pth"), "a PyTorch file"),
    **dict.fromkeys((".pkl", ".pickle"), "a pickle"),
    ".parquet": "a Parquet file",
    ".mat": "a MATLAB file",
    ".gguf": "a GGUF model",
    ".zip": "a zip archive",
    ".npz": "an .npz archive",
    ".safetensors": "a safetensors file",
}

# The library itself refuses longer headers.
_SAFETENSORS_HEADER_MAX = 100_000_000

# No text has these: control characters but for tab, newline, form feed and carriage return.
_CONTROLS = bytes({*range(32), 127} - {9, 10, 12, 13})
_TEXT_BYTES_MIN = 16

# Those that `read_json` is for have kilobytes.
_JSON_BYTES_MAX = 64 << 20


def refuse_container(
    path: str,
    head: bytes,
    nbytes: int,
    dtype: np.dtype[np.generic] | None,
    wanted: str = "raw numbers",
) -> None:
    """Raise FileFormatError when a file is not what is `wanted`, but a container.

    `head` has the first `HEAD_BYTES` of the file, or all of it. If `dtype` is not one of numbers of
    several bytes, text may be the data.
    """
    found = _container(head, nbytes)
    if found is None and (_is_text(head) if dtype is None else _is_text_for(head, dtype)):
        found = _text(head)
    if found is not None:
        what, recipe = found
        told = f"{path} is {what}, not {wanted}: {recipe}"
        if wanted == "raw numbers":
            told += (
                ". If its bytes are the data nevertheless, give their dtype and the byte at which "
                "they begin, as offset=0"
            )
        raise FileFormatError(told)


def refuse_unmarked(path: str) -> NoReturn:
    """Raise for a file that has no mark of any format, and for which no dtype was given."""
    what = _NAMED.get(os.path.splitext(path)[1].lower())
    if what is None:
        raise ArgumentError(f"{path} is a raw file: give its dtype")
    raise FileFormatError(
        f"{path} is named as {what}, but does not begin as one: it is damaged, misnamed, or text "
        "that is no UTF-8. If its bytes are raw numbers, give their dtype"
    )


def told(head: bytes, nbytes: int) -> str:
    """Say what a file is that should be something else."""
    if not nbytes:
        return "empty"
    if head.startswith(NPY_MAGIC):
        return "a .npy file"
    found = _container(head, nbytes) or (_text(head) if _is_text(head) else None)
    return "data without a mark of its format" if found is None else found[0]


def read_json(path: files.PathLike, wanted: str) -> Any:
    """Read a file of JSON, which is `wanted`.

    Raises FileFormatError for any other file, MissingFileError, PathError.
    """
    name = files.check_name(path)
    with files.open_for_reading(name) as file:
        content = file.read(_JSON_BYTES_MAX)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        found = told(content[:HEAD_BYTES], len(content))
        damaged = " that is cut short or damaged" if found == _JSON_FILE[0] else ""
        raise FileFormatError(f"{name} is {found}{damaged}, not {wanted}") from error


def _container(head: bytes, nbytes: int) -> tuple[str, str] | None:
    for magic, what, recipe in _MAGIC:
        if head.startswith(magic):
            return what, recipe
    # A user block, whose size is a power of two, may precede the superblock.
    if any(head.startswith(_HDF5_MAGIC, at) for at in (0, 512, 1024, 2048)):
        return "an HDF5 file", _HDF5
    if head.startswith(_ZIP_MAGICS):
        return _zip(head)
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return "compressed with bzip2", _DECOMPRESS
    if head.startswith(b"RIFF") and head[8:12] in (b"WAVE", b"WEBP", b"AVI "):
        return f"a {head[8:12].decode().strip()} file", _DECODE
    if head[257:262] == b"ustar":
        return "a tar archive", "unpack it first"
    if is_safetensors(head, nbytes):
        return "a safetensors file", _SAFETENSORS
    return None


def _zip(head: bytes) -> tuple[str, str]:
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name.endswith(b".npy"):
        return "an .npz archive", _NPZ
    if name == b"[Content_Types].xml":
        return "an Office document", "read it with pandas.read_excel, and save its numbers"
    if name.endswith((b"/data.pkl", b"/version")):
        return "a PyTorch file", "save its tensors, numpy.save(..., torch.load(path)[name].numpy())"
    return "a zip archive", "unpack it first"


def is_safetensors(head: bytes, nbytes: int) -> bool:
    """Whether a file begins as one of the format does; its header is yet to be checked."""
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= min(nbytes - 8, _SAFETENSORS_HEADER_MAX):
        return False
    text = head[8 : 8 + length]
    ends = text.rstrip(b" ").endswith(b"}") or len(text) < length
    return ends and (text.startswith(b'{"') or text.rstrip(b" ") == b"{}")


def _text(head: bytes) -> tuple[str, str]:
    return _JSON_FILE if head.lstrip()[:1] in (b"{", b"[") else _TEXT_FILE


def _is_text(head: bytes) -> bool:
    if not head or len(head.translate(None, _CONTROLS)) < len(head):
        return False
    with contextlib.suppress(UnicodeDecodeError):
        # A character may go on behind the head.
        return bool(codecs.getincrementaldecoder("utf-8")().decode(head))
    return False


def _is_text_for(head: bytes, dtype: np.dtype[np.generic]) -> bool:
    """Whether a file that should hold such elements is text by more than chance, and no data."""
    is_number = dtype.kind in "iufcmM" and dtype.itemsize > 1
    return is_number and len(head) >= _TEXT_BYTES_MIN and b"\n" in head and _is_text(head)
