"""The batch identity: prompts x samples = global batch x steps, and the share of one data-parallel rank."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from itertools import islice

from slime.config.plan.layout import Layout, number, read
from slime.utils.prompt_sources import has_names, parse_path, parse_sources

__all__ = ["BatchPlan", "plan_batch"]

# Counting the lines of larger files takes seconds.
_COUNT_LINES_BELOW_BYTES = 64 * 1024**2
_ROWS_TO_MEASURE = 1000
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of one rollout and of the run.

    Attributes:
        micro_batches: per rank and step with a fixed micro-batch size; None with a token budget.
        token_budget: most tokens of a micro-batch over all context-parallel ranks. None without --use-dynamic-...
        num_prompts: rows of the prompt data, if counting them is cheap.
        sources: name, path, rows and share of the draws, if there are several sources.
        unique: share of tokens that pass the trainer with --share-prefixes, and where the lengths come from. None if
            they are unknown.
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
    sources: tuple[tuple[str, str, int | None, float], ...] = ()
    unique: tuple[float, str] | None = None


def plan_batch(args: Namespace, layout: Layout, unique_in_dump: float | None = None) -> BatchPlan:
    """The batch of every rollout.

    Args:
        unique_in_dump: share of the tokens of a dump that pass the trainer with --share-prefixes.
    """
    prompts, per_prompt = number(args, "rollout_batch_size", 1), number(args, "n_samples_per_prompt", 1)
    samples = prompts * per_prompt
    steps = number(args, "num_steps_per_rollout", 1)
    global_batch = number(args, "global_batch_size", samples)
    budget = read(args, "max_tokens_per_gpu") if read(args, "use_dynamic_batch_size") else None
    size = None if budget else number(args, "micro_batch_size", 1)
    sources = _sources(read(args, "prompt_data"))
    counts = [count for _, _, count, _ in sources]
    rows = None if None in counts or not counts else sum(count or 0 for count in counts)
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
        sources=sources if has_names(read(args, "prompt_data") or "") else (),
        unique=_unique(args, per_prompt) if unique_in_dump is None else (unique_in_dump, "rollout 0 of the dump"),
    )


def _unique(args: Namespace, per_prompt: int) -> tuple[float, str] | None:
    length, path = read(args, "rollout_max_response_len"), (read(args, "prompt_data") or "").split(",")[0]
    file, _ = parse_path(path)
    if not length or per_prompt < 2 or not file.endswith(".jsonl") or not os.path.isfile(file):
        return None
    with open(file, "rb") as lines:
        sizes = [len(line) for line in islice(lines, _ROWS_TO_MEASURE)]
    prompt = sum(sizes) / max(1, len(sizes)) / _BYTES_PER_TOKEN
    share = (prompt + per_prompt * length) / (per_prompt * (prompt + length))
    return share, f"at most, with responses of {length:,} tokens and {_BYTES_PER_TOKEN} bytes per token of a row"


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


def _sources(prompt_data: str | None) -> tuple[tuple[str, str, int | None, float], ...]:
    found = parse_sources(prompt_data) if prompt_data else []
    total = sum(source.weight for source in found)
    return tuple((source.name, source.path, _num_rows(source.path), source.weight / total) for source in found)


def _num_rows(path: str) -> int | None:
    """Rows of a Parquet file or a small .jsonl file, or of a slice of them. None for a large file and a data set."""
    file, part = parse_path(path)
    if not os.path.isfile(file):
        return None
    if file.endswith(".parquet"):
        try:
            from pyarrow import parquet

            count = parquet.read_metadata(file).num_rows
        except (ImportError, OSError, ValueError):  # the checks report it
            return None
    elif file.endswith(".jsonl") and os.path.getsize(file) <= _COUNT_LINES_BELOW_BYTES:
        with open(file, "rb") as lines:
            count = sum(1 for line in lines if line.strip())
    else:
        return None
    return len(range(count)[part]) if part else count
