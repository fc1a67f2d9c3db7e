r"""Grading of short mathematical answers in ``\boxed{}`` (the rules of PRM800K and Hendrycks' MATH).

Two graders, an answer counts when either accepts it: ``mathd`` compares normalized text, ``sympy`` simplifies the
difference. Unreduced fractions and other orders are wrong on purpose: the rules define the reward.

A response decides what sympy and the LaTeX parser compute, so they run in a grader process (``grader_pool``), and only
there. Everything else here is text processing that takes time proportional to its length: most answers need no process.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from slime.rollout.rm_hub.grader_pool import MAX_CHARS, grade_in_process
from slime.utils.errors import reported
from slime.utils.misc import as_float

_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
    *("foot", "feet", "inch", "yard"),
)
_BRACKETS = "()[]"
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
# A fraction in lowest terms is required, so these are compared as text.
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_INTEGER_TOLERANCE = 1e-7
_MAX_LETTERS = 2
_PLAIN_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
# Up to this length sympy's comparison of decimal numbers is exact, so Decimal gives the same result.
_EXACT_DIGITS = 15
# Refused before sympy sees them: exponents of more than one digit or letter, factorials of large numbers or of powers,
# powers of powers of long numbers, and Python code other than formulas (0xff, 1_000, shifts, repeated texts, methods).
_FORMULA = re.compile(r"([\w+\-*/^(),!]|\.(?![^\W\d]))*")
_COSTLY_POWER = re.compile(r"\^(?!-?([0-9](?![0-9!^])|[a-z](?![a-z])))")
_PYTHON_NUMBER = re.compile(r"[0-9]_|0[xob]")
_COSTLY_FACTORIAL = re.compile(r"[0-9]{4,}!|\)!|!!")
# Longest integer that sympy may compute.
_MAX_DIGITS = 20_000
_NAMES = frozenset({"pi", "ln", "re", "im", "oo", "nan", "zoo", "csc", "sqrt"})
# Names in the code that the parser of sympy generates.
_NAMES_OF_THE_PARSER = frozenset({"Symbol", "Integer", "Float", "Rational", "Function", "factorial", "factorial2"})


# --- extraction


def last_boxed_only_string(string: str) -> str | None:
    r"""The last ``\boxed{...}`` (else ``\fbox{...}``) with its braces, or None if none closes."""
    start = string.rfind("\\boxed")
    if start < 0:
        start = string.rfind("\\fbox")
    return up_to_closing_brace(string, start)


def up_to_closing_brace(string: str, start: int) -> str | None:
    """The text from ``start`` to the brace that closes its first one. None if none does, or for a ``start`` of -1."""
    if start < 0:
        return None
    depth = 0
    for i in range(start, len(string)):
        if string[i] == "{":
            depth += 1
        elif string[i] == "}":
            depth -= 1
            if depth == 0:
                return string[start : i + 1]
    return None


def remove_boxed(s: str | None) -> str | None:
    r"""The content of a string that is exactly one ``\boxed{...}``, else None."""
    left = "\\boxed{"
    if s is None or not s.startswith(left) or not s.endswith("}"):
        return None
    return s[len(left) : -1]


def extract_boxed_answer(solution: str) -> str | None:
    """The content of the last box."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    r"""The content of the last ``\boxed``, or None."""
    return extract_boxed_answer(passage) if "\\boxed" in passage else None


# --- graders


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the boxed answer of a solution equals the ground truth, which may be boxed itself."""
    if ground_truth is None or ground_truth == "":
        return False
    truth: str | None = str(ground_truth)
    if truth is not None and "\\boxed" in truth:
        truth = extract_answer(truth)
    given = extract_answer(solution_str)
    if given is None or truth is None:
        return False
    return grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Equality after text normalization."""
    return mathd_normalize_answer(ground_truth) == mathd_normalize_answer(given_answer)


def grade_answer_sympy(given_answer: str | None, ground_truth: str | None) -> bool:
    """Equality of every element after normalization, or up to algebra.

    Algebra waits for a grader process: call it in a thread. An answer that takes too long is not equal, nor is an
    answer of more than 10,000 characters that differs from the truth.
    """
    if ground_truth is None or given_answer is None:
        return False
    if max(len(given_answer), len(ground_truth)) > MAX_CHARS:
        return given_answer == ground_truth
    truth, given = _clean(ground_truth), _clean(given_answer)
    if truth == given:
        return True
    if "\\" not in truth and "\\" not in given:
        verdict = _compare_texts(_canonical(truth), _canonical(given))
        if isinstance(verdict, bool):
            return verdict
    return bool(grade_in_process("sympy", [given_answer, ground_truth]))


def compare_with_sympy(given_answer: str, ground_truth: str) -> bool:
    """:func:`grade_answer_sympy` with the LaTeX parser and sympy. Runs in a grader process."""
    truth, given = (_canonical(_latex_to_text(_clean(text))) for text in (ground_truth, given_answer))
    verdict = _compare_texts(truth, given)
    return verdict if isinstance(verdict, bool) else all(_are_equal_under_sympy(*pair) for pair in verdict)


def _compare_texts(truth: str, given: str) -> bool | list[tuple[str, str]]:
    """The verdict, or the pairs of elements that only sympy can compare."""
    if truth == given:
        return True
    if not given:
        return False
    truths, givens = _split_tuple(truth), _split_tuple(given)
    if len(truths) != len(givens) or (len(truths) > 1 and (truth[0] != given[0] or truth[-1] != given[-1])):
        return False
    verdicts = {pair: _compare_elements(*pair) for pair in zip(truths, givens, strict=True)}
    if False in verdicts.values():
        return False
    return [pair for pair, verdict in verdicts.items() if verdict is None] or True


def _compare_elements(truth: str, given: str) -> bool | None:
    """None: only sympy can tell."""
    if _FRACTION.search(truth) and _FRACTION.search(given):
        return truth == given  # a fraction must be reduced
    if _is_integer_text(truth) != _is_integer_text(given):
        return False
    if _is_plain_number(truth) and _is_plain_number(given):
        return Decimal(truth) == Decimal(given)
    return None if _may_be_evaluated(_difference(truth, given)) else False


def _is_plain_number(text: str) -> bool:
    return len(text) <= _EXACT_DIGITS and _PLAIN_NUMBER.fullmatch(text) is not None


# --- mathd


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Text normalization of Hendrycks' MATH."""
    if answer is None:
        return None
    answer = answer.strip()
    try:
        answer = _unwrap_text(answer).strip()
        return _strip_string(answer)
    except (AssertionError, IndexError, ValueError):
        # Text that the rules cannot read is compared unchanged.
        return answer


def _unwrap_text(text: str) -> str:
    match = _TEXT.search(text)
    return match.group("text") if match else text


def _strip_string(string: str) -> str:
    for old, new in (
        ("\n", ""),
        ("\\!", ""),
        ("\\\\", "\\"),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        ("\\left", ""),
        ("\\right", ""),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("\\$", ""),
    ):
        string = string.replace(old, new)
    string = _cut_units(string)
    for old, new in (("\\%", ""), (" .", " 0."), ("{.", "{0.")):
        string = string.replace(old, new)
    if not string:
        return string
    if string[0] == ".":
        string = "0" + string
    left, equals, right = string.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        string = right
    string = _fix_sqrt(string).replace(" ", "")
    string = _fix_fractions(string)
    if string == "0.5":
        string = "\\frac{1}{2}"
    return _fix_slash(string)


def _cut_units(string: str) -> str:
    parts = string.split("\\text{ ")
    if len(parts) > 2:
        raise ValueError("more than one unit")
    return parts[0]


def _fix_sqrt(string: str) -> str:
    head, *rest = string.split("\\sqrt")
    return head + "".join("\\sqrt" + (s if s.startswith("{") else f"{{{s[0]}}}{s[1:]}") for s in rest)


def _fix_fractions(string: str) -> str:
    head, *rest = string.split("\\frac")
    result = head
    for part in rest:
        result += "\\frac"
        if part.startswith("{"):
            result += part
            continue
        if len(part) < 2:
            return string
        a, b, tail = part[0], part[1], part[2:]
        result += f"{{{a}}}{b}{tail}" if b == "{" else f"{{{a}}}{{{b}}}{tail}"
    return result


def _fix_slash(string: str) -> str:
    parts = string.split("/")
    if len(parts) != 2:
        return string
    try:
        a, b = int(parts[0]), int(parts[1])
    except ValueError:
        return string
    return f"\\frac{{{a}}}{{{b}}}" if string == f"{a}/{b}" else string


# --- sympy


def _clean(expr: str) -> str:
    """The first half of the normal form, before LaTeX becomes text."""
    expr = _unwrap_text(expr)
    for old, new in (("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")):
        expr = expr.replace(old, new)
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        expr = expr.replace(word, f"*10^{power}")
    for unit in _UNITS:
        expr = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", expr)
    expr = re.sub(r"\^ *\\circ", "", expr)
    if len(expr) > 0 and expr[0] == "{" and expr[-1] == "}":
        expr = expr[1:-1]
    expr = re.sub(r",\\! *", "", expr)
    number = as_float(expr)
    if number is not None and _is_integral(number):
        expr = str(round(number))
    return expr


def _canonical(expr: str) -> str:
    """The second half: text without LaTeX as elements are compared."""
    expr = re.sub(r"- *", "-", expr)
    expr = re.sub(r"([0-9]) +([0-9])", r"\1+\2", expr)  # mixed number
    expr = expr.replace(" ", "").replace("{", "").replace("}", "").lower()
    number = as_float(_strip_thousands(expr))
    if number is not None and _is_integral(number):
        expr = str(int(float(expr.replace(",", ""))))
    return expr


def _latex_to_text(expr: str) -> str:
    if "\\" not in expr:
        return expr
    from pylatexenc.latex2text import LatexNodes2Text

    expr = expr.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    try:
        text: str = LatexNodes2Text().latex_to_text(expr)
    except MemoryError:
        raise
    except Exception:  # also RecursionError: the text stays as it is
        return expr
    for old, new in (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*")):  # noqa: RUF001
        text = text.replace(old, new)
    return text.strip()


def _is_integral(number: float) -> bool:
    try:
        return abs(number - round(number)) <= _INTEGER_TOLERANCE
    except (OverflowError, ValueError):  # inf, nan
        return False


def _is_integer_text(text: str) -> bool:
    number = as_float(_strip_thousands(text))
    return number is not None and _is_integral(number)


def _strip_thousands(text: str) -> str:
    """``1,234,567`` -> ``1234567``. Other commas stay."""
    while True:
        shorter = _THOUSANDS.sub(r"\1\3\4", text)
        if shorter == text:
            return text
        text = shorter


def _split_tuple(expr: str) -> list[str]:
    expr = _strip_thousands(expr)
    if not expr:
        return []
    has_brackets = len(expr) > 2 and expr[0] in _BRACKETS and expr[-1] in _BRACKETS
    if has_brackets and not any(c in expr[1:-1] for c in _BRACKETS):
        return [element.strip() for element in expr[1:-1].split(",")]
    return [expr]


def _may_be_evaluated(expr: str) -> bool:
    letters = {c for c in expr.replace("sqrt", "").replace("frac", "") if c.isalpha()}
    if len(letters) > _MAX_LETTERS or not _FORMULA.fullmatch(expr):
        return False
    if any(pattern.search(expr) for pattern in (_COSTLY_POWER, _COSTLY_FACTORIAL, _PYTHON_NUMBER)):
        return False
    return _digits_at_most(expr) <= _MAX_DIGITS


def _digits_at_most(expr: str) -> int:
    """Upper bound of the digits of an integer in the result."""
    # n! has fewer than 3n digits for n < 1000.
    digits = len(expr) + sum(3 * int(number) for number in re.findall(r"([0-9]+)!", expr))
    # Exponents have one digit, so a power has at most nine times as many digits.
    times: int = 9 ** (expr.count(")^") + ("^" in expr))
    return digits * times


def _difference(truth: str, given: str) -> str:
    return f"({truth})-({given})".replace("**", "^")


def _are_equal_under_sympy(truth: str, given: str) -> bool:
    import sympy

    with reported(pass_memory_error):  # sympy raises many kinds of errors on text that is not a formula
        return bool(sympy.simplify(_parse(_difference(truth, given))) == 0)
    return False


def pass_memory_error(error: Exception) -> None:
    """Raise the error of a grader whose memory is at its limit, which ends its process."""
    if isinstance(error, MemoryError):
        raise error


def _parse(expr: str) -> Any:
    from sympy.parsing import sympy_parser

    # parse_expr evaluates Python code, and the text comes from a model: the formula is checked and the names are
    # limited.
    return sympy_parser.parse_expr(
        expr.replace("^", "**"),
        transformations=(*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application),
        global_dict=dict(_sympy_names()),
    )


@functools.cache
def _sympy_names() -> Mapping[str, Any]:
    """The names that a formula may use: a few of sympy's, without builtins."""
    import sympy

    # Without this entry ``eval`` adds all builtins.
    return {name: getattr(sympy, name) for name in _NAMES | _NAMES_OF_THE_PARSER} | {"__builtins__": {}}
