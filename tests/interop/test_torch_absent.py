"""What needs torch, on a machine without it."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["torch"] = None  # as if it were not installed
try:
    import flashwarp.{name}
except ImportError as error:
    assert "pip install 'flashwarp[torch]'" in str(error), error
else:
    sys.exit("no error")
"""


@pytest.mark.parametrize("name", ["torch", "distributed"])
def test_import_says_what_to_install(name: str) -> None:
    script = SCRIPT.replace("{name}", name)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
