"""An environment in the format of the verifiers hub: a module with ``load_environment``."""

from __future__ import annotations

import random
from typing import Any

import verifiers
from datasets import Dataset


def load_environment(count: int = 200, seed: int = 0) -> verifiers.Environment:
    """Sums of two digits, answered in one turn."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(1, 10), draw.randrange(1, 10)) for _ in range(count)]
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    parser = verifiers.Parser(str.strip)

    def is_right(parser: verifiers.Parser, completion: Any, answer: str, **_: Any) -> float:
        return float(parser.parse_answer(completion) == answer)

    rubric = verifiers.Rubric(funcs=[is_right], parser=parser)
    return verifiers.SingleTurnEnv(dataset=Dataset.from_list(rows), parser=parser, rubric=rubric)
