"""The end of a run and its restart after a death: error messages, exit status, the next attempt.

With ``--use-fault-tolerance`` a dead engine is replaced while the run goes on (``engines.recovery``). A trainer rank,
the rollout manager and the Data Buffer hold parts of the run's state and cannot be replaced alone. Their death ends the
attempt: all processes are stopped, and the run starts as the same command would start it, from the checkpoint in
``--save``. The data state is part of the checkpoint, so no prompt is lost and none is trained on twice.
"""

from __future__ import annotations

import copy
import logging
import sys
import traceback
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime.backends.training.arguments import CheckpointArgs
from slime.backends.training.checkpoint_source import inspect_checkpoint
from slime.config.arguments import FaultToleranceArgs
from slime.config.groups import RunConfig
from slime.observability.arguments import WandbArgs
from slime.observability.logging_utils import RUN_LOG
from slime.ray.watch.failure_report import message_of
from slime.rollout.arguments import GenerationArgs
from slime.utils.async_utils import Interrupted, interruptible
from slime.utils.errors import ConfigError, ProcessDied, StartFailed

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3


def run_to_the_end(train: Callable[[Namespace], None], config: RunConfig) -> None:
    """Call ``train(args)``, and again after a death that a checkpoint can repair, up to three times.

    Raises:
        ProcessDied: without ``--use-fault-tolerance`` and ``--save``, and after the third restart.
        StartFailed: the first start failed: the second would not succeed either. A failure of a later start counts as
            another death.
    """
    wandb, restarts_dead = config[WandbArgs], config[FaultToleranceArgs].use_fault_tolerance
    if wandb.use_wandb and wandb.wandb_run_id is None:
        config = config.with_values(wandb_run_id=uuid.uuid4().hex[:8])  # all attempts are one run for Weights & Biases
    for restarts in range(MAX_RESTARTS + 1):
        try:
            return train(copy.deepcopy(config).args)  # hooks keep state in args, and a restart begins without it
        except ProcessDied as death:
            if not restarts_dead or config[CheckpointArgs].save is None:
                raise
            if restarts == 0 and isinstance(death, StartFailed):
                raise
            if restarts == MAX_RESTARTS:
                logger.error("giving up: the run was started again %d times", MAX_RESTARTS)
                raise
            config = continued(config)
            logger.warning(
                "%s\nstarting the run again (restart %d of at most %d) from %s",
                message_of(death),
                restarts + 1,
                MAX_RESTARTS,
                config[CheckpointArgs].load or config[GenerationArgs].hf_checkpoint,
            )


def continued(config: RunConfig) -> RunConfig:
    """The arguments of processes that start again from the last checkpoint in ``--save``.

    Flags about the first ``--load`` (step, fine-tuning, parts to leave out) do not apply to it.
    """
    saved = config[CheckpointArgs]
    if saved.save is None or inspect_checkpoint("--save", saved.save) is None:
        return config  # nothing is saved yet: start as the first time
    parts = {"no_load_optim": saved.no_save_optim, "no_load_rng": saved.no_save_rng}
    return config.with_values(load=saved.save, ckpt_step=None, start_rollout_id=None, finetune=False, **parts)


@contextmanager
def exit_status(checkpoints: CheckpointArgs | None = None) -> Iterator[None]:
    """Turn expected errors into a message and status 1, Ctrl-C into 130 and SIGTERM into 143 after an orderly stop.

    Args:
        checkpoints: of a run. The message of an interruption names the last one.
    """
    try:
        with interruptible():
            yield
    except KeyboardInterrupt as interruption:
        goes_on = "" if checkpoints is None else _goes_on(checkpoints.save, checkpoints.load)
        print(f"interrupted: every process of the run was stopped.{goes_on}", file=sys.stderr)
        raise SystemExit(interruption.status if isinstance(interruption, Interrupted) else 130) from None
    except Exception as error:  # any error of a user's function may come here. Bugs keep their traceback
        message = message_of(error)
        if message is None:
            _name_log(traceback.format_exc().splitlines())
            raise
        _name_log(f"error: {message}".splitlines())
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _name_log(report: list[str]) -> None:
    """Add the report on a failure to the full log, and name the log on the terminal."""
    if RUN_LOG.path is not None:
        RUN_LOG.write(report)
        print(f"full log: {RUN_LOG.path}", file=sys.stderr)


def _goes_on(save: str | None, load: str | None) -> str:
    """Where a stopped run can go on, as a sentence."""
    try:
        source = None if save is None else inspect_checkpoint("--save", save)
    except ConfigError:  # a damaged checkpoint: the next start explains it
        return ""
    if source is None or not source.is_training_state:
        return " No checkpoint was saved: the same command starts anew."
    how = "The same command" if load == save else f"The same command with --load {save}"
    return f" {how} continues with rollout {source.iteration + 1}."
