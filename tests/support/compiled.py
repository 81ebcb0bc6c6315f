"""Libraries of C that tests load before others, or preload, compiled once for a process."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


@functools.cache
def library(source: Path, name: str) -> Path:
    """Compile a file of C as a shared library with a name; skips the test without a compiler."""
    compile_c = shutil.which("cc") or shutil.which("gcc")
    if compile_c is None:
        pytest.skip("no C compiler")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    made = folder / name
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
    subprocess.run([compile_c, *options, str(source), "-o", str(made), "-ldl"], check=True)
    return made
