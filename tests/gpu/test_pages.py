"""The README's and the quickstart's programs on a GPU; `tree/test_readme.py` runs them without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("README.md", "docs/quickstart.md")
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_program_runs_on_the_gpu_by_default(block: str, tmp_path: Path) -> None:
    arrays = re.findall(r"\bfw\.(?:open|create)\(.*\) as (\w+)", block)
    checks = [f"assert {each}.device.name == 'cuda:0', {each}.device.name" for each in arrays]
    script = "\n".join([block, *checks])
    if "torch" in block:
        pytest.importorskip("torch", reason="torch is an extra")

    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert result.returncode == 0, result.stderr
