"""Opening arrays: from a path or a storage to an `Array`, everything checked before any I/O.

`open` looks at the source, and then chooses, in this order: how the files' data is reached, the
cache, the controllers. It runs apart from signal handlers, so that it is done whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec, TypeAlias

import numpy as np
import numpy.typing as npt

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.array.attachment import Attachment
from flashwarp.array.profile import Profile
from flashwarp.cache.cache import Cache
from flashwarp.cache.sizes import LINE_DEFAULT, automatic_capacity, check_line
from flashwarp.config import SIZE_MAX, choice, flag, integer, parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.errors import (
    ArgumentError,
    CopyError,
    ReadOnlyError,
    RouteError,
    SharedCacheError,
)
from flashwarp.launch.rows import RowFormat
from flashwarp.nvme import Controller
from flashwarp.nvme.group import choose_controllers
from flashwarp.nvme.queue_pair import ROUTES, Route
from flashwarp.nvme.software import SoftwareController
from flashwarp.storage import Namespace, files, npy
from flashwarp.storage.composite import Composite
from flashwarp.storage.file_access import Access, reach
from flashwarp.storage.files import PathLike
from flashwarp.storage.source import FilePart, Shape, Source, look, names_files

CacheLike: TypeAlias = Literal["auto"] | int | str | Cache
Mode: TypeAlias = Literal["r", "r+"]

P = ParamSpec("P")

_OPTIONS_OF_PATHS = {
    "o_direct": None,
    "offset": None,
    "lock": True,
    "immutable": False,
    "tensor": None,
}


def _whole(function: Callable[P, Array]) -> Callable[P, Array]:
    """Let a function that opens an array end as a whole; see `endings.uninterrupted`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Array:
        endings.check_not_ended()
        return endings.uninterrupted(functools.partial(function, *args, **kwargs), Array.close)

    return call


def open(  # noqa: A001 - the door of the library, as numpy.memmap has its
    path_or_storage: PathLike | Namespace,
    mode: Mode = "r",
    dtype: npt.DTypeLike | None = None,
    shape: Shape | None = None,
    *,
    device: Device | str | None = None,
    cache: CacheLike = "auto",
    line: int | str | None = None,
    o_direct: bool | None = None,
    strict: Route | None = None,
    controller: Controller | None = None,
    offset: int | None = None,
    lock: bool = True,
    immutable: bool = False,
    tensor: str | None = None,
    profile: PathLike | None = None,
) -> Array:
    """Open a file or a storage as an array that device threads read on demand.

    Parameters
    ----------
    path_or_storage : path-like or Storage
        A ``.npy`` file; or any file, or a storage, together with `dtype`; or safetensors, together
        with `tensor`. Files are regular files or block devices. `storage.Striped`,
        `storage.Concatenated` and `storage.Replicated` make one array of several files or storages.
        A storage stays the caller's.
    mode : {"r", "r+"}
        Read, or read and write.
    dtype, shape : optional
        Of raw data; shape defaults to one axis over the whole of it. For a ``.npy`` file they must
        agree with its header.
    device : Device or str, optional
        "cpu" or "cuda:N"; default that of `cache`, else cuda:0 if it works, else the CPU.
    cache : "auto", int, str or Cache
        Bytes of device memory to cache lines in ("2 GiB"). "auto": the whole array, or a share of
        the free memory. A `Cache` has a policy and a host tier, and arrays may share it.
    line : int or str, optional
        Bytes of a line, a power of two from 512 to 2 MiB: the unit of transfer. Default "4 KiB". A
        `Cache` has its own.
    o_direct : bool, optional
        Read and write past the page cache (O_DIRECT), or through it. Default: through it if the
        file fits the memory, else past it; a file that is only read may change later. See
        docs/caches.md. For paths; a `storage.File` has its own.
    strict : {"in_place", "bounce", "direct"}, optional
        Raise RouteError unless the data goes this way.
    controller : Controller, optional
        Settings of what serves the storage, usually a `SoftwareController`. The members of a
        striped or replicated storage have a controller each with these settings, or one together:
        docs/architecture.md states the rule, and `Array.explain` the outcome.
    offset : int, optional
        Byte of each file at which raw data begins; any byte, with `dtype`. The rest of the file is
        not looked at, so data inside of other formats can be opened. Default: raw data is all of
        the file, which must be no known container. For paths.
    lock : bool
        Refuse what loses stores in silence: a second writer of a file, in any process, and a reader
        beside a writer in this one. False: the array checks for no other, and no other sees it. For
        paths.
    immutable : bool, optional
        Your promise that nobody writes or cuts the file while the array is open: a GPU then reads
        it in place without a lease. If the promise is broken, rows stay old. For paths.
    tensor : str, optional
        Name of a tensor in a safetensors file, or in the checkpoint of an index or folder. A type
        that numpy lacks opens as integers of its size: BF16 as uint16, FP8 as uint8.
    profile : path-like, optional
        What `flashwarp tune` has stored for this file. Arguments that you give win over it.

    Returns
    -------
    Array
        Close it, or use it in a ``with`` statement.

    Raises
    ------
    MissingFileError, PathError
        If the file is absent, may not be opened so, or is no regular file or block device.
    LockedError
        If the file is open in a way that excludes this one; `holder` says by which process. If
        another array uses the storage, and one of the two may store: a storage that takes writes
        serves one array at a time. A `storage.File` with ``lock=False`` serves any number; keep
        their changes apart yourself.
    FileFormatError, DtypeError
        If contents, dtype and shape do not fit together.
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
    """
    request = _Request(
        path_or_storage, mode, dtype, shape, device, cache, line, o_direct, strict, controller,
        offset, lock, immutable, tensor,
    )  # fmt: skip
    return _open(request if profile is None else request.with_profile(Profile.load(profile)))


@_whole
def create(
    path: PathLike,
    dtype: npt.DTypeLike,
    shape: Shape,
    *,
    overwrite: bool = False,
    device: Device | str | None = None,
    cache: CacheLike = "auto",
    line: int | str | None = None,
    o_direct: bool | None = None,
    strict: Route | None = None,
    controller: Controller | None = None,
    lock: bool = True,
) -> Array:
    """Create a ``.npy`` file of zeros and open it for reading and writing.

    The file appears whole, and only after everything else has succeeded: it is built beside `path`
    and takes the name last. It is valid for `numpy.load` at once, sparse where the file system can,
    and its data begins on a page, as O_DIRECT likes it. A file for which there is no room yet is
    made with a warning. A call that fails, or a crash, leaves what was there before.

    Parameters
    ----------
    path : path-like
        Where; by custom it ends with ``.npy``. A link is followed.
    dtype : dtype
        Any that the ``.npy`` format describes.
    shape : int or sequence of int
        Of the array.
    overwrite : bool
        Replace a regular file that is there. Arrays that read it, and its other hard links, keep
        the old file; one that is open for writing is not replaced.
    device : Device or str, optional
        "cpu" or "cuda:N"; default that of `cache`, else cuda:0 if it works, else the CPU.
    cache : "auto", int, str or Cache
        Bytes of device memory to cache lines in, or a `Cache`.
    line : int or str, optional
        Bytes of a line, a power of two from 512 to 2 MiB. Default "4 KiB". A `Cache` has its own.
    o_direct : bool, optional
        Read and write past the page cache (O_DIRECT), or through it. Default: through it, if the
        file system can.
    strict : {"in_place", "bounce", "direct"}, optional
        Raise RouteError unless the data goes this way; then there is no new file.
    controller : Controller, optional
        Settings of what serves the file, usually a `SoftwareController`.
    lock : bool
        Refuse to replace a file that is open for writing, and exclude other writers of the new one.

    Returns
    -------
    Array
        Close it, or use it in a ``with`` statement.

    Raises
    ------
    ExistingFileError
        If something is there already, and `overwrite` is false. It is a FileExistsError.
    LockedError
        If the file to replace is open for writing.
    MissingFileError, PathError
        If the folder is absent, may not be written, or has no room.
    ArgumentError, DtypeError, CacheError, RouteError, DeviceError, DeviceOutOfMemory
        As for `open`.
    """
    overwrite = flag("overwrite", overwrite)
    if isinstance(cache, Cache) and not cache.owned:
        raise SharedCacheError(
            "a client of a shared cache creates no files: create it without the cache, close it, "
            'and open it with mode="r+"'
        )
    form = npy.empty_layout(shape, dtype)
    name = files.check_name(path)
    target = files.check_new(name, overwrite)
    plan = _Plan(_Request(name, "r+", dtype, shape, device, cache, line, o_direct, strict,
                          controller, None, lock, False))  # fmt: skip
    with files.Draft(target, overwrite, plan.access.lock) as draft:
        try:
            npy.write_empty(draft.descriptor, form)
            draft.warn_of_room(form.nbytes)
        except OSError as error:
            raise files.write_error(error, name) from error
        part = FilePart(draft.path, form, shown=name)
        array = plan.open(Source(form.dtype, form.shape, (part,)))
        try:
            draft.publish()
        except BaseException:
            array.close()
            raise
    return array


def planned(
    path: str,
    mode: Mode,
    *,
    device: Device | str | None = None,
    cache: CacheLike = "auto",
    line: int | str | None = None,
    o_direct: bool | None = None,
    controller: Controller | None = None,
    lock: bool = True,
) -> _Plan:
    """Check what `open` is given, for a caller who then opens a part of a file that it knows."""
    return _Plan(_Request(path, mode, None, None, device, cache, line, o_direct, None, controller,
                          None, lock, False))  # fmt: skip


@dataclass(frozen=True)
class _Request:
    """What `open` was given; pickled, it opens the same files in another process."""

    path_or_storage: PathLike | Namespace
    mode: Mode
    dtype: npt.DTypeLike | None
    shape: Shape | None
    device: Device | str | None
    cache: CacheLike
    line: int | str | None
    o_direct: bool | None
    strict: Route | None
    controller: Controller | None
    offset: int | None
    lock: bool
    immutable: bool
    tensor: str | None = None
    profile: Profile | None = None
    """What it was taken from, to be checked against the file."""
    make_cache: Callable[[], Cache] | None = None
    """Where it was pickled with a `Cache`: makes one as large, in the other process."""

    def with_profile(self, profile: Profile) -> _Request:
        """Take from a profile what was not given."""
        options = profile.options()
        if self.cache != "auto" or self.line is not None:
            options = {name: options[name] for name in options if name not in ("cache", "line")}
        if self.controller is not None:
            options.pop("controller", None)
        if self.o_direct is not None or not names_files(self.path_or_storage):
            options.pop("o_direct")
        return replace(self, profile=profile, **options)

    def recipe(self) -> _Request | None:
        """Return it with paths that hold in any folder; None if it needs the caller's storages."""
        given = self.path_or_storage
        if isinstance(given, Composite) and len(given.paths) == len(given.parts):
            return replace(self, path_or_storage=given.absolute())
        if isinstance(given, Namespace):
            return None
        return replace(self, path_or_storage=os.path.abspath(files.check_name(given)))

    def of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Request:
        """Say what must be found there; refuse to let two processes store to one file."""
        if self.mode != "r":
            raise CopyError(
                f"an array of mode {self.mode!r} cannot be pickled, since two processes would "
                f"store to {self.path_or_storage!r}: flush it and open the file there with mode='r'"
            )
        return replace(self, shape=shape, dtype=dtype)

    def open(self) -> Array:
        """Open it, in the process that has unpickled it."""
        if self.make_cache is None:
            return _open(self)
        array = _open(replace(self, cache=self.make_cache(), make_cache=None))
        array._attachment.own_cache()
        return array

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.device, Device):
            state["device"] = self.device.name
        if isinstance(self.cache, Cache) and self.cache.shared is not None:
            make = functools.partial(Cache, shared=self.cache.shared)
            state |= {"cache": "auto", "make_cache": make, "line": None}
        elif isinstance(self.cache, Cache):
            cache = self.cache
            # Without an array, a cache of capacity "auto" has none yet.
            make = functools.partial(
                Cache,
                getattr(cache, "capacity", "auto") if cache._peers is None else cache._wanted,
                cache.line_bytes,
                cache.ways,
                cache.policy,
                host_memory=cache._host_wanted,
            )
            state |= {"cache": "auto", "make_cache": make}
            if cache._bound_device is not None:
                state["device"] = cache._bound_device.name
        return state


@_whole
def _open(request: _Request) -> Array:
    if isinstance(request.mode, str) and request.mode in ("w", "w+", "x"):
        raise ArgumentError(f"mode={request.mode!r}: flashwarp.create makes the file of an array")
    choice("mode", request.mode, ("r", "r+"))
    plan = _Plan(request)
    given, offset = request.path_or_storage, request.offset
    if not names_files(given):
        for name, default in _OPTIONS_OF_PATHS.items():
            if getattr(request, name) is not default:
                raise ArgumentError(
                    f"{name}= is for paths: a storage.File takes what it needs itself"
                )
    if offset is not None:
        offset = integer("offset", offset, 0, SIZE_MAX)
    source = look(given, request.dtype, request.shape, offset, plan.access.writable, request.tensor)
    if request.profile is not None:
        kind = plan.access.device.kind
        request.profile.check(given, source.dtype, source.shape or (), kind)
    return plan.open(source, request.recipe())


class _Plan:
    """What an array gets besides its source; checked, with nothing opened yet."""

    def __init__(self, request: _Request) -> None:
        """Check what does not depend on the source."""
        if request.strict is not None:
            choice("strict", request.strict, ROUTES)
        self.strict = request.strict
        self.asked_controller = request.controller is not None
        self.controller = SoftwareController() if request.controller is None else request.controller
        if not isinstance(self.controller, Controller):
            raise ArgumentError(
                f"controller={self.controller!r} is no Controller: give one, such as "
                "SoftwareController(...), whose settings hold for all members of a storage"
            )
        self.cache = request.cache
        self.line_bytes = check_line(LINE_DEFAULT if request.line is None else request.line)
        automatic = isinstance(self.cache, str) and self.cache == "auto"
        if not automatic and not isinstance(self.cache, Cache):
            parse_bytes(self.cache, "cache")
        device = None
        if isinstance(self.cache, Cache):
            device, line_bytes = self.cache._bound_device, self.cache.line_bytes
            if request.line is not None and self.line_bytes != line_bytes:
                raise ArgumentError(
                    f"line={self.line_bytes}, but the lines of the cache have {line_bytes} bytes"
                )
            self.line_bytes = line_bytes
        if device is None:
            device = resolve(request.device)
        elif request.device is not None and resolve(request.device) is not device:
            raise ArgumentError(
                f"the cache is on {device.name}, the array is to be on {request.device}"
            )
        self.access = Access(
            request.mode == "r+",
            None if request.o_direct is None else flag("o_direct", request.o_direct),
            device,
            flag("lock", request.lock),
            self.controller.asked_route == "in_place",
            flag("immutable", request.immutable),
        )
        if self.access.immutable and self.access.writable:
            raise ArgumentError('immutable=True is for mode="r": this array may be stored to')

    def open(self, source: Source, recipe: _Request | None = None) -> Array:
        """Choose the route of files, then the cache, then the controllers."""
        if isinstance(self.cache, Cache) and not self.cache.owned:
            return self._open_as_client(self.cache, source, recipe)
        if isinstance(self.cache, Cache) and self.cache._peers and self.access.writable:
            raise ArgumentError('GPUs that share a cache, peers=, only read: use mode="r"')
        for part in source.parts:
            if isinstance(part, FilePart):
                self.make_way(part.path)
        with contextlib.ExitStack() as undo:
            opened = undo.enter_context(contextlib.ExitStack())
            storage, why = reach(source, self.access, self._host_bytes, opened)
            shape, device = source.shape_on(storage), self.access.device
            if self.access.writable and not storage.writable:
                raise ReadOnlyError(
                    f'{storage.path or "the storage"} takes no writes: use mode="r"'
                    f"{storage.refusal and f' ({storage.refusal})'}"
                )
            controller, grouped = choose_controllers(
                self.controller, storage, device, self.line_bytes
            )
            if isinstance(self.cache, Cache):
                cache = self.cache._on(device)
                cache._bind(device, storage.nbytes)
            else:
                capacity = self._capacity(storage.nbytes, self.cache)
                cache = undo.enter_context(Cache(capacity, self.line_bytes, device=device))
            attachment = Attachment(
                storage,
                RowFormat(source.dtype, shape),
                writable=self.access.writable,
                cache=cache,
                owns_cache=not isinstance(self.cache, Cache),
                controller=controller,
                release_storage=opened.close,
            )
            told = "; ".join(filter(None, (why, grouped)))
            array = Array(attachment, why=told, recipe=recipe, strict=self.strict)
            undo.pop_all()
        if self.strict not in (None, array.service.route):
            told = f"strict={self.strict!r}, but the data would go {array.service.route}"
            reason = str(array.explain())
            array.close()
            raise RouteError(f"{told}:\n{reason}")
        return array

    def make_way(self, path: str) -> None:
        """Close what clients of the cache have read of a file and none has open, for a writer."""
        if isinstance(self.cache, Cache) and self.cache._owner is not None and self.access.writable:
            self.cache._owner.give_up(path)

    def _open_as_client(self, cache: Cache, source: Source, recipe: _Request | None) -> Array:
        """Open a file in the cache of another process, which opens it, too."""
        from flashwarp.array.client import ClientAttachment  # most programs share nothing

        part = source.parts[0]
        if source.composite is not None or not isinstance(part, FilePart):
            raise SharedCacheError(
                "a client of a shared cache opens one file by its path: open several files, or a "
                "storage, in the owner's process"
            )
        access = self.access
        chosen = access.o_direct is not None or access.immutable or not access.lock
        if self.strict or self.asked_controller or chosen:
            raise SharedCacheError(
                "the owner of a shared cache chooses how a file is read: leave strict, controller, "
                "o_direct, lock and immutable out"
            )
        attachment = ClientAttachment(cache, part.path, part.layout, access.writable)
        return Array(attachment, recipe=recipe)

    def _host_bytes(self, nbytes: int) -> int:
        """Host memory that is yet to be allocated for the cache of an array of `nbytes`."""
        if isinstance(self.cache, Cache):
            return self.cache._host_bytes_to_come(self.access.device, nbytes)
        return self._capacity(nbytes, self.cache) if self.access.device.kind == "cpu" else 0

    def _capacity(self, nbytes: int, wanted: int | str) -> int:
        """Bytes of frames of the cache that is made for a storage of `nbytes`."""
        if isinstance(wanted, str) and wanted == "auto":
            return automatic_capacity(nbytes, self.line_bytes, self.access.device)
        return parse_bytes(wanted, "cache")
