"""The process that a `KillSuite` kills.

Its arguments are the Python file that defines the suite, the name of its class, the path of the
subject and a seed.
"""

from __future__ import annotations

import importlib.util
import sys
from operator import attrgetter
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run the child's half of the suite that the arguments name."""
    file, name, path, seed = arguments
    spec = importlib.util.spec_from_file_location("killed_suite", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["killed_suite"] = module
    spec.loader.exec_module(module)
    attrgetter(name)(module)().run_child(Path(path), int(seed))


if __name__ == "__main__":
    main(sys.argv[1:])
