"""`CopyEngine`: copies beside the work of kernels, on streams of their own."""

from __future__ import annotations

from collections.abc import Sequence

from flashwarp import _waiting, endings
from flashwarp._names import renamed
from flashwarp.config import integer, time_limit_s
from flashwarp.device import CudaDevice, Device, stream_handle
from flashwarp.errors import ArgumentError, DeviceTimeout, FlashwarpError
from flashwarp.transfer.bandwidth import LinkBandwidth
from flashwarp.transfer.buffer import TransferBuffer
from flashwarp.transfer.copies import After, Copier, Copy, Direction, Piece
from flashwarp.transfer.cpu_copier import CpuCopier
from flashwarp.transfer.cuda_copier import CudaCopier, direction_of
from flashwarp.transfer.operand import Operand, describe

_BYTES_MAX = 1 << 48

# How long the end of the interpreter waits for copies: what a link moves in this time is more than
# any machine has.
_AT_EXIT_S = 10.0


@renamed
class CopyEngine(endings.OfProcess):
    """Copies between a device and the host on streams of its own, one for each direction.

    No multiprocessor is used. A copy begins after the present work of the streams that `after`
    names, and its call returns a `Copy` at once. Copies of one direction run in the order of their
    calls. A GPU's host memory must be pinned, as that of a `TransferClient` is. On the CPU device,
    host threads copy, under the same rules. Any thread may call.

    Parameters
    ----------
    device : Device
        On which the copies begin or end.

    Attributes
    ----------
    bandwidth : dict of Direction to LinkBandwidth
        Measured from copies of 1 MiB and more.

    Notes
    -----
    Events are pooled: no copy creates one once a few have run. Nothing here runs in the background
    on a GPU.

    Examples
    --------
    >>> import numpy as np
    >>> from flashwarp.device import CpuDevice
    >>> from flashwarp.transfer import CopyEngine
    >>> source, target = np.arange(1000), np.zeros(1000, np.int64)
    >>> with CopyEngine(CpuDevice()) as engine:
    ...     copy = engine.copy(target, source)
    ...     copy.wait(timeout_s=10)
    >>> bool((target == source).all())
    True
    """

    _kind = "copy engine"

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.bandwidth = {each: LinkBandwidth(f"{device.name}, {each.value}") for each in Direction}
        self._copiers: dict[Direction, Copier] = {}
        for direction in Direction:
            self._copiers[direction] = self._make_copier(direction)
        endings.remember(self)

    def _make_copier(self, direction: Direction) -> Copier:
        if isinstance(self.device, CudaDevice):
            return CudaCopier(self.device, self.bandwidth[direction])
        return CpuCopier(self.bandwidth[direction])

    # Copies.

    def copy(
        self,
        dst: object,
        src: object,
        nbytes: int | None = None,
        *,
        after: object = None,
        direction: Direction | None = None,
    ) -> Copy:
        """Queue one copy.

        Parameters
        ----------
        dst, src : int, TransferBuffer, DeviceMemory or array
            Target and source: an address, or what has one. They must not overlap.
        nbytes : int, optional
            How much. Default: all of the smaller side that knows its size; both must then have one
            size.
        after : stream, Copy or sequence of these, optional
            What the copy comes after: streams of the device in any form, and copies of this engine.
            Default: the streams on which the libraries of both arrays work now. On a GPU it must be
            given if a side is a mere address; ``()`` is nothing.
        direction : Direction, optional
            Default: as the addresses say on a GPU; on the CPU device `Direction.WITHIN`.

        Returns
        -------
        Copy
            Keeps both sides alive until the copy has ended, staging buffers included.

        Raises
        ------
        ArgumentError, BoundsError
            A side cannot be copied to or from, is too small, or is not pinned.
        CaptureError
            A stream of `after` is being captured into a CUDA graph.
        DeviceError, DeviceTimeout
            The driver refused, or so many copies are in flight that none ended in time.
        """
        target = describe(self.device, dst, "target", writable=True)
        source = describe(self.device, src, "source", writable=False)
        size = _size(target, source, nbytes)
        pieces = [(target.address, source.address, size)] if size else []
        return self._submit(pieces, [target, source], after, direction)

    def copy_pieces(
        self,
        dsts: Sequence[object],
        srcs: Sequence[object],
        nbytes: Sequence[int],
        *,
        after: object = None,
        direction: Direction | None = None,
    ) -> Copy:
        """Queue one copy of many pieces in one direction; as `copy` otherwise.

        A driver of CUDA 12.8 or newer takes them in one call.
        """
        if not len(dsts) == len(srcs) == len(nbytes):
            raise ArgumentError(
                f"{len(dsts)} targets, {len(srcs)} sources and {len(nbytes)} sizes differ in number"
            )
        operands: list[Operand] = []
        pieces: list[Piece] = []
        for dst, src, wanted in zip(dsts, srcs, nbytes, strict=True):
            target = describe(self.device, dst, "target", writable=True)
            source = describe(self.device, src, "source", writable=False)
            size = _size(target, source, wanted)
            if size:
                pieces.append((target.address, source.address, size))
            operands += target, source
        return self._submit(pieces, operands, after, direction)

    def _submit(
        self,
        pieces: list[Piece],
        operands: list[Operand],
        after: object,
        direction: Direction | None,
    ) -> Copy:
        self._check_usable()
        came_after = self._after(after, operands)
        if direction is None:
            direction = self._direction(pieces)
        copier = self._copiers[direction]
        total = sum(size for _, _, size in pieces)
        copy = Copy(copier, direction, total, [each.owner for each in operands])
        if not pieces:
            copy.end(None)
            return copy
        for each in operands:
            if isinstance(each.owner, TransferBuffer):
                each.owner.joins(copy)
        try:
            copier.submit(copy, pieces, came_after)
        except FlashwarpError as error:
            # Raised here, so nobody needs to be told again. What had been queued of it ends later.
            copy.seen = True
            if not copy.number:
                copy.end(error)
            raise
        return copy

    def _after(self, after: object, operands: list[Operand]) -> After:
        if after is None:
            streams = [each.stream for each in operands if each.stream is not None]
            if self.device.kind == "cuda":
                if any(each.nbytes is None for each in operands):
                    raise ArgumentError(
                        "a copy of a mere address needs after=: the stream that writes the source "
                        "or still uses the target, or () if there is none"
                    )
                streams.append(self.device.own_stream())
            return After(streams, ())
        given = after if isinstance(after, list | tuple) else (after,)
        copies = [each for each in given if isinstance(each, Copy)]
        streams = [stream_handle(each) for each in given if not isinstance(each, Copy)]
        return After(streams, copies)

    def _direction(self, pieces: list[Piece]) -> Direction:
        if not isinstance(self.device, CudaDevice) or not pieces:
            return Direction.WITHIN
        return direction_of(self.device, pieces)

    # The end.

    @property
    def in_flight(self) -> int:
        """Copies that have not ended."""
        return sum(copier.in_flight() for copier in self._copiers.values())

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the present copies have ended; raise the first error that nobody has seen."""
        self._check_usable()
        self._wait_idle(time_limit_s(timeout_s))
        self._raise_failures()

    def _wait_idle(self, limit_s: float) -> None:
        waited = _waiting.until(lambda: self.in_flight == 0, limit_s)
        if waited is not None:
            counts = ", ".join(
                f"{copier.in_flight()} {direction.value}"
                for direction, copier in self._copiers.items()
            )
            raise DeviceTimeout(
                f"copies on {self.device.name} have not ended after {waited:.1f} s (limit "
                f"{limit_s:g} s): {counts}; the work that they come after still runs, or a word "
                "that they wait for was not stored"
            )

    def _raise_failures(self) -> None:
        failures = [each for copier in self._copiers.values() for each in copier.take_failures()]
        first = endings.first_of(failures)
        if first is not None:
            raise first

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for copies in flight, release the streams, and raise an error that nobody has seen.

        May be called twice. If the copies do not end in time, raises DeviceTimeout and releases
        nothing, because they may still write: store the words that they wait for, and close again.
        """
        if self._closed or self._in_child:
            return
        limit_s = time_limit_s(timeout_s)
        self._wait_idle(min(limit_s, _AT_EXIT_S) if endings.ended() else limit_s)
        endings.uninterrupted(self._release)
        self._raise_failures()

    def _release(self) -> None:
        self._closed = True
        for copier in self._copiers.values():
            copier.close()
        endings.forget(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.in_flight} copies in flight"
        return f"<CopyEngine of {self.device.name}, {state}>"


def _size(target: Operand, source: Operand, nbytes: int | None) -> int:
    if nbytes is not None:
        size = integer("nbytes", nbytes, 0, _BYTES_MAX)
        target.check(size, "target")
        source.check(size, "source")
        return size
    sizes = {each.nbytes for each in (target, source) if each.nbytes is not None}
    if len(sizes) != 1:
        raise ArgumentError(
            f"target and source have {target.nbytes} and {source.nbytes} bytes: say nbytes="
        )
    return sizes.pop()
