"""Figures and tables as plain text, for terminals and for pasting."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows as lines of text in columns: the first `left` flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def binary(nbytes: float) -> str:
    """Write a size with its binary unit: "128 MiB", "1.5 KiB"."""
    value, unit = _scale(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"


def thousands(value: float) -> str:
    """Write a count with its magnitude: "12.3 k", "4.56 M"."""
    value, unit = _scale(value, 1000, ("", "k", "M", "G", "T"))
    return f"{value:.3g} {unit}".rstrip()


def _scale(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return value, units[power]
