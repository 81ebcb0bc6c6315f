"""The compiler for GPUs and the cache of compiled code, on machines without a GPU."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from flashwarp._jit import compiler, nvrtc, spelling
from flashwarp._jit.artifact_cache import ArtifactCache, Entry, content_key, default_directory
from flashwarp.errors import CompileError
from support.architectures import ARCHITECTURES
from support.built_in import built_in_kernels
from support.samples import sample

# Each of these compiles for seconds; all kernels alone take two minutes for one architecture.
BUILT_IN_FOR = sample(ARCHITECTURES, 5)
ALONE = sample(built_in_kernels(), 10)

PROGRAM_KERNELS = Path(__file__).parents[1] / "support" / "program_kernels.cu"

SOURCE = """
#include <flashwarp/outer.cuh>
#if defined(NEVER)
#include <vector>
#endif
extern "C" __global__ void fw_add(const __grid_constant__ add_params p) {
  p.values[threadIdx.x] += amount();
}
extern "C" __global__ void fw_spill(const __grid_constant__ add_params p) {
  int local[64];
  for (int i = 0; i < p.count; ++i) local[i % 64] = p.values[i];
  p.values[0] = local[p.count % 64];
}
"""
OUTER = (
    '#pragma once\n#include "flashwarp/inner.cuh"\nstruct add_params { int* values; int count; };\n'
)
INNER = "#pragma once\ninline __device__ int amount() { return 1; }\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def make_project(root: Path) -> Path:
    headers = root / "include" / "flashwarp"
    headers.mkdir(parents=True)
    (root / "module.cuh").write_text(SOURCE)
    (headers / "outer.cuh").write_text(OUTER)
    (headers / "inner.cuh").write_text(INNER)
    return root


def build(
    root: Path, cache: ArtifactCache, arch: str = "sm_90", **more: object
) -> compiler.Artifact:
    return compiler.compile_source(
        arch,
        compiler.Source.read(root / "module.cuh"),
        include_dirs=[root / "include"],
        cache=cache,
        **more,  # type: ignore[arg-type]
    )


# The compiler.


@pytest.mark.parametrize("arch", BUILT_IN_FOR)
@pytest.mark.parametrize("name", ALONE)
def test_built_in_kernel_compiles_alone(name: str, arch: str, cache: ArtifactCache) -> None:
    artifact = compiler.compile_source(
        arch,
        compiler.Source.read(compiler.MODULE),
        options=(*compiler.PROGRAM_OPTIONS, "-DFW_ALL_KERNELS=0", f"-DFW_ONLY_{name}=1"),
        cache=cache,
    )

    assert artifact.cubin.startswith(b"\x7fELF")
    (kernel,) = artifact.kernels.values()
    assert f"fw_{name}" in kernel.name
    assert kernel.registers
    print(
        f"\n{arch}, {len(artifact.cubin)} bytes: {kernel.name} {kernel.registers} registers, "
        f"{kernel.stack_bytes} B stack, spills {kernel.spill_store_bytes} B out "
        f"{kernel.spill_load_bytes} B in, {kernel.param_bytes} B parameters"
    )


# They were built in once; on the CPU device their own tests compile them.
@pytest.mark.parametrize(
    "name",
    ["demo/query.cu", "benchmarks/drives/drives.cuh", "benchmarks/arrays/arrays.cu"],
)
def test_kernels_of_benchmarks_and_demo_compile(name: str, cache: ArtifactCache) -> None:
    source = compiler.Source.read(Path(__file__).parents[2] / name)

    artifact = compiler.compile_source("sm_90", source, options=("-DFW_PROGRAM=1",), cache=cache)

    assert artifact.kernels
    assert all(kernel.registers for kernel in artifact.kernels.values())


def test_kernel_resources_name_every_kernel_and_its_parameter_size(
    project: Path, cache: ArtifactCache
) -> None:
    kernels = build(project, cache).kernels

    assert set(kernels) == {"fw_add", "fw_spill"}
    assert kernels["fw_add"].param_bytes == 16
    assert kernels["fw_add"].stack_bytes == 0
    assert (kernels["fw_spill"].stack_bytes or 0) >= 256


def test_kernel_resources_do_not_depend_on_the_order_of_the_log(
    project: Path, cache: ArtifactCache
) -> None:
    artifact = build(project, cache)
    title = "ptxas info    : Compiling entry function"
    lines = artifact.log.splitlines(keepends=True)
    titles = [line for line in lines if line.startswith(title)]
    rest = [line for line in lines if not line.startswith(title)]

    mixed = compiler.kernel_resources(artifact.cubin, "".join(titles + rest))

    assert len(titles) == 2
    assert mixed == artifact.kernels
    assert mixed["fw_spill"].spill_store_bytes is not None


def test_kernels_without_parameters_are_listed(cache: ArtifactCache) -> None:
    source = compiler.Source("program.cu", b"__global__ void nothing() {}", None)

    (kernel,) = compiler.compile_source("sm_90", source, cache=cache).kernels.values()

    assert "nothing" in kernel.name
    assert (kernel.param_bytes, kernel.each_param_bytes) == (0, ())


def test_device_functions_are_not_listed_as_kernels(project: Path, cache: ArtifactCache) -> None:
    inner = project / "include" / "flashwarp" / "inner.cuh"
    inner.write_text("#pragma once\n__device__ __noinline__ int amount() { return clock(); }\n")

    kernels = build(project, cache).kernels

    assert set(kernels) == {"fw_add", "fw_spill"}
    assert kernels["fw_add"].registers is not None


def test_architecture_is_the_best_of_the_same_generation() -> None:
    assert compiler.architecture((9, 0)) == "sm_90"
    assert compiler.architecture((8, 0)) == "sm_80"
    assert compiler.architecture((9, 5)) == "sm_90"


def test_architecture_that_the_compiler_does_not_know_is_an_error_that_lists_those_it_knows() -> (
    None
):
    with pytest.raises(CompileError, match=r"capability 3\.5.*sm_90"):
        compiler.architecture((3, 5))


def test_compile_error_carries_the_compilers_words_and_the_headers_name(
    project: Path, cache: ArtifactCache
) -> None:
    (project / "include" / "flashwarp" / "inner.cuh").write_text("this is no code\n")

    with pytest.raises(CompileError, match=r"flashwarp/inner\.cuh") as caught:
        build(project, cache)

    assert "error" in caught.value.log
    assert not list(cache.directory.glob("*"))


def test_missing_source_is_a_compile_error(tmp_path: Path, cache: ArtifactCache) -> None:
    with pytest.raises(CompileError, match=r"module\.cuh cannot be read"):
        build(tmp_path, cache)


def test_missing_header_is_a_compile_error(project: Path, cache: ArtifactCache) -> None:
    (project / "include" / "flashwarp" / "inner.cuh").unlink()

    with pytest.raises(CompileError, match=r"inner\.cuh"):
        build(project, cache)


def test_one_name_for_two_headers_is_an_error(project: Path, cache: ArtifactCache) -> None:
    (project / "module.cuh").write_text('#include "common.cuh"\n#include <flashwarp/outer.cuh>\n')
    (project / "common.cuh").write_text("")
    headers = project / "include" / "flashwarp"
    (headers / "outer.cuh").write_text('#include "common.cuh"\n')
    (headers / "common.cuh").write_text("")

    with pytest.raises(CompileError, match=r"common\.cuh"):
        build(project, cache)


def test_nvrtc_without_headers_compiles() -> None:
    cubin, log = nvrtc.compile_program(
        b'extern "C" __global__ void f() {}', "f.cu", {}, ["--gpu-architecture=sm_90"]
    )

    assert cubin.startswith(b"\x7fELF")
    assert log == ""


def test_damaged_cubin_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="ELF"):
        compiler.kernel_resources(b"\x7fELF", "")


RING = b"""
#include "flashwarp/nvme/queue_pair.cuh"
extern "C" __global__ void ring(fw::nvme::queue_pair* q) { fw::nvme::ring(*q, q->sq_doorbell, 1); }
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_doorbells_of_devices_are_rung_by_mmio(arch: str) -> None:
    source = compiler.Source("ring.cu", RING)
    headers = compiler.Headers(source, [compiler.INCLUDE_DIR]).contents
    options = [f"--gpu-architecture={arch}", "--std=c++20"]

    cubin, _ = nvrtc.compile_program(source.text, source.name, headers, options)
    ptx, _ = nvrtc.compile_program(source.text, source.name, headers, options, "PTX")

    assert cubin.startswith(b"\x7fELF")
    assert ptx.count(b"st.mmio.relaxed.sys.global.u32") == 1
    assert ptx.count(b"st.relaxed.sys.global.u32") == 1


# Programs of users'.


@pytest.mark.parametrize("arch", BUILT_IN_FOR)
def test_programs_of_the_cpu_device_compile_for_gpus(arch: str, tmp_path: Path) -> None:
    artifact = compiler.compile_source(
        arch,
        compiler.Source.read(PROGRAM_KERNELS),
        options=compiler.PROGRAM_OPTIONS,
        cache=ArtifactCache(tmp_path),
    )

    signatures = {spelling.demangle(symbol): found for symbol, found in artifact.kernels.items()}
    kernels = {text[: text.index("(")]: found for text, found in signatures.items()}
    assert set(kernels) == {
        "gather",
        "mine::scale",
        "transpose",
        "keep",
        "sum_values",
        "count_threads",
        "increment",
        "add",
    }
    assert kernels["keep"].each_param_bytes == (8, 1, 1, 2, 4, 8, 4, 8, 16)
    assert all(found.registers for found in kernels.values())


def test_sizes_of_the_programs_own_types_are_known_for_gpus(tmp_path: Path) -> None:
    text = """
    struct pair { int key; double value; };
    namespace mine { struct tiny {}; struct hidden; template <typename T> struct box { T a, b; }; }
    """

    sizes = compiler.type_sizes(
        "sm_90",
        compiler.Source("program.cu", text.encode()),
        ["pair", "mine::tiny", "mine::hidden", "mine::box<pair>", "float*"],
    )

    assert list(sizes.values()) == [16, 1, 0, 32, 8]


def test_nvrtc_error_names_the_users_line(tmp_path: Path) -> None:
    source = compiler.Source(
        "program.cu", b'#include "flashwarp/array.cuh"\n\nFW_KERNEL k(int* p) { p = mistake; }\n'
    )

    with pytest.raises(CompileError, match=r"program\.cu\(3\): error"):
        compiler.compile_source("sm_90", source, cache=ArtifactCache(tmp_path))


# The cache of compiled code.


def test_second_compile_is_found_on_disk(project: Path, cache: ArtifactCache) -> None:
    first = build(project, cache)
    second = build(project, cache)

    assert not first.from_cache
    assert second.from_cache
    assert second.cubin == first.cubin
    assert second.kernels == first.kernels


@pytest.mark.parametrize("header", ["outer.cuh", "inner.cuh"])
def test_changed_header_compiles_again(project: Path, cache: ArtifactCache, header: str) -> None:
    build(project, cache)
    path = project / "include" / "flashwarp" / header
    path.write_text(path.read_text() + "// changed\n")

    assert not build(project, cache).from_cache


def test_changed_architecture_or_option_compiles_again(project: Path, cache: ArtifactCache) -> None:
    build(project, cache)

    assert not build(project, cache, arch="sm_80").from_cache
    assert not build(project, cache, options=("-DFW_DEBUG=1",)).from_cache


def test_unreachable_header_does_not_matter(project: Path, cache: ArtifactCache) -> None:
    build(project, cache)
    (project / "include" / "flashwarp" / "other.cuh").write_text("// not included\n")

    assert build(project, cache).from_cache


def test_place_of_installation_does_not_matter(tmp_path: Path, cache: ArtifactCache) -> None:
    build(make_project(tmp_path / "here"), cache)

    assert build(make_project(tmp_path / "there"), cache).from_cache


@pytest.mark.parametrize("keep", [0, 3, 20, 45, 500, -1])
def test_damaged_entry_is_built_again(project: Path, cache: ArtifactCache, keep: int) -> None:
    build(project, cache)
    (path,) = cache.directory.glob("*.fwcubin")
    path.write_bytes(path.read_bytes()[:keep])

    assert not build(project, cache).from_cache
    assert build(project, cache).from_cache


@pytest.mark.parametrize("body", [b"", b"\1\0\0", b"\xff\xff\xff\xff", b"\5\0\0\0log"])
def test_entry_with_a_checksum_and_nothing_whole_is_absent(tmp_path: Path, body: bytes) -> None:
    """Its length was read beyond its end, which raised struct.error."""
    cache = ArtifactCache(tmp_path)
    digest = bytes.fromhex(content_key(b"key", body))
    (tmp_path / "key.fwcubin").write_bytes(b"FWCUBIN2" + digest + body)

    assert cache.load("key") is None


def test_flipped_byte_is_noticed(project: Path, cache: ArtifactCache) -> None:
    build(project, cache)
    (path,) = cache.directory.glob("*.fwcubin")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)

    assert not build(project, cache).from_cache


def test_oldest_entries_go_when_the_folder_is_full(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, limit_bytes=3500)
    for age, name in enumerate(["d", "c", "b"]):
        cache.publish(name, Entry(bytes(1000), ""))
        os.utime(tmp_path / f"{name}.fwcubin", (1000 - age, 1000 - age))
    assert cache.load("b") is not None  # used now, so "c" is the oldest

    cache.publish("a", Entry(bytes(1000), ""))

    assert [name for name in "abcd" if cache.load(name)] == ["a", "b", "d"]


def test_entry_larger_than_the_limit_is_kept_until_the_next(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, limit_bytes=10)

    cache.publish("big", Entry(bytes(1000), "log"))

    assert cache.load("big") == Entry(bytes(1000), "log")


def test_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    old, new = tmp_path / "old.tmp", tmp_path / "new.tmp"
    old.write_text("")
    new.write_text("")
    os.utime(old, (0, 0))

    cache.publish("a", Entry(b"code", ""))

    assert not old.exists()
    assert new.exists()


def publish_often(directory: Path, number: int) -> None:
    cache = ArtifactCache(directory)
    for _ in range(50):
        cache.publish("shared", Entry(bytes([number]) * 100_000, str(number)))
        entry = cache.load("shared")
        if entry is None or entry.cubin != bytes([int(entry.log)]) * 100_000:
            os._exit(1)


def test_concurrent_publishers_never_show_a_torn_entry(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=publish_often, args=(tmp_path, n)) for n in range(3)]

    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)

    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["shared.fwcubin"]


def test_keys_depend_on_where_parts_end() -> None:
    assert content_key(b"ab", b"c") != content_key(b"a", b"bc")
    assert content_key(b"a") != content_key(b"a", b"")


def test_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("FLASHWARP_CACHE_DIR", raising=False)
    assert default_directory() == Path("/xdg/flashwarp/cubin")

    monkeypatch.setenv("FLASHWARP_CACHE_DIR", "/chosen")
    assert default_directory() == Path("/chosen")
