"""The archive of sources that `make sdist` writes: all that a package is built of, and no more."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import flashwarp as fw

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".ci/", "results/")

pytest.importorskip("scikit_build_core")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.iterdir()
    return made


def test_archive_has_the_version_of_the_package(archive: Path) -> None:
    assert archive.name == f"flashwarp-{fw.__version__}.tar.gz"


def test_archive_has_every_tracked_file_and_no_other(archive: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout")
    untracked = subprocess.check_output(
        ["git", "ls-files", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    known = set(listed.stdout.split("\n")) | set(untracked.split("\n"))

    with tarfile.open(archive) as opened:
        names = {each.name.partition("/")[2] for each in opened.getmembers() if each.isfile()}

    there = {each for each in known if each and (ROOT / each).exists()}
    assert names - {"PKG-INFO"} == {each for each in there if not each.startswith(LEFT_OUT)}
    assert archive.stat().st_size < 5 << 20
