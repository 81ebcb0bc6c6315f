"""Routes: how the data of a storage reaches a device, and what a device must register for that.

In place, the device reads the storage's own memory. Else the data goes into the frames of a cache,
"direct", or through pinned buffers, "bounce".
"""

from __future__ import annotations

from collections.abc import Iterator

from flashwarp.device import Device
from flashwarp.device.memory import Registration
from flashwarp.errors import ArgumentError, DeviceError
from flashwarp.storage.base import Storage
from flashwarp.storage.composite import Concatenated
from flashwarp.storage.file import File, Mapping
from flashwarp.storage.memory import Memory


def route_of(
    storage: Storage, device: Device, wanted: str | None, refusal: str = ""
) -> tuple[str, str]:
    """Choose how the data of a storage moves; return the route, and why.

    `refusal` says why it cannot be read in place, if that was tried.

    Raises ArgumentError if `wanted` is a route that it cannot take.
    """
    # If a file is cut, a CPU thread that touches its mapped pages dies of SIGBUS; a GPU's
    # registration pins them. So on the CPU files are mapped only under a lease. Otherwise the
    # storage copies from its own mapping, where a fault is an error of the read.
    leased = isinstance(storage, File) and storage.lease is not None
    safe = leased or isinstance(storage, Memory) or device.kind == "cuda"
    mappable = bool(storage.native.mapped_base) and safe
    mappable = mappable or bool(mapped_parts(storage, device))
    if wanted == "in_place" and not mappable:
        refusal = storage.lease_refusal if isinstance(storage, File) else ""
        raise ArgumentError(
            "route='in_place' needs a namespace in memory that the device can read: "
            "storage.Memory, or a read-only file opened for a GPU with o_direct=False, or "
            f"under a lease{refusal and f': {refusal}'}"
        )
    if wanted == "direct" and device.kind != "cpu":
        raise ArgumentError("route='direct' needs a device whose memory the host can write")
    if wanted is not None:
        return wanted, "asked for"
    if mappable and not refusal:
        return "in_place", "the namespace is memory that the device reads itself"
    tried = f"; it is not read in place, because {refusal}" if refusal else ""
    if device.kind == "cpu":
        why = "the device's memory is host memory: the controller fills the frames"
        return "direct", why + tried
    why = "the host cannot write GPU memory: data passes through pinned buffers"
    return "bounce", why + tried


def mapped_parts(storage: Storage, device: Device) -> list[tuple[int, int]]:
    """Return where a device reads a concatenation in place, as a `NamespacePart` has it; or none.

    Stores go through commands, which have one address for the namespace. So it takes none.
    """
    if not isinstance(storage, Concatenated) or storage.writable:
        return []
    parts, begin = [], 0
    for member in storage.members:
        base = int(member.native.mapped_base)
        if not base or not (isinstance(member, Memory) or device.kind == "cuda"):
            return []
        end = begin + member.nbytes
        parts.append((end, (base - begin) % (1 << 64)))
        begin = end
    return parts


PIECE_BYTES = 1 << 30
"""If a device refuses one registration of a file's pages, it may accept them in pieces of this
size, a multiple of all page sizes."""


def register(storage: Storage, device: Device) -> Iterator[Registration]:
    """Make a storage's own memory known to a device, which reads it in place.

    Yields each registration that the caller must close. Raises DeviceError if the device refuses.
    """
    if isinstance(storage, Concatenated):
        for member in storage.members:
            yield from register(member, device)
        return
    held = storage.mapping if isinstance(storage, File) else storage
    if not isinstance(held, Mapping | Memory):
        return
    read_only = not storage.writable
    try:
        # Exactly the caller's bytes: a copy from a neighbour on the same page would be refused if
        # it began outside of a registered range and ended inside.
        yield device.register_host(held.address, held.nbytes, read_only)
    except DeviceError:
        if isinstance(held, Mapping) and held.nbytes > PIECE_BYTES:
            # Of the caller's own memory other libraries may copy parts, which must not lie in two
            # registrations. Of our mapping they know nothing.
            for begin in range(0, held.nbytes, PIECE_BYTES):
                nbytes = min(PIECE_BYTES, held.nbytes - begin)
                yield device.register_host(held.address + begin, nbytes, read_only)
        elif isinstance(held, Memory) and read_only and held.array.flags.writeable:
            # Some devices register no read-only memory. This memory could be written.
            yield device.register_host(held.address, held.nbytes, False)
        else:
            raise
