"""``--rm-type math_verify``: grading with the math-verify library, which knows sets, percentages and powers."""

from __future__ import annotations

import importlib.util
from typing import Any

from slime.rollout.rm_hub.grader_pool import MAX_CHARS, grade_in_process
from slime.utils.errors import DataError

__all__ = ["compare_with_math_verify", "grade_math_verify"]


def grade_math_verify(response: str, label: Any) -> float:
    """1.0 when the answer in ``response`` equals ``label``, else 0.0; also if that takes too long.

    Waits for a free process: call it in a thread.

    Raises:
        DataError: the library is missing.
        ScoringError: no process became free in time.
    """
    if label is None or label == "":
        return 0.0
    if importlib.util.find_spec("math_verify") is None:
        raise DataError("--rm-type math_verify needs the package math-verify: pip install math-verify")
    truth = str(label)
    truth = truth if "$" in truth or "\\boxed" in truth else f"${truth}$"
    # the answer comes last; parsing the text before it only costs time
    return grade_in_process("math_verify", [response[-MAX_CHARS:], truth]) or 0.0


def compare_with_math_verify(response: str, truth: str) -> float:
    """In a grader process: the library's verdict. Whatever it trips over is not the right answer."""
    from math_verify import parse, verify

    try:
        gold = parse(truth, parsing_timeout=None)  # its own limits are signals, which C code does not see
        return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:
        return 0.0
