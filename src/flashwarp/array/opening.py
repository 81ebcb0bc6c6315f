"""Opening arrays: from a path or a storage to an `Array`, everything checked before any I/O.

Opening runs apart from signal handlers, so that it is done whole or not at all.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.array.attachment import Attachment
from flashwarp.array.rows import RowFormat
from flashwarp.cache.cache import LINE_DEFAULT, Cache, automatic_capacity, check_line
from flashwarp.config import SIZE_MAX, choice, flag, integer, parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.dtypes import check_dtype, check_shape
from flashwarp.errors import (
    ArgumentError,
    CopyError,
    DataPathError,
    FileFormatError,
    PathError,
    ReadOnlyError,
)
from flashwarp.nvme import Controller
from flashwarp.nvme.group import ControllerGroup, Spread, spread_storage
from flashwarp.nvme.queue_pair import DATA_PATHS
from flashwarp.nvme.software import SoftwareController
from flashwarp.policy import Policy
from flashwarp.storage import File, Namespace, Storage, containers, files, npy
from flashwarp.storage.file_access import Access, file_storage

__all__ = ["create", "open"]

CacheLike: TypeAlias = Literal["auto"] | int | str | Cache
# The longest load of a GPU thread, and so the strictest alignment.
_LOAD_BYTES_MAX = 16

PathLike: TypeAlias = str | os.PathLike[str]


P = ParamSpec("P")


def _whole(function: Callable[P, Array]) -> Callable[P, Array]:
    """Let a function that opens an array end as a whole; see `endings.uninterrupted`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Array:
        endings.check_not_ended()
        return endings.uninterrupted(functools.partial(function, *args, **kwargs))

    return call


@_whole
def open(  # noqa: A001 - the door of the library, as numpy.memmap has its
    path_or_storage: PathLike | Namespace | Sequence[PathLike] | Sequence[Storage],
    mode: Literal["r", "r+"] = "r",
    dtype: npt.DTypeLike | None = None,
    shape: int | Sequence[int] | None = None,
    *,
    device: Any = None,
    cache: CacheLike = "auto",
    line: int | str | None = None,
    o_direct: bool | None = None,
    strict: str | None = None,
    controller: Controller | Sequence[Controller] | None = None,
    offset: int | None = None,
    lock: bool = True,
    immutable: bool = False,
    layout: Spread | None = None,
    stripe_bytes: int | str | None = None,
) -> Array:
    """Open a file or a storage as an array that device threads read on demand.

    Parameters
    ----------
    path_or_storage : path-like, Storage, or a sequence of these
        A ``.npy`` file; or any file, or a storage, together with `dtype`. Several with `layout`:
        raw data in stripes, or replicas. Files are regular files or block devices. Storages stay
        the caller's.
    mode : {"r", "r+"}
        Read, or read and write.
    dtype, shape : optional
        Of raw data; shape defaults to one axis over the whole of it. For a ``.npy`` file they must
        agree with its header.
    device : Device or str, optional
        "cpu" or "cuda:N"; default that of `cache`, else the first GPU that works, else the CPU.
    cache : "auto", int, str or Cache
        Bytes of device memory to cache lines in ("2 GiB"). "auto": the whole array, or a share of
        the free memory. A `Cache` has a policy and a host tier, and arrays may share it.
    line : int or str, optional
        Bytes of a line, a power of two from 512 to 2 MiB: the unit of transfer. Default "4 KiB". A
        `Cache` has its own.
    o_direct : bool, optional
        Read and write past the page cache (O_DIRECT), or through it. Default: through it if the
        file fits the memory, else past it; a file that is only read may change later. See
        docs/tuning.md. For paths; a `storage.File` has its own.
    strict : {"in_place", "bounce", "direct"}, optional
        Raise DataPathError unless the data goes this way.
    controller : SoftwareController, or one for each of several files or storages, optional
        Your own settings, without a storage. If you give one controller for several, each gets a
        controller with these settings.
    offset : int, optional
        Byte of each file at which raw data begins; any byte, with `dtype`. Whatever else the file
        holds is not looked at: so is data inside of other formats opened. Default: raw data is all
        of the file, which must be no known container.
    lock : bool
        Refuse what loses stores in silence: a second writer of a file, in any process, and a reader
        beside a writer in this one. False: look for nobody, and be seen by nobody. For paths.
    immutable : bool, optional
        Your promise that nobody writes or cuts the file while the array is open: a GPU then reads
        it in place without a lease. Where the promise is broken, rows are old for ever. For paths.
    layout : {"stripe", "replicate"}, optional
        How the array lies on several files or storages, each with a controller; device code goes to
        each without the host. "stripe": dealt round robin. "replicate": each holds all of it; reads
        are shared among them and try the next one after an error, writes go to all. A
        `storage.Striped` or `storage.Replicated` is one storage, behind one controller; the bytes
        lie the same way in both.
    stripe_bytes : int or str, optional
        Bytes of a stripe, a multiple of `line` and of 4 KiB; default 128 KiB or a longer line.

    Returns
    -------
    Array
        Close it, or use it in a ``with`` statement.

    Raises
    ------
    MissingFileError, PathError
        When the file is absent, may not be opened so, or is no regular file or block device.
    LockedError
        When the file is open in a way that excludes this one; `holder` says by which process. When
        another array serves the storage, and one of the two may store: a storage that takes writes
        serves one array at a time. A `storage.File` with ``lock=False`` serves any number, whose
        changes you keep apart.
    FileFormatError, DtypeError
        When contents, dtype and shape do not fit together.
    ReadOnlyError
        For mode "r+" and a storage that takes no writes.
    ArgumentError, CacheError, DeviceError, DeviceOutOfMemory

    Examples
    --------
    >>> import numpy as np, flashwarp as fw
    >>> np.save("table.npy", np.arange(12.0).reshape(6, 2))
    >>> with fw.open("table.npy", device="cpu") as x:
    ...     x[[4, 0]].tolist()
    [[8.0, 9.0], [0.0, 1.0]]
    >>> drives = [fw.storage.Memory("1 MiB") for _ in range(4)]
    >>> with fw.open(drives, "r+", "int64", layout="stripe", device="cpu") as x:
    ...     x[:3] = [7, 8, 9]
    ...     x.gather(np.array([2, 0])).tolist(), len(x.explain().controller["controllers"])
    ([9, 7], 4)
    """
    choice("mode", mode, ("r", "r+"))
    settings = {
        "device": device,
        "cache": cache,
        "line": line,
        "o_direct": o_direct,
        "strict": strict,
        "controller": controller,
        "offset": offset,
        "lock": lock,
        "immutable": immutable,
        "layout": layout,
        "stripe_bytes": stripe_bytes,
    }
    given = path_or_storage
    plan = _Plan.of(device, cache, line, strict, writable=mode == "r+")
    _check_controllers(controller)
    several = _are_several(given)
    members: list[Any] = list(given) if _are_several(given) else [given]
    on_paths = not members or not all(isinstance(each, Namespace) for each in members)
    names = [files.check_name(each) for each in members] if on_paths else []
    if several:
        _check_spread(layout, stripe_bytes, len(members))
    else:
        one = _one(layout, stripe_bytes, controller)
    if not on_paths:
        _check_for_paths(o_direct, offset, lock, immutable)
        kind = _dtype_of_storage(dtype)
        size = None if shape is None else _shape(shape, kind)
        if isinstance(given, Namespace):
            form = npy.Layout(kind, (given.nbytes // kind.itemsize,) if size is None else size, 0)
            return _make(given, form, plan, one)
        return _make_several(members, kind, size, plan, controller, layout, stripe_bytes)
    access = Access(
        plan.writable,
        None if o_direct is None else flag("o_direct", o_direct),
        plan.device,
        flag("lock", lock),
        _asks_in_place(controller),
        flag("immutable", immutable),
    )
    if access.immutable and access.writable:
        raise ArgumentError('immutable=True is for mode="r": this array may be stored to')
    recipe = _Recipe([], mode, dtype, shape, settings)
    start = None if offset is None else integer("offset", offset, 0, SIZE_MAX)
    if not several:
        _settings_only(one)
        files.check(names[0], access.writable)
        form = _layout_of(names[0], dtype, shape, start)
        return _open_one(names[0], form, plan, one, access, recipe=recipe.for_files(names[0]))
    for each in names:
        files.check(each, access.writable)
    parts = _form_of_several(names, layout, dtype, shape, start)
    storages, why, release = _several_files(names, parts, access, plan)
    spread = (layout, stripe_bytes)
    try:
        return _make_several(
            storages,
            parts.dtype,
            parts.shape,
            plan,
            controller,
            *spread,
            why=why,
            release=release,
            recipe=recipe.for_files(names),
        )
    except BaseException:
        release()
        raise


def _check_for_paths(o_direct: Any, offset: Any, lock: Any, immutable: Any) -> None:
    """Refuse for storages what only a path can have."""
    for name, value, default in (
        ("o_direct", o_direct, None),
        ("offset", offset, None),
        ("lock", lock, True),
        ("immutable", immutable, False),
    ):
        if value is not default:
            raise ArgumentError(f"{name}= is for paths: a storage.File takes what it needs itself")


def _dtype_of_storage(dtype: npt.DTypeLike | None) -> np.dtype[Any]:
    if dtype is None:
        raise ArgumentError("a storage holds raw data: say its dtype")
    return check_dtype(dtype)


def _are_several(path: Any) -> TypeGuard[Iterable[Any]]:
    one = isinstance(path, str | bytes | os.PathLike | Namespace) or hasattr(path, "read")
    return not one and isinstance(path, Iterable)


def _check_controllers(controller: Any) -> None:
    several = isinstance(controller, list | tuple)
    plans = controller if several else [controller]
    if controller is not None and not all(isinstance(each, Controller) for each in plans):
        raise ArgumentError(
            f"controller={controller!r} is neither a Controller nor a list of these"
        )


def _asks_in_place(controller: Controller | Sequence[Controller] | None) -> bool:
    plans = [controller] if isinstance(controller, Controller) else controller or []
    return any(plan.asked_path == "in_place" for plan in plans)


def _open_one(
    name: str,
    form: npy.Layout,
    plan: _Plan,
    controller: Controller | None,
    access: Access,
    shown: str = "",
    recipe: _Recipe | None = None,
) -> Array:
    """Open the file `name`, which messages call `shown`."""
    reserved = plan.host_bytes(form.nbytes)
    storage, why, release = _reach(name, form, access, shown, reserved_bytes=reserved)
    try:
        return _make(storage, form, plan, controller, why=why, release=release, recipe=recipe)
    except BaseException:
        release()
        raise


def _reach(
    path: str,
    form: npy.Layout,
    access: Access,
    shown: str = "",
    *,
    in_place: bool = True,
    reserved_bytes: int = 0,
) -> tuple[Storage, str, Callable[[], None]]:
    """Open the part of a file that an array takes, and say how to let go of it."""
    # Elements that device code reads where they are must lie as loads need them.
    in_place = in_place and form.offset % _LOAD_BYTES_MAX == 0
    storage, why, undo = file_storage(
        path, form, access, in_place=in_place, reserved_bytes=reserved_bytes, shown=shown
    )

    def release() -> None:
        storage.close()
        undo()

    if isinstance(storage, File) and form.identity not in (None, storage.identity):
        release()
        raise PathError(errno.ESTALE, "was replaced while it was opened: open it again", path)
    return storage, why, release


@_whole
def create(
    path: PathLike,
    dtype: npt.DTypeLike,
    shape: int | Sequence[int],
    *,
    overwrite: bool = False,
    device: Any = None,
    cache: CacheLike = "auto",
    line: int | str | None = None,
    o_direct: bool | None = None,
    strict: str | None = None,
    controller: Controller | None = None,
    lock: bool = True,
    **unknown: Any,
) -> Array:
    """Create a ``.npy`` file of zeros and open it for reading and writing.

    The file appears whole, and only after everything else has succeeded: it is built beside `path`
    and takes the name last. It is valid for `numpy.load` at once, sparse where the file system can,
    and its data begins on a page, as O_DIRECT likes it. A call that fails, or a crash, leaves what
    was there before.

    Parameters
    ----------
    path : path-like
        Where; by custom it ends with ``.npy``. A link is followed.
    dtype : dtype
    shape : int or sequence of int
    overwrite : bool
        Replace a regular file that is there. Arrays that read it, and its other hard links, keep
        the old file; one that is open for writing is not replaced.
    device, cache, line, o_direct, strict, controller, lock
        As for `open`.

    Returns
    -------
    Array

    Raises
    ------
    ExistingFileError
        When something is there already, and `overwrite` is false. It is a FileExistsError.
    LockedError
        When the file to replace is open for writing.
    MissingFileError, PathError
        When the folder is absent, may not be written, or has no room.
    ArgumentError, DtypeError, CacheError, DataPathError, DeviceError, DeviceOutOfMemory
        As for `open`.
    """
    if unknown:
        names = ", ".join(f"{name}=" for name in unknown)
        raise ArgumentError(f"create has no {names}: it makes one .npy file, and opens it with r+")
    overwrite, lock = flag("overwrite", overwrite), flag("lock", lock)
    o_direct = None if o_direct is None else flag("o_direct", o_direct)
    form = npy.empty_layout(shape, dtype)
    name = files.check_name(path)
    target = files.check_new(name, overwrite)
    plan = _Plan.of(device, cache, line, strict, writable=True)
    one = _settings_only(_one(None, None, controller))
    with files.Draft(target, overwrite, lock) as draft:
        try:
            npy.write_empty(draft.descriptor, form)
        except OSError as error:
            raise files.write_error(error, name) from error
        access = Access(True, o_direct, plan.device, lock)
        array = _open_one(draft.path, form, plan, one, access, name)
        try:
            draft.publish()
        except BaseException:
            array.close()
            raise
    return array


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _Plan:
    """What an array gets besides its storage and controllers."""

    device: Device
    cache: int | str | Cache
    line_bytes: int
    strict: str | None
    writable: bool

    @classmethod
    def of(
        cls,
        device: Any,
        cache: CacheLike,
        line: int | str | None,
        strict: str | None,
        writable: bool,
    ) -> _Plan:
        """Check what does not depend on the storage."""
        if strict is not None:
            choice("strict", strict, DATA_PATHS)
        line_bytes = check_line(LINE_DEFAULT if line is None else line)
        if not isinstance(cache, Cache):
            return cls(resolve(device), cache, line_bytes, strict, writable)
        if line is not None and line_bytes != cache.line_bytes:
            raise ArgumentError(
                f"line={line_bytes}, but the lines of the cache have {cache.line_bytes} bytes"
            )
        return cls(_device_of(cache, device), cache, cache.line_bytes, strict, writable)

    def host_bytes(self, nbytes: int) -> int:
        """Host memory that is yet to be allocated for the cache of an array of `nbytes`."""
        if isinstance(self.cache, Cache):
            return self.cache._host_bytes_to_come(self.device, nbytes)
        return self._capacity(nbytes, self.cache) if self.device.kind == "cpu" else 0

    def _capacity(self, nbytes: int, wanted: int | str) -> int:
        """Bytes of frames of the cache that is made for a storage of `nbytes`."""
        if isinstance(wanted, str) and wanted == "auto":
            return automatic_capacity(nbytes, self.line_bytes, self.device)
        return parse_bytes(wanted, "cache")

    def cache_for(self, nbytes: int) -> Cache:
        """Return the cache that is given, or make one for a storage of `nbytes`."""
        if isinstance(self.cache, Cache):
            self.cache._bind(self.device, nbytes)
            return self.cache
        return Cache(self._capacity(nbytes, self.cache), self.line_bytes, device=self.device)


def _device_of(cache: Cache, asked: Any) -> Device:
    """Return the device of the array: the cache's, if it has one."""
    mine = cache._bound_device
    if mine is None:
        return resolve(asked)
    if asked is not None and resolve(asked) is not mine:
        raise ArgumentError(f"the cache is on {mine.name}, the array is to be on {asked}")
    return mine


@dataclass(frozen=True)
class _CacheRecipe:
    """A cache as large as another process's, for an array that comes from there."""

    capacity: int
    line: int
    ways: int
    policy: Policy
    host_capacity: int | None

    @classmethod
    def of(cls, cache: Cache) -> _CacheRecipe:
        host = cache.host_capacity or None
        return cls(cache.capacity, cache.line_bytes, cache.ways, cache.policy, host)

    def make(self) -> Cache:
        return Cache(
            self.capacity, self.line, self.ways, self.policy, host_capacity=self.host_capacity
        )


@dataclass(frozen=True)
class _Recipe:
    """What `open` was given, to open the same file in another process."""

    path: str | list[str]
    mode: Literal["r", "r+"]
    dtype: npt.DTypeLike | None
    shape: int | Sequence[int] | None
    settings: dict[str, Any]

    def for_files(self, names: str | list[str]) -> _Recipe:
        """Return it with the files, by paths that hold in any folder."""
        if isinstance(names, str):
            return replace(self, path=os.path.abspath(names))
        return replace(self, path=[os.path.abspath(each) for each in names])

    def of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Recipe:
        """Say what must be found there; refuse to let two processes store to one file."""
        if self.mode != "r":
            raise CopyError(
                f"an array of mode {self.mode!r} cannot be pickled, since two processes would "
                f"store to {self.path}: flush it and open the file there with mode='r'"
            )
        return replace(self, shape=shape, dtype=dtype)

    def open(self) -> Array:
        """Open the file with the settings that it was opened with."""
        cache = self.settings["cache"]
        made = {"cache": cache.make()} if isinstance(cache, _CacheRecipe) else {}
        array = open(self.path, self.mode, self.dtype, self.shape, **self.settings | made)
        if made:
            array._attachment.own_cache()
        return array

    def __getstate__(self) -> dict[str, Any]:
        settings = dict(self.settings)
        device, cache = settings["device"], settings["cache"]
        if isinstance(device, Device):
            settings["device"] = device.name
        if isinstance(cache, Cache):
            settings |= {"device": cache.device.name, "cache": _CacheRecipe.of(cache)}
        return {**self.__dict__, "settings": settings}


def _shape(shape: int | Sequence[int], dtype: npt.DTypeLike) -> tuple[int, ...]:
    return check_shape(shape, check_dtype(dtype).itemsize)


def _layout_of(
    path: str,
    dtype: npt.DTypeLike | None,
    shape: int | Sequence[int] | None,
    offset: int | None,
) -> npy.Layout:
    wanted = None if dtype is None else check_dtype(dtype)
    if offset is not None and wanted is None:
        raise ArgumentError("offset= is where raw data begins: say its dtype")
    with files.open_for_reading(path) as file:
        head = file.read(containers.HEAD_BYTES)
        nbytes = file.seek(0, os.SEEK_END)
        status = os.fstat(file.fileno())
        is_npy = offset is None and head.startswith(npy.MAGIC)
        if offset is None and not is_npy:
            containers.refuse_container(path, head, nbytes, wanted)
        if is_npy or (path.endswith(".npy") and wanted is None):
            return _checked(npy.layout_of(file, path), path, wanted, shape)
    if wanted is None:
        raise ArgumentError(f"{path} is a raw file: say its dtype")
    start, identity = offset or 0, (status.st_dev, status.st_ino)
    room = nbytes - start
    if room < 0:
        raise ArgumentError(f"offset={start} is beyond the end of {path}, which has {nbytes} bytes")
    if shape is None:
        if room % wanted.itemsize:
            raise FileFormatError(
                f"{path} has {room} bytes{_from(start)}, no multiple of the {wanted.itemsize} of "
                f"{wanted}: give a shape, or another dtype"
            )
        return npy.Layout(wanted, (room // wanted.itemsize,), start, identity)
    layout = npy.Layout(wanted, _shape(shape, wanted), start, identity)
    if layout.nbytes > room:
        raise FileFormatError(
            f"shape {layout.shape} of {wanted} needs {layout.nbytes} bytes, {path} has {room}"
            f"{_from(start)}"
        )
    return layout


def _from(start: int) -> str:
    return f" from byte {start} on" if start else ""


def _checked(
    layout: npy.Layout,
    path: str,
    dtype: np.dtype[Any] | None,
    shape: int | Sequence[int] | None,
) -> npy.Layout:
    """Return the layout of a .npy file, if it is what the caller says."""
    if dtype is not None and dtype != layout.dtype:
        raise FileFormatError(f"{path} holds {layout.dtype}, not {dtype}")
    if shape is not None and _shape(shape, layout.dtype) != layout.shape:
        raise FileFormatError(f"{path} has shape {layout.shape}, not {shape}")
    return layout


# Several storages.


def _check_spread(layout: str | None, stripe_bytes: int | str | None, count: int) -> None:
    """Check what needs no storage; `spread_storage` checks the rest."""
    if count == 0:
        raise ArgumentError("no storage is given: the list is empty")
    if not isinstance(layout, str) or layout not in ("stripe", "replicate"):
        raise ArgumentError(
            f"layout={layout!r}: say how the array lies on {count} storages, 'stripe' or "
            "'replicate'"
        )
    if layout == "replicate" and stripe_bytes is not None:
        raise ArgumentError("stripe_bytes is for layout='stripe'")


def _one(
    layout: str | None,
    stripe_bytes: int | str | None,
    controller: Controller | Sequence[Controller] | None,
) -> Controller | None:
    """Refuse what only several storages have; return the controller."""
    if layout is not None or stripe_bytes is not None:
        raise ArgumentError("layout and stripe_bytes are for several storages: give a list")
    if controller is not None and not isinstance(controller, Controller):
        raise ArgumentError("several controllers are for several storages: give a list of these")
    return controller


def _settings_only(controller: Controller | None) -> Controller | None:
    if controller is not None and controller.storage is not None:
        raise ArgumentError("the controller has a storage of its own: open that storage")
    return controller


def _form_of_several(
    paths: Sequence[str],
    layout: str | None,
    dtype: npt.DTypeLike | None,
    shape: int | Sequence[int] | None,
    offset: int | None,
) -> _Several:
    if layout == "stripe":
        if dtype is None:
            raise ArgumentError("stripes are raw files: say the dtype of the array")
        kind = check_dtype(dtype)
        raw = [_raw_part(path, kind, offset) for path in paths]
        return _Several(kind, None if shape is None else _shape(shape, kind), raw)
    forms = [_layout_of(path, dtype, shape, offset) for path in paths]
    for path, form in zip(paths, forms, strict=True):
        if (form.dtype, form.shape) != (forms[0].dtype, forms[0].shape):
            raise FileFormatError(
                f"{path} holds {form.shape} of {form.dtype}, {paths[0]} {forms[0].shape} of "
                f"{forms[0].dtype}: they are no replicas"
            )
    if forms[0].nbytes == 0:
        raise ArgumentError("an empty array has nothing to replicate: open one of its files")
    return _Several(forms[0].dtype, forms[0].shape, forms)


def _raw_part(path: str, kind: np.dtype[Any], offset: int | None) -> npy.Layout:
    """All bytes of a file of stripes, from `offset` on."""
    with files.open_for_reading(path) as file:
        head = file.read(containers.HEAD_BYTES)
        nbytes = file.seek(0, os.SEEK_END)
        status = os.fstat(file.fileno())
    if offset is None:
        containers.refuse_container(path, head, nbytes, kind)
        if head.startswith(npy.MAGIC):
            raise FileFormatError(
                f"{path} is a .npy file, and stripes are raw files, in which its header would be "
                "data: say where the data begins in each file, as offset=128"
            )
    start = offset or 0
    if start > nbytes:
        raise ArgumentError(f"offset={start} is beyond the end of {path}, which has {nbytes} bytes")
    identity = (status.st_dev, status.st_ino)
    return npy.Layout(np.dtype(np.uint8), (nbytes - start,), start, identity)


@dataclass(frozen=True)
class _Several:
    """The array that lies on several files, and the part of each file that it takes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    parts: list[npy.Layout]


def _several_files(
    paths: Sequence[str],
    form: _Several,
    access: Access,
    plan: _Plan,
) -> tuple[list[Storage], str, Callable[[], None]]:
    """Choose how the files are reached: all in place, or none."""
    releases: list[Callable[[], None]] = []
    # All files together must fit the memory, so each reserves what the others take.
    sizes = [part.nbytes for part in form.parts]
    frames = plan.host_bytes(sum(sizes))

    def release() -> None:
        while releases:
            releases.pop()()

    def reach(in_place: bool) -> tuple[list[Storage], list[str]]:
        storages, reasons = [], []
        for path, part, size in zip(paths, form.parts, sizes, strict=True):
            file, why, undo = _reach(
                path,
                part,
                access,
                in_place=in_place,
                reserved_bytes=frames + sum(sizes) - size,
            )
            releases.append(undo)
            storages.append(file)
            reasons.append(f"{path}: {why}")
        return storages, reasons

    try:
        storages, reasons = reach(True)
        mapped = [isinstance(file, File) and file.mapping is not None for file in storages]
        if any(mapped) and not all(mapped):
            release()
            storages, reasons = reach(False)
    except BaseException:
        release()
        raise
    return storages, "; ".join(reasons), release


def _make_several(
    members: Sequence[Storage],
    kind: np.dtype[Any],
    shape: tuple[int, ...] | None,
    plan: _Plan,
    controller: Controller | Sequence[Controller] | None,
    layout: str | None,
    stripe_bytes: int | str | None,
    *,
    why: str = "",
    release: Callable[[], None] = _nothing,
    recipe: _Recipe | None = None,
) -> Array:
    stripe = None if stripe_bytes is None else parse_bytes(stripe_bytes, "stripe_bytes")
    storage = spread_storage(members, layout, stripe, plan.line_bytes)
    size = (storage.nbytes // kind.itemsize,) if shape is None else shape
    form = npy.Layout(kind, size, 0)
    group = ControllerGroup(controller, len(members))

    def let_go() -> None:
        storage.close()
        release()

    return _make(storage, form, plan, group, why=why, release=let_go, recipe=recipe)


def _make(
    storage: Namespace,
    form: npy.Layout,
    plan: _Plan,
    controller: Controller | None,
    *,
    why: str = "",
    release: Callable[[], None] = _nothing,
    recipe: _Recipe | None = None,
) -> Array:
    strict = plan.strict
    if storage.nbytes < form.nbytes:
        raise ArgumentError(
            f"shape {form.shape} of {form.dtype} needs {form.nbytes} bytes, the storage has "
            f"{storage.nbytes}"
        )
    owns = not isinstance(plan.cache, Cache)
    if plan.writable and not storage.writable:
        raise ReadOnlyError(f'{storage.path or "the storage"} takes no writes: use mode="r"')
    held = plan.cache_for(storage.nbytes)
    try:
        attachment = Attachment(
            storage,
            RowFormat(form.dtype, form.shape),
            writable=plan.writable,
            cache=held,
            owns_cache=owns,
            controller=controller or SoftwareController(),
            release_storage=release,
        )
        array = Array(attachment, why=why, recipe=recipe)
    except BaseException:
        if owns:
            held.close()
        raise
    path = array.controller.path
    if strict is not None and path != strict:
        reason = str(array.explain())
        array.close()
        raise DataPathError(f"strict={strict!r}, but the data would go {path}:\n{reason}")
    array.strict = strict
    return array
