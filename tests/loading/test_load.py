"""`load` on the CPU device: exact bytes of every dtype, sources, targets, and what is refused."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
import weakref

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import (
    ArgumentError,
    DtypeError,
    FileFormatError,
    MissingFileError,
    PathError,
    StorageError,
)
from flashwarp.loading import moving
from flashwarp.storage import safetensors
from flashwarp.transfer import pool
from flashwarp.transfer.buffer import Block

torch = pytest.importorskip("torch")

KIB = 1 << 10
MIB = 1 << 20

# What torch calls each dtype, from the format's own description.
TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip


def write(path, entries, *, pad=0, seed=0):
    """Write a safetensors file of (dtype, shape) by name; return the bytes of each tensor."""
    random = np.random.default_rng(seed)
    header, data, held = {}, b"", {}
    for name, (dtype, shape) in entries.items():
        nbytes = int(np.prod(shape, dtype=np.int64)) * safetensors.DTYPE_BITS[dtype] // 8
        most = 2 if dtype == "BOOL" else 256
        held[name] = random.integers(0, most, nbytes, np.uint8).tobytes()
        begin = len(data)
        data += held[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return held


def bytes_of(tensor):
    """The bytes of a dense tensor of any dtype."""
    if not tensor.numel():
        return b""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


MANY = {
    "one": ("F32", [1000, 3]), "two": ("BF16", [7, 11, 13]), "bytes": ("U8", [5001]),
    "none": ("F16", [0, 4]), "odd": ("I64", [3]), "scalar": ("F64", []),
    "large": ("F16", [400_000]),
}  # fmt: skip


def load(path, **options):
    return fw.load(path, device="cpu", **options)


# What comes.


@pytest.mark.parametrize("pad", [0, 1, 7])
@pytest.mark.parametrize("o_direct", [None, False, True])
def test_bytes_shapes_and_dtypes_are_those_of_the_file(tmp_path, o_direct, pad):
    held = write(tmp_path / "x.safetensors", MANY, pad=pad)

    found = load(tmp_path / "x.safetensors", o_direct=o_direct, host_memory="64 KiB")

    assert list(found) == list(safetensors.read_header(tmp_path / "x.safetensors"))
    for name, (dtype, shape) in MANY.items():
        assert found[name].dtype == TORCH[dtype]
        assert list(found[name].shape) == shape
        assert bytes_of(found[name]) == held[name]


@pytest.mark.parametrize("dtype", sorted(set(safetensors.DTYPE_BITS) - {"F6_E2M3", "F6_E3M2"}))
def test_every_dtype_that_torch_has_is_exact(tmp_path, dtype):
    # Behind a tensor of one byte, so that nothing is aligned in the file.
    held = write(tmp_path / "x.safetensors", {"byte": ("U8", [1]), "x": (dtype, [6, 4])})

    found = load(tmp_path / "x.safetensors")["x"]

    assert found.dtype == TORCH[dtype]
    assert list(found.shape) == ([6, 2] if dtype == "F4" else [6, 4])
    assert bytes_of(found) == held["x"]
    assert found.data_ptr() % found.element_size() == 0


def test_values_in_numpy_are_those_in_torch(tmp_path):
    write(tmp_path / "x.safetensors", {k: v for k, v in MANY.items() if v[0] != "BF16"})

    ours, theirs = (
        load(tmp_path / "x.safetensors", library="numpy"),
        load(tmp_path / "x.safetensors"),
    )

    for name, array in ours.items():
        assert np.array_equal(array, theirs[name].numpy(), equal_nan=True)
        assert array.ctypes.data % 256 == 0


def test_random_files_come_as_the_library_of_the_format_reads_them(tmp_path):
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    random = np.random.default_rng(seed)
    for case in range(20):
        entries = {
            f"t{i}": (
                str(random.choice(["U8", "BF16", "F32", "I64"])),
                [int(n) for n in random.integers(0, 40, random.integers(0, 4))],
            )
            for i in range(int(random.integers(1, 30)))
        }
        held = write(tmp_path / "x.safetensors", entries, pad=case, seed=case)
        only = [n for n in entries if random.random() < 0.5] or None

        found = load(
            tmp_path / "x.safetensors",
            only=only,
            o_direct=bool(random.integers(2)),
            host_memory=int(random.integers(2, 20)) * 4096,
        )

        assert set(found) == set(only or entries)
        assert all(bytes_of(tensor) == held[name] for name, tensor in found.items())


def test_a_tensor_keeps_its_bytes_when_the_others_are_gone(tmp_path):
    held = write(tmp_path / "x.safetensors", MANY)

    kept = load(tmp_path / "x.safetensors")["two"]

    assert bytes_of(kept) == held["two"]
    assert kept.untyped_storage().nbytes() == len(held["two"])


def test_a_loaded_tensor_trains(tmp_path):
    write(tmp_path / "x.safetensors", {"w": ("I8", [4, 4])})

    weight = load(tmp_path / "x.safetensors")["w"].to(torch.float32).requires_grad_()
    (weight.sum() * 2).backward()

    assert weight.grad.tolist() == [[2.0] * 4] * 4


def shards(folder):
    held = write(folder / "m-1.safetensors", {"a": ("F32", [100]), "b": ("U8", [3])})
    held |= write(folder / "m-2.safetensors", {"c": ("BF16", [9000])}, seed=1)
    index = {name: f"m-{1 if name < 'c' else 2}.safetensors" for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return held


@pytest.mark.parametrize("named", ["folder", "index", "files"])
def test_shards_come_together(tmp_path, named):
    held = shards(tmp_path)
    files = [tmp_path / "m-1.safetensors", tmp_path / "m-2.safetensors"]
    given = {"folder": tmp_path, "index": tmp_path / "model.safetensors.index.json", "files": files}

    found = load(given[named])

    assert {name: bytes_of(tensor) for name, tensor in found.items()} == held


@pytest.mark.parametrize("shape", [(5,), (3, 4), (0, 2), ()])
@pytest.mark.parametrize("dtype", ["f4", "i8", "?", "c8"])
def test_an_array_of_numpy_has_its_file_s_name(tmp_path, dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    np.save(tmp_path / "weights.npy", array)

    (name, tensor), *_ = load(tmp_path / "weights.npy").items()

    assert name == "weights"
    assert tensor.numpy().dtype == array.dtype
    assert np.array_equal(tensor.numpy(), array)


def test_arrays_and_tensors_come_in_one_call(tmp_path):
    held = write(tmp_path / "x.safetensors", {"t": ("U8", [10])})
    np.save(tmp_path / "a.npy", np.arange(4))

    found = load([tmp_path / "x.safetensors", tmp_path / "a.npy"])

    assert bytes_of(found["t"]) == held["t"]
    assert found["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("only", "names"),
    [("o*", {"one", "odd"}), (["two", "s?alar"], {"two", "scalar"}), ("none", {"none"})],
)
def test_only_what_is_named_is_read(tmp_path, only, names):
    held = write(tmp_path / "x.safetensors", MANY)
    seen = []

    found = load(tmp_path / "x.safetensors", only=only, progress=lambda *each: seen.append(each))

    assert set(found) == names
    assert all(bytes_of(tensor) == held[name] for name, tensor in found.items())
    assert seen[-1] == (sum(len(held[n]) for n in names),) * 2


# Targets of the caller.


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(30, 20)
        self.tied = torch.nn.Linear(30, 20, bias=False)
        self.tied.weight = self.first.weight


MODEL = {"first.weight": ("F32", [20, 30]), "first.bias": ("F32", [20]), "other": ("U8", [9])}


@pytest.mark.parametrize("o_direct", [None, True])
def test_a_module_is_filled_in_place(tmp_path, o_direct):
    held = write(tmp_path / "x.safetensors", MODEL)
    model = Model()
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}

    load(tmp_path / "x.safetensors", into=model, o_direct=o_direct)

    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == before
    assert bytes_of(model.first.weight.detach()) == held["first.weight"]
    assert bytes_of(model.first.bias.detach()) == held["first.bias"]
    assert model.tied.weight is model.first.weight


def test_arrays_are_filled_in_place(tmp_path):
    held = write(tmp_path / "x.safetensors", MODEL)
    mine = {"other": np.zeros(9, np.uint8)}

    found = load(tmp_path / "x.safetensors", into=mine)

    assert found["other"] is mine["other"]
    assert mine["other"].tobytes() == held["other"]


def test_backward_of_what_a_load_has_overwritten_raises(tmp_path):
    write(tmp_path / "x.safetensors", MODEL)
    model = Model()
    loss = (model.first(torch.ones(2, 30)) @ torch.ones(20, 30) * model.first.weight[:1]).sum()

    load(tmp_path / "x.safetensors", into=model)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def write_bytes(path, entries):
    """Write a safetensors file of these bytes by name."""
    header, at = {}, 0
    for name, data in entries.items():
        end = at + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(entries.values()))


@pytest.mark.parametrize("parts", [(0, 9, 0, 9), (0, 9, 4, 9), (2, 5, 0, 9), (0, 6, 5, 9)])
def test_two_entries_for_one_memory_are_refused_before_any_byte_moves(tmp_path, parts):
    a, b, c, d = parts
    write_bytes(tmp_path / "x.safetensors", {"one": b"1" * (b - a), "two": b"2" * (d - c)})
    memory = torch.zeros(9, dtype=torch.uint8)
    into = {"one": memory[a:b], "two": memory[c:d]}

    with pytest.raises(ArgumentError, match=r"'(one|two)' and '(one|two)' share memory"):
        fw.load(tmp_path / "x.safetensors", into=into)

    assert not memory.any()
    load(tmp_path / "x.safetensors", into=into, only="two")
    assert bytes_of(memory[c:d]) == b"2" * (d - c)


def test_two_entries_of_the_same_bytes_fill_one_memory(tmp_path):
    whole = bytes(range(9))
    write_bytes(tmp_path / "x.safetensors", {"all": whole, "part": whole[3:7], "rest": whole[6:]})
    memory = torch.zeros(9, dtype=torch.uint8)

    load(
        tmp_path / "x.safetensors",
        into={"all": memory, "part": memory[3:7], "rest": memory[6:], "tied": memory[2:8]},
    )

    assert bytes_of(memory) == whole


def test_a_tensor_of_no_file_that_is_filled_in_part_is_named(tmp_path):
    write_bytes(tmp_path / "x.safetensors", {"head": b"12345"})
    memory = torch.zeros(9, dtype=torch.uint8)

    with pytest.raises(FileFormatError, match="no file has 'whole'"):
        fw.load(tmp_path / "x.safetensors", into={"head": memory[:5], "whole": memory})

    assert not memory.any()


@pytest.mark.parametrize(
    ("into", "error", "says"),
    [
        ({"other": torch.zeros(9)}, DtypeError, "float32"),
        ({"other": torch.zeros(8, dtype=torch.uint8)}, FileFormatError, r"\[8\]"),
        ({"another": torch.zeros(9)}, FileFormatError, "'another'"),
        ({"first.weight": torch.zeros(30, 20).T}, ArgumentError, "contiguous"),
        ({"first.bias": np.zeros(20, "f4"), "other": torch.zeros(9)}, ArgumentError, "numpy"),
        ({"other": "text"}, ArgumentError, "'other'"),
        ([1, 2], ArgumentError, "list"),
        ({"other": torch.zeros(9, dtype=torch.uint8, device="meta")}, ArgumentError, "meta"),
    ],
)
def test_targets_that_do_not_fit_are_refused_and_stay(tmp_path, into, error, says):
    write(tmp_path / "x.safetensors", MODEL)

    with pytest.raises(error, match=says):
        fw.load(tmp_path / "x.safetensors", into=into)

    if isinstance(into, dict) and isinstance(into.get("other"), torch.Tensor):
        assert into["other"].is_meta or not into["other"].any()


def test_a_read_only_array_is_refused(tmp_path):
    write(tmp_path / "x.safetensors", MODEL)
    mine = np.zeros(9, np.uint8)
    mine.flags.writeable = False

    with pytest.raises(ArgumentError, match="read-only"):
        load(tmp_path / "x.safetensors", into={"other": mine})


# Bad input.


def test_a_file_that_was_cut_is_refused(tmp_path):
    write(tmp_path / "x.safetensors", MANY)
    os.truncate(tmp_path / "x.safetensors", (tmp_path / "x.safetensors").stat().st_size - 1)

    with pytest.raises(FileFormatError, match="'large'"):
        load(tmp_path / "x.safetensors")


def test_a_missing_shard_is_named(tmp_path):
    shards(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()

    with pytest.raises(MissingFileError, match=r"m-2\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"only": "x*"}, ArgumentError, r"'x\*'.*'one'"),
        ({"only": 3}, ArgumentError, "3"),
        ({"host_memory": 4096}, ArgumentError, "8192"),
        ({"library": "jax"}, ArgumentError, "'jax'"),
        ({"library": "cupy"}, ArgumentError, "cuda"),
        ({"o_direct": "yes"}, ArgumentError, "'yes'"),
        ({"progress": "bar"}, ArgumentError, "'bar'"),
        ({"library": "numpy", "only": "six"}, DtypeError, "only="),
        ({"only": "six"}, DtypeError, "F6_E2M3"),
    ],
)
def test_arguments_that_cannot_work_are_refused(tmp_path, options, error, says):
    write(tmp_path / "x.safetensors", MANY | {"six": ("F6_E2M3", [4])})

    with pytest.raises(error, match=says):
        load(tmp_path / "x.safetensors", **({"only": "o*"} | options))


def test_an_empty_list_of_files_is_refused():
    with pytest.raises(ArgumentError, match="empty"):
        load([])


def test_a_name_in_two_files_is_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(4))
    write(tmp_path / "x.safetensors", {"t": ("U8", [10])})

    with pytest.raises(FileFormatError, match="name one"):
        load([tmp_path / "x.safetensors", tmp_path / "t.npy"])


def test_a_file_system_without_o_direct_is_named(tmp_path, monkeypatch):
    write(tmp_path / "x.safetensors", MANY)
    monkeypatch.setattr(moving._native, "direct_io_alignment", lambda path: "no O_DIRECT here")

    with pytest.raises(PathError, match="no O_DIRECT here"):
        load(tmp_path / "x.safetensors", o_direct=True)
    assert set(load(tmp_path / "x.safetensors")) == set(MANY)


# What happens meanwhile.


class Meanwhile:
    """Does something to a file when its first bytes are read."""

    def __init__(self, monkeypatch, act):
        self.act, self.lock = act, threading.Lock()
        self.read = moving._native.read_file
        monkeypatch.setattr(moving._native, "read_file", self)

    def __call__(self, *arguments):
        with self.lock:
            act, self.act = self.act, None
        if act is not None:
            act()
        return self.read(*arguments)


@pytest.mark.parametrize("route", moving._Route)
def test_a_file_that_is_cut_meanwhile_is_an_error(tmp_path, monkeypatch, route):
    path = tmp_path / "x.safetensors"
    # The larger one is read by many direct reads at once, too.
    write(path, {"a": ("F16", [400_000]), "b": ("U8", [3 * MIB])})

    def cut(*_):
        os.truncate(path, 8 * KIB)
        return route

    monkeypatch.setattr(moving._Source, "route", cut)

    with pytest.raises(StorageError, match="cut") as caught:
        load(path)

    assert caught.value.filename == str(path)
    assert caught.value.errno == errno.ENODATA


def test_a_file_that_is_written_meanwhile_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write(path, MANY)
    os.utime(path, ns=(1, 1))
    Meanwhile(monkeypatch, lambda: write(path, MANY, seed=9))

    with pytest.raises(StorageError, match="written"):
        load(path, o_direct=True)


def test_a_file_that_is_replaced_after_its_header_was_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write(path, MANY)
    write(tmp_path / "y", MANY, seed=9)
    opened = moving._Source.__init__

    def replace(*arguments):
        os.replace(tmp_path / "y", path)
        opened(*arguments)

    monkeypatch.setattr(moving._Source, "__init__", replace)

    with pytest.raises(StorageError, match="replaced"):
        load(path)


def failing(number):
    def read_file(*_):
        raise OSError(number, os.strerror(number))

    return read_file


def test_a_failing_read_is_typed_and_ends_the_threads(tmp_path, monkeypatch):
    write(tmp_path / "x.safetensors", MANY)
    monkeypatch.setattr(moving._native, "read_file", failing(5))

    with pytest.raises(StorageError, match="Input/output") as caught:
        load(tmp_path / "x.safetensors", host_memory="32 KiB", o_direct=True)

    assert caught.value.errno == 5
    assert not [each for each in threading.enumerate() if "flashwarp-load" in each.name]


def test_a_storage_that_does_not_answer_is_an_error_in_time(tmp_path, monkeypatch):
    write(tmp_path / "x.safetensors", {"a": ("U8", [100])})
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "0.2")
    answer = threading.Event()
    monkeypatch.setattr(moving._native, "read_file", lambda *_: answer.wait(20) and 0)

    with pytest.raises(StorageError, match="no bytes have arrived") as caught:
        load(tmp_path / "x.safetensors", o_direct=True)

    assert caught.value.errno == 110
    answer.set()
    for each in threading.enumerate():
        if "flashwarp-load" in each.name:
            each.join(10)


def test_a_read_that_does_not_end_keeps_the_memory_that_it_writes(tmp_path, monkeypatch):
    write(tmp_path / "x.safetensors", {"a": ("U8", [100])})
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "0.2")
    answer = threading.Event()
    monkeypatch.setattr(moving._native, "read_file", lambda *_: answer.wait(20) and 0)
    monkeypatch.setattr(moving._Source, "route", lambda *_: moving._Route.BUFFERED)
    target = np.zeros(100, np.uint8)
    held = weakref.ref(target)

    try:
        load(tmp_path / "x.safetensors", into={"a": target})
    except StorageError:
        pass
    else:
        pytest.fail("no error")
    del target
    gc.collect()

    assert held() is not None
    answer.set()
    for each in threading.enumerate():
        if "flashwarp-load" in each.name:
            each.join(10)
    gc.collect()
    assert held() is None


def test_an_error_of_the_progress_function_ends_the_load(tmp_path):
    write(tmp_path / "x.safetensors", MANY)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(tmp_path / "x.safetensors", progress=stop)

    assert not [each for each in threading.enumerate() if "flashwarp-load" in each.name]


def test_staging_memory_is_bounded_and_given_back(tmp_path, monkeypatch):
    write(tmp_path / "x.safetensors", {"a": ("U8", [3 * MIB])})
    device = fw.device.CpuDevice()
    blocks = []
    monkeypatch.setattr(pool, "Block", lambda *each: blocks.append(Block(*each)) or blocks[-1])

    fw.load(tmp_path / "x.safetensors", device, o_direct=True, host_memory="256 KiB")

    assert 0 < sum(block.nbytes for block in blocks) <= 256 * KIB
    assert all(block.memory.closed for block in blocks)


def test_a_terminal_shows_a_line(tmp_path, capsys):
    write(tmp_path / "x.safetensors", MANY)

    load(tmp_path / "x.safetensors", progress=True)

    assert "100% of 0.00 GB" in capsys.readouterr().err
