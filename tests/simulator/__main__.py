"""`python tests/simulator`: the command line of command_line.py."""

import importlib
import sys
from pathlib import Path

# Python puts this folder first, where `coverage.py` hides the package of that name.
sys.path[0] = str(Path(__file__).resolve().parents[1])
sys.exit(importlib.import_module("simulator.command_line").main())
