"""The commands ``slime doctor env`` and ``slime tasks``. Called by ``slime.cli``."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from slime.config.groups import json_object
from slime.doctor import Finding, examine, exit_status, fail, render, render_json
from slime.utils.errors import kept, named

_ALL_EPISODES = 20  # times the limit of one episode: a thread that blocks the event loop ends here


def env(words: Sequence[str]) -> int:
    """Test an environment. Returns 0, or 1 if a check failed.

    Raises:
        ConfigError, ConnectionError: the environment or its server cannot be used.
    """
    options = _parse(words)
    faulthandler.dump_traceback_later(_ALL_EPISODES * options.timeout, exit=True, file=2)
    try:
        findings, is_late = findings_of(options)
    finally:
        faulthandler.cancel_dump_traceback_later()
    (render_json if options.json else render)(findings)
    if is_late:
        sys.stdout.flush()
        os._exit(exit_status(findings))  # a thread of the environment may hang, and Python would wait for it
    return exit_status(findings)


def _parse(words: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="slime doctor env",
        description="Test an environment with a scripted model: the same tasks everywhere, no answer in a prompt, "
        "rewards in range and for right answers only, isolation, time limits, tokens per turn. Needs no engine.",
    )
    _add_environment(parser)
    parser.add_argument("--tasks", type=int, default=6, metavar="N", help="tasks to play, default %(default)s")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="of one episode, default %(default)g s"
    )
    parser.add_argument("--max-turn-tokens", type=int, default=8192, metavar="N", help="default %(default)s")
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="counts tokens. Default: 4 characters are a token")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(list(words))


def findings_of(options: Namespace) -> tuple[list[Finding], bool]:
    """(findings, whether an episode did not return in time).

    Args:
        options: ``name``, ``options``, ``tasks``, ``timeout``, ``max_turn_tokens``, ``hf_checkpoint``.

    Raises:
        ConfigError: the environment cannot be loaded.
    """
    from slime.doctor.environment_checks import CHECKS, Trial, run_episodes
    from slime.environments import load

    environment = load(options.name, **options.options)
    total = len(environment)
    if total < 1:
        return [fail("tasks", "the environment has none", "let __len__ return the number of tasks")], False
    indices = sorted({number * total // options.tasks for number in range(options.tasks)})
    errors: list[Exception] = []
    with kept(errors):  # of the user's code
        tasks = [environment.task(index) for index in indices]
    if errors:
        value = f"task(index) raised {named(errors[0])}"
        return [fail("tasks", value, f"every index from 0 to {total - 1} must give a task")], False
    limits = {"timeout_s": options.timeout, "max_turn_tokens": options.max_turn_tokens}
    trial = Trial(options.name, options.options, environment, indices, tasks, **limits)
    if options.hf_checkpoint:
        from slime.data.processing import load_tokenizer

        tokenizer = load_tokenizer(options.hf_checkpoint, trust_remote_code=True)
        trial.count_tokens = lambda text: len(tokenizer.encode(text, add_special_tokens=False))
    # Not asyncio.run(), which waits for episodes that ignore their cancellation.
    asyncio.new_event_loop().run_until_complete(run_episodes(trial))
    is_late = any(played.is_late for played in (*trial.episodes, trial.failing, trial.talking))
    return examine(trial, CHECKS), is_late or trial.cancelled.is_stuck


def tasks(words: Sequence[str]) -> int:
    """Write tasks of an environment as prompt data. Returns 0. Raises the errors of :func:`env`."""
    parser = ArgumentParser(prog="slime tasks", description="Write tasks of an environment as rows for --prompt-data.")
    _add_environment(parser)
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file")
    parser.add_argument("--begin", type=int, default=0, metavar="N", help="first task, default %(default)s")
    parser.add_argument("--count", type=int, metavar="N", help="number of tasks. Default: all")
    options = parser.parse_args(list(words))
    # Imports torch, which takes seconds: wrong options are reported before.
    from slime.environments.rollout import rows

    end = None if options.count is None else options.begin + options.count
    lines = [json.dumps(row) + "\n" for row in rows(options.name, options.options, options.begin, end)]
    options.output.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} tasks of {options.name} in {options.output}")
    return 0


def _add_environment(parser: ArgumentParser) -> None:
    """Add the arguments that name an environment."""
    parser.add_argument("name", metavar="NAME", help="such as reasoning-gym:chain_sum, or my_module:MyEnvironment")
    parser.add_argument(
        "--options",
        type=json_object,
        default={},
        metavar="JSON",
        help="keyword arguments of it, such as '{\"seed\": 1}'",
    )
