r"""``--rm-type deepscaler``: 1 when the box behind the thinking holds the right answer (DeepScaleR's rule)."""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer_mathd, grade_answer_sympy

__all__ = ["get_deepscaler_rule_based_reward"]

_END_OF_THINKING = "</think>"
_RESPONSE = "###Response"


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 or 0. Without ``</think>`` or ``###Response`` there is no solution to grade, so the score is 0.

    Raises:
        AssertionError: a label that is neither text nor a number.
    """
    if _END_OF_THINKING in response:
        solution = response.split(_END_OF_THINKING)[-1]
    elif _RESPONSE in response:
        solution = response.split(_RESPONSE)[1]
    else:
        return 0
    answer = extract_boxed_answer(solution)
    if answer is None or label == "":
        return 0
    assert isinstance(label, str | int | float), f"label is a {type(label).__name__}, it must be text or a number"
    truth: str | None = str(label)
    if "\\boxed" in str(truth):
        truth = extract_boxed_answer(str(truth))
    if truth is None:
        return 0
    return int(grade_answer_mathd(answer, truth) or grade_answer_sympy(answer, truth))
