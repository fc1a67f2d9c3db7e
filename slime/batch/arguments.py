"""Flags of the batch room: micro-batches, and the dump and replay of rollouts. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BatchArgs", "ReplayArgs"]


@dataclass(frozen=True)
class BatchArgs:
    """Micro-batches."""

    use_dynamic_batch_size: bool = field(
        default=False,
        metadata={"help": "Fill micro-batches up to --max-tokens-per-gpu instead of --micro-batch-size samples."},
    )
    max_tokens_per_gpu: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens in a dynamic micro-batch, per rank. A longer sample gets a micro-batch of its own."
        },
    )
    balance_data: bool = field(
        default=False, metadata={"help": "Give every data-parallel rank about the same amount of compute."}
    )
    balance_by_flops: bool = field(
        default=False,
        metadata={"help": "Form dynamic micro-batches of equal compute rather than first fit. Implies --balance-data."},
    )


@dataclass(frozen=True)
class ReplayArgs:
    """Dump and replay of rollouts."""

    save_debug_rollout_data: str | None = field(
        default=None,
        metadata={
            "metavar": "TEMPLATE",
            "help": "Write the samples of every rollout to this file; {rollout_id} is replaced (evaluations: eval_N).",
        },
    )
    load_debug_rollout_data: str | None = field(
        default=None,
        metadata={
            "metavar": "TEMPLATE",
            "help": "Train on rollouts dumped by --save-debug-rollout-data; starts no engine (--debug-train-only).",
        },
    )
    load_debug_rollout_data_subsample: float | None = field(
        default=None,
        metadata={"metavar": "FRACTION", "help": "Keep this fraction of the loaded samples, half from either end."},
    )
