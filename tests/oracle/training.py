"""Training with torch that is saved by name, lost, and taken up again by a program like it."""

from __future__ import annotations

import copy
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flashwarp as fw
from flashwarp.errors import LockedError
from oracle import torches
from oracle.model import Wrong
from oracle.steps import step
from oracle.world import Hand

_LIMIT_S = 30


@dataclass
class Training:
    """A module and what trains it, and the states that its versions must have."""

    folder: Path
    device: Any
    place: str
    keep_last: int | None
    optimizer: str
    writer: Any = None
    parts: dict[str, Any] = field(default_factory=dict)
    versions: dict[int, dict[str, Any]] = field(default_factory=dict)
    number: int = 0

    def begin(self, seed: int) -> None:
        """Make all anew, as a process does that begins, and protect it."""
        torch = torches.torch
        generator = torch.Generator().manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Conv1d(1, 2, 3))
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.randn(each.shape, generator=generator))
        model.to(self.place)
        make = getattr(torch.optim, self.optimizer)
        optimizer = make(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        notes = {"seen": 0, "name": "", "sums": torch.zeros(3), "by": {"kind": [0.0]}}
        self.parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler,
                      "notes": notes}  # fmt: skip
        sizes = "256 KiB", "256 KiB"
        end = time.monotonic() + _LIMIT_S
        while self.writer is None:
            try:
                self.writer = fw.Checkpointer(
                    self.folder, self.device, *sizes, keep_last=self.keep_last,
                    config={"timeout_s": _LIMIT_S},
                )  # fmt: skip
            except LockedError:  # of the one that was lost
                if time.monotonic() > end:
                    raise
                time.sleep(1e-3)
        for name, part in self.parts.items():
            self.writer.protect(name, part)

    def train(self) -> None:
        """Make one step of the training; all of it is the same on each machine that repeats it."""
        torch = torches.torch
        model, optimizer = self.parts["model"], self.parts["optimizer"]
        generator = torch.Generator().manual_seed(self.parts["notes"]["seen"])
        rows = torch.randn((4, 1, 6), generator=generator).to(self.place)
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        self.parts["scheduler"].step()
        notes = self.parts["notes"]
        notes["seen"] += 1
        notes["name"] = f"step {notes['seen']}"
        notes["sums"] += notes["seen"]
        notes["by"]["kind"][0] += 0.5

    def state(self) -> dict[str, Any]:
        """Copy the present state of all parts."""
        return {
            name: copy.deepcopy(part if isinstance(part, dict) else part.state_dict())
            for name, part in self.parts.items()
        }

    def close(self) -> None:
        """Close what is open, and remove the folder."""
        try:
            if self.writer is not None:
                self.writer.close()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def _of(hand: Hand) -> Training | None:
    if not torches.there_is_torch(hand):
        return None
    training: Training | None = hand.world.extras.get("training")
    if training is None:
        folder = hand.world.folders["memory"] / "training"
        shutil.rmtree(folder, ignore_errors=True)
        training = Training(
            folder,
            hand.machine.devices[hand.world.device],
            "cuda" if hand.machine.on_gpu and hand.odds(0.7) else "cpu",
            hand.random.choice((None, 1, 3)),
            hand.random.choice(("AdamW", "SGD", "Adagrad")),
        )
        hand.world.closing.append(training)
        hand.say(
            f"c = fw.Checkpointer(folder, keep_last={training.keep_last})  # protects "
            f"a module in {training.place}, {training.optimizer}, a scheduler and a dict"
        )
        training.begin(hand.random.getrandbits(30))
        hand.world.extras["training"] = training
    return training


def _difference(path: str, got: Any, want: Any) -> str | None:
    """Say where two states differ; None: nowhere."""
    if isinstance(want, torches.torch.Tensor) and isinstance(got, torches.torch.Tensor):
        same = got.dtype == want.dtype
        pair = got.cpu().numpy(), want.cpu().numpy()
        if same and got.shape == want.shape and pair[0].tobytes() == pair[1].tobytes():
            return None
        return f"{path} is {got}, not {want}"
    if type(got) is not type(want):
        return f"{path} is a {type(got).__name__}, not a {type(want).__name__}"
    if isinstance(want, dict | list | tuple):
        keys = list(want) if isinstance(want, dict) else list(range(len(want)))
        if len(got) != len(want) or (isinstance(want, dict) and set(got) != set(want)):
            return f"{path} has {got}, not {want}"
        found = (_difference(f"{path}[{key!r}]", got[key], want[key]) for key in keys)
        return next(filter(None, found), None)
    return None if got == want else f"{path} is {got!r}, not {want!r}"


def _check(hand: Hand, training: Training, version: int) -> None:
    hand.world.checks += 1
    wrong = _difference("state", training.state(), training.versions[version])
    if wrong:
        raise Wrong(f"version {version}: {wrong}")


def _trim(training: Training) -> None:
    if training.keep_last is not None:
        for version in sorted(training.versions)[: -training.keep_last]:
            del training.versions[version]


@step(5, alone=True, room="torches")
def train_and_save(hand: Hand) -> None:
    """Make some steps of a training, and save it."""
    training = _of(hand)
    if training is None:
        return
    steps = hand.random.randint(0, 2)
    waits = hand.odds(0.3)
    hand.say(f"{steps} steps; c.checkpoint({training.number}){'.result()' if waits else ''}")
    for _ in range(steps):
        training.train()
    training.versions[training.number] = training.state()
    future = training.writer.checkpoint(training.number)
    training.number += 1
    if waits:
        future.result(_LIMIT_S)


@step(2, alone=True, room="torches")
def look_at_last_versions(hand: Hand) -> None:
    """Ask which versions there are, once all are durable."""
    training = _of(hand)
    if training is None or not training.versions:
        return
    hand.say("c.wait(); c.versions()")
    training.writer.wait(timeout_s=_LIMIT_S)
    _trim(training)
    hand.world.checks += 1
    if training.writer.versions() != sorted(training.versions):
        raise Wrong(f"versions {training.writer.versions()}, not {sorted(training.versions)}")


@step(2, alone=True, room="torches")
def go_back(hand: Hand) -> None:
    """Restore a version into what is protected; the training goes on from there."""
    training = _of(hand)
    if training is None or not training.versions:
        return
    training.writer.wait(timeout_s=_LIMIT_S)
    _trim(training)
    version = hand.random.choice(list(training.versions))
    hand.say(f"c.wait(); c.restart({version})")
    training.writer.restart(version)
    _check(hand, training, version)


@step(3, alone=True, room="torches")
def take_up(hand: Hand) -> None:
    """Close or lose all of it, and take the newest version up in a program like it."""
    training = _of(hand)
    if training is None:
        return
    lost = hand.odds(0.3)
    hand.say(
        f"{'c = None' if lost else 'c.close()'}; c = fw.Checkpointer(folder); "
        "c.protect(...); c.restart_latest()"
    )
    if lost:
        training.writer.wait(timeout_s=_LIMIT_S)
    else:
        training.writer.close()
    training.writer, training.parts = None, {}
    training.begin(hand.random.getrandbits(30))
    _trim(training)
    newest = max(training.versions, default=None)
    found = training.writer.restart_latest()
    if found != newest:
        raise Wrong(f"version {found} was restored, and {newest} is the newest")
    if newest is not None:
        _check(hand, training, newest)
