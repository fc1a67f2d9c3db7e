"""The batch identity: prompts x samples = global batch x steps, and the share of one data-parallel rank."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass

from slime.config.plan.layout import Layout, number, read

__all__ = ["BatchPlan", "plan_batch"]

# Counting the lines of larger files takes seconds.
_COUNT_LINES_BELOW_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of one rollout and of the run.

    Attributes:
        micro_batches: per rank and step with a fixed micro-batch size; None with a token budget.
        token_budget: most tokens of a micro-batch over all context-parallel ranks. None without --use-dynamic-...
        num_prompts: rows of the prompt file, if counting them is cheap.
        num_rollouts: of the whole run, None if unknown.
    """

    prompts: int
    samples_per_prompt: int
    samples: int
    global_batch: int
    steps: int
    is_consistent: bool
    over_sampling: int
    dp: int
    samples_per_rank: float
    micro_batch_size: int | None
    micro_batches: int | None
    token_budget: int | None
    max_response: int | None
    num_prompts: int | None
    num_rollouts: int | None
    run_length: str


def plan_batch(args: Namespace, layout: Layout) -> BatchPlan:
    """The batch of every rollout."""
    prompts, per_prompt = number(args, "rollout_batch_size", 1), number(args, "n_samples_per_prompt", 1)
    samples = prompts * per_prompt
    steps = number(args, "num_steps_per_rollout", 1)
    global_batch = number(args, "global_batch_size", samples)
    budget = read(args, "max_tokens_per_gpu") if read(args, "use_dynamic_batch_size") else None
    size = None if budget else number(args, "micro_batch_size", 1)
    rows = _num_rows(read(args, "prompt_data"))
    rollouts, why = _num_rollouts(args, rows, prompts)
    return BatchPlan(
        prompts=prompts,
        samples_per_prompt=per_prompt,
        samples=samples,
        global_batch=global_batch,
        steps=steps,
        is_consistent=samples == global_batch * steps,
        over_sampling=number(args, "over_sampling_batch_size", prompts),
        dp=layout.dp,
        samples_per_rank=global_batch / layout.dp,
        micro_batch_size=size,
        micro_batches=None if size is None else global_batch // (size * layout.dp),
        # The flag is per rank, and context-parallel ranks share a sample.
        token_budget=budget * layout.cp if budget else None,
        max_response=read(args, "rollout_max_response_len"),
        num_prompts=rows,
        num_rollouts=rollouts,
        run_length=why,
    )


def _num_rollouts(args: Namespace, rows: int | None, prompts: int) -> tuple[int | None, str]:
    """The number of rollouts, and the flags that decide it."""
    if read(args, "num_rollout") is not None:
        return int(args.num_rollout), "--num-rollout"
    epochs = read(args, "num_epoch")
    if epochs is None:
        return None, "neither --num-rollout nor --num-epoch"
    if rows is None:
        return None, f"--num-epoch {epochs} x (rows of the prompt file // {prompts})"
    return epochs * (rows // prompts), f"--num-epoch {epochs} x ({rows} rows // {prompts} prompts)"


def _num_rows(path: str | None) -> int | None:
    """Lines of a small .jsonl file. None for a large file and for Parquet."""
    if path is None or not path.endswith(".jsonl") or not os.path.isfile(path):
        return None
    if os.path.getsize(path) > _COUNT_LINES_BELOW_BYTES:
        return None
    with open(path, "rb") as lines:
        return sum(1 for line in lines if line.strip())
