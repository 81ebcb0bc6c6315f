"""Arrays over several storages with a controller each: against numpy, with faults, and refused."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    ControllerTimeout,
    CopyError,
    FileFormatError,
    FlashwarpError,
    LockedError,
    MissingFileError,
    PathError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.nvme.group import ControllerGroup, GroupService
from flashwarp.storage import File, Memory, Namespace, Replicated, Storage, Striped
from flashwarp.testing import Faulty


def plan(path: str = "bounce", queue_pairs: int = 2, depth: int = 4) -> fw.nvme.SoftwareController:
    return fw.nvme.SoftwareController(queue_pairs=queue_pairs, depth=depth, route=path)


def churn(x: fw.Array, held: np.ndarray[Any, Any], rounds: int, seed: int) -> None:
    """Stores, loads and prefetches, each checked against `held`, which follows."""
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        where = random.permutation(len(held))[: int(random.integers(1, 200))]
        values = random.integers(1, 1 << 60, len(where))
        x[where] = values
        held[where] = values
        x.prefetch(random.integers(0, len(held), 20))
        some = random.integers(0, len(held), 200)
        np.testing.assert_array_equal(x.gather(some), held[some])


def test_replicas_share_the_reads_of_any_stride() -> None:
    drives = [Memory(np.zeros(1 << 20, np.uint8)) for _ in range(4)]
    for stride in (1, 2, 4, 8, 16):
        with fw.open(
            Replicated(drives), "r+", "u1", device="cpu", line=512, controller=plan()
        ) as x:
            x.gather(np.arange(0, 1 << 20, 512 * stride))
            reads = [c["commands"]["read"] for c in x.service.stats["controllers"]]

        assert sum(reads) == 2048 // stride
        # 128 lines at the least; a stride that ends on some of the replicas gives twice the share.
        assert max(reads) < 1.5 * min(reads), (stride, reads)


def test_a_partial_last_line_of_replicas_is_written_in_full() -> None:
    drives = [Memory(1000) for _ in range(2)]
    with fw.open(Replicated(drives), "r+", "u1", device="cpu", line=512, controller=plan()) as x:
        x[...] = 7
    for drive in drives:
        assert drive.read(0, 1000) == bytes([7]) * 1000


def test_each_controller_has_settings_of_its_own() -> None:
    pairs, depths, threads = (1, 3), (2, 16), (1, 2)
    every = list(itertools.product(pairs, depths, threads))
    drives = [Memory(1 << 14) for _ in every]
    controllers = [
        fw.nvme.SoftwareController(queue_pairs=p, depth=d, threads=t, route="bounce")
        for p, d, t in every
    ]
    with fw.open(
        Striped(drives, 4096),
        "r+",
        "<i8",
        device="cpu",
        cache="8 KiB",
        line=512,
        controller=ControllerGroup(controllers),
    ) as x:
        held = np.zeros(x.shape, np.int64)
        churn(x, held, 10, 3)

        services = x.service.services  # type: ignore[attr-defined]
        queues = [service.queues for service in services]
        assert [(q.count, q.depth) for q in queues] == [(p, d) for p, d, _ in every]
        assert [service.threads for service in services] == [t for _, _, t in every]
        assert x.stats.commands == sum(q.counters().commands for q in queues)


def test_one_plan_serves_all_and_stays_a_plan() -> None:
    settings_ = plan(queue_pairs=3)
    with fw.open(
        Replicated([Memory(8192), Memory(8192)]),
        "r+",
        "i4",
        device="cpu",
        controller=settings_,
    ) as x:
        served = x.service.stats["controllers"]
        assert len(served) == 2
        assert x.service.queues.count == 6


# Files.


def test_copies_of_a_npy_file_open_as_replicas(tmp_path: Path) -> None:
    content = np.random.default_rng(1).random((100, 33))
    paths = [tmp_path / f"{n}.npy" for n in range(2)]
    for path in paths:
        np.save(path, content)

    with fw.open(Replicated(paths), "r+", device="cpu", cache="32 KiB") as x:
        np.testing.assert_array_equal(x[:], content)
        x[5] = 1
    content[5] = 1
    for path in paths:
        np.testing.assert_array_equal(np.load(path), content)


def test_files_that_are_no_replicas_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    np.save(tmp_path / "b.npy", np.zeros(4))
    with pytest.raises(FileFormatError, match="no replicas"):
        fw.open(Replicated([tmp_path / "a.npy", tmp_path / "b.npy"]), device="cpu")
    with pytest.raises(MissingFileError):
        fw.open(Replicated([tmp_path / "a.npy", tmp_path / "c.npy"]), device="cpu")
    with pytest.raises(ArgumentError, match="dtype"):
        fw.open(Striped([tmp_path / "a.npy", tmp_path / "b.npy"]), device="cpu")


# Faults.


def test_a_stripe_that_fails_is_named_with_its_own_offset(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.raw").write_bytes(bytes(64 << 10))
    files = [File(tmp_path / f"{n}.raw", writable=True) for n in range(3)]
    bad = Faulty(files[1], "read eio bytes=8192-12288")
    with fw.open(
        Striped([files[0], bad, files[2]], 4096),
        "r+",
        "u1",
        line=4096,
        device="cpu",
    ) as x:
        # Row 2 of stripes, the one of the second file.
        position = (2 * 3 + 1) * 4096
        with pytest.raises(StorageError) as error:
            x[position : position + 10]
        assert error.value.errno == errno.EIO
        assert error.value.filename == str(tmp_path / "1.raw")
        assert error.value.offset == 8192
        # The others are read.
        assert x[position - 4096] == 0
        assert x[position + 4096] == 0
        bad.heal()
        assert x[position] == 0


@pytest.mark.parametrize("path", ["bounce", "direct"])
def test_a_read_that_fails_on_one_replica_is_answered_by_another(path: str) -> None:
    content = np.random.default_rng(1).integers(0, 255, 1 << 16, dtype=np.uint8)
    drives = [Faulty(Memory(content.copy()), "read eio p=0.5; any delay=20us p=0.1") for _ in "ab"]
    good = Memory(content.copy())
    with fw.open(
        Replicated([drives[0], good, drives[1]]),
        "r+",
        "u1",
        device="cpu",
        cache="8 KiB",
        line=512,
        controller=plan(path),
    ) as x:
        for seed in range(5):
            some = np.random.default_rng(seed).integers(0, len(content), 500)
            np.testing.assert_array_equal(x.gather(some), content[some])
        assert x.stats.errors == 0
    assert all(drive.hits()[0] > 0 for drive in drives)


def test_a_read_that_fails_on_all_replicas_raises_and_can_be_tried_again() -> None:
    drives = [Faulty(Memory(8192), "read eio") for _ in range(3)]
    with fw.open(Replicated(drives), "r+", "u1", device="cpu", line=512, controller=plan()) as x:
        with pytest.raises(StorageError) as error:
            x[700]
        assert error.value.errno == errno.EIO
        assert error.value.offset == 512
        assert [drive.hits() for drive in drives] == [(1,), (1,), (1,)]
        drives[2].heal()
        assert x[700] == 0


def test_a_write_that_fails_on_one_replica_stays_dirty_until_all_have_it() -> None:
    inner = [Memory(8192) for _ in range(3)]
    bad = Faulty(inner[1], "write enospc n=1,2")
    with fw.open(
        Replicated([inner[0], bad, inner[2]]),
        "r+",
        "u1",
        device="cpu",
        line=512,
        controller=plan(),
    ) as x:
        x[:512] = 9
        with pytest.raises(StorageError) as error:
            x.flush()
        assert error.value.errno == errno.ENOSPC
        assert x[5] == 9
        with pytest.raises(StorageError):
            x.flush()
        x.flush()
    for drive in inner:
        assert drive.read(0, 512) == bytes([9]) * 512


def test_detached_write_backs_to_replicas_end_after_the_last() -> None:
    """Dirty lines leave ahead of fills; a failure on one replica never loses a store."""
    inner = [Memory(1 << 15) for _ in range(3)]
    drives = [inner[0], Faulty(inner[1], "write eio p=0.2"), inner[2]]
    held = np.zeros(1 << 15, np.uint8)
    random = np.random.default_rng(4)
    with fw.open(
        Replicated(drives),
        "r+",
        "u1",
        device="cpu",
        cache="4 KiB",
        line=512,
        controller=plan(),
    ) as x:
        for _ in range(300):
            i, value = int(random.integers(0, len(held))), int(random.integers(1, 255))
            try:
                x[i] = value
                held[i] = value
            except StorageError:
                got = None
                while got is None:
                    try:
                        got = int(x[i])
                    except StorageError:
                        continue
                assert got in (held[i], value)
                held[i] = got
        drives[1].heal()  # type: ignore[attr-defined]
        np.testing.assert_array_equal(x[:], held)
    for drive in inner:
        assert drive.read(0, len(held)) == held.tobytes()


def test_a_flush_reaches_every_storage_and_names_the_one_that_failed(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.raw").write_bytes(bytes(8192))
    files = [Faulty(File(tmp_path / f"{n}.raw", writable=True)) for n in range(3)]
    x = fw.open(Striped(files, 4096), "r+", "u1", line=512, device="cpu")
    x.flush()
    assert [file.operations()["flush"] for file in files] == [1, 1, 1]
    files[2].inject("flush eio")
    with pytest.raises(StorageError) as error:
        x.flush()
    assert error.value.filename == str(tmp_path / "2.raw")
    with pytest.raises(StorageError, match="earlier flush"):
        x.close()
    x.close()


def hanging(tmp_path: Path, count: int, bad: int) -> list[Faulty]:
    """Files of which one does not answer reads until its controller stops."""
    for n in range(count):
        (tmp_path / f"{n}.raw").write_bytes(bytes([n + 1]) * (64 << 10))
    return [
        Faulty(File(tmp_path / f"{n}.raw"), "read hang" if n == bad else "") for n in range(count)
    ]


def test_a_stripe_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "1.2")
    files = hanging(tmp_path, 3, 1)
    x = fw.open(
        Striped(files, 4096),
        "r",
        "u1",
        line=4096,
        device="cpu",
        controller=plan(queue_pairs=1),
    )
    with pytest.raises(ControllerTimeout, match=r"storage 1 \(.*1\.raw\) does not answer"):
        x[4096]
    assert x[0] == 1
    assert x[8192] == 3
    with pytest.raises(ControllerTimeout):
        x.close()


def test_a_replica_that_does_not_answer_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "1.2")
    # A prefetch that never comes back keeps its line.
    monkeypatch.setenv("FLASHWARP_LOOK_AHEAD", "0")
    for n in range(2):
        (tmp_path / f"{n}.raw").write_bytes(bytes(range(256)) * 256)
    files = [File(tmp_path / "0.raw"), Faulty(File(tmp_path / "1.raw"), "read hang")]
    x = fw.open(
        Replicated(files),
        "r",
        "u1",
        line=512,
        device=fw.device.CpuDevice(1),
        controller=plan(queue_pairs=1),
    )
    expected = np.arange(1 << 16, dtype=np.uint8)
    # The first read that the silent one was to answer waits for it; then nobody asks it again.
    np.testing.assert_array_equal(x[:], expected)
    assert files[1].operations()["read"] <= 4  # type: ignore[attr-defined]
    assert x.stats.errors == 0
    assert x.service.silent() == f"storage 1 ({tmp_path / '1.raw'})"
    with pytest.raises(ControllerTimeout, match=r"storage 1 .* does not answer"):
        x.close()
    x.close()


# The end, and bad input.


def test_controllers_stop_with_the_array_and_serve_the_next() -> None:
    drives = [Memory(8192), Memory(8192)]
    others = [Memory(8192), Memory(8192)]
    group = ControllerGroup([plan(), plan()])
    for _ in range(2):
        x = fw.open(Replicated(drives), "r+", "i4", device="cpu", controller=group)
        with fw.open(Replicated(others), "r+", "i4", device="cpu", controller=group) as y:
            y[3] = 5
        assert y.service.stats == {"controllers": [{}, {}]}
        x[3] = 4
        x.close()
        x.close()
        assert x.service.stats == {"controllers": [{}, {}]}
        with pytest.raises(ClosedError):
            _ = x.stats
        with pytest.raises(ClosedError):
            _ = x.service.queues
    assert drives[1].read(12, 4) == b"\x04\0\0\0"


def test_one_read_only_member_makes_the_array_read_only() -> None:
    drives = [Memory(8192), Memory(np.zeros(8192, np.uint8), writable=False)]
    with (
        fw.open(Replicated(drives), "r", "i4", device="cpu") as x,
        pytest.raises(ReadOnlyError),
    ):
        x[0] = 1


def test_stripes_of_empty_files_are_an_empty_array_and_of_short_ones_are_refused(
    tmp_path: Path,
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.touch()
    with fw.open(Striped(paths), dtype="u1", device="cpu") as x:
        assert x.shape == (0,)

    for path in paths:
        path.write_bytes(bytes(65536))
    with pytest.raises(ArgumentError, match="65536 bytes, less than a stripe of 131072"):
        fw.open(Striped(paths), dtype="u1", device="cpu")


@pytest.mark.parametrize(
    ("stripe", "words"),
    [
        (4000, "stripe=4000 is not a multiple of 4096"),
        (512, "not a multiple of 4096"),
        (1 << 32, "stripe=4294967296 is not a multiple of 4096 bytes up to 2 GiB"),
        ("0 KiB", "not a multiple of 4096"),
        (-4096, "negative"),
        (None, "stripe=None is not a size"),
    ],
)
def test_stripes_that_cannot_be_are_refused(stripe: Any, words: str) -> None:
    for member in (Memory(1 << 18), "a path"):
        with pytest.raises(ArgumentError, match=words):
            Striped([member], stripe)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"controller": ControllerGroup([plan()])}, "group of 1 controllers.* of 2 members"),
        ({"controller": ControllerGroup([plan()] * 3)}, "group of 3 controllers.* of 2 members"),
        ({"controller": ControllerGroup([plan("direct"), plan("in_place")])}, "different routes"),
        ({"controller": [plan(), plan()]}, "no Controller"),
        ({"controller": ControllerGroup([plan()] * 2), "line": "256 KiB"}, "multiple of a line"),
        ({"shape": 1 << 40}, "needs"),
        ({"strict": "fast"}, "strict"),
        ({"o_direct": True}, "o_direct= is for paths"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    drives = [Memory(1 << 18), Memory(1 << 18)]
    with pytest.raises(ArgumentError, match=words):
        fw.open(Striped(drives), "r+", "i4", device="cpu", **options)
    # Nothing is left behind that would keep a storage or a controller.
    fw.open(Striped(drives), "r+", "i4", device="cpu").close()


def test_settings_may_be_the_same_object_for_two_members() -> None:
    group = ControllerGroup([plan()] * 2)
    with fw.open(Striped([Memory(1 << 18)] + [Memory(1 << 18)]), "r+", "i4", device="cpu",
                 controller=group) as x:  # fmt: skip
        x[...] = 3
        assert len(x.service.stats["controllers"]) == 2


def test_numbers_and_kinds_of_storages_are_checked() -> None:
    drive = Memory(1 << 18)
    for kind in (Striped, Replicated):
        with pytest.raises(ArgumentError, match="members is empty"):
            kind([])
        with pytest.raises(ArgumentError, match="twice"):
            kind([drive, drive])
        with pytest.raises(ArgumentError, match="not a sequence"):
            kind(drive)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="without its bytes"):
            kind([drive, Namespace(1 << 18)])  # type: ignore[list-item]
        with pytest.raises(ArgumentError, match="paths as members"):
            kind([drive, kind(["a path"])])
    with pytest.raises(ArgumentError, match="differ in size"):
        Replicated([drive, Memory(4096)])
    with pytest.raises(ArgumentError, match="for a Striped or Replicated storage"):
        fw.open(drive, "r+", "i4", controller=ControllerGroup([plan()]), device="cpu")
    with pytest.raises(ArgumentError, match=r"storage\.Striped"):
        fw.open([drive, Memory(4096)], "r+", "i4", device="cpu")  # type: ignore[arg-type]
    for wrong in ([], [drive], plan()):
        with pytest.raises(ArgumentError, match="not a sequence of controllers"):
            ControllerGroup(wrong)  # type: ignore[arg-type]
    closed = Memory(4096)
    closed.close()
    with pytest.raises(ClosedError):
        Replicated([Memory(4096), closed])


# One controller for each, or one for all.


class ForAll(fw.nvme.SoftwareController):
    """Serves a striped or replicated storage as a whole."""

    serves_members = False


def memories(count: int) -> list[Storage]:
    return [Memory(1 << 18) for _ in range(count)]


@pytest.mark.parametrize(
    ("storage", "options", "words"),
    [
        (lambda _: Replicated(memories(17)), {}, "at most 16 controllers"),
        (lambda _: Striped(memories(2), 4096), {"line": 8192}, "no multiple of a line, 8192"),
        (lambda _: Striped(memories(2)), {"controller": ForAll()}, "serves a storage as a whole"),
        (
            lambda _: Replicated([Striped(memories(2), 4096), Memory(1 << 19)]),
            {},
            "a member is itself striped",
        ),
        (
            lambda folder: Striped([Memory(1 << 18), File(folder / "f", writable=True)]),
            {},
            "different routes, direct and in_place",
        ),
    ],
)
def test_one_controller_serves_what_members_cannot_have_each(
    tmp_path: Path, storage: Any, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "f").write_bytes(bytes(1 << 18))
    whole = storage(tmp_path)
    with fw.open(whole, "r+", "<i8", device="cpu", cache="64 KiB", **options) as x:
        count = len(whole.members)
        assert f"one controller for all {count} members: " in x.explain().reason
        assert words in x.explain().reason
        assert not isinstance(x.service, GroupService)
        held = np.zeros(x.shape, np.int64)
        churn(x, held, 4, 1)
    assert whole.read(0, held.nbytes) == held.tobytes()


def test_array_explains_that_members_have_a_controller_each() -> None:
    with fw.open(Striped(memories(3)), "r+", "i8", device="cpu") as x:
        assert "a controller for each of 3 members" in x.explain().reason
        assert len(x.service.describe()["controllers"]) == 3


# Paths as members.


def test_files_and_storages_make_one_array(tmp_path: Path) -> None:
    content = np.random.default_rng(1).integers(0, 255, 4 * 8192, dtype=np.uint8)
    stripes = content.reshape(2, 2, 8192)
    stripes[:, 0].tofile(tmp_path / "f")
    memory = Memory(np.ascontiguousarray(stripes[:, 1]))
    striped = Striped([tmp_path / "f", memory], 8192)

    with fw.open(striped, "r+", "u1", device="cpu", o_direct=False) as x:
        np.testing.assert_array_equal(x[:], content)
        with pytest.raises(LockedError):
            fw.open(memory, "r", "u1", device="cpu")
        x[8192 - 2 : 8192 + 2] = 7
    assert memory.read(0, 3) == bytes([7, 7, stripes[0, 1, 2]])
    assert (tmp_path / "f").read_bytes()[8189:8192] == bytes([stripes[0, 0, 8189], 7, 7])
    memory.write(0, b"the caller's still")


def test_paths_are_opened_by_open_alone(tmp_path: Path) -> None:
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for path in paths:
        np.save(path, np.arange(5))
    replicas = Replicated(paths)
    assert repr(replicas) == f"Replicated({list(map(str, paths))})"
    for use in (
        lambda: replicas.nbytes,
        lambda: replicas.writable,
        lambda: replicas.read(0, 1),
        lambda: replicas.write(0, b"1"),
        lambda: replicas.flush(),
        lambda: replicas.describe(),
        lambda: replicas.check_unchanged(),
        lambda: Faulty(replicas),
    ):
        with pytest.raises(ArgumentError, match="which only flashwarp"):
            use()

    for mode in ("r", "r+"):  # as often as one likes, in any mode
        with fw.open(replicas, mode, device="cpu") as x:  # type: ignore[arg-type]
            assert x[:].tolist() == [0, 1, 2, 3, 4]
    replicas.close()


def test_array_over_paths_is_pickled_and_one_over_storages_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = np.arange(2 * 4096 // 8)
    for n, part in enumerate(content.reshape(2, -1)):
        part.tofile(f"{n}")
    with fw.open(Striped(["0", "1"], 4096), dtype="i8", device="cpu") as x:
        data = pickle.dumps(x)
    monkeypatch.chdir("/")
    with pickle.loads(data) as again:
        np.testing.assert_array_equal(again[:], content)

    with (
        fw.open(Striped([File(tmp_path / "0")], 4096), dtype="i8", device="cpu") as x,
        pytest.raises(CopyError),
    ):
        pickle.dumps(x)


def test_open_that_fails_closes_the_files_of_all_members(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(1 << 18))
    before = len(os.listdir("/proc/self/fd"))
    striped = Striped([tmp_path / "a", tmp_path / "b"])
    for wrong in ({"shape": 1 << 40}, {"cache": 1}, {"strict": "bounce"}):
        with pytest.raises(FlashwarpError):
            fw.open(striped, "r+", "i4", device="cpu", **wrong)  # type: ignore[arg-type]
    with pytest.raises(PathError):
        fw.open(Striped([tmp_path / "a", tmp_path]), "r+", "i4", device="cpu")

    assert len(os.listdir("/proc/self/fd")) == before
    fw.open(striped, "r+", "i4", device="cpu").close()
