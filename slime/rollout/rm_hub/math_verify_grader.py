"""``--rm-type math_verify``: grading with the math-verify library, which knows sets, percentages and powers."""

from __future__ import annotations

from typing import Any

__all__ = ["grade_math_verify"]


def grade_math_verify(response: str, label: Any) -> float:
    """1.0 when the answer in ``response`` equals ``label``, else 0.0.

    The library's own time limits use signals, which work in the main thread only; the caller has a deadline instead.
    """
    from math_verify import parse, verify

    if label is None or label == "":
        return 0.0
    truth = str(label)
    gold = parse(truth if "$" in truth or "\\boxed" in truth else f"${truth}$", parsing_timeout=None)
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
