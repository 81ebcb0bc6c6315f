"""The built-in kernels that a package ships, built as CMake builds them, without a GPU."""

from __future__ import annotations

import logging
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from flashwarp._jit import compiler, precompiled, spelling
from flashwarp.errors import CompileError
from flashwarp.policy import CLOCK, POLICIES, Policy
from support.built_in import CUBIN_POLICIES, built_in_kernels, cubins

# The first test that needs the files compiles them.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cubins(tmp_path_factory)


@pytest.fixture
def shipped(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that has them."""
    folder = tmp_path / "cubins"
    shutil.copytree(built, folder)
    monkeypatch.setattr(precompiled, "FOLDER", folder)
    return folder


@pytest.mark.parametrize("policy", CUBIN_POLICIES, ids=lambda policy: policy.name)
def test_package_has_all_built_in_kernels_for_a_policy(policy: Policy, shipped: Path) -> None:
    artifact = precompiled.find((9, 0), policy)

    assert artifact is not None
    assert artifact.arch == "sm_90"
    names = {spelling.kernel_name(symbol) for symbol in artifact.kernels}
    assert names == {f"fw_{name}" for name in built_in_kernels()}
    assert all(found.registers and found.param_bytes for found in artifact.kernels.values())


def test_policies_have_code_of_their_own(shipped: Path) -> None:
    found = [precompiled.find((9, 0), policy) for policy in CUBIN_POLICIES]

    assert len({artifact.cubin for artifact in found if artifact}) == len(CUBIN_POLICIES)


@pytest.mark.parametrize("capability", [(9, 1), (9, 9)])
def test_later_gpus_of_a_generation_have_its_code(
    capability: tuple[int, int], shipped: Path
) -> None:
    assert precompiled.find(capability, CLOCK) == precompiled.find((9, 0), CLOCK)


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (13, 0)])
def test_other_gpus_have_none(capability: tuple[int, int], shipped: Path) -> None:
    assert precompiled.find(capability, CLOCK) is None


def test_custom_policy_has_none(shipped: Path) -> None:
    assert precompiled.find((9, 0), Policy("mine", "struct mine {};")) is None


def test_package_built_without_a_compiler_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompiled, "FOLDER", tmp_path / "missing")

    assert precompiled.find((9, 0), CLOCK) is None


def test_code_of_other_headers_is_not_used(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = tmp_path / "include"
    shutil.copytree(compiler.INCLUDE_DIR, include)
    monkeypatch.setattr(compiler, "INCLUDE_DIR", include)
    assert precompiled.find((9, 0), CLOCK) is not None

    with (include / "flashwarp" / "cache" / "geometry.cuh").open("a") as header:
        header.write("// changed\n")

    assert precompiled.find((9, 0), CLOCK) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "exchanged"])
def test_damaged_file_is_not_used(
    damage: str, shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, policy = shipped / "sm_90.clock.xz", CLOCK
    content = path.read_bytes()
    if damage == "cut":
        content = content[:-100]
    elif damage == "flipped":
        whole = bytearray(lzma.decompress(content))
        whole[5000] ^= 1
        content = lzma.compress(bytes(whole))
    else:
        path, policy = shipped / "sm_90.lru.xz", POLICIES["lru"]
    path.write_bytes(content)

    with caplog.at_level(logging.INFO):
        assert precompiled.find((9, 0), policy) is None

    assert str(path) in caplog.text


def test_finding_needs_no_compiler(built: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from flashwarp._jit import precompiled; "
        "from flashwarp.policy import CLOCK; precompiled.FOLDER = Path(sys.argv[1]); "
        "assert precompiled.find((9, 0), CLOCK); "
        "assert 'cuda.bindings' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", script, built], check=True, timeout=60)


def test_unknown_architecture_fails_the_build(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"none of 75, 80, 90, 100, 120 serves .*'70'"):
        precompiled.build(tmp_path, ["80", "70"])
    with pytest.raises(CompileError, match="'sm_80'"):
        precompiled.build(tmp_path, ["sm_80"])
