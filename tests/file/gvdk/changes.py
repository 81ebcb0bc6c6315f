"""A program that changes an image and syncs it, while another thread writes beside the syncs.

    python -m file.gvdk.changes PATH EVENTS SEED KEY

For each mark of the record it prints four things: whether a sync has ended there, the image's size,
its bytes, and the last value that the other thread had written.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path

from file.gvdk.disk_states import begin
from flashwarp.file.gvdk import Gvdk

CAPACITY = 160 << 10
BESIDE = 152 << 10
"""The block of the thread beside: one byte, which grows with each write."""
END = BESIDE + 4096


def change(image: Gvdk, model: bytearray, chooser: random.Random) -> None:
    """Make one change of an image and of its model, which ends before the block beside."""
    at = chooser.randrange(BESIDE)
    nbytes = min(BESIDE - at, chooser.choice([1, 700, 4096, 9000, 40000]))
    kind = chooser.randrange(10)
    if kind < 7:
        data = chooser.randbytes(nbytes)
        image.write(at, data)
        model[at : at + nbytes] = data
    else:
        image.discard(at, nbytes)
        model[at : at + nbytes] = bytes(nbytes)


def main() -> None:
    """Do what the command line says."""
    path, events, seed, key = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    chooser = random.Random(seed)
    image = Gvdk(path, writable=True, key=key.encode() or None)
    model = bytearray(CAPACITY)
    marks: list[tuple[bool, int, str, int]] = []
    mark, written, stop = begin(str(path), events), [0], threading.Event()

    def note(synced: bool, known: int) -> None:
        marks.append((synced, image.size, model.hex(), known))
        mark(len(marks) - 1)

    def beside() -> None:
        while not stop.wait(0.0005):
            value = min(written[0] + 1, 255)
            image.write(BESIDE, bytes([value]) * 4096)
            written[0] = value

    note(True, 0)
    thread = threading.Thread(target=beside)
    for number in range(3):
        for _ in range(chooser.randrange(1, 4)):
            change(image, model, chooser)
        # Another size each time: a header tells of which sync its image is.
        image.resize(END + 512 * number if number else chooser.randrange(BESIDE, END))
        if number == 1:
            thread.start()
        known = written[0]
        note(False, known)
        image.flush()
        note(True, known)
    change(image, model, chooser)
    image.resize(CAPACITY)
    stop.set()
    thread.join()
    note(False, written[0])
    image.close()
    json.dump(marks, sys.stdout)


if __name__ == "__main__":
    main()
