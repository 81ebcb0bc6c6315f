"""A cache that two GPUs share, whose lines each reads in the memory of both."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, DeviceError
from support.program import Program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROWS, WIDTH, LINE = 20_000, 1024, 4096
WAYS = {
    "in place": {},
    "bounce": {"controller": fw.nvme.SoftwareController(route="bounce")},
    "o_direct": {"o_direct": True},
}
SUM = """
#include "flashwarp/array.cuh"
FW_KERNEL sums(fw::array<const int32_t> x, uint64_t* sum, uint64_t stride) {
  uint64_t mine = 0;
  const uint64_t threads = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i * stride < x.size(); i += threads) {
    mine += x[i * stride];
  }
  fw::atomic::add_relaxed(sum, mine);
}
"""


@pytest.fixture(scope="module")
def devices():
    with fw.device.CudaDevice(0) as first:
        try:
            second = fw.device.CudaDevice(1)
        except DeviceError:
            pytest.skip("there is one GPU")
        with second:
            yield [first, second]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("peers") / "a.npy"
    content = np.random.default_rng(3).integers(0, 1 << 30, (ROWS, WIDTH), np.int32)
    np.save(path, content)
    return path, content


@pytest.mark.parametrize("policy", ["clock", "s3_fifo"])
@pytest.mark.parametrize("way", WAYS)
def test_each_line_is_read_once(devices, table, way, policy):
    path, content = table
    rng = np.random.default_rng(1)
    with fw.Cache("80 MiB", peers=devices, policy=policy) as cache:
        arrays = [fw.open(path, device=each, cache=cache, **WAYS[way]) for each in devices]
        for _ in range(3):
            for x in arrays:
                index = rng.permutation(ROWS)[: ROWS // 2]
                assert (x.gather(index) == content[index]).all()
        lines = sum(x.stats.bytes_read for x in arrays) // LINE
        evictions = sum(x.stats.evictions for x in arrays)
        assert lines - evictions <= ROWS + 1, "each line is there once"
        for x in arrays:
            x.close()


@pytest.mark.parametrize("line", [512, 4096])
@pytest.mark.parametrize("way", ["in place", "bounce"])
def test_both_read_at_once_while_lines_are_evicted(devices, table, way, line):
    path, content = table
    wrong = []
    with fw.Cache("2 MiB", peers=devices, line=line) as cache:
        arrays = [fw.open(path, device=each, cache=cache, **WAYS[way]) for each in devices]

        def read(x, seed):
            rng = np.random.default_rng(seed)
            for _ in range(60):
                index = rng.integers(0, 1500, 3000)
                if not (x.gather(index) == content[index]).all():
                    wrong.append(seed)

        running = [threading.Thread(target=read, args=(x, k)) for k, x in enumerate(arrays * 2)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        assert not wrong
        for x in arrays:
            x.close()


def test_kernels_read_elements_of_both(devices, table):
    path, content = table
    with fw.Cache("60 MiB", peers=devices) as cache:
        arrays = [fw.open(path, device=each, cache=cache) for each in devices]
        stride = 97
        expected = int(content.reshape(-1)[::stride].astype(np.int64).sum())
        sums = []
        for x in arrays:  # both run at once
            program = fw.compile(SUM, x.device, policy=x.cache.policy)
            sums.append(x.device.empty_array((1,), np.uint64))
            x.device.fill(sums[-1].address, 0, 8)
            program["sums"](x, sums[-1], stride)
        for x, each in zip(arrays, sums, strict=True):
            x.wait()
            found = int.from_bytes(x.device.download(each.address, 8), "little")
            assert found == expected
            each.close()
        with pytest.raises(ArgumentError, match="policy"):
            fw.compile(SUM, devices[0])["sums"](arrays[0], 0, 1)
        for x in arrays:
            x.close()


RANK = """
cache = fw.Cache({capacity!r}, peers={gpus}, shared="ranks", device={gpus}[{rank} % len({gpus})])
x = fw.open({path!r}, device={gpus}[{rank} % len({gpus})], cache=cache)
content = np.load({path!r})
rng = np.random.default_rng({rank})
x.gather([0])  # compiles what calls need
"""
# Gathers that end by an error count as late, and rows that differ as wrong.
READ = """
end, wrong, late, calls = time.monotonic() + {seconds}, 0, 0, 0
while time.monotonic() < end:
    index = rng.integers(0, {rows}, {count})
    try:
        wrong += not (x.gather(index) == content[index]).all()
    except fw.errors.ControllerTimeout:
        late += 1
    calls += 1
result = [wrong, late, calls, x.stats.bytes_read, x.stats.evictions]
"""


BOTH = ("cuda:0", "cuda:1")


def ranks(folder, path, capacity, gpus=BOTH, **environment):
    """Start two processes that have the cache together, on two GPUs or on one."""
    made = [Program(folder, **environment) for _ in range(2)]
    for rank, each in enumerate(made):
        each.start(RANK.format(capacity=capacity, path=str(path), rank=rank, gpus=gpus))
    for each in made:
        each.finish()
    return made


@pytest.mark.parametrize("capacity", ["80 MiB", "2 MiB"])
def test_processes_share_it(devices, table, tmp_path, capacity):
    path, _ = table
    programs = ranks(tmp_path / "run", path, capacity)
    with programs[0], programs[1]:
        for each in programs:
            each.start(READ.format(seconds=2, rows=ROWS, count=ROWS // 2))
        seen = [each.finish() for each in programs]
        assert all(wrong == late == 0 and calls > 1 for wrong, late, calls, *_ in seen)
        nbytes, evictions = (sum(each[k] for each in seen) for k in (3, 4))
        if capacity == "80 MiB":
            assert nbytes <= (ROWS + 1) * LINE, "each line is read once"
            assert evictions == 0
        else:
            assert evictions > 0
        programs[0].end()  # it made the cache, perhaps; the other keeps the memory
        assert programs[1].run(READ.format(seconds=0.5, rows=ROWS, count=1000))[:2] == [0, 0]
        programs[1].run("x.close(); cache.close()")
        programs[1].run(RANK.format(capacity=capacity, path=str(path), rank=1, gpus=BOTH))
        assert programs[1].run(READ.format(seconds=0.5, rows=ROWS, count=1000))[:2] == [0, 0]


@pytest.mark.parametrize("delay_s", [0.2, 0.7, 1.1])
def test_a_killed_process_leaves_nothing_wrong(devices, table, tmp_path, delay_s):
    path, _ = table
    programs = ranks(tmp_path / "run", path, "1 MiB", FLASHWARP_TIMEOUT_S="3")
    with programs[0], programs[1]:
        for each in programs:
            each.start(READ.format(seconds=4, rows=3000, count=3000))
        time.sleep(delay_s)
        programs[1].kill()
        wrong, late, calls, *_ = programs[0].finish()
        print(f"{calls} calls, {late} of them late")
        assert wrong == 0
        assert calls > 1


@pytest.mark.parametrize("capacity", ["160 MiB", "2 MiB"])
def test_processes_of_one_gpu_share_it(devices, table, tmp_path, capacity):
    """They take turns on the GPU, and each fetches what it misses, also in kernels of its own."""
    path, content = table
    load = f"""
program = fw.compile({SUM!r}, x.device, policy=x.cache.policy)
with x.device.empty_array((1,), np.uint64) as total:
    x.device.fill(total.address, 0, 8)
    program["sums"](x, total, 97)
    x.wait()
    result = int(total.copy_to_host()[0])
"""
    expected = int(content.reshape(-1)[::97].astype(np.int64).sum())
    programs = ranks(tmp_path / "run", path, capacity, ("cuda:0",))
    with programs[0], programs[1]:
        for each in programs:
            each.start(READ.format(seconds=2, rows=ROWS, count=2000))
        seen = [each.finish() for each in programs]
        assert all(wrong == late == 0 and calls > 1 for wrong, late, calls, *_ in seen)
        for each in programs:
            each.start(load)
        assert [each.finish() for each in programs] == [expected, expected]
        if capacity == "160 MiB":
            reads = [each.run("result = x.stats.bytes_read") for each in programs]
            assert sum(reads) <= (ROWS + 1) * LINE, "each line is read once"


@pytest.mark.parametrize("way", WAYS)
def test_what_stands_on_arrays_takes_them(devices, tmp_path, way):
    torch = pytest.importorskip("torch")
    import flashwarp.torch

    path = tmp_path / "f.npy"
    content = np.random.default_rng(3).integers(-64, 64, (4000, 96)).astype(np.float32)
    np.save(path, content)
    whole = torch.from_numpy(content)
    with fw.Cache("256 KiB", peers=devices, line=512) as cache:
        for each in devices:
            with (
                torch.cuda.device(each.ordinal),
                fw.open(path, device=each, cache=cache, **WAYS[way]) as x,
            ):
                ids = torch.randint(0, 4000, (3000,), device="cuda")
                expected = whole[ids.cpu()]
                assert torch.equal(flashwarp.torch.Embedding(x)(ids).cpu(), expected)
                bags = flashwarp.torch.EmbeddingBag(x, mode="sum")(ids.view(-1, 10))
                assert torch.equal(bags.cpu(), expected.view(-1, 10, 96).sum(1))
                assert (x.gather_async(ids.cpu().numpy()).result() == expected.numpy()).all()
                with fw.Pipeline(x, batch_rows=3000) as pipeline:
                    pipeline.prefetch(ids)
                    assert torch.equal(pipeline.take().cpu(), expected)
                batches = [_rows(batch).cpu() for batch in flashwarp.torch.Loader(x, 500)]
                assert torch.equal(torch.cat(batches), whole)
                out = torch.empty_like(expected, device="cuda")
                x.gather(ids, out)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    x.gather(ids, out, stream=torch.cuda.current_stream())
                for _ in range(3):
                    ids.copy_(torch.randint(0, 4000, (3000,), device="cuda"))
                    graph.replay()
                    torch.cuda.synchronize()
                    assert torch.equal(out.cpu(), whole[ids.cpu()])
                graph.reset()  # it uses the array


def _rows(batch):
    return batch[0] if isinstance(batch, tuple | list) else batch
