"""The GPU architectures that tests compile for."""

from __future__ import annotations

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
