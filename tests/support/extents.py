"""Arrays on a file whose blocks lie elsewhere, which kernels look up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import flashwarp as fw
from flashwarp.nvme.queue_pair import NamespacePart
from support.drive_terms import put_in_terms_of_a_drive


def check_arrays_by_extents(
    folder: Path, device: Any, route: Any, line: int, count: int, nbytes: int = 16 << 20
) -> None:
    """Read and write an array by `count` extents of 8 KiB or more, in any order on the drive."""
    chooser = np.random.default_rng(count)
    unit = 8192
    inner = 1 + chooser.choice(nbytes // unit - 1, count - 1, replace=False)
    ends = [*(np.sort(inner) * unit).tolist(), nbytes]
    begins = [0, *ends[:-1]]
    content = chooser.integers(0, 256, nbytes, np.uint8)
    places, at = {}, 0
    for number in chooser.permutation(count).tolist():
        places[number] = at
        at += ends[number] - begins[number]
    extents = [NamespacePart(ends[n], (places[n] - begins[n]) % (1 << 64)) for n in range(count)]

    def as_on_the_drive(values: Any) -> bytes:
        order = sorted(places, key=lambda n: places[n])
        return b"".join(values[begins[n] : ends[n]].tobytes() for n in order)

    drive = folder / "drive.bin"
    drive.write_bytes(as_on_the_drive(content))
    rows = chooser.integers(0, nbytes // 512, 20_000)
    controller = fw.nvme.SoftwareController(4, 64, route=route, commands=True)
    with fw.open(
        drive, "r+", "u1", (nbytes // 512, 512),
        device=device, cache="1 MiB", line=line, controller=controller,
    ) as x:  # fmt: skip
        put_in_terms_of_a_drive(x.service.queues, extents=extents)
        np.testing.assert_array_equal(x[rows], content.reshape(-1, 512)[rows])
        content = content.copy()
        content[: nbytes // 4] = content[nbytes // 2 : 3 * nbytes // 4]
        x[: nbytes // 4 // 512] = content[: nbytes // 4].reshape(-1, 512)
        x.flush()
    assert drive.read_bytes() == as_on_the_drive(content)
