"""The two drivers: the order of the steps of a run, and their command line.

``train.py`` and ``slime train`` run :func:`train`, ``train_async.py`` and ``slime train-async`` run
:func:`train_async`. The steps are methods of ``slime.ray.run.loop.Run``.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from slime.backends.training.arguments import CheckpointArgs
from slime.backends.training.rules import nothing_left
from slime.config.groups import RunConfig, from_args
from slime.observability.logging_utils import driver_logs
from slime.observability.tracking import run_directory
from slime.ray.engines.preloading import imports_begun
from slime.ray.run.header import HeaderArgs, print_header

# Ray and torch take seconds to import: --help and a wrong command line must not wait for them. So the functions below
# import them.


def train(args: Namespace) -> None:
    """The synchronous loop: generate, train, send the new weights, again."""
    from slime.ray.run.start import start_run

    with start_run(args) as run:
        # The engines generate with the trainer's weights from the first token on.
        run.sync_weights(num_trained=run.start_rollout_id)
        if run.num_rollout == 0 and args.eval_interval is not None:
            run.evaluate(rollout_id=0, num_trained=0)

        for rollout_id in run.rollout_ids:
            if rollout_id == 0 and args.eval_interval is not None and not args.skip_eval_before_train:
                run.evaluate(rollout_id, num_trained=0)

            rollout = run.generate(rollout_id)
            report = run.train(rollout_id, rollout)

            if run.saves_after(rollout_id):
                run.save(rollout_id)
            if run.is_due(rollout_id, args.update_weights_interval, at_epochs=False):
                run.sync_weights(num_trained=rollout_id + 1)
            run.report(rollout_id, rollout, report)
            if run.is_due(rollout_id, args.eval_interval):
                run.evaluate(rollout_id, num_trained=rollout_id + 1)


def train_async(args: Namespace) -> None:
    """The asynchronous loop: the next rollouts are generated while the trainer works on this one."""
    from slime.ray.run.start import start_run

    with start_run(args) as run:
        run.sync_weights(num_trained=run.start_rollout_id)
        prefetched = run.prefetch_rollouts()
        for rollout_id in run.rollout_ids:
            rollout = prefetched.take(rollout_id)
            report = run.train(rollout_id, rollout)

            if run.saves_after(rollout_id):
                run.save(rollout_id)
            if run.is_due(rollout_id, args.update_weights_interval, at_epochs=False):
                # One set of weights generates a rollout: the one in flight ends first.
                with prefetched.engines_idle():
                    run.sync_weights(num_trained=rollout_id + 1)
            run.report(rollout_id, rollout, report)
            if run.is_due(rollout_id, args.eval_interval):
                run.evaluate(rollout_id, num_trained=rollout_id + 1)


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run ``train.py``. Returns the exit status. ``argv`` defaults to the words of this process."""
    return run_command(train, "train.py", argv)


def main_async(argv: Sequence[str] | None = None) -> int | None:
    """Run ``train_async.py``, as :func:`main`."""
    return run_command(train_async, "train_async.py", argv, is_async=True)


def run_command(
    loop: Callable[[Namespace], None], program: str, argv: Sequence[str] | None = None, *, is_async: bool = False
) -> int | None:
    """Run ``loop(args)`` with the arguments of a command line. Returns the exit status. None is success.

    Args:
        program: file name of the driver, for ``--plan`` and the run's record.
        argv: the words after it. Default: those of this process.
        is_async: rollouts are generated while the trainer works.
    """
    words = sys.argv[1:] if argv is None else argv
    from slime import cli

    if "--plan" in words:
        return cli.main(["plan", program, *words])
    with cli.quiet_if_unread(), driver_logs(), imports_begun(words):
        from slime.ray.arguments import parse_args  # here, so that it does not delay the imports

        run_arguments(loop, parse_args(argv=argv, is_async=is_async))
    return None


def run_arguments(
    loop: Callable[[Namespace], None], args: Namespace, guard: AbstractContextManager[None] | None = None
) -> None:
    """Run ``loop(args)``, unless a finished run has done all of it. Without ``guard`` an error ends this process."""
    if nothing_left(args) is not None:  # a notice has the reason. Engines and trainer would start for nothing
        return
    print_header(from_args(HeaderArgs, args), run_directory(args))
    from slime.ray.run.cluster import running_cluster
    from slime.ray.run.restart import exit_status, run_to_the_end

    with guard or exit_status(from_args(CheckpointArgs, args)), running_cluster(args):
        run_to_the_end(loop, RunConfig.of(args))
