"""The command of ``train.py`` and ``train_async.py``: parse, start a cluster, run, restart, exit status."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable

from slime.backends.training.arguments import CheckpointArgs
from slime.backends.training.checkpoint_source import nothing_left
from slime.config.groups import from_args
from slime.ray.arguments import parse_args


def run_command(train: Callable[[Namespace], None], program: str, *, is_async: bool = False) -> int | None:
    """Run ``train(args)`` with the arguments of the command line. Returns the exit status. None is success.

    Args:
        train: the loop of the driver.
        program: file name of the driver, for ``--plan``.
        is_async: rollouts are generated while the trainer works.
    """
    argv = sys.argv[1:]
    if "--plan" in argv:
        from slime.cli import main as slime

        return slime(["plan", program, *argv])
    args = parse_args(is_async=is_async)
    if (reason := nothing_left(args)) is not None:  # engines and trainer would start for nothing
        print(f"--num-rollout {reason}.")
        return None
    # Ray and torch take seconds to import: --help and a wrong command line must not wait for them.
    from slime.observability.logging_utils import configure_logger
    from slime.ray.run.cluster import running_cluster
    from slime.ray.run.restart import exit_status, run_to_the_end

    configure_logger()
    with exit_status(from_args(CheckpointArgs, args)), running_cluster(args):
        run_to_the_end(train, args)
    return None
