"""Moving rows: what a call on rows does in its turn, from its operands to the end of its launch.

The launch runs on the caller's stream, on that of the caller's library, or on the library's own;
what its operands need comes before it there.
"""

from __future__ import annotations

from typing import Any, Protocol

from flashwarp.array.attachment import Attachment
from flashwarp.device import stream_handle
from flashwarp.errors import CaptureError
from flashwarp.launch.launcher import Verb
from flashwarp.launch.operands import Index, Operands, Rows


class Attached(Protocol):
    """An array, of which the caller has the turn."""

    _attachment: Attachment


def gather(array: Attached, idx: object, out: object, stream: object) -> Any:
    """Copy rows to `out`, or to a new array; see `Array.gather`."""
    operands = _operands_of(array, stream)
    chosen = operands.choose(idx)
    target = operands.target(out, chosen, stream)
    move(array, "gather", chosen, target, stream)
    return target.finish(stream)


def scatter(array: Attached, idx: object, values: object, stream: object) -> None:
    """Store rows; see `Array.scatter`."""
    array._attachment.need_writable()
    operands = _operands_of(array, stream)
    index = operands.index(idx)
    source = operands.source(values, index)
    move(array, "scatter", index, source, stream)
    if stream is None:  # else it is lent to the stream
        source.release()


def prefetch(array: Attached, idx_or_slice: object, stream: object) -> None:
    """Start fetching rows into the cache; see `Array.prefetch`."""
    chosen = _operands_of(array, stream).choose(idx_or_slice)
    attachment, launcher = array._attachment, array._attachment.launcher
    if not len(chosen) or not launcher.format.row_bytes:
        return
    run = _stream_of(attachment, "prefetch", chosen, None, stream)
    launcher.prefetch(chosen, run)
    _lend(attachment, chosen, None, run, stream)
    _finish(attachment, "prefetch", run, stream)


def place_ids(array: Attached, idx_or_slice: object, stream: object) -> range | Index:
    """Check which rows a call is about, and place their numbers where kernels read them."""
    return array._attachment.operands_for(stream).choose(idx_or_slice)


def _operands_of(array: Attached, stream: object) -> Operands:
    array._attachment.launcher.format.need_axis()
    return array._attachment.operands_for(stream)


def move(
    array: Attached,
    verb: Verb,
    chosen: range | Index,
    rows: Rows,
    stream: object = None,
    sms: int | None = None,
) -> None:
    """Copy chosen rows, by at most so many multiprocessors; those of a range lie back to back."""
    attachment, launcher = array._attachment, array._attachment.launcher
    if not len(chosen) or not launcher.format.row_bytes:
        return
    run = _stream_of(attachment, verb, chosen, rows, stream)
    launcher.move(verb, chosen, rows.address, run, sms=sms)
    _lend(attachment, chosen, rows, run, stream)
    _finish(attachment, verb, run, stream)
    if stream is None and launcher.copies is not None and launcher.copies.spoilt():
        # Warps, which read it now, know what a writer may change.
        launcher.move(verb, chosen, rows.address, run)
        _finish(attachment, verb, run, stream)


def _stream_of(
    attachment: Attachment, what: str, chosen: range | Index, rows: Rows | None, stream: object
) -> int | None:
    """Return the stream that a launch runs on; what its operands need comes before it there."""
    device = attachment.device
    if device.kind == "cpu":
        return None
    if stream is not None:
        handle = stream_handle(stream)
        held = (isinstance(chosen, Index) and chosen.held) or (rows and rows.held)
        if held and device.capture(handle) is not None:
            raise CaptureError(
                f"{what} with operands on the host cannot become part of a CUDA graph, because "
                "it copies them now: put them on the GPU"
            )
        attachment.join(handle)
        # Uploads, and calls that are queued on the library's own stream, come first.
        device.order(None, handle)
        return handle
    instead = "give it stream=, and operands on the GPU"
    if isinstance(chosen, Index) and chosen.library != "numpy":
        handle = device.current_stream(chosen.library).handle
        if device.capture(handle) is not None:
            raise CaptureError(
                f"{what} waits for its end, which a stream in a capture cannot: {instead}"
            )
        if rows is not None and rows.library not in ("numpy", chosen.library):
            device.refuse_capture(what, instead)
            device.order(device.current_stream(rows.library).handle, handle)
        device.order(None, handle)
        # If the wait for the launch is interrupted, the launch goes on.
        attachment.note_stream(handle)
        return handle
    device.refuse_capture(what, instead)
    if rows is not None and rows.library != "numpy":
        # The work that computes the values comes first.
        device.order(device.current_stream(rows.library).handle, None)
    return None


def _lend(
    attachment: Attachment,
    chosen: range | Index,
    rows: Rows | None,
    run: int | None,
    stream: object,
) -> None:
    """Keep the copies of host operands until a stream of the caller's has passed the call."""
    index = chosen.held if isinstance(chosen, Index) else None
    copies = [each for each in (index, None if rows is None else rows.held) if each is not None]
    if copies and stream is not None and run is not None:
        attachment.calls.lend(copies, run)


def _finish(attachment: Attachment, what: str, run: int | None, stream: object) -> None:
    """Wait for a launch on `run`, unless the caller has chosen the stream."""
    if stream is None:
        attachment.finish(what, run)
