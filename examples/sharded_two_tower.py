"""Two-tower training on several ranks, killed and resumed on another number of them.

    python examples/sharded_two_tower.py --device cpu

Starts two ranks, whose tables of users and items are dealt over them, and kills one of them in the
middle. Then three ranks go on from the last checkpoint, and deal the rows anew. The loss is checked
against that of guessing. Started by torchrun, the script is one rank of a training in FOLDER:

    torchrun --nproc-per-node 4 examples/sharded_two_tower.py --folder FOLDER

Each rank has a share of each batch. The small networks of the towers are the same on all ranks
(DistributedDataParallel), and each row of a table is on one rank alone, with the state of its
optimizer. Users are of one of 8 groups, and choose items of their group.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flashwarp as fw
import flashwarp.distributed
import flashwarp.torch

USERS, ITEMS, GROUPS, DIM = 3000, 2000, 8, 16
BATCH, STEPS, EVERY = 768, 80, 20


def batch_of(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's share of the users of a step, and of the items that they choose."""
    random = torch.Generator().manual_seed(step)
    users = torch.randint(USERS, (BATCH,), generator=random)
    items = torch.randint(ITEMS // GROUPS, (BATCH,), generator=random) * GROUPS + users % GROUPS
    return users[rank::ranks], items[rank::ranks]


class Towers(nn.Module):
    """What follows the rows of both tables."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = (
            nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM)) for _ in range(2)
        )

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (users + self.user(users)) @ (items + self.item(items)).T


def open_tables(folder: Path, saved: Path | None) -> list[fw.distributed.ShardedArray]:
    """Make the tables of a training, or take them from a checkpoint of any number of ranks."""
    for name, rows in (("users", USERS), ("items", ITEMS)):
        if saved is None:
            fw.distributed.create_table(folder / name, rows, DIM, scale=0.1, deal="hash")
        else:
            fw.distributed.reshard(saved / name, to=folder / name)
    open_table = fw.distributed.ShardedArray.open
    return [open_table(folder / name, "r+", device="cpu") for name in ("users", "items")]


def train(folder: Path, die_at: int) -> None:
    """Train from the last checkpoint in the folder on, as one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    towers = Towers()
    dense = torch.optim.Adam(towers.parameters(), lr=3e-3)
    names = sorted(folder.glob("step-*/complete"))
    saved = names[-1].parent if names else None
    first = 0
    if saved is not None:
        state = torch.load(saved / "dense.pt")
        towers.load_state_dict(state["towers"])
        dense.load_state_dict(state["dense"])
        first = state["step"]
    if rank == 0:  # what a killed run has trained since is forgotten
        shutil.rmtree(folder / "now", ignore_errors=True)
    dist.barrier()
    arrays = open_tables(folder / "now", saved)
    users, items = tables = [fw.distributed.Embedding(each, dim=DIM) for each in arrays]
    sparse = fw.torch.RowWiseAdagrad(tables, lr=0.2)
    model = DistributedDataParallel(towers)
    for step in range(first, STEPS):
        if rank == 1 and step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        who, what = batch_of(step, rank, ranks)
        scores = model(users(who), items(what))  # the other pairs' items are the other candidates
        loss = nn.functional.cross_entropy(scores, torch.arange(len(who)))
        dense.zero_grad()
        sparse.zero_grad()
        loss.backward()
        dense.step()
        sparse.step()
        if (step + 1) % EVERY == 0:
            sparse.checkpoint()
            target = folder / f"step-{step + 1:06d}"
            for array, name in zip(arrays, ("users", "items"), strict=True):
                array.save(target / name)
            if rank == 0:
                state = {"towers": towers.state_dict(), "dense": dense.state_dict()}
                torch.save({**state, "step": step + 1}, target / "dense.pt")
                (target / "complete").touch()
    if rank == 0:
        guessing = math.log(len(who))
        print(
            f"{ranks} ranks, steps {first} to {STEPS}: loss {loss:.2f}, of guessing {guessing:.2f}"
        )
        if not loss < guessing - 1:
            raise SystemExit("the model has not learned what users choose")
    for array in arrays:
        array.close()


def start(ranks: int, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Start ranks on this machine, as torchrun does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, "--folder", str(folder), *options]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def main() -> None:
    """Run the story of a killed training, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--then", type=int, default=3, help="ranks that go on")
    parser.add_argument("--folder", type=Path, help="of the training; for torchrun")
    parser.add_argument("--die-at", type=int, default=-1, help="step at which rank 1 kills itself")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(options.folder, options.die_at)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        killed = start(2, Path(folder), "--die-at=50")
        if "Signal 9 (SIGKILL)" not in killed.stderr:
            raise SystemExit(f"the first training was not killed:\n{killed.stderr}")
        print("2 ranks: killed in step 50")
        resumed = start(options.then, Path(folder))
        if resumed.returncode != 0:
            raise SystemExit(resumed.stderr)
        print(resumed.stdout, end="")


if __name__ == "__main__":
    main()
