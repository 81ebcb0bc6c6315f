"""Opening arrays: from a path or a storage to an `Array`, everything checked before any I/O."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from flashwarp import _native, config, npy
from flashwarp.array import Array
from flashwarp.cache import Cache, automatic_capacity
from flashwarp.config import parse_bytes
from flashwarp.controller import SoftwareController
from flashwarp.device import CpuDevice, Device, resolve
from flashwarp.errors import ArgumentError, DataPathError, FileFormatError
from flashwarp.policy import CLOCK, Policy, resolve_policy
from flashwarp.queue_pair import DATA_PATHS
from flashwarp.storage import File, Mapping, Memory, Storage, _check_file

__all__ = ["create", "from_storage", "open"]

_log = logging.getLogger(__name__)

CacheLike: TypeAlias = Literal["auto"] | int | str | Cache


def open(  # noqa: A001 - the door of the library, as numpy.memmap has its
    path: str | os.PathLike[str],
    mode: Literal["r", "r+"] = "r",
    dtype: npt.DTypeLike | None = None,
    shape: int | Sequence[int] | None = None,
    device: Any = None,
    cache: CacheLike = "auto",
    line: int | str = "4 KiB",
    controller: SoftwareController | None = None,
    strict: str | None = None,
    direct: bool | None = None,
    policy: str | Policy | None = None,
) -> Array:
    """Open a .npy or raw file as an array that device threads read on demand.

    Parameters
    ----------
    path : path-like
        A ``.npy`` file, or any file together with `dtype`.
    mode : {"r", "r+"}
        Read, or read and write.
    dtype, shape : optional
        Of a raw file; shape defaults to one axis over the whole file. For a ``.npy`` file they must
        agree with its header.
    device : Device or str, optional
        "cpu" or "cuda:N"; default the first GPU that works, else the CPU.
    cache : "auto", int, str or Cache
        Bytes of device memory to cache lines in ("2 GiB"), or a `Cache` to share.
    line : int or str
        Bytes of a line, a power of two from 512 to 2 MiB: the unit of transfer.
    controller : SoftwareController, optional
        With settings of one's own; a storage it brings takes the place of the file's.
    strict : {"mapped", "bounce", "direct"}, optional
        Raise DataPathError unless the data goes this way.
    direct : bool, optional
        Read and write past the page cache (O_DIRECT), or through it. Default: by how much of the
        file is in the page cache.
    policy : str or Policy, optional
        Which line makes room for another; see `Cache`. Default "clock". A `Cache` has its own.

    Returns
    -------
    Array
        Close it, or use it in a ``with`` statement.

    Raises
    ------
    MissingFileError, PathError
        When the file is absent or may not be opened so.
    FileFormatError, DtypeError
        When contents, dtype and shape do not fit together.
    ArgumentError, CacheError, DeviceError, DeviceOutOfMemory

    Examples
    --------
    >>> import numpy as np, flashwarp as fw
    >>> np.save("table.npy", np.arange(12.0).reshape(6, 2))
    >>> with fw.open("table.npy", device="cpu") as x:
    ...     x[[4, 0]].tolist()
    [[8.0, 9.0], [0.0, 1.0]]
    """
    if mode not in ("r", "r+"):
        raise ArgumentError(f"mode={mode!r} is neither 'r' nor 'r+'")
    name = os.fspath(path)
    writable = mode == "r+"
    _check_file(name, writable)
    layout = _layout_of(name, dtype, shape)
    where = resolve(device) if not isinstance(cache, Cache) else _same_device(cache, device)
    if controller is not None and controller.storage is not None:
        storage, why, release = controller.storage, "the controller's own storage", _nothing
    else:
        storage, why, release = _file_storage(name, layout, writable, direct, where)
    try:
        return _make(
            storage,
            layout,
            where,
            cache,
            line,
            controller,
            strict,
            policy,
            why=why,
            release=release,
        )
    except BaseException:
        release()
        raise


def create(
    path: str | os.PathLike[str],
    shape: int | Sequence[int],
    dtype: npt.DTypeLike,
    **options: Any,
) -> Array:
    """Create a ``.npy`` file of zeros and open it for reading and writing.

    The file is valid for `numpy.load` at once, sparse where the file system can, and its data
    begins on a page, as O_DIRECT likes it. An existing file is replaced.

    Parameters
    ----------
    path : path-like
        Where; by custom it ends with ``.npy``.
    shape : int or sequence of int
    dtype : dtype
    **options
        As for `open`.

    Returns
    -------
    Array
    """
    npy.write_empty(os.fspath(path), _shape(shape), dtype)
    return open(path, "r+", **options)


def from_storage(
    storage: Storage,
    dtype: npt.DTypeLike,
    shape: int | Sequence[int] | None = None,
    *,
    device: Any = None,
    cache: CacheLike = "auto",
    line: int | str = "4 KiB",
    controller: SoftwareController | None = None,
    strict: str | None = None,
    policy: str | Policy | None = None,
) -> Array:
    """Open an array over any storage: memory, a block device, stripes, replicas.

    Parameters are those of `open`. The storage stays the caller's.
    """
    kind = npy.check_dtype(dtype)
    size = _shape(shape) if shape is not None else (storage.nbytes // kind.itemsize,)
    layout = npy.Layout(kind, size, 0)
    if layout.nbytes > storage.nbytes:
        raise ArgumentError(
            f"shape {size} of {kind} needs {layout.nbytes} bytes, the storage has {storage.nbytes}"
        )
    where = resolve(device) if not isinstance(cache, Cache) else _same_device(cache, device)
    return _make(storage, layout, where, cache, line, controller, strict, policy)


def _nothing() -> None:
    pass


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    result = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    if any(n < 0 for n in result):
        raise ArgumentError(f"shape {result} has a negative length")
    return result


def _same_device(cache: Cache, device: Any) -> Device:
    if device is not None and resolve(device) is not cache.device:
        raise ArgumentError(f"the cache is on {cache.device.name}, the array shall be on {device}")
    return cache.device


def _layout_of(
    path: str, dtype: npt.DTypeLike | None, shape: int | Sequence[int] | None
) -> npy.Layout:
    wanted = None if dtype is None else npy.check_dtype(dtype)
    with Path(path).open("rb") as file:
        is_npy = file.read(6) == b"\x93NUMPY"
    if is_npy or (path.endswith(".npy") and wanted is None):
        layout = npy.read_layout(path)
        if wanted is not None and wanted != layout.dtype:
            raise FileFormatError(f"{path} holds {layout.dtype}, not {wanted}")
        if shape is not None and _shape(shape) != layout.shape:
            raise FileFormatError(f"{path} has shape {layout.shape}, not {_shape(shape)}")
        return layout
    if wanted is None:
        raise ArgumentError(f"{path} is a raw file: say its dtype")
    size = Path(path).stat().st_size
    if shape is None:
        if size % wanted.itemsize:
            raise FileFormatError(
                f"{path} has {size} bytes, no multiple of the {wanted.itemsize} of {wanted}: "
                "give a shape, or another dtype"
            )
        return npy.Layout(wanted, (size // wanted.itemsize,), 0)
    layout = npy.Layout(wanted, _shape(shape), 0)
    if layout.nbytes > size:
        raise FileFormatError(
            f"shape {layout.shape} of {wanted} needs {layout.nbytes} bytes, {path} has {size}"
        )
    return layout


def _file_storage(
    path: str, layout: npy.Layout, writable: bool, direct: bool | None, device: Device
) -> tuple[Storage, str, Callable[[], None]]:
    """Choose how the file is reached: in place, through the page cache, or past it."""
    if layout.nbytes == 0:
        # Nothing to reach; one block of memory stands in, so that the rest needs no special case.
        return Memory(np.zeros(512, np.uint8), writable), "the array is empty", _nothing
    end = layout.offset + layout.nbytes
    resident, mapping = _residency(path, end)
    defaults = config.current()
    warm = resident >= defaults.mapped_residency
    share = f"{resident:.0%} of the file is in the page cache"
    if direct is None:
        direct = not warm and resident < 0.5 and _accepts_direct(path)
    if device.kind == "cuda" and not writable and not direct and mapping is not None and warm:
        budget = int(CpuDevice(1).memory_info().free_bytes * defaults.mapped_budget)
        if end <= budget:
            storage = File(
                path, layout.offset, layout.nbytes, _map_address=mapping.address, _mapping=mapping
            )
            why = f"{share}, and it fits the {budget} bytes that may be pinned"
            return storage, why, mapping.close
        share += f", but it exceeds the {budget} bytes that may be pinned"
    if mapping is not None:
        mapping.close()
    storage = File(path, layout.offset, layout.nbytes, writable=writable, direct=direct)
    why = f"{share}; {'O_DIRECT' if direct else 'through the page cache'}"
    return storage, why, _nothing


# Looking at more pages than this costs more than the answer is worth: sample the front.
_RESIDENCY_BYTES_MAX = 64 << 30


def _residency(path: str, nbytes: int) -> tuple[float, Mapping | None]:
    """Share of the file in the page cache, and the mapping that was used to look."""
    if nbytes > _RESIDENCY_BYTES_MAX:
        return 0.0, None
    try:
        mapping = Mapping(Path(path), nbytes)
    except (OSError, ValueError) as error:
        _log.info("cannot map %s: %s", path, error)
        return 0.0, None
    return mapping.residency(), mapping


def _accepts_direct(path: str) -> bool:
    return not isinstance(_native.direct_io_alignment(path), str)


def _make(
    storage: Storage,
    layout: npy.Layout,
    device: Device,
    cache: CacheLike,
    line: int | str,
    controller: SoftwareController | None,
    strict: str | None,
    policy: str | Policy | None,
    *,
    why: str = "",
    release: Callable[[], None] = _nothing,
) -> Array:
    if strict is not None and strict not in DATA_PATHS:
        raise ArgumentError(f"strict={strict!r} is none of {', '.join(DATA_PATHS)}")
    if storage.nbytes < layout.nbytes:
        raise ArgumentError(
            f"shape {layout.shape} of {layout.dtype} needs {layout.nbytes} bytes, the storage has "
            f"{storage.nbytes}"
        )
    owns = not isinstance(cache, Cache)
    chosen = CLOCK if policy is None else resolve_policy(policy)
    if isinstance(cache, Cache):
        held = cache
        if policy is not None and chosen != held.policy:
            raise ArgumentError(
                f"the cache has policy {held.policy.name!r}, the array shall have {chosen.name!r}: "
                "all arrays on a cache share its policy"
            )
    else:
        capacity = (
            automatic_capacity(storage.nbytes, line, device)
            if cache == "auto"
            else parse_bytes(cache)
        )
        held = Cache(capacity, line, policy=chosen, device=device)
    try:
        array = Array(
            storage,
            layout.dtype,
            layout.shape,
            cache=held,
            owns_cache=owns,
            controller=controller or SoftwareController(),
            release=release,
            why=why,
        )
    except BaseException:
        if owns:
            held.close()
        raise
    path = array.explain().path
    if strict is not None and path != strict:
        reason = str(array.explain())
        array.close()
        raise DataPathError(f"strict={strict!r}, but the data would go {path}:\n{reason}")
    return array
