"""Numbers for people."""

from __future__ import annotations

__all__ = ["count", "size"]


def size(num_bytes: int) -> str:
    """``1610612736`` -> ``1.5 GiB``: three significant digits, binary units."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 999.5 or unit == "PiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes everything")


def count(number: int) -> str:
    """``4022468096`` -> ``4.02 B``: thousand, million, billion."""
    value = float(number)
    for unit in ("", " K", " M", " B"):
        if value < 999.5 or unit == " B":
            return f"{value:.0f}{unit}" if not unit or value >= 99.5 else f"{value:.3g}{unit}"
        value /= 1000
    raise AssertionError("the last unit takes everything")
