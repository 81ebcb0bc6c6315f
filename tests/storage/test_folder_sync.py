"""Folders that cannot be synced: FUSE, 9p and others answer that fsync(2) is for files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.file.gvdk import Gvdk
from flashwarp.table.checkpoint import save
from flashwarp.table.making import create_table

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def file_of_rows() -> None:
    fw.create("x.npy", "f4", (3,), device="cpu").close()


def file_for_kernels() -> None:
    fw.File.create("x.bin", "1 KiB", device="cpu").close()


def image() -> None:
    Gvdk.create("x.gvdk", "1 MiB").close()


def table() -> None:
    create_table("t.npy", rows=4, dim=4, optimizer="sgd")


def version() -> None:
    with fw.Checkpointer("ck", "cpu", "1 MiB", "1 MiB") as checkpointer:
        checkpointer.protect("s", np.zeros(10))
        checkpointer.checkpoint(0).result(timeout=30)


def state_dict() -> None:
    pytest.importorskip("torch")
    import flashwarp.torch as fwt

    fwt.save({"a": 1}, "state")


def distributed() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint

    from flashwarp.dcp import Writer

    checkpoint.save({"a": torch.ones(3)}, storage_writer=Writer("dcp"), no_dist=True)


def copies_of_tables() -> None:
    save("steps", 1, [])


MAKERS = (
    file_of_rows,
    file_for_kernels,
    image,
    table,
    version,
    state_dict,
    distributed,
    copies_of_tables,
)


@pytest.fixture
def folders_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    monkeypatch.chdir(tmp_path)
    sync = os.fsync

    def fail(number: int) -> None:
        def of_files(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", of_files)

    return fail


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_folder_that_cannot_be_synced_is_no_error(
    make: Callable[[], None], number: int, folders_fail: Callable[[int], None]
) -> None:
    folders_fail(number)
    make()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_folder_that_lost_a_name_is_one(
    make: Callable[[], None], number: int, folders_fail: Callable[[int], None]
) -> None:
    if make in (state_dict, distributed):
        pytest.importorskip("torch")
    folders_fail(number)
    with pytest.raises(BaseException, match=rf"Errno {number}\b"):
        make()
