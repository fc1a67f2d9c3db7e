"""The kinds of simulated runs: their flags, and the users' functions that the flags name."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.simulation.cluster import copied
from tests.simulation.engines import FIRST_TOKEN
from tests.simulation.law import GROUP_SIZE
from tests.simulation.world import world

NUM_ROLLOUTS = 5
NUM_PROMPTS = 7


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """The reward function of the simulated runs."""
    return float(sample.response_length % 2)


def note_evaluation(rollout_id: int, args: Any, data: Any, *more: Any) -> bool:
    """Keep the weights whose tokens an evaluation scored. The log function of the simulated evaluations."""
    tokens = {
        token for result in data.values() for s in result["samples"] for token in s.tokens[-s.response_length or None :]
    }
    world().globals["evaluated"].append((rollout_id, sorted(token - FIRST_TOKEN for token in tokens)))
    return False


def keep_most(args: Any, samples: Any, **kwargs: Any) -> bool:
    """The dynamic filter of the simulated runs."""
    return int(samples[0].group_index) % 5 != 3


FULLY_ASYNC = "slime.rollout.fully_async_rollout"
_EVALUATION = [
    *("--eval-interval", "2", "--n-samples-per-eval-prompt", "1"),
    *("--custom-eval-rollout-log-function-path", "tests.simulation.modes.note_evaluation"),
]
_TWO_RANKS = ["--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "4"]
MODES: dict[str, tuple[bool, list[str]]] = {
    "train": (False, []),
    "train, filter": (False, ["--dynamic-sampling-filter-path", "tests.simulation.modes.keep_most"]),
    "train, partial": (False, ["--partial-rollout"]),
    "train_async": (True, ["--async-buffer-size", "2"]),
    "fully async": (
        True,
        ["--rollout-function-path", f"{FULLY_ASYNC}.generate_rollout_fully_async", "--max-weight-staleness", "1"],
    ),
    "train, evaluation": (False, _EVALUATION),
    "train, two ranks": (False, _TWO_RANKS),
    "train_async, two ranks, background evaluation": (
        True,
        [*_TWO_RANKS, *_EVALUATION, "--async-buffer-size", "2", "--background-eval"],
    ),
}


@functools.cache
def _task() -> tuple[str, str]:
    """(model, prompts)."""
    from tools.make_tiny_task import make_tiny_task

    folder = Path(tempfile.mkdtemp(prefix="slime-simulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    task = make_tiny_task(folder, num_sft=1, num_eval=1)
    prompts = folder / "few.jsonl"
    lines = Path(task.train).read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return task.model, str(prompts)


@functools.cache
def parsed(mode: str) -> Namespace:
    from slime.ray.arguments import parse_args

    model, prompts = _task()
    is_async, more = MODES[mode]
    argv = ["--hf-checkpoint", model, "--prompt-data", prompts, "--fp32", "--rollout-shuffle", "--use-fault-tolerance"]
    argv += ["--engines-port", "0"]
    argv += ["--weight-sync-proof", "none"]  # weights are numbers here
    argv += ["--rollout-num-gpus", "2", "--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "3"]
    argv += ["--num-rollout", str(NUM_ROLLOUTS), "--rollout-batch-size", "2", "--n-samples-per-prompt", str(GROUP_SIZE)]
    argv += ["--over-sampling-batch-size", "3", "--rollout-max-response-len", "8", "--save-interval", "2"]
    argv += ["--custom-rm-path", "tests.simulation.modes.reward", "--save", "/tmp/none", "--load", "/tmp/none"]
    if "--eval-interval" in more:
        argv += ["--eval-prompt-data", "few", prompts]
    return parse_args(argv=[*argv, *more], is_async=is_async)


def arguments(mode: str, root: Path) -> Namespace:
    args: Namespace = copied(parsed(mode))
    vars(args).update(save=f"{root}/save", load=f"{root}/save", output_dir=f"{root}/out", experiment_name="run")
    vars(args).update(num_rollout=world().globals["num_rollouts"])
    return args
