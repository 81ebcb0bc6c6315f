"""What ranks do in the tests of loads by all ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flashwarp as fw
from distributed.programs import failure, same
from flashwarp.distributed import load, loading
from support.safetensors_files import save


def write(folder: Path, ranks: int) -> None:
    """Write a checkpoint of two files, and a copy of it for each rank."""
    draw = torch.Generator().manual_seed(1)
    kinds = torch.float32, torch.bfloat16, torch.int8
    for number in range(2):
        tensors = {f"{number}.scalar": torch.tensor(3.5)}
        for size, kind in itertools.product((0, 1, 900, 33), kinds):
            values = torch.randint(-9, 9, (size, 7), generator=draw)
            tensors[f"{number}.{size}.{kind}"] = values.to(kind)
        for rank in range(ranks):
            (folder / str(rank)).mkdir(exist_ok=True)
            save(folder / str(rank) / f"{number}.safetensors", tensors)


def plain(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def reads_once(rank: int, group: Any, folder: Path, share: int) -> tuple[int, int]:
    """Load in rounds; returns the bytes that this rank reads, and those of all tensors."""
    files = sorted((folder / str(rank)).glob("*.safetensors"))
    wanted = fw.load(files, device="cpu")
    read = []
    move = loading.move

    def counted(contents: Any, *arguments: Any, **options: Any) -> Any:
        read.extend(each.nbytes for each in contents)
        return move(contents, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "move", counted)
        patch.setattr(loading, "_SHARE_BYTES", share)
        found = load(files, "cpu", group=group)
        nbytes = sum(read)
        target = {name: torch.full_like(each, 1) for name, each in wanted.items() if "33" in name}
        assert load(files, group=group, into=target, only=list(target)).keys() == target.keys()
    for made, names in ((found, wanted), (target, target)):
        assert list(made) == list(names)
        for name in names:
            assert made[name].dtype == wanted[name].dtype
            assert made[name].shape == wanted[name].shape
            same(plain(made[name]), plain(wanted[name]))
    return nbytes, sum(each.nbytes for each in wanted.values())


def bad_loads(rank: int, group: Any, folder: Path) -> list[tuple[str, str]]:
    bad = rank == 1
    (folder / str(rank)).mkdir()
    x, y = (folder / str(rank) / f"{name}.npy" for name in "xy")
    np.save(x, np.arange(1000.0))
    np.save(y, np.arange(999.0))
    found = [
        failure(lambda: load([x, y], "cpu", only="y*" if bad else "x*", group=group)),
        failure(lambda: load(folder / "absent.npy" if bad else x, "cpu", group=group)),
        failure(lambda: load(x, "cpu", host_memory=1 if bad else "1 MiB", group=group)),
    ]
    content = x.read_bytes()
    move = loading.move

    def cut(*arguments: Any, **options: Any) -> Any:
        x.write_bytes(content[:200])
        return move(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        if bad:
            patch.setattr(loading, "move", cut)
        found.append(failure(lambda: load(x, "cpu", group=group)))
    x.write_bytes(content)
    return found
