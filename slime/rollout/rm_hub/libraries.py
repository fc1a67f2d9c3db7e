"""``--rm-type math_verify``: grading with the math-verify library, which knows sets, percentages and powers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

from slime.rollout.rm_hub.grader_pool import MAX_CHARS, grade_in_process
from slime.utils.errors import DataError


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

    try:
        gold = parse(truth, parsing_timeout=None)  # its own limits are signals, which C code does not see
        return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
    except MemoryError:
        raise
    # The library raises many kinds of errors on text that it cannot read. Such an answer is wrong.
    except Exception:
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
