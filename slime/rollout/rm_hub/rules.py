"""Rules that compare text: deepscaler (the box after the thinking, DeepScaleR's rule), f1 and gpqa."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer_mathd, grade_answer_sympy

_END_OF_THINKING = "</think>"
_RESPONSE = "###Response"


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 or 0. The score is 0 without ``</think>`` or ``###Response`` before the solution.

    Raises:
        AssertionError: a label that is neither text nor a number.
    """
    if _END_OF_THINKING in response:
        solution = response.rsplit(_END_OF_THINKING, maxsplit=1)[-1]
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


# Token-overlap F1 between two texts, as in SQuAD and HotpotQA. Pure functions.

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(s: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_NO_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """``(f1, precision, recall)`` over the multisets of words. Closed answers (yes, no) must match exactly."""
    if prediction is None:
        return 0, 0, 0
    given, truth = normalize_answer(prediction), normalize_answer(ground_truth)
    if given != truth and _CLOSED_ANSWERS & {given, truth}:
        return 0, 0, 0
    common = (Counter(given.split()) & Counter(truth.split())).total()
    if common == 0:
        return 0, 0, 0
    precision, recall = common / len(given.split()), common / len(truth.split())
    return 2 * precision * recall / (precision + recall), precision, recall


# ``--rm-type gpqa``: multiple choice, 1.0 when the chosen letter, or else the text of the right choice, is given.
#
# The answer comes from the label and the metadata of the sample: ``choices``, ``valid_letters``,
# ``correct_letter``, ``correct_answer``, ``answer_text``. Pure apart from noting ``correct_answer`` in the metadata.

DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:10])
ANSWER_KEYS = ("correct_letter", "correct_answer", "answer_text")
"""Entries of the metadata that hold the answer of a row without a label."""


# Between "is" and the letter: brackets, bold, a box. Every repetition is possessive (``*+``), so the search takes time
# proportional to the length of the response. The search holds the GIL, and backtracking would stop all other threads.
_OPENING = r"[\s(*$\"'\[{]*+(?:\\(?:boxed|text|textbf|mathrm)\s*+\{\s*+)*+[(*\s]*+"
_CHOICE_PATTERNS = (
    rf"(?:answer|option|choice)\s*+(?:is|:)?{_OPENING}([A-Z])\b",
    r"\b([A-Z])\b[)*\s]*+is\s++(?:the\s++)?correct",
    rf"final\s++(?:answer|option)\s*+(?:is|:)?{_OPENING}([A-Z])\b",
)


def compute_gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 or 0.0."""
    if response is None:
        return 0.0
    facts: Any = metadata if isinstance(metadata, Mapping) else {}
    choices = _choices(facts.get("choices"))
    letters = _valid_letters(facts, choices)
    correct = _correct_letter(label, facts, choices, letters)
    chosen = _extract_letter_from_response(response, letters)
    # A response that chooses a letter is judged by the letter alone. The text may quote every choice.
    if chosen is not None and correct is not None:
        return float(chosen == correct)
    said = f" {_normalize(_after_thinking(response))} "
    candidates = [choices.get(correct or ""), facts.get("correct_answer"), facts.get("answer_text")]
    if isinstance(label, str):
        candidates.append(label)
    for text in candidates:
        if isinstance(text, str) and (words := _normalize(text)) and f" {words} " in said:
            return 1.0
    is_label = isinstance(label, str) and chosen is not None and correct is None
    return float(is_label and chosen == label.strip().upper())


def _extract_letter_from_response(response: str | None, valid_letters: Sequence[str]) -> str | None:
    """The letter a response commits to: a phrase such as "the answer is B", else the last capital that is a choice."""
    if not response:
        return None
    text = _after_thinking(response)
    for pattern in _CHOICE_PATTERNS:
        match = re.search(pattern, text, re.IGNORECASE)
        if match is not None and match.group(1).upper() in valid_letters:
            return match.group(1).upper()
    standing_alone = [letter for letter in re.findall(r"\b([A-Z])\b", text) if letter in valid_letters]
    return standing_alone[-1] if standing_alone else None


def _after_thinking(response: str) -> str:
    return response.rsplit(_END_OF_THINKING, maxsplit=1)[-1]


def _choices(given: Any) -> dict[str, str]:
    """Letter -> text of the choice."""
    if isinstance(given, Mapping):
        return {str(letter).strip().upper(): str(text) for letter, text in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return dict(zip(string.ascii_uppercase, map(str, given), strict=False))
    return {}


def _valid_letters(facts: Any, choices: Mapping[str, str]) -> list[str]:
    given = facts.get("valid_letters")
    if given:
        return [str(letter).strip().upper() for letter in given]
    return list(string.ascii_uppercase[: len(choices)]) if choices else list(DEFAULT_VALID_LETTERS)


def _correct_letter(label: Any, facts: Any, choices: Mapping[str, str], letters: Sequence[str]) -> str | None:
    given = facts.get("correct_letter")
    found = given.strip().upper() if isinstance(given, str) and given.strip() else None
    # A number is the position of the choice. bool is a subclass of int.
    if isinstance(label, int | float) and not isinstance(label, bool):
        position = int(label)
        return letters[position] if 0 <= position < len(letters) else found
    if found is None and isinstance(label, str):
        text = label.strip()
        if len(text) == 1 and text.upper() in letters:
            return text.upper()
        matches = [letter for letter, choice in choices.items() if _normalize(choice) == _normalize(text)]
        if text and matches:
            if isinstance(facts, dict):
                facts.setdefault("correct_answer", choices[matches[0]])
            return matches[0]
    return found


def _normalize(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
