"""What else saves states: torch, managed memory with hints, and what else is installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from flashwarp.bench.checkpoints_shots import Links
from flashwarp.bench.checkpoints_state import VALUES, blocked, ends_are, finish, new_array
from flashwarp.device import Device
from flashwarp.probe.report import Report, Row
from flashwarp.probe.timing import wall_seconds

__all__ = ["WAYS", "absent", "add_shot", "add_state"]

_ABSENT = {"orbax.checkpoint": "orbax", "adios2": "ADIOS2"}
_INTERVAL_S = 0.01
_MANAGED_SHARE = 0.25


def _torch_save(device: Device, tensor: Any, path: Path) -> float:
    torch: Any = importlib.import_module("torch")
    return blocked(device, lambda: torch.save({"state": tensor}, path))


def _async_save(kind: str, device: Device, tensor: Any, path: Path) -> float:
    """Return what a save blocks; in a process, the second, since the first one starts it."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    saver: Any = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
    options: dict[str, Any] = {
        "async_checkpointer_type": saver.AsyncCheckpointerType(kind),
    }
    with contextlib.ExitStack() as stack:
        if kind == "process":
            stack.enter_context(_one_rank())
            staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
            stager = staging.DefaultStager(staging.StagingOptions(use_async_staging=False))
            stack.callback(stager.close)
            options["async_stager"] = stager
        else:
            options["no_dist"] = True
        for turn in range(2 if kind == "process" else 1):
            saved: list[Any] = []

            def save(turn: int = turn, saved: list[Any] = saved) -> None:
                saved.append(
                    dcp.async_save({"state": tensor}, checkpoint_id=path / str(turn), **options)
                )

            seconds = blocked(device, save)
            getattr(saved[0], "upload_completion", saved[0]).result(120)
            shutil.rmtree(path / str(turn), ignore_errors=True)
    return seconds


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Make this process a group of its own, which saves in a process need."""
    distributed: Any = importlib.import_module("torch.distributed")
    if distributed.is_initialized():
        yield
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


_SAVES: dict[str, Callable[[Device, Any, Path], float]] = {
    "dcp.async_save, a thread": partial(_async_save, "thread"),
    "torch.save": _torch_save,
    "dcp.async_save, a process and pinned memory": partial(_async_save, "process"),
}
WAYS = tuple(_SAVES)
"""How else one state is saved."""


def add_state(
    report: Report,
    device: Device,
    folder: Path,
    nbytes: int,
    saved_s: float,
    late: Callable[[], bool],
    names: Sequence[str],
) -> None:
    """Add what some of `WAYS` block to save one state."""
    if not _has(report, "torch"):
        return
    state = new_array(device, nbytes)
    torch: Any = importlib.import_module("torch")
    tensor = torch.as_tensor(state)
    for number, name in enumerate(names):
        save = _SAVES[name]
        if late():
            absent(report, name, "no time was left")
            continue
        place = folder / f"other{number}"
        try:
            seconds = save(device, tensor, place)
        except Exception as error:  # of a library that this one does not control
            absent(report, name, f"{type(error).__name__}: {str(error)[:200]}")
            continue
        finally:
            shutil.rmtree(place, ignore_errors=True)
            place.unlink(missing_ok=True)
        report.add(
            Row(
                f"a state saved, beside {name}",
                nbytes / saved_s / 1e9,
                "GB/s",
                name,
                nbytes / seconds / 1e9,
                target=100.0 if "a thread" in name else 0.0,
                note=f"it blocks {seconds:.3f} s, and a checkpoint {saved_s * 1e3:.3f} ms",
                footprint=nbytes,
            )
        )


def add_shot(
    report: Report, device: Device, folder: Path, lengths: NDArray[Any], links: Links
) -> None:
    """Add how other ways restore the uniform shot in reverse order."""
    for module, name in _ABSENT.items():
        _has(report, module, name)
    if _has(report, "torch"):
        _add_torch_load(report, device, folder, lengths, links)
    if device.kind == "cuda" and _has(report, "cupy"):
        try:
            _add_managed(report, device, lengths, links)
        except Exception as error:  # of a library that this one does not control
            absent(report, "managed memory", f"{type(error).__name__}: {str(error)[:200]}")


def _add_torch_load(
    report: Report, device: Device, folder: Path, lengths: NDArray[Any], links: Links
) -> None:
    torch: Any = importlib.import_module("torch")
    place = folder / "torch"
    place.mkdir()
    state = torch.as_tensor(new_array(device, int(lengths[0])))
    write_s = read_s = 0.0
    for step in range(len(lengths)):
        state.fill_(step % VALUES)
        finish(device)
        write_s += wall_seconds(partial(torch.save, {"state": state}, place / f"{step}.pt"))
    right = True
    for step in reversed(range(len(lengths))):
        began = time.perf_counter()
        found = torch.load(place / f"{step}.pt", map_location=state.device)["state"]
        finish(device)
        read_s += time.perf_counter() - began
        right &= ends_are(found, step % VALUES)
    shutil.rmtree(place)
    total = int(lengths.sum())
    report.add(
        Row(
            "torch.load of each",
            total / read_s / 1e9,
            "GB/s",
            "copies inside the device",
            links.within / 1e9,
            checked=right,
            note=(
                f"{total / write_s / 1e9:.3g} GB/s written by torch.save, which makes nothing "
                "durable; through the page cache, without the limits of links"
            ),
            footprint=total,
        )
    )


def _add_managed(report: Report, device: Device, lengths: NDArray[Any], links: Links) -> None:
    """Add managed memory with advice and prefetches in the order of restores, as in the paper.

    All of it stays in host memory, and nothing is written to storage, which favours it. Prefetches
    hold at most a twelfth of the data on the GPU, as the GPU cache does.
    """
    cupy: Any = importlib.import_module("cupy")
    total = int(lengths.sum())
    free = device.memory_info().free_bytes
    if total > free * _MANAGED_SHARE:
        absent(report, "managed memory", f"{total} bytes exceed a quarter of {free} free bytes")
        return
    runtime = cupy.cuda.runtime
    advise_location = runtime.cudaMemAdviseSetPreferredLocation
    host, gpu = -1, device.ordinal or 0
    nbytes, steps = int(lengths[0]), len(lengths)
    blocks = [cupy.cuda.malloc_managed(nbytes) for _ in range(steps)]
    state = new_array(device, nbytes)
    stream = cupy.cuda.Stream(non_blocking=True)
    ahead_max = max(1, steps // 12)

    def place(block: Any, location: int) -> None:
        runtime.memAdvise(block.ptr, nbytes, advise_location, location)
        runtime.memPrefetchAsync(block.ptr, nbytes, location, stream.ptr)

    def copy(target: int, source: int) -> None:
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, 0)

    write_s = read_s = 0.0
    for hinted in ("none", "all"):
        for step, block in enumerate(blocks):
            state[:] = step % VALUES
            place(block, gpu)
            stream.synchronize()
            time.sleep(_INTERVAL_S)
            write_s += blocked(device, partial(copy, block.ptr, state.data_ptr()))
            place(block, host)
        stream.synchronize()
        ahead: deque[Any] = deque()
        left = iter(list(reversed(blocks)))
        read_s, right = 0.0, True
        for step in reversed(range(steps)):
            while hinted == "all" and len(ahead) < ahead_max:
                block = next(left, None)
                if block is None:
                    break
                place(block, gpu)
                ahead.append(block)
            state[:] = VALUES
            finish(device)
            time.sleep(_INTERVAL_S)
            read_s += blocked(device, partial(copy, state.data_ptr(), blocks[step].ptr))
            right &= ends_are(state, step % VALUES)
            place(blocks[step], host)
            if ahead:
                ahead.popleft()
        stream.synchronize()
        report.add(
            Row(
                f"restore from managed memory, uniform reverse, 10 ms, hints: {hinted}",
                total / read_s / 1e9,
                "GB/s",
                "copies inside the device",
                links.within / 1e9,
                checked=right,
                note="advice and prefetches by cupy; in host memory alone, never on storage",
                footprint=total,
            )
        )


def _has(report: Report, module: str, name: str = "") -> bool:
    try:
        found = importlib.util.find_spec(module) is not None
    except ImportError:  # of a package that it is in
        found = False
    if not found:
        absent(report, name or module, "not installed")
    return found


def absent(report: Report, name: str, why: str) -> None:
    """Note what was not measured."""
    report.settings.setdefault("left out", {})[name] = why
    print(f"left out: {name}: {why}", flush=True)
