"""An environment in the format of the verifiers hub whose answer is found with a tool."""

from __future__ import annotations

from typing import Any

import verifiers
from datasets import Dataset


def load_environment() -> verifiers.Environment:
    def look_up(name: str) -> str:
        """Find the code of a name."""
        return {"amber": "4711"}[name]

    def is_right(completion: Any, answer: str, **_: Any) -> float:
        return float(completion[-1]["content"] == answer)

    rows = Dataset.from_list([{"question": "code of amber?", "answer": "4711"}])
    rubric = verifiers.Rubric(funcs=[is_right])
    return verifiers.ToolEnv(tools=[look_up], max_turns=4, dataset=rows, rubric=rubric)
