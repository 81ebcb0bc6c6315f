"""Making and opening the shards of an array, by all ranks or by none."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from flashwarp.array.array import Array
from flashwarp.array.opening import Mode
from flashwarp.array.opening import open as open_array
from flashwarp.config import choice
from flashwarp.device import Device, resolve
from flashwarp.device.foreign import torch_dtype
from flashwarp.distributed import records
from flashwarp.distributed.dealing import Deal, Dealing
from flashwarp.distributed.ranks import Ranks
from flashwarp.distributed.saves import RANKS_MAX, Folder, Save, chosen
from flashwarp.errors import ArgumentError, CheckpointError, DeviceError, FileFormatError
from flashwarp.storage import files, npy
from flashwarp.storage.files import PathLike
from flashwarp.storage.source import Shape
from flashwarp.table.making import NewTable
from flashwarp.table.record import Record

Options = dict[str, Any]
"""What `flashwarp.open` takes: device, cache, line."""


def create_shards(
    ranks: Ranks,
    held: contextlib.ExitStack,
    path: PathLike,
    options: Options,
    dtype: npt.DTypeLike,
    shape: Shape,
    deal: Deal,
    table: Callable[[], tuple[str, NewTable]] | None = None,
) -> tuple[Save, Array]:
    """Make a new array of zeros, or a table, and open this rank's shard, which `held` closes."""

    def check() -> tuple[str, str, tuple[Folder, Callable[..., Save], NewTable | None]]:
        device = _device_of(options)
        of, new = ("", None) if table is None else table()
        if new is None:
            form = npy.empty_layout(shape, dtype)
        else:
            form = npy.empty_layout((new.rows, new.width), np.float32)
        if not form.shape:
            raise ArgumentError("a sharded array has at least one axis, whose rows are dealt")
        if ranks.count > RANKS_MAX:
            raise ArgumentError(f"{ranks.count} ranks: at most {RANKS_MAX} have a shard each")
        Dealing(deal, form.shape[0], ranks.count)
        _check_kind(device, form.dtype)
        home = Folder(path)
        home.check_new()
        described = repr(np.lib.format.dtype_to_descr(form.dtype))
        save = functools.partial(Save, deal=deal, shape=form.shape, dtype=described)
        what = f"create shape {form.shape} of {form.dtype}, dealt by {deal}{of}, on {device.kind}"
        return what, os.urandom(16).hex(), (home, save, new)

    (home, make_save, new), ids = ranks.agree("create", check)
    save = make_save(ids[0], ids[0], ranks=ranks.count)

    def make() -> Array:
        files.make_folder(home.path)
        with save.new_shard(home.path, ranks.rank) as (descriptor, offset):
            if new is not None:
                first, last = save.dealing.starts[ranks.rank : ranks.rank + 2]
                new.write(descriptor, offset, range(first, last))
        if new is not None:
            new.record(last - first).write(save.path(home.path, ranks.rank))
        return _open_shard(ranks, held, home, save, "r+", options)

    local = ranks.step("make the shards", make)
    commit(ranks, home, save)
    return save, local


def commit(ranks: Ranks, home: Folder, save: Save) -> None:
    """Make a save whose shards are durable the present one on all ranks, and end the others."""
    ranks.step("prepare a save", lambda: home.prepare(save))
    ranks.step("commit a save", lambda: home.switch(save) if ranks.rank == 0 else None)
    ranks.step("follow a save", lambda: home.follow(save))


def save_shards(ranks: Ranks, present: Save, local: Array, path: PathLike) -> None:
    """Copy the shards of an open array to a new array in other folders."""
    source = records.path_of(local)

    def look() -> tuple[str, str, tuple[Folder, Record | None]]:
        home = Folder(path)
        home.check_new()
        local.flush()
        record = Record.read(source)
        if record is not None and record.changing:
            raise CheckpointError(
                f"{source} is being trained: call the checkpoint() of its optimizer before, so "
                "that the copy has all steps",
                record.step,
            )
        return "save", os.urandom(16).hex(), (home, record)

    (home, record), ids = ranks.agree("save", look)
    new = replace(present, id=ids[0], array=ids[0])

    def copy() -> None:
        files.make_folder(home.path)
        with new.new_shard(home.path, ranks.rank, source):
            pass
        if record is not None:
            record.write(new.path(home.path, ranks.rank))

    ranks.step("copy the shards", copy)
    commit(ranks, home, new)


def open_shards(
    ranks: Ranks, held: contextlib.ExitStack, path: PathLike, options: Options, mode: Mode
) -> tuple[Save, Array]:
    """Open this rank's shard of the save that all ranks have; `held` closes it."""

    def look() -> tuple[str, Any, tuple[Folder, Device]]:
        choice("mode", mode, ("r", "r+"))
        device = _device_of(options)
        home = Folder(path)
        return f"open with mode {mode!r}, on {device.kind}", home.look(), (home, device)

    (home, device), told = ranks.agree("open", look)

    def open_it() -> tuple[Save, Array]:
        save = chosen(told, str(home.path))
        if save.ranks != ranks.count:
            raise ArgumentError(
                f"the array has {save.ranks} shards, and the group {ranks.count} ranks: call "
                "flashwarp.distributed.reshard first"
            )
        _check_kind(device, save.kind)
        local = _open_shard(ranks, held, home, save, mode, options)
        # Who deals the rows anew has locked the shards of the old save: now nobody can.
        now = home.look()
        if told[0]["present"] not in (now["present"], now["next"] if ranks.rank else None):
            raise FileFormatError(f"{home.path}: was changed by another program: open it again")
        return save, local

    save, local = ranks.step("open the shards", open_it)
    if mode == "r+":
        ranks.step("follow a save", lambda: home.follow(save))
    return save, local


def _device_of(options: Options) -> Device:
    device = resolve(options["device"])
    check_torch(device)
    return device


def check_torch(device: Device) -> None:
    """Raise DeviceError if rows or tensors on a GPU cannot go to others."""
    if device.kind == "cuda" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise DeviceError(
            f"messages between GPUs as {device.name} need a torch that has CUDA and NCCL, and this "
            f"is {torch.__version__}: install another, or give device='cpu'"
        )


def _check_kind(device: Device, dtype: np.dtype[Any]) -> None:
    """Raise DtypeError for what messages between GPUs cannot have."""
    if device.kind == "cuda":
        torch_dtype(torch, dtype)


def _open_shard(
    ranks: Ranks,
    held: contextlib.ExitStack,
    home: Folder,
    save: Save,
    mode: Mode,
    options: Options,
) -> Array:
    save.check_shard(home.path, ranks.rank)
    path, shape = save.path(home.path, ranks.rank), save.shard_shape(ranks.rank)
    local = open_array(path, mode, save.kind, shape, **options)
    held.callback(local.close)
    return local
