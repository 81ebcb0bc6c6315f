"""What else saves states: torch, managed memory with hints, orbax and ADIOS2."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.base import Record
from benchmarks.checkpoints.managed import add_managed
from benchmarks.checkpoints.shots import Links
from benchmarks.checkpoints.state import (
    VALUES,
    blocked,
    copy,
    ends_are,
    finish,
    new_array,
    pinned_array,
)
from flashwarp.device import Device
from flashwarp.probe.timing import wall_seconds

__all__ = ["SHOTS", "STATES", "add_shot", "add_state"]

_INTERVAL_S = 0.01


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
            options["async_stager"] = stack.enter_context(_kept_stager(device))
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
def _kept_stager(device: Device) -> Iterator[Any]:
    """Make a stager that keeps its pinned memory from one save to the next.

    torch before 2.13 closes the copier inside the stager at the end of each save, and the next save
    fails with ``KeyError: <class 'type'>``.
    """
    staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
    on_gpu = device.kind == "cuda"
    stager = staging.DefaultStager(
        staging.StagingOptions(
            use_pinned_memory=on_gpu,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
    )
    copier = stager._state_dict_stager
    close, copier.close = copier.close, lambda: None
    try:
        yield stager
    finally:
        close()


def _orbax_save(device: Device, tensor: Any, path: Path) -> float:
    """Return what the second save blocks: the first one starts threads.

    Arrays of jax never change, so that it may copy them after it has returned.
    """
    # Otherwise jax takes three quarters of the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax: Any = importlib.import_module("jax")
    orbax: Any = importlib.import_module("orbax.checkpoint")
    state = {"state": jax.dlpack.from_dlpack(tensor)}
    path.mkdir()
    with contextlib.closing(orbax.AsyncCheckpointer(orbax.StandardCheckpointHandler())) as saver:
        for turn in range(2):
            place = path.resolve() / str(turn)
            save = partial(saver.save, place, args=orbax.args.StandardSave(state))
            seconds = blocked(device, save)
            saver.wait_until_finished()
            shutil.rmtree(place)
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


_SAVES: dict[str, tuple[str, Callable[[Device, Any, Path], float]]] = {
    "thread": ("dcp.async_save, a thread", partial(_async_save, "thread")),
    "save": ("torch.save", _torch_save),
    "process": (
        "dcp.async_save, a process and pinned memory",
        partial(_async_save, "process"),
    ),
    "orbax": ("orbax", _orbax_save),
}
STATES = tuple(_SAVES)
"""How else one state is saved."""
SHOTS = ("managed", "load", "adios2")
"""How else a shot is restored: managed memory, torch.load, ADIOS2."""


def add_state(
    report: Record,
    device: Device,
    folder: Path,
    nbytes: int,
    saved_s: float,
    names: Sequence[str],
) -> None:
    """Add what some of `STATES` block to save one state."""
    if not names or not _has(report, "torch"):
        return
    state = new_array(device, nbytes)
    torch: Any = importlib.import_module("torch")
    tensor = torch.as_tensor(state)
    tensor.random_()  # some libraries compress
    for number, (name, save) in enumerate(map(_SAVES.__getitem__, names)):
        if report.is_late(name):
            continue
        place = folder / f"other{number}"
        try:
            seconds = save(device, tensor, place)
        except Exception as error:  # of a library that this one does not control
            report.leave_out(name, f"{type(error).__name__}: {error}")
            continue
        finally:
            shutil.rmtree(place, ignore_errors=True)
            place.unlink(missing_ok=True)
        report.row(
            f"a state saved, beside {name}",
            nbytes / saved_s / 1e9,
            "GB/s",
            name,
            nbytes / seconds / 1e9,
            target=100.0 if "a thread" in name else 0.0,
            note=f"it blocks {seconds:.3f} s, and a checkpoint {saved_s * 1e3:.3f} ms",
            footprint=nbytes,
        )


def add_shot(
    report: Record,
    device: Device,
    folder: Path,
    lengths: NDArray[Any],
    links: Links,
    names: Sequence[str],
) -> None:
    """Add how some of `SHOTS` restore the uniform shot in reverse order."""
    ways: dict[str, Callable[[], object]] = {}
    if "managed" in names and device.kind == "cuda":
        ways["managed memory"] = partial(add_managed, report, device, lengths, links)
    if "load" in names and _has(report, "torch"):
        ways["torch.load"] = partial(_add_torch_load, report, device, folder, lengths, links)
    if "adios2" in names and _has(report, "adios2"):
        ways["ADIOS2"] = partial(_add_adios2, report, device, folder, lengths, links)
    for name, add in ways.items():
        if report.is_late(name):
            continue
        try:
            why = add()
        except Exception as error:  # of a library that this one does not control
            why = f"{type(error).__name__}: {error}"
        if why:
            report.leave_out(name, str(why))


def _add_torch_load(
    report: Record, device: Device, folder: Path, lengths: NDArray[Any], links: Links
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
    report.row(
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


def _add_adios2(
    report: Record, device: Device, folder: Path, lengths: NDArray[Any], links: Links
) -> None:
    """Add ADIOS2 with its engine BP5, which buffers in host memory and has no cache on the GPU.

    Its package on PyPI copies from no GPU: a copy to pinned memory comes before each step.
    """
    adios2: Any = importlib.import_module("adios2")
    mode = adios2.bindings.Mode
    nbytes = int(lengths[0])
    state, pinned = new_array(device, nbytes), pinned_array(device, nbytes)
    host = np.asarray(pinned)
    path = folder / "adios2.bp"
    system = adios2.Adios()
    write_s = read_s = 0.0

    def opened(name: str, way: Any) -> tuple[Any, Any]:
        stream = system.declare_io(name)
        stream.set_engine("BP5")
        stream.set_parameters({"AsyncWrite": "On"})
        return stream, stream.open(str(path), way)

    stream, engine = opened("writing", mode.Write)
    variable = stream.define_variable("state", host, [nbytes], [0], [nbytes], True)

    def put() -> None:
        copy(pinned, state)
        finish(device)
        engine.begin_step()
        engine.put(variable, host, mode.Sync)
        engine.end_step()

    for step in range(len(lengths)):
        state[:] = step % VALUES
        finish(device)
        time.sleep(_INTERVAL_S)
        write_s += blocked(device, put)
    close_s = wall_seconds(engine.close)
    stream, engine = opened("reading", mode.ReadRandomAccess)
    variable = stream.inquire_variable("state")

    def get() -> None:
        engine.get(variable, host, mode.Sync)
        copy(state, pinned)

    right = True
    for step in reversed(range(len(lengths))):
        variable.set_step_selection([step, 1])
        state[:] = VALUES
        finish(device)
        time.sleep(_INTERVAL_S)
        read_s += blocked(device, get)
        right &= ends_are(state, step % VALUES)
    engine.close()
    shutil.rmtree(path)
    total = int(lengths.sum())
    report.row(
        "restore by ADIOS2, uniform reverse, 10 ms",
        total / read_s / 1e9,
        "GB/s",
        "copies inside the device",
        links.within / 1e9,
        checked=right,
        note=(
            f"{total / write_s / 1e9:.3g} GB/s written, closed after {close_s:.2f} s more; "
            f"BP5 of {adios2.__version__}, written in the background, nothing durable"
        ),
        footprint=total,
    )


def _has(report: Record, module: str) -> bool:
    if importlib.util.find_spec(module) is not None:
        return True
    report.leave_out(module, "not installed")
    return False
