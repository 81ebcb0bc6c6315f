"""Sections and symbols of ELF files, such as cubins."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from flashwarp.errors import CompileError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2  # SHT_SYMTAB
_FUNCTION = 2  # STT_FUNC, in the low four bits of a symbol's info


def sections(file: bytes) -> list[tuple[str, bytes]]:
    """List the sections by name; raises CompileError for what is no ELF file."""
    return [(name, content) for name, _, content in _read(file)]


@dataclass(frozen=True)
class Symbol:
    """One entry of a symbol table: its name, and the fields of ELF's structure."""

    name: str
    info: int
    other: int
    section: int

    @property
    def is_function(self) -> bool:
        """Whether it names code."""
        return self.info & 15 == _FUNCTION


def symbols(file: bytes) -> list[Symbol]:
    """List the symbols in the file's order, so that an index of the file's own finds its symbol."""
    table = _read(file)
    return [
        Symbol(_string(table[header[6]][2], name), info, other, section)
        for _, header, content in table
        if header[1] == _SYMBOL_TABLE
        for name, info, other, section, _, _ in _SYMBOL.iter_unpack(content)
    ]


def functions(file: bytes, section: str) -> list[str]:
    """List the names of the functions that lie in a section, in the file's order."""
    numbers = {number for number, (name, _) in enumerate(sections(file)) if name == section}
    return [s.name for s in symbols(file) if s.section in numbers and s.is_function]


def _read(file: bytes) -> list[tuple[str, tuple[int, ...], bytes]]:
    try:
        return list(_sections(file))
    except (struct.error, ValueError, IndexError) as error:
        raise CompileError(f"the compiled code is not a readable ELF file: {error}") from error


def _sections(file: bytes) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    header = _HEADER.unpack_from(file)
    table, entry_bytes, count, names_index = header[6], header[11], header[12], header[13]
    headers = [_SECTION.unpack_from(file, table + i * entry_bytes) for i in range(count)]
    names = file[headers[names_index][4] :]
    for section in headers:
        name, offset, nbytes = section[0], section[4], section[5]
        yield _string(names, name), section, file[offset : offset + nbytes]


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
