"""Token-overlap F1 between two texts, as in SQuAD and HotpotQA. Pure functions."""

from __future__ import annotations

import re
import string
from collections import Counter

__all__ = ["f1_score", "normalize_answer"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(s: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_NO_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """``(f1, precision, recall)`` over the multisets of words; closed answers (yes, no) must match exactly."""
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
