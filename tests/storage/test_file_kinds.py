"""What may be opened: regular files and block devices, raw numbers and no containers of them."""

from __future__ import annotations

import bz2
import contextlib
import errno
import fcntl
import gzip
import io
import json
import lzma
import os
import pickle
import resource
import signal
import socket
import sqlite3
import struct
import tarfile
import threading
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native, graphs
from flashwarp.errors import (
    ArgumentError,
    DtypeError,
    FileFormatError,
    FlashwarpError,
    MissingFileError,
    PathError,
)
from flashwarp.storage import File, Replicated, Striped, file_access, files
from flashwarp.storage.npy import read_layout

NUMBERS = np.random.default_rng(5).standard_normal((64, 16))


def open_raw(path: Any, dtype: Any = "f8", **options: Any) -> fw.Array:
    return fw.open(path, dtype=dtype, device="cpu", **options)


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """What blocks is ended by a signal, and fails."""

    def end(*_: Any) -> None:
        raise TimeoutError("blocked")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# Kinds.


def make_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def make_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        before = Path.cwd()
        os.chdir(folder)  # names of sockets are short
        made.bind("socket")
        os.chdir(before)
    return folder / "socket"


def make_loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def make_slash(folder: Path) -> Path:
    (folder / "file").write_bytes(bytes(64))
    return Path(f"{folder}/file/x")


STRANGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("fifo", make_fifo, "FIFO"),
    ("socket", make_socket, "socket"),
    ("folder", lambda folder: folder, "directory"),
    ("zero", lambda _: "/dev/zero", "character device"),
    ("null", lambda _: "/dev/null", "character device"),
    ("urandom", lambda _: "/dev/urandom", "character device"),
    ("tty", lambda _: "/dev/tty", "character device|No such"),
    ("proc", lambda _: "/proc/self/maps", "made by the kernel"),
    ("proc of one", lambda _: "/proc/version", "made by the kernel"),
    ("sys", lambda _: "/sys/kernel/mm/transparent_hugepage/enabled", "made by the kernel|folder"),
    ("loop of links", make_loop, "symbolic links"),
    ("file as folder", make_slash, "treats a file as a folder"),
    ("slash", lambda folder: f"{make_slash(folder).parent}/", "treats a file as a folder"),
]

NATIVE = 6
WAYS: list[Callable[[Any], Any]] = [
    lambda path: fw.open(path, dtype="u1", device="cpu"),
    lambda path: fw.open(path, dtype="u1", offset=0, device="cpu"),
    lambda path: fw.open(path, device="cpu"),
    lambda path: fw.open(Striped([path]), dtype="u1", device="cpu"),
    lambda path: fw.open(Replicated([path, path]), dtype="u1", device="cpu"),
    lambda path: File(path),
    lambda path: _native.FileStorage(str(path)),
    lambda path: read_layout(str(path)),
]


@pytest.mark.parametrize("how", range(len(WAYS)))
@pytest.mark.parametrize(("make", "words"), [s[1:] for s in STRANGE], ids=[s[0] for s in STRANGE])
def test_only_regular_files_and_block_devices_are_opened(
    tmp_path: Path, make: Callable[[Path], Any], words: str, how: int
) -> None:
    path = make(tmp_path)
    if how == NATIVE:
        with pytest.raises(OSError, match=rf"{words}|Not a directory|No such"):
            WAYS[how](path)
        return
    with pytest.raises(FlashwarpError, match=words) as caught:
        WAYS[how](path)
    assert isinstance(caught.value, OSError)
    assert caught.value.filename == str(path)


def test_fifo_that_would_be_written_does_not_block(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="FIFO"):
        open_raw(make_fifo(tmp_path), mode="r+")


def test_file_that_becomes_a_fifo_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look by name and the open by descriptor."""
    (tmp_path / "f").write_bytes(bytes(4096))
    fifo = make_fifo(tmp_path)
    monkeypatch.setattr(os, "stat", lambda *_, **__: os.lstat(tmp_path / "f"))
    with pytest.raises(PathError, match="FIFO"):
        File(fifo)


def test_file_that_is_removed_while_it_is_checked_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(4096))
    access = os.access

    def remove_before(name: str, how: int) -> bool:
        path.unlink(missing_ok=True)
        return access(name, how)

    monkeypatch.setattr(os, "access", remove_before)

    with pytest.raises(MissingFileError):
        File(path)


def test_graph_of_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "offsets.npy")
    with pytest.raises(FlashwarpError):
        graphs.CsrGraph.open(tmp_path)


def test_descriptor_does_not_stay_nonblocking(tmp_path: Path) -> None:
    """For such a descriptor io_uring gives EAGAIN instead of waiting."""
    (tmp_path / "f").write_bytes(bytes(4096))
    storage = _native.FileStorage(str(tmp_path / "f"))
    assert not fcntl.fcntl(storage.fd, fcntl.F_GETFL) & os.O_NONBLOCK
    assert not os.get_inheritable(storage.fd)


def test_lease_of_somebody_else_is_waited_for(tmp_path: Path) -> None:
    """Its holder is asked to let go: the open waits instead of failing."""
    path = tmp_path / "f"
    path.write_bytes(bytes(4096))
    with path.open("rb") as held:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        asked: list[int] = []

        def let_go(number: int, _: Any) -> None:
            asked.append(number)
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)

        before = signal.signal(signal.SIGIO, let_go)
        try:
            opened: list[Any] = []
            thread = threading.Thread(target=lambda: opened.append(File(path, writable=True)))
            thread.start()
            while thread.is_alive():
                thread.join(0.01)
        finally:
            signal.signal(signal.SIGIO, before)
    assert asked == [signal.SIGIO]
    assert opened[0].nbytes == 4096


def test_lease_that_is_never_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(4096))
    monkeypatch.setattr(files, "_LEASE_WAIT_S", 0.05)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        with path.open("rb") as held:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            with pytest.raises(PathError, match=r"lease.* in 0\.05 s") as caught:
                File(path, writable=True)
            assert caught.value.errno == errno.EBUSY
            File(path).close()
    finally:
        signal.signal(signal.SIGIO, before)


def test_descriptors_up_to_the_hard_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NUMBERS.tofile(tmp_path / "f")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(each) for each in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limits[1]))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        with monkeypatch.context() as at_hard_limit:
            at_hard_limit.setattr(files, "_raise_descriptor_limit", lambda: None)
            with pytest.raises(PathError, match=rf"{used + 1:,} in .*ulimit -n") as caught:
                open_raw(tmp_path / "f")
        with open_raw(tmp_path / "f") as x:
            assert x[5] == NUMBERS.flat[5]
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in held:
            os.close(each)
    assert caught.value.errno == errno.EMFILE
    assert raised == limits[1]


def test_empty_raw_file_is_an_empty_array(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with open_raw(tmp_path / "f") as x:
        assert x.shape == (0,)


# Containers.


def compressed(module: Any) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(module.compress(NUMBERS.tobytes()))


def write_npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, NUMBERS)


def write_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, first=NUMBERS)


def write_zip(path: Path, name: str = "some.txt") -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, NUMBERS.tobytes())


def write_safetensors(path: Path, **metadata: Any) -> int:
    """Write a file of one tensor by hand; returns where its data begins."""
    header = json.dumps(
        {
            **({"__metadata__": metadata} if metadata else {}),
            "rows": {"dtype": "F64", "shape": [64, 16], "data_offsets": [0, NUMBERS.nbytes]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + NUMBERS.tobytes())
    return 8 + len(header)


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo("x"), io.BytesIO())


def write_sqlite(path: Path) -> None:
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE t (a)")
    base.close()


def write_wave(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 44100, 0, "NONE", ""))
        file.writeframes(NUMBERS.tobytes())


def begins_with(head: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(head + NUMBERS.tobytes())


HDF5 = b"\x89HDF\r\n\x1a\n"

CONTAINERS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("parquet", begins_with(b"PAR1"), "Parquet.*pyarrow"),
    ("arrow", begins_with(b"ARROW1\0\0"), "Arrow.*pyarrow"),
    ("feather", begins_with(b"FEA1"), "Feather.*pyarrow"),
    ("hdf5", begins_with(HDF5), "HDF5.*get_offset"),
    ("hdf5 after a block of the user's", begins_with(bytes(512) + HDF5), "HDF5.*get_offset"),
    ("npz", write_npz, "npz.*numpy.save"),
    ("torch", lambda path: write_zip(path, "model/data.pkl"), "PyTorch.*torch.load"),
    ("torch of old", begins_with(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."), "PyTorch"),
    ("zip", write_zip, "zip archive"),
    ("empty zip", lambda path: zipfile.ZipFile(path, "w").close(), "zip archive"),
    ("safetensors", write_safetensors, "safetensors.*tensor="),
    ("git lfs", begins_with(b"version https://git-lfs.github.com/spec/v1\n"), "LFS.*git lfs pull"),
    ("safetensors of many", lambda path: write_safetensors(path, a="x" * 9000), "safetensors"),
    ("gzip", compressed(gzip), "gzip.*decompress"),
    ("xz", compressed(lzma), "xz.*decompress"),
    ("bzip2", compressed(bz2), "bzip2.*decompress"),
    ("zstd", begins_with(b"\x28\xb5\x2f\xfd"), "zstd.*decompress"),
    ("sqlite", write_sqlite, "SQLite"),
    ("png", begins_with(b"\x89PNG\r\n\x1a\n"), "PNG"),
    ("tar", write_tar, "tar archive"),
    ("wave", write_wave, "WAVE"),
    ("pickle", lambda path: path.write_bytes(pickle.dumps(NUMBERS)), "pickle"),
    ("csv", lambda path: np.savetxt(path, NUMBERS, delimiter=","), "text.*loadtxt"),
    ("csv of names", begins_with("город,1\n".encode() * 999), "text.*pandas.read_csv"),
    ("json", lambda path: path.write_text(json.dumps(NUMBERS.tolist(), indent=1)), "JSON.*load"),
    ("xlsx", lambda path: write_zip(path, "[Content_Types].xml"), "Office.*read_excel"),
]


@pytest.mark.parametrize("dtype", ["f8", None, "<u2"])
@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(
    ("write", "words"), [c[1:] for c in CONTAINERS], ids=[c[0] for c in CONTAINERS]
)
def test_container_is_refused_with_a_recipe(
    tmp_path: Path, write: Callable[[Path], Any], words: str, mode: Any, dtype: Any
) -> None:
    path = tmp_path / "data"
    write(path)
    before = path.read_bytes()

    with pytest.raises(FileFormatError, match=words) as caught:
        fw.open(path, mode, dtype=dtype, shape=(8,), device="cpu")

    assert path.read_bytes() == before
    assert "offset=0" in str(caught.value)
    with fw.open(path, dtype="u1", offset=0, device="cpu") as x:
        assert x[...].tobytes() == before


def test_short_text_is_refused_unless_a_dtype_says_what_it_is(tmp_path: Path) -> None:
    for name, content, words in [
        ("rows.csv", b"7", "text, .*loadtxt"),
        ("rows.json", b'{"rows": [1, 2]}', "JSON text, .*json.load"),
        ("rows", "\ufeffid,größe".encode(), "text, .*loadtxt"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileFormatError, match=rf"{name} is {words}"):
            fw.open(tmp_path / name, device="cpu")
        with open_raw(tmp_path / name, "u1") as x:
            assert x[...].tobytes() == content


@pytest.mark.parametrize("end", ["csv", "TXT", "json", "parquet", "zip", "h5", "feather", "pt"])
def test_name_says_what_bytes_do_not_unless_a_dtype_is_given(tmp_path: Path, end: str) -> None:
    path = tmp_path / f"rows.{end}"
    path.write_bytes(NUMBERS.tobytes())

    with pytest.raises(FileFormatError, match=rf"rows.{end} is named as .*give their dtype"):
        fw.open(path, device="cpu")
    with open_raw(path, shape=NUMBERS.shape) as x:
        np.testing.assert_array_equal(x[...], NUMBERS)


def test_container_under_the_name_of_a_npy_file(tmp_path: Path) -> None:
    write_npz(tmp_path / "data.npy")
    with pytest.raises(FileFormatError, match="npz"):
        fw.open(tmp_path / "data.npy", device="cpu")


@pytest.mark.parametrize("write", [write_npz, write_npy])
def test_stripes_are_raw_files(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path / "a")
    (tmp_path / "b").write_bytes(bytes(1 << 17))
    with pytest.raises(FileFormatError, match=r"npz|npy file"):
        open_raw(Striped([tmp_path / "a", tmp_path / "b"]))


@pytest.mark.parametrize("dtype", ["u1", "S8", "V16", "?"])
def test_text_may_be_the_data(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"all work and no play makes jack\n" * 128)
    with open_raw(tmp_path / "corpus.txt", dtype) as x:
        assert x.nbytes == 4096


def test_raw_numbers_are_no_container(tmp_path: Path) -> None:
    """No random file, no zeros, and nothing that begins like a small number is refused."""
    path = tmp_path / "f"
    random = np.random.default_rng(1)
    for dtype in ["u1", "i2", "i4", "i8", "f4", "f8"]:
        for make in (np.zeros, np.ones, np.arange):
            make(1000).astype(dtype).tofile(path)
            open_raw(path, dtype).close()
        for _ in range(30):
            random.integers(0, 256, 8000, dtype=np.uint8).tofile(path)
            open_raw(path, dtype).close()
    for length in range(64):
        # The length of a safetensors header, and nothing of the kind behind it.
        np.array([length, 1, 2, 3], "<u8").tofile(path)
        open_raw(path).close()


# Raw data inside of other files.


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("o_direct", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 7, 512, 4095, 4096, 5001])
def test_offset_is_any_byte(tmp_path: Path, offset: int, o_direct: bool, mode: Any) -> None:
    path = tmp_path / "f"
    rows = np.random.default_rng(offset).standard_normal((500, 12))
    head, tail = os.urandom(offset), os.urandom(999)
    path.write_bytes(head + rows.tobytes() + tail)

    with open_raw(
        path, shape=rows.shape, offset=offset, o_direct=o_direct, mode=mode, cache=16384
    ) as x:
        assert x.explain().facts["storage"]["offset"] == offset
        np.testing.assert_array_equal(x[...], rows)
        index = np.random.default_rng(1).integers(0, 500, 300)
        np.testing.assert_array_equal(x.gather(index), rows[index])
        if mode == "r+":
            x[index] = rows[index] * 2
            rows[index] *= 2

    assert path.read_bytes() == head + rows.tobytes() + tail


def test_offset_without_a_shape_goes_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"123" + NUMBERS.tobytes())
    with open_raw(tmp_path / "f", offset=np.int64(3)) as x:
        np.testing.assert_array_equal(x[...], NUMBERS.reshape(-1))
    with open_raw(tmp_path / "f", offset=3 + NUMBERS.nbytes) as x:
        assert x.shape == (0,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offset": -1}, "not an integer"),
        ({"offset": 1.0}, "not an integer"),
        ({"offset": "128"}, "not an integer"),
        ({"offset": True}, "not an integer"),
        ({"offset": 8193}, "beyond the end"),
        ({"offset": 2**70}, "not an integer"),
        ({"offset": 4}, "no multiple of the 8 .*"),
        ({"offset": 4096, "shape": (513,)}, "needs 4104 bytes, .* has 4096 from byte 4096 on"),
        ({"offset": 0, "dtype": None}, "give its dtype"),
        ({"lock": "no"}, "neither True nor False"),
    ],
    ids=str,
)
def test_offset_that_cannot_be(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    (tmp_path / "f").write_bytes(bytes(8192))
    with pytest.raises((ArgumentError, FileFormatError), match=words):
        open_raw(tmp_path / "f", **options)


@pytest.mark.parametrize(
    ("offset", "aligned"), [(8, True), (16, True), (4096, True), (1, False), (4, False)]
)
def test_only_aligned_data_is_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, aligned: bool
) -> None:
    """Warps would copy from any other address by less than words of 8 bytes."""
    NUMBERS.tofile(tmp_path / "f")
    reach = file_access.file_storage
    asked: list[bool] = []

    def note(*args: Any, **options: Any) -> Any:
        asked.append(options["in_place"])
        return reach(*args, **options)

    monkeypatch.setattr(file_access, "file_storage", note)
    open_raw(tmp_path / "f", shape=4, offset=offset).close()
    assert asked == [aligned]


def test_offset_of_a_npy_file_is_raw(tmp_path: Path) -> None:
    """Also what its Fortran order needs: the transpose lies row by row."""
    np.save(tmp_path / "x.npy", np.asfortranarray(NUMBERS))
    with pytest.raises(FileFormatError, match=r"shape=\(16, 64\), offset=128"):
        fw.open(tmp_path / "x.npy", device="cpu")
    with open_raw(tmp_path / "x.npy", shape=(16, 64), offset=128) as x:
        np.testing.assert_array_equal(x[...], NUMBERS.T)


@pytest.mark.parametrize("layout", ["stripe", "replicate"])
def test_offset_in_each_of_several_files(tmp_path: Path, layout: str) -> None:
    rows = np.arange(1 << 16, dtype="<i8")
    parts = [rows.tobytes()] * 2
    if layout == "stripe":
        stripes = rows.reshape(-1, 2, 4096 // 8)
        parts = [stripes[:, n].tobytes() for n in range(2)]
    names = []
    for n, part in enumerate(parts):
        names.append(tmp_path / f"{n}")
        names[-1].write_bytes(b"head\n" + part)
    several = Striped(names, 4096) if layout == "stripe" else Replicated(names)
    with open_raw(several, "<i8", offset=5) as x:
        np.testing.assert_array_equal(x[...], rows)


# Tensors of safetensors files.


def test_tensor_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    begin = write_safetensors(path, made="by hand")
    index = {"weight_map": {"rows": path.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    for given in (path, tmp_path, tmp_path / "model.safetensors.index.json"):
        with fw.open(given, tensor="rows", device="cpu") as x:
            np.testing.assert_array_equal(x[...], NUMBERS)
            assert x.explain().facts["storage"]["offset"] == begin
            with pickle.loads(pickle.dumps(x)) as again:
                np.testing.assert_array_equal(again[3], NUMBERS[3])
    with fw.open(path, "r+", tensor="rows", device="cpu") as x:
        x[5] = 7
    with fw.open(path, dtype="f8", offset=begin, device="cpu") as raw:
        assert raw[5 * 16 : 6 * 16].tolist() == [7] * 16


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tensor": "row"}, ArgumentError, "'row' is in none.*close to it is 'rows'"),
        ({"tensor": "zzz"}, ArgumentError, "'zzz' is in none.*there are 'rows'"),
        ({"tensor": 3}, ArgumentError, "tensor=3 is not the name"),
        ({"tensor": "rows", "offset": 0}, ArgumentError, "leave offset= out"),
        ({"tensor": "rows", "dtype": "f4"}, FileFormatError, "opens as float64, not float32"),
        ({"tensor": "rows", "shape": (3,)}, FileFormatError, r"not \(3,\)"),
    ],
)
def test_tensor_that_is_not_there(
    tmp_path: Path, options: Any, error: type[Exception], words: str
) -> None:
    write_safetensors(tmp_path / "model.safetensors")
    with pytest.raises(error, match=words):
        fw.open(tmp_path / "model.safetensors", device="cpu", **options)


@pytest.mark.parametrize(
    ("dtype", "shape", "opened"), [("BF16", 6, "u2"), ("F8_E4M3", 12, "u1"), ("F6_E2M3", 16, None)]
)
def test_tensor_of_a_type_that_numpy_lacks(
    tmp_path: Path, dtype: str, shape: int, opened: str | None
) -> None:
    entry = {"dtype": dtype, "shape": [shape], "data_offsets": [0, 12]}
    head, data = json.dumps({"w": entry}).encode(), bytes(range(12))
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(head)) + head + data)

    if opened is None:
        with pytest.raises(DtypeError, match="parts of bytes"):
            fw.open(tmp_path / "m", tensor="w", device="cpu")
        return
    with fw.open(tmp_path / "m", tensor="w", device="cpu") as x:
        assert (x.dtype, x[...].tobytes()) == (np.dtype(opened), data)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"GGUF", "GGUF"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "PyTorch"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS.*git lfs pull"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "x.npy"])
def test_load_names_what_it_was_given(tmp_path: Path, head: bytes, words: str, name: str) -> None:
    begins_with(head)(tmp_path / name)
    with pytest.raises(FileFormatError, match=words):
        fw.load(tmp_path / name, device="cpu")


# Ways to name what is opened.


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (io.BytesIO(b"x" * 64), "Memory"),
        (3, "file descriptor"),
        (True, "file descriptor"),
        (None, "not a path"),
        (1.5, "not a path"),
        ("", "empty"),
        ("a\0b", "null byte"),
        ([], "members is empty"),
        ([io.BytesIO()], "Memory"),
        ([None], "not a path"),
        (bytearray(b"ab"), "not a path: give a str, bytes"),
        ("\udcff", "UTF-8"),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_what_names_no_file(path: Any, words: str) -> None:
    with pytest.raises(FlashwarpError, match=words):
        open_raw(Striped(path) if isinstance(path, list) else path)
    if not isinstance(path, list | bytearray):
        with pytest.raises(FlashwarpError, match=words):
            File(path)


class OddPath:
    """As py.path.local, which can read itself; or one that names nothing."""

    def __init__(self, name: Any) -> None:
        self.name = name

    def __fspath__(self) -> Any:
        return self.name

    def read(self) -> bytes:
        return b""


def test_path_that_can_read_itself_is_a_path(tmp_path: Path) -> None:
    NUMBERS.tofile(tmp_path / "f")
    open_raw(OddPath(str(tmp_path / "f"))).close()
    with pytest.raises(ArgumentError, match="not a path"):
        open_raw(OddPath(3))


def test_open_file_is_no_path(tmp_path: Path) -> None:
    NUMBERS.tofile(tmp_path / "f")
    with (tmp_path / "f").open("rb") as file:
        with pytest.raises(ArgumentError, match="give its name"):
            open_raw(file)
        with open_raw(f"/proc/self/fd/{file.fileno()}") as x:
            np.testing.assert_array_equal(x[...], NUMBERS.reshape(-1))


def test_name_in_bytes_and_missing_folder(tmp_path: Path) -> None:
    NUMBERS.tofile(tmp_path / "f")
    open_raw(os.fsencode(tmp_path / "f")).close()
    with pytest.raises(FileNotFoundError, match=r"the folder .*/absent does not exist"):
        open_raw(tmp_path / "absent" / "f")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="link to what does not exist"):
        open_raw(tmp_path / "dangling")


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "8", True])
def test_bytes_of_a_storage_that_cannot_be(tmp_path: Path, nbytes: Any) -> None:
    """Zero was taken for all of the file."""
    NUMBERS.tofile(tmp_path / "f")
    with pytest.raises(ArgumentError, match="nbytes="):
        File(tmp_path / "f", 0, nbytes)


def test_file_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of one file with the data of another would be garbage."""
    path = tmp_path / "x.npy"
    np.save(path, NUMBERS)
    reach = file_access.file_storage

    def late(*args: Any, **options: Any) -> Any:
        np.save(tmp_path / "new.npy", NUMBERS.astype("f4").repeat(4))
        (tmp_path / "new.npy").replace(path)
        return reach(*args, **options)

    monkeypatch.setattr(file_access, "file_storage", late)
    with pytest.raises(PathError, match="replaced while it was opened"):
        fw.open(path, device="cpu")
