"""What the README and the pages of docs/ show runs as it stands, without a GPU."""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashwarp
from edges import nursery

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(python_blocks(page))
]
# The first examples of these pages, and what they say that they print.
PRINTED = {
    block: re.findall(r"print\(.*\)  # (.*)", block)[0]
    for page in ("kernels.md", "architecture.md")
    for block in python_blocks(ROOT / "docs" / page)[:1]
}


@pytest.fixture(scope="module")
def run_block(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Run code as a program of a reader on a laptop; return what it prints.

    No GPU is visible, and warnings would be the first thing seen.
    """
    folder = tmp_path_factory.mktemp("blocks")

    def run(code: str) -> str:
        script = tmp_path_factory.mktemp("block") / "block.py"
        script.write_text(code)
        start = f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
        outcome = run_program(nursery.Program("block", start, limit_s=100))
        assert outcome.status == 0, outcome
        # On a busy machine a compilation says that it takes long.
        said = [line for line in outcome.err.splitlines() if "takes longer than" not in line]
        assert said == []
        return outcome.out

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTHONWARNINGS", "error")
        patch.setenv("FLASHWARP_RUNTIME_DIR", str(folder / "run"))
        with nursery.opened(folder) as run_program:
            yield run


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs(block: str, run_block: Callable[[str], str]) -> None:
    if "from numba" in block:
        pytest.importorskip("numba.cuda", reason="numba-cuda is an extra")
    if re.search(r"import (flashwarp\.)?torch", block):
        pytest.importorskip("torch", reason="torch is an extra")
    if "torch_geometric" in block:
        pytest.importorskip("torch_geometric", reason="torch_geometric is an extra")
        # Its import warns of what torch deprecates.
        block = f"import warnings\nwarnings.simplefilter('ignore')\n{block}"

    said = run_block(block)

    if block in PRINTED:
        assert said.strip() == PRINTED[block]


def modules_with_examples() -> list[str]:
    return [
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for package in (Path(flashwarp.__file__).parent, ROOT / "demo")
        for path in sorted(package.rglob("*.py"))
        if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE)
    ]


# torch says so also to a caller who passes no_dist=True, as the examples of flashwarp.dcp do.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_of_docstrings_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ".numba" in name:
        pytest.importorskip("numba.cuda", reason="numba-cuda is an extra")
    if ".torch" in name or ".distributed" in name:
        pytest.importorskip("torch", reason="torch is an extra")
    if ".pyg" in name:
        pytest.importorskip("torch_geometric", reason="torch_geometric is an extra")
    module = importlib.import_module(name)
    source = Path(str(module.__file__)).read_text()
    if re.search(r"import flashwarp\.torch|import_module\(\"torch\"\)", source):
        pytest.importorskip("torch", reason="torch is an extra")
    runner = doctest.DocTestRunner()

    # Each in a folder of its own: examples make files, and some have the same names.
    for number, example in enumerate(doctest.DocTestFinder(exclude_empty=True).find(module)):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        runner.run(example)

    assert runner.summarize(verbose=False).attempted > 0
    assert runner.summarize(verbose=False).failed == 0


def test_readme_shows_python() -> None:
    assert python_blocks(ROOT / "README.md")


def test_readme_opens_with_the_two_commands() -> None:
    first_block = re.search(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)

    assert first_block
    commands = [line.split("#")[0].strip() for line in first_block[1].splitlines()]
    assert commands == ["make demo", "make test"]


def test_commands_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()

    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(
            r"\bmake ([a-z]+)\b(?=[`\s]*(?:$|[#`\"]|ARGS))", page.read_text(), re.M
        ):
            assert re.search(rf"^[a-z ]*\b{target}\b[a-z ]*:", makefile, re.M), f"make {target}"
