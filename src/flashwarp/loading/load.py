"""`load`: a checkpoint's tensors, straight from their files to a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from flashwarp._names import renamed
from flashwarp.config import flag, integer, parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.errors import ArgumentError
from flashwarp.loading import into as targets
from flashwarp.loading.contents import Content, chosen, contents
from flashwarp.loading.moving import STAGING_BYTES_MIN, move
from flashwarp.loading.places import Place, allocate, library_for
from flashwarp.storage.progress import Progress, progress_for
from flashwarp.storage.safetensors import Checkpoint

_STAGING_MOST = 1 << 40


@renamed
def load(
    path: Checkpoint,
    device: object = None,
    *,
    only: str | Sequence[str] | None = None,
    into: object = None,
    library: str | None = None,
    host_memory: int | str = "256 MiB",
    o_direct: bool | None = None,
    progress: bool | Progress | None = None,
) -> dict[str, Any]:
    """Load tensors of safetensors or .npy files straight to a device, by several threads at once.

    Blocks until all bytes have arrived; any stream may use the tensors then. Beside the tensors it
    takes `host_memory` bytes of host memory for a GPU, and no second copy anywhere.

    Parameters
    ----------
    path : path-like or sequence of path-like
        A ``.safetensors`` file, an index (``.json``), a folder that has
        ``model.safetensors.index.json``, ``model.safetensors`` or other files of the format, a
        ``.npy`` file, or several files.
    device : Device, str or torch.device, optional
        Where tensors go. Default: that of `into`, else "cuda:0" if a GPU works, else "cpu".
    only : str or sequence of str, optional
        Names, or patterns with ``*`` and ``?`` as in `fnmatch`. Default: all tensors.
    into : module or mapping of str to tensor, optional
        Fill these tensors, of torch, cupy or numpy, and allocate none. Each needs the dtype and
        shape that it has in the file. What the files have beside them is not read.
    library : str, optional
        "torch", "cupy" or "numpy". Default: torch if it is installed, else cupy for a GPU and numpy
        for the CPU.
    host_memory : int or str
        Most bytes of pinned host memory.
    o_direct : bool, optional
        Read past the page cache (True), or through it (False). Default: what is in the page cache
        is read from there, and the rest past it, which leaves the page cache as it is.
    progress : bool or callable, optional
        True shows a line on stderr, False none. A function is called with the bytes that have
        arrived, and all bytes. Default: a line if stderr is a terminal and the load takes more than
        two seconds.

    Returns
    -------
    dict of str to tensor
        By name, in the order of the index or file. An array of a .npy file has the file's name
        without its suffix. With `into`, its tensors.

    Raises
    ------
    FileFormatError
        A file is damaged, cut short, or no file of its format; or `into` names a tensor that no
        file has, or that has another shape.
    MissingFileError, PathError
        A file, such as one that the index names, is absent or cannot be opened.
    DtypeError
        The library does not have a dtype of the file, or a tensor of `into` has another one.
    DeviceOutOfMemory
        The tensors do not fit. Nothing stays allocated.
    StorageError
        A read failed, or a file was changed meanwhile: tensors of `into` hold any bytes then.
    ArgumentError

    Notes
    -----
    The tensors of one file share one allocation, which is freed with the last of them.
    FLASHWARP_TIMEOUT_S limits the time in which no byte arrives.

    Examples
    --------
    >>> import numpy
    >>> import flashwarp
    >>> numpy.save("weights.npy", numpy.arange(6, dtype="float32").reshape(2, 3))
    >>> found = flashwarp.load("weights.npy", device="cpu", library="numpy")
    >>> found["weights"]
    array([[0., 1., 2.],
           [3., 4., 5.]], dtype=float32)
    """
    budget = budget_of(host_memory)
    direct = None if o_direct is None else flag("o_direct", o_direct)
    job = prepare(path, device, only, into, library)
    what = os.path.basename(next(iter(job.wanted.values())).path) if job.wanted else ""
    return move(
        job.wanted.values(),
        job.places,
        job.device,
        o_direct=direct,
        staging_bytes=budget,
        progress=progress_for(progress, what),
        meanwhile=job.made,
    )


class Job(NamedTuple):
    """What a load has to do: tensors of files, their memory, and what makes them there."""

    wanted: Mapping[str, Content]
    places: Mapping[str, Place]
    device: Device
    made: Callable[[], dict[str, Any]]


def budget_of(host_memory: int | str) -> int:
    """Return the checked bytes of host memory for a load."""
    nbytes = parse_bytes(host_memory, "host_memory")
    return integer("host_memory", nbytes, STAGING_BYTES_MIN, _STAGING_MOST)


def prepare(
    path: Checkpoint,
    device: object,
    only: str | Sequence[str] | None,
    into: object,
    library: str | None,
) -> Job:
    """Find tensors in files and memory for them, as `load` takes these arguments."""
    found = contents(path)
    given = None if into is None else targets.tensors_of(into)
    where = _device(device, given)
    wanted = chosen(found, only)
    if given is None:
        places, made = allocate(wanted.values(), library_for(library, where))
        return Job(wanted, places, where, made)
    tensors = given if only is None else {n: t for n, t in given.items() if n in wanted}
    kind = targets.library_of(tensors, where) if library is None else library
    places = targets.places_of(wanted, tensors, library_for(kind, where), where)
    return Job({name: wanted[name] for name in places}, places, where, partial(dict, tensors))


def _device(device: object, given: Mapping[str, Any] | None) -> Device:
    if given is None:
        return resolve(device)
    found = targets.device_of(given)
    where = resolve(found)
    if device is not None and resolve(device) is not where:
        raise ArgumentError(
            f"device={str(device)!r}, and the tensors of into are on {found}: leave device out"
        )
    return where
