"""Repair: what is left of a damaged image, made usable."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from flashwarp import _native
from flashwarp.errors import ReadOnlyError
from flashwarp.file.gvdk.inspecting import (
    Report,
    clear_torn_marks,
    inspect,
    marked_ranges,
    marks_of,
    native_image,
    newest_header,
)
from flashwarp.file.gvdk.layout import (
    HEADERS,
    PAGE,
    TABLE_ENTRIES,
    Header,
    ImageType,
    Sealer,
    places,
)
from flashwarp.file.gvdk.tables import Disk, Table, Tables
from flashwarp.storage import files
from flashwarp.storage.base import typed_errors


def repaired(path: str, key: bytes | None) -> Report:
    """Do what `Gvdk.repair` promises."""
    files.check(path, writable=True)
    file = files.opened(
        lambda: _native.FileStorage(path, writable=True, lock=True), path, writable=True
    )
    try:
        return _repaired(Disk(file.fd), Sealer(key), path)
    finally:
        del file  # whoever keeps an exception does not keep the lock


def _repaired(disk: Disk, sealer: Sealer, path: str) -> Report:
    with typed_errors("repair"):
        header, _ = newest_header(disk, sealer, path)
        if not header.writable:
            raise ReadOnlyError(f"{path}: the image is read-only, and stays as it is")
        found = inspect(disk, sealer, path)
        if found.clean:
            return found
        marks = marks_of(disk, header)
        lost = set(marked_ranges(marks, header))
        at = places(header)
        generation = marks.newest + 1
        if header.type is ImageType.FIXED:
            if disk.nbytes < at.data + header.capacity:
                lost.add((max(0, disk.nbytes - at.data), header.capacity))
                os.ftruncate(disk.fd, at.data + header.capacity)
        else:
            tables = Tables(disk, header, sealer, path)
            kept, used = _kept(disk, header, tables, path, lost)
            root = tables.write(kept, used, generation, all_there_are=True)
            header = replace(header, root=root)
        disk.flush()
        header = replace(header, generation=generation)
        for copy in range(HEADERS):
            disk.write(copy * PAGE, header.pack(sealer))
            disk.flush()
        clear_torn_marks(disk, header)
    return Report(found.problems, tuple(sorted(lost)))


def _kept(
    disk: Disk, header: Header, tables: Tables, path: str, lost: set[tuple[int, int]]
) -> tuple[list[Table], bytes]:
    """Return the tables that can be used, and their slots; add to what is lost."""
    slots = native_image(disk, header, path)
    wanted: dict[int, Table] = {}
    problems: list[str] = []
    for table in tables.load(problems):
        wanted.setdefault(table.index, table)
    span = TABLE_ENTRIES * header.block

    def lose(index: int) -> None:
        begin, end = index * span, min((index + 1) * span, header.capacity)
        if begin < end:
            lost.add((begin, end))

    for index in tables.lost:
        lose(index)
    at = places(header)
    fit = max(0, disk.nbytes - at.data) // header.block
    taken = np.zeros(at.slots if at.slots < fit else fit, bool)
    kept = []
    # Current tables before older ones, whose blocks may be others' by now.
    for table in sorted(wanted.values(), key=lambda each: (each.stale, each.index)):
        own = taken[table.slot : table.slot + at.table_slots]
        if len(own) < at.table_slots or own.any():
            lose(table.index)
            continue
        own[:] = True
        entries = table.entries.copy()
        numbers = entries.astype(np.int64) - 1
        blocks = np.arange(TABLE_ENTRIES) + table.index * TABLE_ENTRIES
        usable = (entries != 0) & (entries <= len(taken))
        usable &= blocks * header.block < header.capacity
        # The first of several blocks of one slot keeps it.
        first = np.zeros(TABLE_ENTRIES, bool)
        first[np.unique(numbers, return_index=True)[1]] = True
        usable &= first & ~taken[np.where(usable, numbers, 0)]
        taken[numbers[usable]] = True
        for block in blocks[(entries != 0) & ~usable]:
            lost.add((int(block) * header.block, (int(block) + 1) * header.block))
        entries[~usable] = 0
        slots.load_table(table.index, table.slot, entries)
        kept.append(Table(table.index, table.slot, entries))
        if table.stale:
            lose(table.index)
    return kept, slots.used()
