"""The gradient of a wave simulation, with all its states in a checkpointer instead of in memory.

The 2-D acoustic wave equation runs forwards from a source; receivers record it. How the misfit with
other records changes with the speed of sound, at each place, needs each state of the forward pass
again, last one first. Memory for all of them is what such programs lack. Here a checkpointer saves
each state, and brings it back before the backward pass asks for it. The gradient is compared with
that of torch's autograd, which keeps everything.

    python examples/adjoint_wave.py --device cpu
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch

import flashwarp as fw

SPACING_M = 10.0
STEP_S = 1e-3  # 3000 m/s times this is 0.3 spacings: stable below 0.7
Tensor = torch.Tensor


def ricker(steps: int, peak_hz: float = 25.0) -> Tensor:
    """Return a Ricker wavelet, the usual source of seismic simulations."""
    time_s = torch.arange(steps, dtype=torch.float64) * STEP_S - 1.2 / peak_hz
    squared = (torch.pi * peak_hz * time_s) ** 2
    return (1 - 2 * squared) * torch.exp(-squared)


def advance(state: Tensor, speed: Tensor, source: Tensor) -> Tensor:
    """Return the state after a step: the present field, and the next one."""
    before, now = state
    laplacian = -4 * now
    for axis in (0, 1):
        for shift in (1, -1):
            laplacian = laplacian + torch.roll(now, shift, axis)
    change = (speed * STEP_S / SPACING_M) ** 2 * laplacian
    after = 2 * now - before + change
    middle = now.shape[0] // 2
    pulse = torch.zeros_like(now)
    pulse[middle, middle] = source
    return torch.stack([now, after + pulse])


def misfit(state: Tensor, record: Tensor) -> Tensor:
    """Return half the squared difference at the receivers, a line near the top."""
    return 0.5 * ((state[1, 5] - record) ** 2).sum()


def records_of(speed: Tensor, wavelet: Tensor) -> list[Tensor]:
    """Simulate, and return what the receivers see after each step."""
    state = torch.zeros(2, *speed.shape, dtype=speed.dtype, device=speed.device)
    records = []
    for source in wavelet:
        state = advance(state, speed, source)
        records.append(state[1, 5].clone())
    return records


def gradient_keeping_all(speed: Tensor, wavelet: Tensor, records: list[Tensor]) -> Tensor:
    """Return the gradient by autograd through all steps at once."""
    speed = speed.clone().requires_grad_()
    state = torch.zeros(2, *speed.shape, dtype=speed.dtype, device=speed.device)
    total = speed.new_zeros(())
    for source, record in zip(wavelet, records, strict=True):
        state = advance(state, speed, source)
        total = total + misfit(state, record)
    (gradient,) = torch.autograd.grad(total, speed)
    return gradient


def gradient_from_checkpoints(
    checkpointer: fw.Checkpointer, speed: Tensor, wavelet: Tensor, records: list[Tensor]
) -> Tensor:
    """Return the gradient by the adjoint method: one step in memory at a time."""
    steps = len(wavelet)
    state = torch.zeros(2, *speed.shape, dtype=speed.dtype, device=speed.device)
    checkpointer.protect("state", state)
    for step in reversed(range(steps)):
        checkpointer.prefetch_enqueue(step)
    for step, source in enumerate(wavelet):
        checkpointer.checkpoint(step)
        state.copy_(advance(state, speed, source))

    checkpointer.prefetch_start()
    adjoint = torch.zeros_like(state)
    gradient = torch.zeros_like(speed)
    for step in reversed(range(steps)):
        checkpointer.restart(step)
        began = state.clone().requires_grad_()
        model = speed.clone().requires_grad_()
        ended = advance(began, model, wavelet[step])
        loss = misfit(ended, records[step]) + (ended * adjoint).sum()
        adjoint, change = torch.autograd.grad(loss, (began, model))
        gradient += change
    return gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cells", type=int, default=100, help="of each side of the square")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gpu-memory", default="2 MiB")
    parser.add_argument("--host-memory", default="8 MiB")
    arguments = parser.parse_args()

    shape = (arguments.cells, arguments.cells)
    wavelet = ricker(arguments.steps).to(arguments.device)
    true_speed = torch.full(shape, 2500.0, dtype=torch.float64, device=arguments.device)
    true_speed[arguments.cells // 4 : arguments.cells // 3] = 3000.0  # a layer of rock
    guessed = torch.full_like(true_speed, 2500.0)
    records = records_of(true_speed, wavelet)

    with (
        tempfile.TemporaryDirectory() as folder,
        fw.Checkpointer(
            folder, arguments.device, arguments.gpu_memory, arguments.host_memory
        ) as checkpointer,
    ):
        began = time.perf_counter()
        gradient = gradient_from_checkpoints(checkpointer, guessed, wavelet, records)
        seconds = time.perf_counter() - began
        stats = checkpointer.stats
        expected = gradient_keeping_all(guessed, wavelet, records)

    difference = float((gradient - expected).abs().max() / expected.abs().max())
    if not difference < 1e-10:
        raise SystemExit(f"the gradients differ by {difference:.1e} of the largest value")
    states = arguments.steps * 2 * 8 * shape[0] * shape[1]
    print(
        f"{arguments.device}: {arguments.steps} states, {states / 1e6:.0f} MB, through caches of "
        f"{arguments.gpu_memory} and {arguments.host_memory} in {seconds:.2f} s"
    )
    print(f"the gradient differs from autograd's by {difference:.1e} of its largest value")
    print(
        f"restores from {stats.restarts_from}; hints: {stats.hints.useful} useful, "
        f"{stats.hints.late} late; on average {stats.prefetch_distance:.1f} versions ahead"
    )


if __name__ == "__main__":
    main()
