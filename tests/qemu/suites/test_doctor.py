"""The doctor goes with a drive from the kernel's driver to VFIO."""

from __future__ import annotations

from flashwarp.cli.doctor_nvme import Machine
from flashwarp.cli.finding import Finding
from qemu import guest
from qemu.suites.machines import FAULTS

MACHINE = FAULTS


def findings() -> dict[str, Finding]:
    return {name: check() for name, check in Machine().checks()}


def test_each_step_is_found() -> None:
    bdf = guest.address_of(0)
    guest.block_device()

    found = findings()

    assert f"{bdf} has nvme (nvme0n1, nvme0n2, nvme0n3, nvme0n4)" in found["drives"].detail
    assert (found["passthrough"].state, found["IOMMU"].state) == ("ok", "ok")
    assert found["iommufd"].state == "missing"
    assert found["GPU route"].values["route"] == "software"

    guest.load("vfio-pci")
    offered = findings()["vfio-pci"]
    assert f"{bdf} is used by nobody" in offered.detail
    assert offered.advice.endswith(f"bind {bdf}")

    guest.bind(bdf, "vfio-pci")
    try:
        bound = findings()
        assert bdf in bound["vfio-pci"].detail
        assert (bound["vfio-pci"].state, bound["permission"].state) == ("ok", "ok")
        assert bound["passthrough"].state == "missing"
    finally:
        guest.bind(bdf, "nvme")
        guest.character_device(nsid=4)
