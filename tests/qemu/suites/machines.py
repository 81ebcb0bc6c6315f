"""Machines that several suites share, so that one guest runs them all."""

from __future__ import annotations

from qemu.machine import Drive, Machine, Namespace

# Namespaces of drive 0. The faults lie where the storage contract wants damage: beyond byte 24,576.
GOOD, DAMAGED, COARSE, BLANK = 1, 2, 3, 4
UNREADABLE = (48, 93)
UNWRITABLE = 4000

FAULTS = Machine(
    (
        Drive(
            (
                Namespace(),
                Namespace(unreadable=UNREADABLE, unwritable=(UNWRITABLE,)),
                Namespace(lba_bytes=4096),
                Namespace(),
            )
        ),
    )
)

# Drives that are used hard: 0 holds data, 1 is slow, the others are reset and pulled out.
HOLDING, SLOW, RESET, PULLED = 0, 1, 2, (3, 4, 5)
ROUGH = Machine(
    (
        Drive((Namespace(32 << 20),)),
        Drive((Namespace(8 << 20, iops_max=400),)),
        Drive((Namespace(8 << 20),)),
        *(Drive((Namespace(8 << 20),)) for _ in PULLED),
    ),
    modules=("nvme", "vfio-pci"),
)
