"""The command ``slime tasks``: the tasks of an environment as a file for ``--prompt-data``. Called by ``slime.cli``."""

from __future__ import annotations

import argparse
import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.utils.errors import ConfigError


def tasks(words: Sequence[str]) -> int:
    """Write the rows. Returns 0, or 2 for an environment that cannot be loaded or whose server fails."""
    parser = ArgumentParser(prog="slime tasks", description="Write tasks of an environment as rows for --prompt-data.")
    add_environment(parser)
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file")
    parser.add_argument("--begin", type=int, default=0, metavar="N", help="first task, default %(default)s")
    parser.add_argument("--count", type=int, metavar="N", help="number of tasks. Default: all")
    options = parser.parse_args(list(words))
    # Imports torch, which takes seconds: wrong options are reported before.
    from slime.environments.rollout import rows

    end = None if options.count is None else options.begin + options.count
    try:
        lines = [json.dumps(row) + "\n" for row in rows(options.name, options.options, options.begin, end)]
    except (ConfigError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.output.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} tasks of {options.name} in {options.output}")
    return 0


def add_environment(parser: ArgumentParser) -> None:
    """Add the arguments that name an environment."""
    parser.add_argument("name", metavar="NAME", help="such as reasoning-gym:chain_sum, or my_module:MyEnvironment")
    parser.add_argument(
        "--options", type=_options, default={}, metavar="JSON", help="keyword arguments of it, such as '{\"seed\": 1}'"
    )


def _options(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: give a JSON object")
    return value
