"""What a backend's author tests with: faults on demand, power cuts, and contracts to be kept.

Importing it brings neither pytest nor hypothesis; the suites are classes whose `test_` methods
pytest finds in a subclass. See docs/testing.md.
"""

from flashwarp.testing.crash import CrashSuite, KillSuite
from flashwarp.testing.faults import Fault, FaultPlan, Faulty
from flashwarp.testing.recording import CrashState, Event, Recording

__all__ = [
    "CrashState",
    "CrashSuite",
    "Event",
    "Fault",
    "FaultPlan",
    "Faulty",
    "KillSuite",
    "Recording",
]
