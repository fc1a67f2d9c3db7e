"""A run that outlives the processes it is made of: begun again, in the same job, from its last checkpoint.

With ``--use-fault-tolerance`` a dead engine is replaced while the run goes on (``recovery``). What cannot be replaced
alone, because it holds a part of the run's state (a trainer rank, the rollout manager, the Data Buffer) or because all
of it is gone, ends the attempt: everything that is left is stopped, and the run starts as the same command would start
it, from what lies in ``--save``. The prompts go back with the weights, so none is lost and none is trained on twice.

Called by ``train.py`` and ``train_async.py`` around their loop. Knows nothing of the loop.
"""

from __future__ import annotations

import copy
import logging
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime.backends.training.checkpoint_source import inspect_checkpoint
from slime.ray.watch.failure_report import message_of
from slime.utils.errors import ProcessDied, StartFailed
from slime.utils.interrupt import interruptible

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3


def run_to_the_end(train: Callable[[Namespace], None], args: Namespace) -> None:
    """Call ``train(args)``, again after each death that a checkpoint makes good, up to three times.

    Raises:
        ProcessDied: without ``--use-fault-tolerance`` and ``--save``, and after the third restart.
        StartFailed: the first start failed: the second would not succeed either. A death during a later one is one
            more that a checkpoint makes good.
    """
    args = _named(args)
    for restarts in range(MAX_RESTARTS + 1):
        try:
            return train(copy.deepcopy(args))  # a run resolves more of it while it starts
        except ProcessDied as death:
            if not args.use_fault_tolerance or args.save is None:
                raise
            if restarts == 0 and isinstance(death, StartFailed):
                raise
            if restarts == MAX_RESTARTS:
                logger.error("giving up: the run was started again %d times", MAX_RESTARTS)
                raise
            args = continued(args)
            logger.warning(
                "%s\nstarting the run again (restart %d of at most %d) from %s",
                message_of(death),
                restarts + 1,
                MAX_RESTARTS,
                args.load or args.hf_checkpoint,
            )


def _named(args: Namespace) -> Namespace:
    """All attempts are one run to Weights & Biases; the run's folder has its name from the command line's checks."""
    if not args.use_wandb or args.wandb_run_id is not None:
        return args
    return Namespace(**vars(args) | {"wandb_run_id": uuid.uuid4().hex[:8]})


def continued(args: Namespace) -> Namespace:
    """The arguments of processes that start again from ``--save``: flags about the first ``--load`` no longer apply."""
    if inspect_checkpoint("--save", args.save) is None:
        return args  # nothing saved yet: as at first
    how_to_load = {
        "load": args.save,
        "ckpt_step": None,
        "start_rollout_id": None,
        "finetune": False,
        "no_load_optim": args.no_save_optim,
        "no_load_rng": args.no_save_rng,
    }
    return Namespace(**vars(args) | how_to_load)


# How a run ends badly: the sentence that explains it last on the screen, and a non-zero exit status.
#
# Ray wraps an actor's error into its own type and traceback; for errors that slime raised on purpose only their message
# is of use to the reader, so it is taken out again. Everything else keeps its traceback.


@contextmanager
def exit_status() -> Iterator[None]:
    """Turn expected errors into a message and status 1, Ctrl-C into 130 and SIGTERM into 143 after a stop in order."""
    try:
        with interruptible():
            yield
    except KeyboardInterrupt as interruption:
        print("interrupted: every process of the run was stopped.", file=sys.stderr)
        raise SystemExit(getattr(interruption, "status", 130)) from None
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
