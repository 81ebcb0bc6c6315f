"""Suites are for pytest in a guest, and no tests of the host."""

from __future__ import annotations

from qemu.guest import in_guest

collect_ignore = [] if in_guest() else ["suites"]
