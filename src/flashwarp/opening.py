"""Opening arrays: from a path or a storage to an `Array`, everything checked before any I/O."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from flashwarp import _native, config, npy
from flashwarp.array import Array
from flashwarp.cache import Cache, _check_line, automatic_capacity
from flashwarp.config import parse_bytes
from flashwarp.controller import SoftwareController
from flashwarp.device import CpuDevice, Device, resolve
from flashwarp.errors import ArgumentError, DataPathError, FileFormatError
from flashwarp.lease import Lease
from flashwarp.policy import CLOCK, Policy, resolve_policy
from flashwarp.queue_pair import DATA_PATHS
from flashwarp.spread import ControllerGroup, Spread, spread_storage
from flashwarp.storage import File, Mapping, Memory, Storage, _check_file

__all__ = ["create", "from_storage", "open"]

_log = logging.getLogger(__name__)

CacheLike: TypeAlias = Literal["auto"] | int | str | Cache
PathLike: TypeAlias = str | os.PathLike[str]


def open(  # noqa: A001 - the door of the library, as numpy.memmap has its
    path: PathLike | Sequence[PathLike],
    mode: Literal["r", "r+"] = "r",
    dtype: npt.DTypeLike | None = None,
    shape: int | Sequence[int] | None = None,
    device: Any = None,
    cache: CacheLike = "auto",
    line: int | str = "4 KiB",
    controller: SoftwareController | Sequence[SoftwareController] | None = None,
    strict: str | None = None,
    direct: bool | None = None,
    policy: str | Policy | None = None,
    *,
    host_cache: int | str | None = None,
    layout: Spread | None = None,
    stripe_bytes: int | str | None = None,
    immutable: bool = False,
) -> Array:
    """Open a .npy or raw file as an array that device threads read on demand.

    Parameters
    ----------
    path : path-like, or a sequence of these
        A ``.npy`` file, or any file together with `dtype`. Several files with `layout`: raw files
        in stripes, or replicas of one file.
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
    controller : SoftwareController, or one for each of several files, optional
        With settings of one's own; a storage it brings takes the place of the file's. One for
        several files is a plan: each file gets a controller with its settings.
    strict : {"mapped", "bounce", "direct"}, optional
        Raise DataPathError unless the data goes this way.
    direct : bool, optional
        Read and write past the page cache (O_DIRECT), or through it. Default: by how much of the
        file is in the page cache.
    policy : str or Policy, optional
        Which line makes room for another; see `Cache`. Default "clock". A `Cache` has its own.
    host_cache : int or str, optional
        Bytes of pinned host memory for lines that leave the cache ("8 GiB"); see `Cache`.
    layout : {"stripe", "replicate"}, optional
        How the array lies on several files; device code goes to each without the host. "stripe":
        dealt round robin. "replicate": each holds all of it; reads are shared among them and try
        the next one after an error, writes go to all.
    stripe_bytes : int or str, optional
        Bytes of a stripe, a multiple of `line` and of 4 KiB; default 128 KiB or a longer line.
    immutable : bool, optional
        Your promise that nobody writes or cuts the file while the array is open: a GPU then reads
        it in place without a lease. Where the promise is broken, rows are old for ever.

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
    writable = mode == "r+"
    if immutable and writable:
        raise ArgumentError('immutable=True is for mode="r": this array may be stored to')
    plan = _Plan.of(device, cache, line, policy, strict, host_cache)
    if not isinstance(path, str | os.PathLike):
        names = [os.fspath(each) for each in path]
        _check_spread(layout, stripe_bytes, len(names))
        for each in names:
            _check_file(each, writable)
        several = _form_of_several(names, layout, dtype, shape)
        way = _Way(writable, direct, plan.device, _asks_mapped(controller), immutable)
        files, why, release = _several_files(names, several, way)
        spread = (layout, stripe_bytes)
        try:
            return _make_several(
                files,
                several.dtype,
                several.shape,
                plan,
                controller,
                *spread,
                why=why,
                release=release,
            )
        except BaseException:
            release()
            raise
    one = _one(layout, stripe_bytes, controller)
    name = os.fspath(path)
    _check_file(name, writable)
    form = _layout_of(name, dtype, shape)
    way = _Way(writable, direct, plan.device, _asks_mapped(controller), immutable)
    return _open_one(name, form, plan, one, way)


def _open_one(
    name: str,
    form: npy.Layout,
    plan: _Plan,
    controller: SoftwareController | None,
    way: _Way,
) -> Array:
    if controller is not None and controller.storage is not None:
        storage, why, release = controller.storage, "the controller's own storage", _nothing
    else:
        storage, why, release = _file_storage(name, form, way)
    try:
        return _make(storage, form, plan, controller, why=why, release=release)
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
    storage: Storage | Sequence[Storage],
    dtype: npt.DTypeLike,
    shape: int | Sequence[int] | None = None,
    *,
    device: Any = None,
    cache: CacheLike = "auto",
    line: int | str = "4 KiB",
    controller: SoftwareController | Sequence[SoftwareController] | None = None,
    strict: str | None = None,
    policy: str | Policy | None = None,
    host_cache: int | str | None = None,
    layout: Spread | None = None,
    stripe_bytes: int | str | None = None,
) -> Array:
    """Open an array over any storage, or over several with a controller each.

    Parameters are those of `open`. The storages stay the caller's. A `Striped` or `Replicated`
    storage is one storage, behind one controller; a sequence of storages with `layout` has as many
    controllers, and device code chooses among them. The bytes lie the same way in both.

    Examples
    --------
    >>> import numpy as np, flashwarp as fw
    >>> drives = [fw.storage.Memory("1 MiB") for _ in range(4)]
    >>> with fw.from_storage(drives, "int64", layout="stripe", device="cpu") as x:
    ...     x[:3] = [7, 8, 9]
    ...     x.gather(np.array([2, 0])).tolist(), len(x.explain().controller["controllers"])
    ([9, 7], 4)
    """
    kind = npy.check_dtype(dtype)
    plan = _Plan.of(device, cache, line, policy, strict, host_cache)
    if not isinstance(storage, Storage):
        members = list(storage)
        _check_spread(layout, stripe_bytes, len(members))
        given = None if shape is None else _shape(shape)
        return _make_several(members, kind, given, plan, controller, layout, stripe_bytes)
    one = _one(layout, stripe_bytes, controller)
    size = _shape(shape) if shape is not None else (storage.nbytes // kind.itemsize,)
    form = npy.Layout(kind, size, 0)
    if form.nbytes > storage.nbytes:
        raise ArgumentError(
            f"shape {size} of {kind} needs {form.nbytes} bytes, the storage has {storage.nbytes}"
        )
    return _make(storage, form, plan, one)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _Plan:
    """What an array gets besides its storage and controllers."""

    device: Device
    cache: CacheLike
    line: int | str
    policy: str | Policy | None
    strict: str | None
    host_cache: int | str | None

    @classmethod
    def of(
        cls,
        device: Any,
        cache: CacheLike,
        line: int | str,
        policy: str | Policy | None,
        strict: str | None,
        host_cache: int | str | None,
    ) -> _Plan:
        """Resolve the device, which a cache of one's own has already."""
        where = resolve(device) if not isinstance(cache, Cache) else _same_device(cache, device)
        return cls(where, cache, line, policy, strict, host_cache)

    @property
    def line_bytes(self) -> int:
        """Bytes of a line of the cache."""
        return self.cache.line_bytes if isinstance(self.cache, Cache) else _check_line(self.line)


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


# Several storages.


def _check_spread(layout: str | None, stripe_bytes: int | str | None, count: int) -> None:
    """Check what needs no storage; `spread_storage` checks the rest."""
    if layout not in ("stripe", "replicate"):
        raise ArgumentError(
            f"layout={layout!r}: say how the array lies on {count} storages, 'stripe' or "
            "'replicate'"
        )
    if count == 0:
        raise ArgumentError("no storage is given")
    if layout == "replicate" and stripe_bytes is not None:
        raise ArgumentError("stripe_bytes is for layout='stripe'")


def _one(
    layout: str | None,
    stripe_bytes: int | str | None,
    controller: SoftwareController | Sequence[SoftwareController] | None,
) -> SoftwareController | None:
    """Refuse what only several storages have; return the controller."""
    if layout is not None or stripe_bytes is not None:
        raise ArgumentError("layout and stripe_bytes are for several storages: give a list")
    if controller is not None and not isinstance(controller, SoftwareController):
        raise ArgumentError("several controllers are for several storages: give a list of these")
    return controller


def _form_of_several(
    paths: Sequence[str],
    layout: str | None,
    dtype: npt.DTypeLike | None,
    shape: int | Sequence[int] | None,
) -> _Several:
    if layout == "stripe":
        if dtype is None:
            raise ArgumentError("stripes are raw files: say the dtype of the array")
        kind = npy.check_dtype(dtype)
        raw = [npy.Layout(np.dtype(np.uint8), (Path(p).stat().st_size,), 0) for p in paths]
        return _Several(kind, None if shape is None else _shape(shape), raw)
    forms = [_layout_of(path, dtype, shape) for path in paths]
    for path, form in zip(paths, forms, strict=True):
        if (form.dtype, form.shape) != (forms[0].dtype, forms[0].shape):
            raise FileFormatError(
                f"{path} holds {form.shape} of {form.dtype}, {paths[0]} {forms[0].shape} of "
                f"{forms[0].dtype}: they are no replicas"
            )
    if forms[0].nbytes == 0:
        raise ArgumentError("an empty array has nothing to replicate: open one of its files")
    return _Several(forms[0].dtype, forms[0].shape, forms)


@dataclass(frozen=True)
class _Several:
    """The array that lies on several files, and the part of each file that it takes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    parts: list[npy.Layout]


def _several_files(
    paths: Sequence[str],
    form: _Several,
    way: _Way,
) -> tuple[list[Storage], str, Callable[[], None]]:
    """Choose how the files are reached: all in place, or none."""
    releases: list[Callable[[], None]] = []

    def release() -> None:
        while releases:
            releases.pop()()

    def reach(in_place: bool) -> tuple[list[Storage], list[str]]:
        files, reasons = [], []
        for path, part in zip(paths, form.parts, strict=True):
            file, why, undo = _file_storage(path, part, way, in_place)
            releases.append(undo)
            files.append(file)
            reasons.append(f"{path}: {why}")
        return files, reasons

    try:
        files, reasons = reach(True)
        mapped = [isinstance(file, File) and file.mapping is not None for file in files]
        if any(mapped) and not all(mapped):
            release()
            files, reasons = reach(False)
    except BaseException:
        release()
        raise
    return files, "; ".join(reasons), release


def _make_several(
    members: Sequence[Storage],
    kind: np.dtype[Any],
    shape: tuple[int, ...] | None,
    plan: _Plan,
    controller: SoftwareController | Sequence[SoftwareController] | None,
    layout: str | None,
    stripe_bytes: int | str | None,
    *,
    why: str = "",
    release: Callable[[], None] = _nothing,
) -> Array:
    stripe = None if stripe_bytes is None else parse_bytes(stripe_bytes)
    storage = spread_storage(members, layout, stripe, plan.line_bytes)
    size = (storage.nbytes // kind.itemsize,) if shape is None else shape
    form = npy.Layout(kind, size, 0)
    group = ControllerGroup(controller, len(members))
    return _make(storage, form, plan, group, why=why, release=release)


@dataclass(frozen=True)
class _Way:
    """How files may be reached."""

    writable: bool
    direct: bool | None
    device: Device
    asks_mapped: bool
    immutable: bool


def _asks_mapped(
    controller: SoftwareController | Sequence[SoftwareController] | None,
) -> bool:
    if controller is None:
        return False
    plans = [controller] if isinstance(controller, SoftwareController) else controller
    return any(plan.asked_path == "mapped" for plan in plans)


def _file_storage(
    path: str, layout: npy.Layout, way: _Way, in_place: bool = True
) -> tuple[Storage, str, Callable[[], None]]:
    """Choose how the file is reached: in place, through the page cache, or past it."""
    if layout.nbytes == 0:
        # Nothing to reach; one block of memory stands in, so that the rest needs no special case.
        return Memory(np.zeros(512, np.uint8), way.writable), "the array is empty", _nothing
    end = layout.offset + layout.nbytes
    resident, mapping = _residency(path, end)
    defaults = config.current()
    warm = resident >= defaults.mapped_residency
    share = f"{resident:.0%} of the file is in the page cache"
    refusal = ""
    on_gpu = way.device.kind == "cuda"
    # The CPU device does it only if it is asked to: its rings copy what is in the page cache.
    wanted = warm if on_gpu else way.asks_mapped
    may_map = in_place and wanted and not way.writable and not way.direct
    if may_map and mapping is not None:
        budget = int(CpuDevice(1).memory_info().free_bytes * defaults.mapped_budget)
        if end <= budget or not on_gpu:
            found = _read_in_place(path, layout, mapping, way.immutable and on_gpu)
            if not isinstance(found, str):
                pinned = f", and it fits the {budget} bytes that may be pinned" if on_gpu else ""
                why = "immutable=True" if found.lease is None else "a lease holds writers off"
                return found, f"{share}{pinned}; {why}", functools.partial(_leave, found)
            refusal = found
            share += f"; it is not read in place, because {refusal}"
        else:
            share += f", but it exceeds the {budget} bytes that may be pinned"
    if mapping is not None:
        mapping.close()
    direct = way.direct
    if direct is None:
        direct = not warm and resident < 0.5 and _accepts_direct(path)
    storage = File(path, layout.offset, layout.nbytes, writable=way.writable, direct=direct)
    storage.lease_refusal = refusal
    why = f"{share}; {'O_DIRECT' if direct else 'through the page cache'}"
    return storage, why, _nothing


def _read_in_place(path: str, layout: npy.Layout, mapping: Mapping, immutable: bool) -> File | str:
    """Return the file behind a mapping, under a lease; or why it cannot be had so."""
    lease = None
    if not immutable:
        try:
            lease = Lease(path)
        except OSError as error:
            return f"there is no lease on it: {Lease.refusal(error)}"
    try:
        storage = File(
            path,
            layout.offset,
            layout.nbytes,
            _map_address=mapping.address,
            _mapping=mapping,
            _lease=lease,
        )
    except BaseException:
        if lease is not None:
            lease.close()
        raise
    same = {mapping.identity, storage.identity} | ({lease.identity} if lease else set())
    if len(same) == 1:
        return storage
    if lease is not None:
        lease.close()
    return "its path names another file than a moment ago"


def _leave(storage: File) -> None:
    if storage.lease is not None:
        storage.lease.close()
    storage.mapping.close()


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
    form: npy.Layout,
    plan: _Plan,
    controller: SoftwareController | ControllerGroup | None,
    *,
    why: str = "",
    release: Callable[[], None] = _nothing,
) -> Array:
    strict = plan.strict
    if strict is not None and strict not in DATA_PATHS:
        raise ArgumentError(f"strict={strict!r} is none of {', '.join(DATA_PATHS)}")
    if storage.nbytes < form.nbytes:
        raise ArgumentError(
            f"shape {form.shape} of {form.dtype} needs {form.nbytes} bytes, the storage has "
            f"{storage.nbytes}"
        )
    owns = not isinstance(plan.cache, Cache)
    held = _cache_of(plan, storage.nbytes)
    try:
        array = Array(
            storage,
            form.dtype,
            form.shape,
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
    array.strict = strict
    return array


def _cache_of(plan: _Plan, nbytes: int) -> Cache:
    """Return the cache that is given, or make one for a storage of so many bytes."""
    chosen = CLOCK if plan.policy is None else resolve_policy(plan.policy)
    if isinstance(plan.cache, Cache):
        if plan.host_cache is not None:
            raise ArgumentError("host_cache is for a cache that is made here: give it to the Cache")
        if plan.policy is not None and chosen != plan.cache.policy:
            raise ArgumentError(
                f"the cache has policy {plan.cache.policy.name!r}, the array shall have "
                f"{chosen.name!r}: all arrays on a cache share its policy"
            )
        return plan.cache
    capacity = (
        automatic_capacity(nbytes, plan.line, plan.device)
        if plan.cache == "auto"
        else parse_bytes(plan.cache)
    )
    return Cache(
        capacity,
        plan.line,
        policy=chosen,
        device=plan.device,
        host_capacity=plan.host_cache,
    )
