"""What a backend's author tests with: faults on demand, power cuts, and contracts to be kept.

Importing it brings neither pytest nor hypothesis; the suites are classes whose `test_` methods
pytest finds in a subclass. See docs/testing.md.
"""

from flashwarp.testing.controller_contract import ControllerContract
from flashwarp.testing.crash import CrashSuite, KillSuite
from flashwarp.testing.faults import Fault, FaultPlan, Faulty
from flashwarp.testing.recording import CrashState, Event, Recording
from flashwarp.testing.rings import Host, Ring
from flashwarp.testing.service_contract import ServiceContract
from flashwarp.testing.storage_contract import StorageContract

__all__ = [
    "ControllerContract",
    "CrashState",
    "CrashSuite",
    "Event",
    "Fault",
    "FaultPlan",
    "Faulty",
    "Host",
    "KillSuite",
    "Recording",
    "Ring",
    "ServiceContract",
    "StorageContract",
]
