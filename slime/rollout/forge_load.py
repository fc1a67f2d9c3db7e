"""Rollout functions without generation: replay of dumps while the engines stay up, and a sleep.

``slime.rollout.forge_load.generate_rollout`` replays the dumps of ``--load-forge-rollout-data TEMPLATE``. Training,
weight sync and evaluation of the engines continue as usual. (``--load-debug-rollout-data`` replays dumps without
engines.) With a literal path, every rollout is that file. With ``{rollout_id}``, rollout n is file n, or file 0 if file
n does not exist. ``slime.rollout.forge_load.sleep`` keeps the engines up for work from outside.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NoReturn

from slime.config.groups import from_args
from slime.data.dump_file import dump_path, read_samples
from slime.rollout.arguments import RewardModelArgs
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_FLAG = "--load-forge-rollout-data"
_EVAL_SET = "forge_eval"


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The unchanged samples of a dump. An evaluation is the set ``forge_eval``, or empty if none was dumped.

    Raises:
        ConfigError: the flag is not given.
        DataError: the file of the rollout is missing or not a dump.
    """
    template = args.load_forge_rollout_data
    if template is None:
        raise ConfigError(f"slime.rollout.forge_load replays dumps: it needs {_FLAG} TEMPLATE.")
    if evaluation:
        return _evaluation(from_args(RewardModelArgs, args), template, rollout_id)
    path = _training_file(template, rollout_id)
    samples = read_samples(_FLAG, path)
    for sample in samples:
        sample.weight_versions = []  # made by other weights, so they must not be compared with those of the engines
    logger.info("rollout %d: %d samples of %s", rollout_id, len(samples), path)
    return RolloutFnTrainOutput(samples=samples)  # type: ignore[arg-type]  # a flat list is as good as groups


def _evaluation(rewards: RewardModelArgs, template: str, rollout_id: int) -> RolloutFnEvalOutput:
    path = dump_path(_FLAG, template, rollout_id=f"eval_{rollout_id}")
    # A literal path is a dump of training samples, which would be replayed as an evaluation.
    if _is_literal(template) or not path.is_file():
        return RolloutFnEvalOutput(data={})
    samples = read_samples(_FLAG, path)
    key = rewards.eval_reward_key or rewards.reward_key
    for sample in samples:
        if sample.reward is None:
            sample.reward = {key: 0.0, rewards.reward_key: 0.0} if key else 0.0
    scores = [sample.reward[key] if key else sample.reward for sample in samples]
    truncated = [sample.status is sample.Status.TRUNCATED for sample in samples]
    return RolloutFnEvalOutput(data={_EVAL_SET: {"rewards": scores, "truncated": truncated, "samples": samples}})


def _training_file(template: str, rollout_id: int) -> Path:
    wanted, first = (dump_path(_FLAG, template, rollout_id=number) for number in (rollout_id, 0))
    if wanted.is_file():
        return wanted
    if not first.is_file():
        raise DataError(f"{_FLAG} {template}: there is neither {wanted} nor {first}.")
    logger.warning("%s: there is no %s: rollout %d replays %s", _FLAG, wanted, rollout_id, first)
    return first


def _is_literal(template: str) -> bool:
    return dump_path(_FLAG, template, rollout_id=0) == dump_path(_FLAG, template, rollout_id=1)


def sleep(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Keep the engines up for work from outside, until the process ends. ``--rollout-timeout`` still applies."""
    while True:
        logger.info("sleeping; engines are up at %s:%s", args.sglang_router_ip, args.sglang_router_port)
        time.sleep(3600)
