"""The command ``slime replay``. Called by ``slime.cli``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.data.sample import Sample
from slime.observability.run_info import read_run_info
from slime.utils.errors import SlimeError

__all__ = ["replay"]

_SHOWN = ("loss", "pg_loss", "kl_loss", "entropy_loss", "ppo_kl", "train_rollout_logprob_abs_diff", "grad_norm")


def replay(words: Sequence[str]) -> int:
    """Generate, score and train on one recorded sample in this process.

    Returns:
        0 when the tokens and the reward are those of the record, 1 when they differ, 2 when it cannot be done.
    """
    parser = argparse.ArgumentParser(
        prog="slime replay",
        description="One recorded sample again in one ordinary process: your generate function against recorded "
        "replies, your reward, and the loss. breakpoint() works in all of them.",
    )
    parser.add_argument("run", type=Path, help="folder of the run: <output-dir>/<experiment>")
    parser.add_argument("--rollout", type=int, required=True, metavar="R")
    parser.add_argument("--sample", type=int, required=True, metavar="S", help="its place in the rollout, from 0")
    parser.add_argument("--no-train", action="store_true", help="generate and score only: needs no model")
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="weights for the loss; default: the run's own")
    options = parser.parse_args(list(words))
    if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del os.environ["PYTHONBREAKPOINT"]  # left by a process of Ray, whose debugger waits for a remote client
    try:
        return _replay(options)
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _replay(options: argparse.Namespace) -> int:
    from slime.replay import run as steps

    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # tracebacks of the user's functions
    folder = options.run.resolve()
    info = read_run_info(folder)
    recorded = steps.load_recorded(folder, options.rollout, options.sample)
    args, weights = steps.replay_args(info, recorded.version, options.hf_checkpoint)
    replayed = steps.generate(args, recorded)
    is_same = _compare(recorded.sample, replayed.samples)
    if not options.no_train:
        step, means = steps.train(args, replayed, options.rollout)
        print(f"\nloss of this sample, with the weights of {weights}")
        _table({name: step[name] for name in _SHOWN if name in step})
        _table({name: means[name] for name in ("advantages", "log_probs", "rollout_log_probs") if name in means})
    return 0 if is_same else 1


def _compare(recorded: Sample, made: Sequence[Sample]) -> bool:
    """Print the record and what was made; True when they are equal."""
    if not made:
        print("the execution made no sample")
        return False
    # of several rows that one execution made, the record is one
    again = next((row for row in made if row.tokens == recorded.tokens), made[0])
    if len(made) > 1:
        print(f"the execution made {len(made)} samples, of which the record should be one")
    rows = [
        ("status", recorded.status.value, again.status.value),
        ("response tokens", recorded.response_length, again.response_length),
        ("trained tokens", recorded.effective_response_length, again.effective_response_length),
        ("reward", recorded.reward, again.reward),
    ]
    print(f"{'':<18} {'recorded':>24} {'now':>24}")
    for name, before, now in rows:
        print(f"{name:<18} {before!s:>24} {now!s:>24}{'' if before == now else '   differs'}")
    same_tokens = recorded.tokens == again.tokens
    print(f"{'tokens':<18} {'the same' if same_tokens else 'differ':>49}")
    print(f"\n{again.prompt}{again.response}")
    return same_tokens and all(before == now for _, before, now in rows)


def _table(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        print(f"  {name:<32} {value:.6g}")
