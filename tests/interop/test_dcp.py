"""Checkpoints of torch.distributed.checkpoint: torch's own loader, damage, crashes, and staging."""

from __future__ import annotations

import copy
import errno
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

import flashwarp.dcp
from flashwarp import _native
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DamagedVersionError,
    DeviceTimeout,
    DtypeError,
    ExistingFileError,
    MissingFileError,
    PathError,
    StorageError,
)
from flashwarp.interop.torch.dcp import checksums, relied
from interop import dcp_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Reader, Stager, Writer, verify = (
    flashwarp.dcp.Reader,
    flashwarp.dcp.Stager,
    flashwarp.dcp.Writer,
    flashwarp.dcp.verify,
)


def small(step: int = 0) -> dict[str, Any]:
    return {"a": torch.full((100, 3), float(step)), "step": step}


def many() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 40)).sum().backward()
    optimizer.step()
    base = torch.randn(50, 60)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.randn(17).half(),
        "bfloat16": torch.randn(3, 4, 5).bfloat16(),
        "float8": torch.randn(33).to(torch.float8_e4m3fn),
        "complex": torch.randn(4, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "transposed": base.t(),
        "one": base[2:3, 58::2],
        "strided": base[::2, 1::3],
        "view": base[10:20],
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "nested": {"list": [torch.ones(2), {"x": torch.zeros(2)}], "text": "three"},
        "large": torch.randn(3, 1 << 20),  # several segments
    }


def zeroed(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeroed(value) for value in state]
    return type(state)() if state is not None else None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        a, b = (t.resolve_conj().clone(memory_format=torch.contiguous_format) for t in (a, b))
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(folder, **options), no_dist=True)


def loaded(folder: Path, like: dict[str, Any], *, checked: bool = False) -> dict[str, Any]:
    state = zeroed(like)
    if checked:
        dcp.load(state, storage_reader=Reader(folder), no_dist=True)
    else:
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


# Files.


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_torch_reads_what_was_saved(tmp_path: Path, checked: bool, staged: bool) -> None:
    state = many()

    if staged:
        with Stager("64 MiB") as stager:
            dcp.async_save(
                state, storage_writer=Writer(tmp_path), async_stager=stager, no_dist=True
            ).result()
    else:
        save(state, tmp_path)

    assert same(loaded(tmp_path, state, checked=checked), state)
    assert verify(tmp_path) == sum(
        path.stat().st_size for path in tmp_path.iterdir() if "checksums" not in path.name
    )


def test_torch_reads_it_without_flashwarp(tmp_path: Path) -> None:
    save({"a": torch.arange(6.0).view(2, 3), "n": [1, 2]}, tmp_path)
    script = (
        "import sys, torch, torch.distributed.checkpoint as dcp\n"
        "state = {'a': torch.zeros(2, 3), 'n': [0, 0]}\n"
        "dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)\n"
        "assert state['a'].tolist() == [[0, 1, 2], [3, 4, 5]] and state['n'] == [1, 2]\n"
        "assert not any(name.startswith('flashwarp') for name in sys.modules)\n"
    )

    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True)


def test_each_tensor_is_a_file_of_torch_save(tmp_path: Path) -> None:
    """Alignment and layout are torch's own, byte for byte but for what names and checks them."""
    state = {"w": torch.randn(100, 7)}
    save(state, tmp_path / "ours")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "torchs"), no_dist=True)

    sizes = [next((tmp_path / name).glob("__*")).stat().st_size for name in ("ours", "torchs")]
    # The archives differ in the length of their names only.
    assert abs(sizes[0] - sizes[1]) < 200


@pytest.mark.parametrize("staged", [False, True])
def test_a_part_of_a_larger_tensor_is_stored_without_the_rest(tmp_path: Path, staged: bool) -> None:
    whole = torch.randn(1000, 1000)
    state = {
        "rows": whole[3:5],
        "column": whole[:, 7],
        "conjugate": torch.view_as_complex(whole.view(-1, 2))[:9].conj(),
    }
    with Stager("16 MiB") as stager:
        save(stager.stage(state) if staged else state, tmp_path)

    assert sum(path.stat().st_size for path in tmp_path.glob("__*")) < 20_000
    assert same(loaded(tmp_path, state), state)


def test_what_was_saved_before_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for step in range(3):
        save(small(step), tmp_path)
        assert len(list(tmp_path.iterdir())) == 3

    assert same(loaded(tmp_path, small()), small(2))


def test_overwriting_can_be_refused(tmp_path: Path) -> None:
    save(small(1), tmp_path)

    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(small(2), tmp_path, overwrite=False)

    assert isinstance(caught.value.failures[0][0], ExistingFileError)
    assert same(loaded(tmp_path, small()), small(1))


def test_a_checkpoint_id_takes_the_place_of_the_path(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "default")

    for step in range(2):
        dcp.save(
            small(step), checkpoint_id=tmp_path / str(step), storage_writer=writer, no_dist=True
        )

    for step in range(2):
        assert same(loaded(tmp_path / str(step), small(), checked=True), small(step))
    assert not (tmp_path / "default").exists()


def test_ranks_without_coordination_have_files_of_their_own(tmp_path: Path) -> None:
    for step in range(2):
        dcp.save(small(step), storage_writer=Writer(tmp_path), no_dist=True, use_collectives=False)

    names = sorted(path.name[:12] for path in tmp_path.iterdir())
    assert [name[:12] for name in names if name.endswith("data")] == ["__0.metadata"[:12]]
    assert len(names) == 3
    assert verify(tmp_path, rank=0) > 1200
    state = zeroed(small())
    dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)
    assert same(state, small(1))


def test_another_process_can_write(tmp_path: Path) -> None:
    """As `async_checkpointer_type` PROCESS does it: writer and staged state are pickled."""
    script = (
        "import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp\n"
        "import flashwarp.dcp\n"
        "from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType\n"
        "if __name__ == '__main__':\n"
        "    os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='0')\n"
        "    dist.init_process_group('gloo', store=dist.FileStore(sys.argv[2], 1), rank=0,\n"
        "                            world_size=1)\n"
        "    with flashwarp.dcp.Stager('1 MiB') as stager:\n"
        "        dcp.async_save({'a': torch.full((100, 3), 5.0), 'step': 5},\n"
        "            storage_writer=flashwarp.dcp.Writer(sys.argv[1]), async_stager=stager,\n"
        "            async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()\n"
        "    os._exit(0)\n"
    )
    (tmp_path / "program.py").write_text(script)

    subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(tmp_path / "program.py"),
            str(tmp_path / "saved"),
            str(tmp_path / "store"),
        ],
        check=True,
        timeout=200,
    )

    assert same(loaded(tmp_path / "saved", small(), checked=True), small(5))


# Damage.


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    save(small(1), tmp_path / "good")
    rng = random.Random(0)
    for path in sorted((tmp_path / "good").iterdir()):
        size = path.stat().st_size
        for place in {0, size - 1, *rng.sample(range(size), 60)}:
            shutil.rmtree(tmp_path / "bad", ignore_errors=True)
            shutil.copytree(tmp_path / "good", tmp_path / "bad")
            content = bytearray(path.read_bytes())
            content[place] ^= 1 << rng.randrange(8)
            (tmp_path / "bad" / path.name).write_bytes(content)

            with pytest.raises(DamagedVersionError):
                verify(tmp_path / "bad")


@pytest.mark.parametrize("name", ["__*", ".metadata", ".checksums-*"])
def test_a_reader_hands_out_nothing_damaged(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(small(1), tmp_path)
    path = next(tmp_path.glob(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    state = zeroed(small())

    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)

    # torch makes an error of its own of one in the metadata; before 2.13, without its text.
    assert isinstance(caught.value.failures[0][0], DamagedVersionError | AssertionError)
    assert "checksum" in str(caught.value.failures[0][0]) + caplog.text
    assert same(state["a"], torch.zeros(100, 3))


def test_damage_is_not_passed_over_for_older_files_of_a_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save(small(1), storage_writer=Writer(tmp_path), no_dist=True, use_collectives=False)
    dcp.load(zeroed(small()), storage_reader=Reader(tmp_path), no_dist=True)
    save(small(2), tmp_path)
    (tmp_path / ".metadata").write_bytes(b"damaged")

    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(zeroed(small()), storage_reader=Reader(tmp_path), no_dist=True)
    assert "its checksum differs" in str(caught.value) + caplog.text


def test_files_that_are_short_missing_or_foreign_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no committed checkpoint"):
        verify(tmp_path)
    save(small(1), tmp_path)
    path = next(tmp_path.glob("__*"))

    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DamagedVersionError, match=r"distcp: it has \d+ bytes, not \d+"):
        verify(tmp_path)
    path.unlink()
    with pytest.raises(DamagedVersionError, match=r"distcp: it is missing"):
        verify(tmp_path)
    next(tmp_path.glob(".checksums-*")).unlink()
    with pytest.raises(DamagedVersionError, match="written by another program"):
        verify(tmp_path)


def test_checksums_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    item = checksums.Item(0, 10, 0)
    for files in (
        {"../../etc/passwd": [item]},
        {"__0_0123456789abcdef_0.distcp": [checksums.Item(1, 10, 0)]},
        {"__0_0123456789abcdef_0.distcp": [item, item]},
    ):
        path = tmp_path / ".checksums-0123456789abcdef"
        path.write_bytes(checksums.encode(checksums.Checksums(item, files)))
        with pytest.raises(DamagedVersionError, match="makes no sense"):
            checksums.parse(path)


# Failures and crashes.


class Failing:
    """Lets the n-th of some calls fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
        self.count = 0
        self.nth = nth
        for owner, name in (
            (_native, "write_file"),
            (os, "fsync"),
            (os, "posix_fallocate"),
            (Path, "rename"),
        ):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.nth:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*arguments, **options)

        return act


def failure_of(act: Callable[[], None]) -> BaseException | None:
    try:
        act()
    except dcp.api.CheckpointException as error:
        return error.failures[0][0]
    return None


def test_a_failure_at_any_call_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nth = 0
    while True:
        nth += 1
        shutil.rmtree(tmp_path, ignore_errors=True)
        save(small(1), tmp_path)
        with monkeypatch.context() as patch:
            failing = Failing(patch, nth)
            problem = failure_of(lambda: save(small(2), tmp_path))
        assert problem is None or isinstance(problem, StorageError | PathError)
        assert problem is None or problem.errno == errno.ENOSPC
        if failing.count < nth:
            break
        verify(tmp_path)
        found = loaded(tmp_path, small(), checked=True)
        # A failure behind the rename of the metadata file may leave the new one.
        assert same(found, small(1)) or (problem is not None and same(found, small(2)))
        assert not list(tmp_path.glob("*.tmp"))
        save(small(3), tmp_path)
        assert same(loaded(tmp_path, small(), checked=True), small(3))
        assert len(list(tmp_path.iterdir())) == 3
    assert nth > 8


def test_an_error_reaches_the_future(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Stager("1 MiB") as stager:
        saved = dcp.async_save(
            small(), storage_writer=Writer(tmp_path / "file"), async_stager=stager, no_dist=True
        )
        with pytest.raises(dcp.api.CheckpointException) as caught:
            saved.result()
    assert isinstance(caught.value.failures[0][0], StorageError)


SAVES = """
import sys, torch, torch.distributed.checkpoint as dcp
import flashwarp.dcp
with flashwarp.dcp.Stager("8 MiB") as stager:
    step = int(sys.argv[2])
    while True:
        step += 1
        state = {"a": torch.full((300_000,), float(step)), "step": step}
        dcp.async_save(state, storage_writer=flashwarp.dcp.Writer(sys.argv[1]),
                       async_stager=stager, no_dist=True).result()
        print(step, flush=True)
"""


def test_a_killed_process_loses_no_committed_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(os.environ.get("FLASHWARP_SEED", "1"))
    committed = 0
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SAVES, str(tmp_path), str(committed)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            committed = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            committed = int([str(committed), *process.stdout.read().split()][-1])

        verify(tmp_path)
        state = {"a": torch.zeros(300_000), "step": 0}
        dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)
        assert state["step"] >= committed
        assert bool((state["a"] == state["step"]).all())
        committed = state["step"]
    save(small(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "leftovers of killed saves remain"


# Staging.


def test_later_changes_are_not_in_the_copy() -> None:
    state: dict[str, Any] = {
        "tensor": torch.ones(1000),
        "view": torch.ones(10, 10)[2:4, ::2],
        "list": [1, {"x": torch.ones(2)}],
        "tuple": (torch.ones(1), "a"),
    }
    expected = copy.deepcopy(state)
    with Stager("1 MiB") as stager:
        staged = stager.stage(state)
        state["tensor"].zero_()
        state["view"].zero_()
        state["list"][1]["x"].zero_()
        state["list"].append(2)

        assert same(staged["tensor"], expected["tensor"])
        assert same(staged["view"], expected["view"])
        assert same(staged["list"], expected["list"])
        assert same(staged["tuple"][0], expected["tuple"][0])


def test_a_tensor_that_occurs_twice_is_copied_once() -> None:
    weight = torch.ones(1 << 18)
    with Stager("1 MiB") as stager:
        staged = stager.stage({"a": weight, "b": weight, "c": weight.view(512, 512)})

        assert staged["a"] is staged["b"]
        assert staged["c"].data_ptr() == staged["a"].data_ptr()
        assert staged["c"].shape == (512, 512)


def test_memory_is_used_again_only_when_nobody_holds_a_part() -> None:
    with Stager("1 MiB", timeout_s=0.05) as stager:
        state = {"a": torch.ones(1 << 17), "b": torch.ones(1 << 10)}
        staged = stager.stage(state)
        first = staged["a"].data_ptr()
        second = stager.stage({"a": torch.zeros(1 << 16)})
        held = staged["b"][5:6]
        del staged
        gc.collect()
        with pytest.raises(DeviceTimeout, match="no transfer buffer of 528384 bytes was free"):
            stager.stage(state)
        assert float(held) == 1

        del held, second
        gc.collect()
        again = stager.stage({"a": torch.full((1 << 17,), 2.0), "b": torch.ones(1 << 10)})
        assert again["a"].data_ptr() == first
        assert bool((again["a"] == 2).all())


def test_a_state_larger_than_the_budget_is_refused() -> None:
    with (
        Stager("1 KiB") as stager,
        pytest.raises(ArgumentError, match=r"4032 bytes are more than the budget of 1024 bytes"),
    ):
        stager.stage({"a": torch.ones(1000)})


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.ones(3, device="meta")],
    ids=["sparse", "meta"],
)
def test_tensors_that_cannot_be_copied_are_refused(tensor: Any) -> None:
    with Stager("1 MiB") as stager, pytest.raises((DtypeError, ArgumentError), match="staged"):
        stager.stage({"a": tensor})


def test_saves_in_flight_do_not_see_each_other(tmp_path: Path) -> None:
    weights = torch.zeros(1 << 20)
    with Stager("64 MiB") as stager:
        saves: list[Future[Any]] = []
        for step in range(5):
            weights.fill_(step)
            saves.append(
                dcp.async_save(
                    {"w": weights},
                    storage_writer=Writer(tmp_path / str(step)),
                    async_stager=stager,
                    no_dist=True,
                )
            )
        for each in saves:
            each.result()

    for step in range(5):
        state = {"w": torch.full((1 << 20,), -1.0)}
        dcp.load(state, storage_reader=Reader(tmp_path / str(step)), no_dist=True)
        assert bool((state["w"] == step).all())


def test_after_close_it_refuses() -> None:
    stager = Stager("1 MiB")
    staged = stager.stage({"a": torch.ones(10)})
    stager.close()
    stager.close()

    assert same(staged["a"], torch.ones(10))
    with pytest.raises(ClosedError):
        stager.stage({"a": torch.ones(10)})


@pytest.mark.parametrize("make", [lambda: Writer("x"), lambda: Reader("x"), Stager])
@pytest.mark.parametrize(
    ("owner", "name", "match"),
    [
        (torch.serialization, "skip_data", "another form"),
        (filesystem.FileSystemReader, "read_data", "other methods"),
        (filesystem, "_StorageInfo", "another way"),
    ],
)
def test_a_torch_that_lacks_what_is_relied_on_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], object],
    owner: Any,
    name: str,
    match: str,
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: None)
    relied._problem.cache_clear()
    try:
        with pytest.raises(ArgumentError, match=f"cannot be used by flashwarp.dcp.*{match}"):
            make()
    finally:
        relied._problem.cache_clear()


# Ranks.


def test_a_checkpoint_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert dcp_ranks.run(2, dcp_ranks.save, folder, 1) == ["", ""]
    assert dcp_ranks.run(1, dcp_ranks.load, folder, 1, True) == [""]
    assert dcp_ranks.run(1, dcp_ranks.save, folder, 2) == [""]
    assert dcp_ranks.run(2, dcp_ranks.load, folder, 2, False) == ["", ""]


def test_one_rank_that_fails_ends_the_save_on_all(tmp_path: Path) -> None:
    assert dcp_ranks.run(2, dcp_ranks.one_fails, tmp_path / "saved") == ["", ""]
