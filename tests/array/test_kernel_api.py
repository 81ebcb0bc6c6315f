"""What kernels do with arrays: the same text on the CPU device and on a GPU, against numpy.

Caches are smaller than the data, so that lines come and go under the kernels.
"""

from __future__ import annotations

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import BoundsError

REVERSE = """
FW_KERNEL reverse_DTYPE(fw::array<const ELEMENT> from, fw::array<ELEMENT> to) {
  const uint64_t n = from.size();
  for (uint64_t i = thread_index(); i < n; i += thread_count()) to.store(i, from[n - 1 - i]);
}
"""

SOURCE = """
#include "flashwarp/array.cuh"

using fw::base::kWarpWidth;
using fw::base::thread_count;
using fw::base::thread_index;

struct triple { float x, y, z; };
struct wide { uint64_t words[75]; };

FW_KERNEL shift_triples(fw::array<triple> data, float by) {
  for (uint64_t i = thread_index(); i < data.size(); i += thread_count()) {
    triple t = data[i];
    data.store(i, {t.x + by, t.y - by, t.z * by});
  }
}
FW_KERNEL first_words(fw::array<const wide> data, uint64_t* sums) {
  for (uint64_t i = thread_index(); i < data.size(); i += thread_count()) {
    const wide w = data[i];
    sums[i] = w.words[0] + w.words[37] + w.words[74];
  }
}

FW_KERNEL transpose(fw::array<const float, 2> from, fw::array<float, 2> to) {
  const uint64_t rows = from.extent(0), columns = from.extent(1);
  for (uint64_t k = thread_index(); k < rows * columns; k += thread_count()) {
    to.store_at(from(k / columns, k % columns), k % columns, k / columns);
  }
}
FW_KERNEL middle(fw::array<const float, 3> from, float* out) {
  if (thread_index() == 0) out[0] = from(1, 2, 3);
}

FW_KERNEL sum_range(fw::array<const uint32_t> data, uint64_t* sum) {
  // Each warp takes a part; its lanes read side by side.
  const uint64_t part = (data.size() + fw::warp::count() - 1) / fw::warp::count();
  const uint64_t begin = part * fw::warp::index();
  const uint64_t end = begin + part < data.size() ? begin + part : data.size();
  uint64_t total = 0;
  for (uint32_t v : fw::range<const uint32_t>(data, begin + fw::warp::lane(), end, kWarpWidth)) {
    total += v;
  }
  fw::atomic::add(sum, total);
}

FW_KERNEL sum_each(fw::array<const uint32_t> data, uint64_t* sum) {
  const uint64_t part = (data.size() + fw::warp::count() - 1) / fw::warp::count();
  const uint64_t begin = part * fw::warp::index();
  const uint64_t end = begin + part < data.size() ? begin + part : data.size();
  uint64_t total = 0;
  fw::range<const uint32_t>(data, begin + fw::warp::lane(), end, kWarpWidth)
      .each([&](uint64_t i, uint32_t v) { total += v + i * 3; });
  fw::atomic::add(sum, total);
}

// Copies elements, and counts the visits of each.
template <typename T>
FW_DEVICE auto copy_to(T* out, uint32_t* visits) {
  return [=](uint64_t i, T value) {
    out[i] = value;
    fw::atomic::add_relaxed(&visits[i], 1u);
  };
}
FW_KERNEL each_byte(fw::array<const uint8_t> data, uint64_t begin, uint64_t end, uint8_t* out,
                    uint32_t* visits) {
  fw::each(data, begin, end, copy_to(out, visits));
}
FW_KERNEL each_double(fw::array<const double> data, uint64_t begin, uint64_t end, double* out,
                      uint32_t* visits) {
  fw::each(data, begin, end, copy_to(out, visits));
}
FW_KERNEL each_triple(fw::array<const triple> data, uint64_t begin, uint64_t end, triple* out,
                      uint32_t* visits) {
  fw::each(data, begin, end, copy_to(out, visits));
}
FW_KERNEL each_word_by_warps(fw::array<const uint32_t> data, uint64_t begin, uint64_t end,
                             uint32_t* out, uint32_t* visits) {
  const uint64_t part = (end - begin) / fw::warp::count() + 1;
  const uint64_t first = begin + part * fw::warp::index();
  const uint64_t last = first + part < end ? first + part : end;
  if (first < last) fw::warp::each(data, first, last, copy_to(out, visits));
}
FW_KERNEL range_of_words(fw::array<const uint32_t> data, uint64_t begin, uint64_t end,
                         uint64_t stride, uint64_t at_most, uint32_t* out, uint32_t* visits) {
  if (thread_index() != 0) return;
  fw::range<const uint32_t> range(data, begin, end, stride);
  const auto visit = copy_to(out, visits);
  for (auto at = range.begin(); at != range.end() && at_most-- != 0; ++at) visit(at.index(), *at);
}

FW_KERNEL load_eight(fw::array<const uint32_t> data, const uint64_t* starts, uint64_t n,
                     uint64_t stride, uint32_t* out) {
  fw::cursor<const uint32_t> line(data);
  for (uint64_t k = thread_index(); k < n; k += thread_count()) {
    uint32_t values[8];
    line.load(starts[k], stride, values);
    for (uint32_t j = 0; j < 8; j++) out[8 * k + j] = values[j];
  }
}

FW_KERNEL copy_by_warps(fw::array<const uint32_t> from, fw::array<uint32_t> to, uint32_t* buffer,
                        const uint64_t* starts, const uint64_t* counts, uint64_t spans) {
  for (uint64_t k = fw::warp::index(); k < spans; k += fw::warp::count()) {
    fw::warp::read(from, starts[k], counts[k], buffer + starts[k]);
    fw::warp::sync(fw::warp::kFullMask);
    fw::warp::write(to, starts[k], counts[k], buffer + starts[k]);
  }
}
FW_KERNEL sum_by_blocks(fw::array<const uint32_t> data, uint64_t* sum) {
  constexpr uint64_t kTile = 3000;
  FW_SHARED uint32_t tile[kTile];
  const uint64_t blocks = thread_count() / (fw::block::warp_count() * kWarpWidth);
  const uint64_t block = thread_index() / (fw::block::warp_count() * kWarpWidth);
  for (uint64_t first = block * kTile; first < data.size(); first += blocks * kTile) {
    const uint64_t n = data.size() - first < kTile ? data.size() - first : kTile;
    fw::block::read(data, first, n, tile);
    uint64_t total = 0;
    for (uint64_t k = thread_index() % (fw::block::warp_count() * kWarpWidth); k < n;
         k += fw::block::warp_count() * kWarpWidth) {
      total += tile[k];
    }
    fw::atomic::add(sum, total);
    fw::block::sync();
  }
}

template <typename T>
FW_DEVICE void count_into(const fw::array<T>& bins, const uint32_t* which, uint64_t n) {
  for (uint64_t k = thread_index(); k < n; k += thread_count()) {
    bins.atomic_add(which[k], T(1));
  }
}
FW_KERNEL count_int(fw::array<int32_t> bins, const uint32_t* which, uint64_t n) {
  count_into(bins, which, n);
}
FW_KERNEL count_long(fw::array<uint64_t> bins, const uint32_t* which, uint64_t n) {
  count_into(bins, which, n);
}
FW_KERNEL count_float(fw::array<float> bins, const uint32_t* which, uint64_t n) {
  count_into(bins, which, n);
}
FW_KERNEL count_double(fw::array<double> bins, const uint32_t* which, uint64_t n) {
  count_into(bins, which, n);
}

FW_KERNEL read_blocks(fw::array<const uint32_t> data, const uint64_t* starts, uint64_t n,
                      uint64_t length, uint32_t* out, uint32_t* failures) {
  for (uint64_t k = thread_index(); k < n; k += thread_count()) {
    fw::token t = data.read_async(starts[k], length, out + k * length);
    while (k % 2 == 0 && !t.done()) fw::base::pause(100);
    if (t.wait() != fw::nvme::kSuccess || t.wait() != t.status()) fw::atomic::add(failures, 1u);
  }
}
FW_KERNEL write_blocks(fw::array<uint32_t> data, const uint64_t* starts, uint64_t n,
                       uint64_t length, const uint32_t* in, uint32_t* failures) {
  for (uint64_t k = thread_index(); k < n; k += thread_count()) {
    fw::token t = data.write_async(starts[k], length, in + k * length);
    if (t.wait() != fw::nvme::kSuccess) fw::atomic::add(failures, 1u);
    t = data.write_back(starts[k], length);
    if (k % 3 == 0 && t.wait() != fw::nvme::kSuccess) fw::atomic::add(failures, 1u);
  }
}

// Every thread starts all that it wants before it waits for any of it.
FW_KERNEL start_all_then_wait(fw::array<const uint32_t> data, uint32_t each, uint64_t* sum) {
  constexpr uint32_t kMost = 16;
  uint32_t values[kMost];
  fw::token tokens[kMost];
  const uint64_t step = data.size() / (uint64_t(thread_count()) * each);
  for (uint32_t k = 0; k < each; k++) {
    tokens[k] = data.read_async((uint64_t(thread_index()) * each + k) * step, 1, &values[k]);
  }
  uint64_t total = 0;
  for (uint32_t k = 0; k < each; k++) {
    tokens[k].wait();
    total += values[k];
  }
  fw::atomic::add(sum, total);
}
FW_KERNEL start_and_leave(fw::array<uint32_t> data) {
  uint32_t value = 7;
  for (uint64_t i = thread_index(); i < data.size(); i += thread_count() * 64ull) {
    data.prefetch(i, 3000);
    data.read_async(i, 1, &value);
    data.write_back(i, 1);
  }
}
"""

TYPES = {
    "int8": "int8_t",
    "uint8": "uint8_t",
    "int16": "int16_t",
    "uint16": "uint16_t",
    "int32": "int32_t",
    "uint32": "uint32_t",
    "int64": "int64_t",
    "uint64": "uint64_t",
    "float32": "float",
    "float64": "double",
}
SOURCE += "".join(
    REVERSE.replace("DTYPE", dtype).replace("ELEMENT", element) for dtype, element in TYPES.items()
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    with fw.device.CpuDevice(2) if request.param == "cpu" else fw.device.CudaDevice(0) as found:
        yield found


@pytest.fixture(scope="module")
def program(device):
    return fw.compile(SOURCE, device)


@pytest.fixture(params=[False, True], ids=["in_place", "direct"])
def o_direct(request):
    return request.param


def opened(path, device, data, mode="r", o_direct=False, **options):
    np.save(path, data)
    options = {"cache": "64 KiB", "line": 512, **options}
    return fw.open(path, mode, device=device, o_direct=o_direct, **options)


def on_device(device, values):
    array = device.empty_array(values.shape, values.dtype)
    if values.size:
        device.upload(array.address, np.ascontiguousarray(values))
    return array


@pytest.mark.parametrize("dtype", TYPES)
def test_elements_of_every_type_are_loaded_and_stored(tmp_path, device, program, dtype):
    rng = np.random.default_rng(1)
    data = rng.integers(0, 100, 50_001).astype(dtype)

    with (
        opened(tmp_path / "from.npy", device, data) as a,
        opened(tmp_path / "to.npy", device, np.zeros_like(data), "r+") as b,
    ):
        program[f"reverse_{dtype}"](a, b, warps=64)
        b.wait()
        b.flush()

    assert (np.load(tmp_path / "to.npy") == data[::-1]).all()


@pytest.mark.parametrize("line", [512, 4096])
def test_records_may_straddle_lines(tmp_path, device, program, o_direct, line):
    data = np.arange(30_000, dtype=np.float32).view([("x", "f4"), ("y", "f4"), ("z", "f4")])

    with opened(tmp_path / "a.npy", device, data, "r+", o_direct, line=line) as a:
        program["shift_triples"](a, 2.0, warps=32)
        a.wait()
        a.flush()

    got = np.load(tmp_path / "a.npy")
    assert (got["x"] == data["x"] + 2).all()
    assert (got["y"] == data["y"] - 2).all()
    assert (got["z"] == data["z"] * 2).all()


def test_records_may_be_longer_than_a_line(tmp_path, device, program):
    words = np.random.default_rng(2).integers(0, 1 << 40, (200, 75)).astype(np.uint64)
    data = words.view([("words", "u8", 75)])[:, 0]
    sums = on_device(device, np.zeros(200, np.uint64))

    with opened(tmp_path / "a.npy", device, data) as a:
        program["first_words"](a, sums, warps=4)
        a.wait()

    assert (sums.copy_to_host() == words[:, 0] + words[:, 37] + words[:, 74]).all()


def test_two_axes_are_indexed_together(tmp_path, device, program):
    data = np.random.default_rng(3).random((301, 177), np.float32)

    with (
        opened(tmp_path / "from.npy", device, data) as a,
        opened(tmp_path / "to.npy", device, np.zeros((177, 301), np.float32), "r+") as b,
    ):
        program["transpose"](a, b, warps=32)
        b.wait()
        b.flush()

    assert (np.load(tmp_path / "to.npy") == data.T).all()


def test_three_axes_are_indexed_together(tmp_path, device, program):
    data = np.random.default_rng(3).random((4, 5, 6), np.float32)
    out = on_device(device, np.zeros(1, np.float32))

    with opened(tmp_path / "a.npy", device, data) as a:
        program["middle"](a, out, warps=1)
        a.wait()

    assert out.copy_to_host()[0] == data[1, 2, 3]


def test_a_range_meets_every_element_once(tmp_path, device, program, o_direct):
    data = np.random.default_rng(4).integers(0, 1 << 32, 100_003).astype(np.uint32)
    total = on_device(device, np.zeros(1, np.uint64))

    with opened(tmp_path / "a.npy", device, data, o_direct=o_direct) as a:
        program["sum_range"](a, total, warps=8)
        a.wait()

    assert total.copy_to_host()[0] == data.sum(dtype=np.uint64)


def test_a_range_visits_every_element_with_its_index(tmp_path, device, program, o_direct):
    data = np.random.default_rng(4).integers(0, 1 << 32, 100_003).astype(np.uint32)
    total = on_device(device, np.zeros(1, np.uint64))

    with opened(tmp_path / "a.npy", device, data, o_direct=o_direct) as a:
        program["sum_each"](a, total, warps=8)
        a.wait()

    expected = data.astype(np.uint64) + 3 * np.arange(data.size, dtype=np.uint64)
    assert total.copy_to_host()[0] == expected.sum()


@pytest.mark.parametrize(("begin", "end"), [(0, 30_000), (1, 29_999), (4_095, 4_097), (777, 777)])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("each_byte", np.uint8),
        ("each_double", np.float64),
        ("each_triple", np.dtype([("x", "f4"), ("y", "f4"), ("z", "f4")])),
        ("each_word_by_warps", np.uint32),
    ],
)
def test_each_visits_every_element_once(tmp_path, device, program, kernel, dtype, begin, end):
    width = np.dtype(dtype).itemsize
    data = np.random.default_rng(6).integers(1, 100, 30_000 * width).astype(np.uint8).view(dtype)
    out = on_device(device, np.zeros(data.size, dtype))
    visits = on_device(device, np.zeros(data.size, np.uint32))

    with opened(tmp_path / "a.npy", device, data) as a:
        program[kernel](a, begin, end, out, visits, warps=16)
        a.wait()

    inside = (np.arange(data.size) >= begin) & (np.arange(data.size) < end)
    assert (visits.copy_to_host() == inside).all()
    assert (out.copy_to_host()[inside] == data[inside]).all()


# Whole batches, a part of one, one element a line, fewer elements than a batch; ended early.
@pytest.mark.parametrize("at_most", [2**63, 11])
@pytest.mark.parametrize(
    ("begin", "end", "stride"), [(0, 800, 1), (5, 802, 3), (0, 20_000, 1000), (126, 130, 1)]
)
def test_a_range_visits_what_its_stride_says(
    tmp_path, device, program, begin, end, stride, at_most
):
    data = np.random.default_rng(7).integers(1, 1 << 32, 20_000).astype(np.uint32)
    out = on_device(device, np.zeros(data.size, np.uint32))
    visits = on_device(device, np.zeros(data.size, np.uint32))

    with opened(tmp_path / "a.npy", device, data) as a:
        program["range_of_words"](a, begin, end, stride, at_most, out, visits, warps=1)
        a.wait()

    wanted = np.arange(begin, end, stride)[:at_most]
    assert (np.flatnonzero(visits.copy_to_host()) == wanted).all()
    assert (visits.copy_to_host()[wanted] == 1).all()
    assert (out.copy_to_host()[wanted] == data[wanted]).all()


# On a line of 128 elements, on two, on one each, backwards.
@pytest.mark.parametrize("stride", [0, 1, 20, 127, 128, 1000, -1, -130])
def test_a_cursor_loads_several_elements(tmp_path, device, program, stride):
    rng = np.random.default_rng(9)
    data = rng.integers(0, 1 << 32, 100_003).astype(np.uint32)
    reach = 7 * abs(stride)
    starts = rng.integers(reach, data.size - reach, 500).astype(np.uint64)
    starts[:100] = np.arange(100) + reach
    out = on_device(device, np.zeros((500, 8), np.uint32))

    with opened(tmp_path / "a.npy", device, data) as a:
        program["load_eight"](a, on_device(device, starts), 500, stride % 2**64, out, warps=8)
        a.wait()

    indices = starts.astype(np.int64)[:, None] + stride * np.arange(8)
    np.testing.assert_array_equal(out.copy_to_host(), data[indices])


# Past the end, in front of the begin, and round all numbers with the first and the last inside.
@pytest.mark.parametrize(("start", "stride"), [(93, 1), (100, 1), (6, -1), (3, 2**64 // 7 + 1)])
def test_a_cursor_refuses_elements_that_do_not_exist(tmp_path, device, program, start, stride):
    data = np.arange(1, 101, dtype=np.uint32)
    out = on_device(device, np.full((1, 8), 7, np.uint32))

    with opened(tmp_path / "a.npy", device, data) as a:
        starts = on_device(device, np.array([start], np.uint64))
        program["load_eight"](a, starts, 1, stride % 2**64, out, warps=1)
        with pytest.raises(BoundsError):
            a.wait()

    inside = {(start + stride * k) % 2**64: k for k in range(8)}
    assert all(
        value == 0 or data[index] == value
        for index, value in zip(inside, out.copy_to_host()[0], strict=True)
        if index < 100
    )
    assert all(out.copy_to_host()[0][k] == 0 for i, k in inside.items() if i >= 100)


def test_warps_move_spans_of_any_alignment(tmp_path, device, program, o_direct):
    rng = np.random.default_rng(5)
    data = rng.integers(0, 1 << 32, 100_003).astype(np.uint32)
    cuts = np.unique(np.concatenate([[0, data.size], rng.integers(0, data.size, 120)]))
    starts, counts = cuts[:-1].astype(np.uint64), np.diff(cuts).astype(np.uint64)
    buffer = on_device(device, np.zeros_like(data))

    with (
        opened(tmp_path / "from.npy", device, data, o_direct=o_direct) as a,
        opened(tmp_path / "to.npy", device, np.zeros_like(data), "r+", o_direct) as b,
    ):
        program["copy_by_warps"](
            a,
            b,
            buffer,
            on_device(device, starts),
            on_device(device, counts),
            len(starts),
            warps=16,
        )
        b.wait()
        b.flush()

    assert (buffer.copy_to_host() == data).all()
    assert (np.load(tmp_path / "to.npy") == data).all()


def test_blocks_read_into_shared_memory(tmp_path, device, program):
    data = np.random.default_rng(6).integers(0, 1 << 32, 100_003).astype(np.uint32)
    total = on_device(device, np.zeros(1, np.uint64))

    with opened(tmp_path / "a.npy", device, data) as a:
        program["sum_by_blocks"](a, total, warps=32)
        a.wait()

    assert total.copy_to_host()[0] == data.sum(dtype=np.uint64)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("count_int", "int32"),
        ("count_long", "uint64"),
        ("count_float", "float32"),
        ("count_double", "float64"),
    ],
)
def test_no_addition_is_lost(tmp_path, device, program, kernel, dtype):
    which = np.random.default_rng(7).integers(0, 2000, 20_000).astype(np.uint32)

    with opened(tmp_path / "a.npy", device, np.zeros(2000, dtype), "r+", cache="4 KiB") as a:
        program[kernel](a, on_device(device, which), which.size, warps=32)
        a.wait()
        a.flush()

    assert (np.load(tmp_path / "a.npy") == np.bincount(which, minlength=2000)).all()


@pytest.mark.parametrize("length", [1, 100, 1024])
def test_a_token_brings_its_elements(tmp_path, device, program, o_direct, length):
    rng = np.random.default_rng(8)
    data = rng.integers(0, 1 << 32, 100_003).astype(np.uint32)
    starts = rng.integers(0, data.size - length, 200).astype(np.uint64)
    out = on_device(device, np.zeros((200, length), np.uint32))
    failures = on_device(device, np.zeros(1, np.uint32))

    with opened(tmp_path / "a.npy", device, data, o_direct=o_direct) as a:
        program["read_blocks"](a, on_device(device, starts), 200, length, out, failures, warps=8)
        a.wait()

    assert failures.copy_to_host()[0] == 0
    assert (out.copy_to_host() == data[starts[:, None].astype(int) + np.arange(length)]).all()


@pytest.mark.parametrize("length", [1, 100, 1024])
def test_a_token_takes_elements_to_the_storage(tmp_path, device, program, o_direct, length):
    rng = np.random.default_rng(9)
    data = rng.integers(0, 1 << 32, 100_003).astype(np.uint32)
    starts = (rng.permutation(data.size // length)[:90] * length).astype(np.uint64)
    blocks = rng.integers(0, 1 << 32, (len(starts), length)).astype(np.uint32)
    failures = on_device(device, np.zeros(1, np.uint32))

    with opened(tmp_path / "a.npy", device, data, "r+", o_direct) as a:
        program["write_blocks"](
            a,
            on_device(device, starts),
            len(starts),
            length,
            on_device(device, blocks),
            failures,
            warps=8,
        )
        a.wait()
        a.flush()

    for start, block in zip(starts.astype(int), blocks, strict=True):
        data[start : start + length] = block
    assert failures.copy_to_host()[0] == 0
    assert (np.load(tmp_path / "a.npy") == data).all()


@pytest.mark.parametrize("route", ["bounce", "in_place", "direct"])
def test_more_requests_than_queue_entries_do_not_stop_each_other(device, program, route):
    """The case of AGILE's Figure 1: each thread holds requests that no entry is free for."""
    if route == "direct" and device.kind == "cuda":
        pytest.skip("the host cannot write GPU memory")
    data = np.arange(1 << 18, dtype=np.uint32)
    warps, each = 64, 16
    total = on_device(device, np.zeros(1, np.uint64))

    with fw.open(
        fw.storage.Memory(data),
        "r+",
        np.uint32,
        data.shape,
        device=device,
        cache="64 KiB",
        line=512,
        controller=fw.nvme.SoftwareController(queue_pairs=1, depth=2, route=route),
    ) as a:
        program["start_all_then_wait"](a, each, total, warps=warps)
        a.wait()

    got = total.copy_to_host()[0]
    threads = 2 if device.kind == "cpu" else warps * 32
    step = data.size // (threads * each)
    assert got == data[: threads * each * step : step].sum(dtype=np.uint64)


def test_a_kernel_that_leaves_its_tokens_leaks_nothing(tmp_path, device, program, o_direct):
    data = np.arange(100_003, dtype=np.uint32)

    with opened(tmp_path / "a.npy", device, data, "r+", o_direct) as a:
        for _ in range(3):
            program["start_and_leave"](a, warps=16)
            a.wait()
        assert (a[:] == data).all()
