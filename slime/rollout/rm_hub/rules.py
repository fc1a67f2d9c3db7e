"""Rules that score text: deepscaler (the box after the thinking, DeepScaleR's rule), dapo, f1 and gpqa.

``--rm-type dapo`` is the score of DAPO's training runs (arXiv:2503.14476), +1 or -1 on the line ``Answer: ...``. The
answer is normalized as Minerva does (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D.1). Only the end of a response
counts: 300 characters, 100 for a strict box.

Rules of libraries: math-verify, which knows sets, percentages and powers, and ifbench.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import string
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slime.rollout.rm_hub.grader_pool import MAX_CHARS, grade_in_process
from slime.rollout.rm_hub.math_utils import (
    extract_boxed_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    pass_memory_error,
    up_to_closing_brace,
)
from slime.utils.errors import DataError, reported

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


def grade_math_verify(response: str, label: Any) -> float:
    """1.0 when the answer in ``response`` equals ``label``, else 0.0. An answer that takes too long gets 0.0.

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
    """The verdict of the library. Runs in a grader process."""
    from math_verify import parse, verify

    # The library raises many kinds of errors on text that it cannot read. Such an answer is wrong.
    with reported(pass_memory_error):
        gold = parse(truth, parsing_timeout=None)  # its own limits are signals, which C code does not see
        return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
    return 0.0


# ``--rm-type ifbench``: 1.0 when a response follows every instruction, judged by IFBench's own evaluation code.
#
# The code is not on PyPI: clone https://github.com/allenai/IFBench and name the clone in ``SLIME_IFBENCH_DIR``, or put
# it on ``PYTHONPATH``. Nothing is downloaded here.

_DIRECTORY = "SLIME_IFBENCH_DIR"
_READ = ("instruction_id_list", "prompt_text", "kwargs", "record_id")


def grade_ifbench(response: str | None, metadata: Mapping[str, Any]) -> float:
    """:func:`compute_ifbench_reward` in a grader process: its checks search the response with patterns of all kinds."""
    facts = {key: metadata[key] for key in _READ if key in metadata}
    return grade_in_process("ifbench", [response, None, facts]) or 0.0


def compute_ifbench_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 or 0.0. The reward is 0.0 without a response or an instruction.

    Args:
        metadata: ``instruction_id_list``, ``prompt_text``, ``kwargs`` (one mapping per instruction), ``record_id``.

    Raises:
        ImportError: the evaluation code cannot be found.
    """
    if not response or not isinstance(metadata, Mapping):
        return 0.0
    given = metadata.get("instruction_id_list") or []
    names = [name.strip() for name in given if isinstance(name, str) and name.strip()]
    if not names:
        return 0.0
    library = _evaluation_library()
    prompt = str(metadata.get("prompt_text") or "")
    example = library.InputExample(
        key=int(metadata.get("record_id") or 0),
        instruction_id_list=names,
        prompt=prompt,
        kwargs=_arguments(metadata.get("kwargs"), len(names)),
    )
    outcome = library.test_instruction_following_strict(example, {prompt: response})
    return float(bool(outcome.follow_all_instructions))


def _arguments(given: Any, count: int) -> list[dict[str, Any]]:
    """One mapping per instruction. A single mapping holds for all, and the last entry continues a short list."""
    if isinstance(given, Mapping):
        entries = [dict(given)] * count
    elif isinstance(given, list) and given:
        entries = [dict(entry) if isinstance(entry, Mapping) else {} for entry in given[:count]]
        entries += [entries[-1]] * (count - len(entries))
    else:
        entries = [{}] * count
    # Data sets store absent arguments as None.
    return [{key: value for key, value in entry.items() if value is not None} for entry in entries]


def _evaluation_library() -> Any:
    directory = os.environ.get(_DIRECTORY)
    if directory and directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module("evaluation_lib")
    except ImportError as error:
        raise ImportError(
            f"--rm-type ifbench needs IFBench's evaluation_lib ({error}): clone https://github.com/allenai/IFBench, "
            f"install its requirements, and set {_DIRECTORY} to the clone."
        ) from error


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
