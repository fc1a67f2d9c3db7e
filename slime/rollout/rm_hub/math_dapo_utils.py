r"""``--rm-type dapo``: the score of DAPO's training runs (arXiv:2503.14476), +1 or -1 on the line ``Answer: ...``.

The answer is normalized as Minerva does (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D.1). Only the end of a
response counts: 300 characters, 100 for a strict box. Pure functions.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

from slime.rollout.rm_hub.math_utils import up_to_closing_brace

__all__ = [
    "compute_score",
    "is_correct_minerva",
    "is_correct_strict_box",
    "last_boxed_only_string",
    "normalize_final_answer",
    "remove_boxed",
    "verify",
]

_TAIL = 300
_BOX_TAIL = 100
_ANSWER_LINE = r"(?i)Answer\s*:\s*([^\n]+)"
_INVALID = "[INVALID]"

# The order of both tables matters: "\$" goes before " ", and "feet" would otherwise leave parts of other words.
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *(
        "childrentickets",
        "multiples",
        "\\text{s}",
        "\\text{.}",
        "\\text{\ns}",
        "\\text{}^2",
        "\\text{}^3",
        "\\text{\n}",
    ),
    *("\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots"),
    *("<|im_end|>", "<|endoftext|>"),
)
_IN_DOLLARS = re.compile(r"^(.*?)(\$)(.*?)(\$)(.*)$", re.DOTALL)
_UNWRAPPED = (r"(\\text\{)(.*?)(\})", r"(\\textbf\{)(.*?)(\})", r"(\\overline\{)(.*?)(\})", r"(\\boxed\{)(.*)(\})")
_BARE_FRACTION = re.compile(r"(frac)([^{])(.)")
_BARE_ROOT = re.compile(r"(sqrt)([^{])")


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """``{"score": 1.0 or -1.0, "acc": bool, "pred": text}``; select one with ``--reward-key score``."""
    tail = solution_str[-_TAIL:]
    is_correct, answer = verify(tail, ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if is_correct else -1.0, "acc": is_correct, "pred": answer}


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> tuple[bool, str | None]:
    """(whether the solution's answer is right, the answer that was found)."""
    if strict_box_verify:
        score, found = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, found
    return is_correct_minerva(solution_str, answer)


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = _ANSWER_LINE
) -> tuple[bool, str]:
    """Compare the last ``Answer:`` line with the ground truth, both normalized.

    A whole number as ground truth loses its spelling (``042``, ``42.0``). Any other text is compared unchanged.
    """
    found = re.findall(answer_pattern, solution_str)
    prediction = normalize_final_answer(found[-1] if found else _INVALID)
    truth = str(gt)
    if gt_need_extract:
        truth = remove_boxed(last_boxed_only_string(truth) or "")
    # The original cuts fractions to their integer part, so that 42 would be right for 42.7.
    truth = _whole_number(normalize_final_answer(truth))
    return prediction == truth, prediction


def _whole_number(text: str) -> str:
    """A whole number in its shortest spelling, any other text unchanged."""
    with contextlib.suppress(ValueError):
        return str(int(text))  # a float is exact up to 15 digits only
    with contextlib.suppress(ValueError):
        number = float(text)
        return str(int(number)) if number.is_integer() else text
    return text


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: Sequence[int] | None = None
) -> tuple[int, str | None]:
    r"""(1 or -1, content of the last ``\boxed{}`` near the end), compared character by character."""
    if pause_tokens_index is None:
        tail = pred[-_BOX_TAIL:]
    else:
        if len(pause_tokens_index) != 4:
            raise ValueError(f"pause_tokens_index needs 4 positions, got {len(pause_tokens_index)}")
        tail = pred[pause_tokens_index[-1] - _BOX_TAIL :]
    boxed = last_boxed_only_string(tail)
    found = remove_boxed(boxed) if boxed is not None else None
    return (1 if found == gt else -1), found


def last_boxed_only_string(string: str) -> str | None:
    r"""The last ``\boxed{...}`` with its braces, or None if none closes."""
    return up_to_closing_brace(string, string.rfind("\\boxed{"))


def remove_boxed(s: str) -> str:
    r"""The content of ``\boxed{...}``. Raises AssertionError for other text."""
    left = "\\boxed{"
    # AssertionError is part of the public contract: callers catch it.
    assert s.startswith(left), f"box error: {s}"
    assert s.endswith("}"), f"box error: {s}"
    return s[len(left) : -1]


def normalize_final_answer(final_answer: str) -> str:
    """Minerva's normal form of a short answer: no units, no LaTeX dressing, the part after the last ``=``."""
    answer = str(final_answer).split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for text in _REMOVED:
        answer = answer.replace(text, "")
    answer = _IN_DOLLARS.sub(r"$\3$", answer)
    for pattern in _UNWRAPPED:
        answer = re.sub(pattern, r"\2", answer)
    answer = _BARE_FRACTION.sub(r"frac{\2}{\3}", answer)
    answer = _BARE_ROOT.sub(r"sqrt{\2}", answer).replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
