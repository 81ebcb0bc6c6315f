"""A two-tower recommender whose tables of users and items are larger than their caches.

    python examples/two_tower.py --device cpu

Each tower reads a row of its table and passes it through a small network; the dot product of both
is the score of a pair. The data is synthetic. Users are drawn uniformly. Items are drawn by a Zipf
law with exponent 0.8, within the range 0.64 to 0.83 that Breslau et al. found for web requests
("Web caching and Zipf-like distributions", 1999). Each item and each user belong to one of 16
groups, and four of five items that a user chooses are of the user's group.

The loss is the cross entropy of the chosen item among 64, of which 63 are drawn like items at
large. Chosen items and the others have the same popularity, so a model that ignores the user has at
best ln 64. The script fails unless the trained model's loss on new pairs is closer to the best
possible loss, that of the distribution itself, than to ln 64.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import flashwarp as fw
import flashwarp.torch

USERS, ITEMS, GROUPS = 20_000, 20_000, 16
LOYALTY, EXPONENT = 0.8, 0.8
DIM, BATCH, STEPS, CANDIDATES = 16, 1024, 500, 64
CACHE = "512 KiB"


class World:
    """Who chooses what."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        popularity = np.arange(1, ITEMS + 1) ** -EXPONENT
        self.popularity = self.random.permutation(popularity / popularity.sum())
        self.user_group = self.random.integers(0, GROUPS, USERS)
        self.item_group = self.random.integers(0, GROUPS, ITEMS)
        self.members = [np.flatnonzero(self.item_group == group) for group in range(GROUPS)]
        self.shares = [self.popularity[each] / self.popularity[each].sum() for each in self.members]
        # Items at large are drawn by their group first, and a group is as popular as it has users.
        self.group_share = np.bincount(self.user_group, minlength=GROUPS) / USERS

    def items(self, groups: np.ndarray) -> np.ndarray:
        """Draw an item of each group."""
        drawn = np.empty(len(groups), np.int64)
        for group in range(GROUPS):
            here = groups == group
            drawn[here] = self.random.choice(self.members[group], here.sum(), p=self.shares[group])
        return drawn

    def at_large(self, count: int) -> np.ndarray:
        """Draw items as all users together choose them."""
        return self.items(self.random.choice(GROUPS, count, p=self.group_share))

    def pairs(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw users, and an item that each chooses."""
        users = self.random.integers(0, USERS, count)
        loyal = self.random.random(count) < LOYALTY
        any_group = self.random.choice(GROUPS, count, p=self.group_share)
        return users, self.items(np.where(loyal, self.user_group[users], any_group))

    def candidates(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw users, and for each the chosen item and 63 others."""
        users, chosen = self.pairs(count)
        others = self.at_large(count * (CANDIDATES - 1)).reshape(count, -1)
        return users, np.column_stack([chosen, others])

    def best_scores(self, users: np.ndarray, items: np.ndarray) -> torch.Tensor:
        """The logarithm of how much more often a user chooses an item than users at large do."""
        same = self.item_group[items] == self.user_group[users][:, None]
        share = self.group_share[self.user_group[users]][:, None]
        return torch.from_numpy(np.log(1 - LOYALTY + LOYALTY * same / share))


class Tower(nn.Module):
    """A row of a table, through a small network."""

    def __init__(self, path: Path, rows: int, device: str) -> None:
        super().__init__()
        fw.torch.create_table(path, rows, DIM, optimizer="rowwise_adagrad", scale=0.1)
        self.table = fw.torch.Embedding(path, mode="r+", device=device, cache=CACHE, dim=DIM)
        self.layers = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids)
        return rows + self.layers(rows)


def loss_of(scores: torch.Tensor) -> float:
    """Return the mean cross entropy of the first of each row's candidates."""
    return float(nn.functional.cross_entropy(scores, scores.new_zeros(len(scores)).long()))


def main(device: str) -> None:
    """Train, check the loss, and show the caches."""
    torch.manual_seed(1)
    world = World(seed=1)
    with tempfile.TemporaryDirectory() as folder:
        users = Tower(Path(folder) / "users.npy", USERS, device).to(device)
        items = Tower(Path(folder) / "items.npy", ITEMS, device).to(device)
        model = nn.ModuleList([users, items])
        dense = torch.optim.Adam(model.parameters(), lr=3e-3)
        sparse = fw.torch.RowWiseAdagrad(model, lr=0.2)
        for _ in range(STEPS):
            who, what = (torch.from_numpy(each).to(device) for each in world.pairs(BATCH))
            scores = users(who) @ items(what).T  # the other pairs' items are the other candidates
            loss = nn.functional.cross_entropy(scores, torch.arange(BATCH, device=device))
            dense.zero_grad()
            sparse.zero_grad()
            loss.backward()
            dense.step()
            sparse.step()
        sparse.checkpoint(Path(folder) / "checkpoints", extra={"dense": model.state_dict()})

        who, what = world.candidates(4096)
        with torch.no_grad():
            chosen = users(torch.from_numpy(who).to(device))
            offered = items(torch.from_numpy(what).to(device))
            trained = loss_of((offered @ chosen[:, :, None]).squeeze(-1))
        best, ignorant = loss_of(world.best_scores(who, what)), math.log(CANDIDATES)
        print(
            f"{device}: loss {trained:.3f} on new pairs, {best:.3f} at best, "
            f"{ignorant:.3f} without the user"
        )
        for tower in (users, items):
            array = tower.table.array
            stats = array.stats
            rate = stats.hits / (stats.hits + stats.misses)
            print(f"{array.nbytes >> 10} KiB in a cache of {CACHE}: {rate:.0%} hits")
            tower.table.close()
    if not trained < (best + ignorant) / 2:
        raise SystemExit("the model has not learned what users choose")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args().device)
