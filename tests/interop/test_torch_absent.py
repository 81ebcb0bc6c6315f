"""`flashwarp.torch` on a machine without torch."""

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["torch"] = None  # as if it were not installed
try:
    import flashwarp.torch
except ImportError as error:
    assert "pip install 'flashwarp[torch]'" in str(error), error
else:
    sys.exit("no error")
"""


def test_import_says_what_to_install():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
