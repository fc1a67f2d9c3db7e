"""Flags of the batch room: micro-batches, and the dump and replay of rollouts. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from slime.utils.misc import flag

CUDA_ROW_MULTIPLE = 128
"""Default of --data-pad-size-multiplier on CUDA."""


@dataclass(frozen=True)
class BatchArgs:
    """Micro-batches."""

    use_dynamic_batch_size: bool = flag(
        False, "Fill micro-batches up to --max-tokens-per-gpu instead of --micro-batch-size samples."
    )
    max_tokens_per_gpu: int | None = flag(
        None, "Most tokens in a dynamic micro-batch, per rank. A longer sample is a micro-batch by itself."
    )
    balance_data: bool = flag(False, "Give every data-parallel rank about the same amount of compute.")
    balance_by_flops: bool = flag(
        False, "Form dynamic micro-batches of equal compute rather than first fit. Implies --balance-data."
    )
    share_prefixes: bool = flag(
        False,
        "Tokens that several samples of a micro-batch begin with pass the model once. The results are those of "
        "separate samples.",
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None, "The same for passes without gradients. Default: --max-tokens-per-gpu."
    )
    data_pad_size_multiplier: int | None = flag(
        None,
        "The packed tokens of a rank are padded to a multiple of this times the tensor-parallel size, so that sizes "
        f"repeat. Default: {CUDA_ROW_MULTIPLE} on CUDA, 1 on a CPU.",
    )


@dataclass(frozen=True)
class ReplayArgs:
    """Dump and replay of rollouts."""

    save_debug_rollout_data: str | None = flag(
        None,
        "Write the samples of every rollout to this file; {rollout_id} is replaced (evaluations: eval_N).",
        metavar="TEMPLATE",
    )
    load_debug_rollout_data: str | None = flag(
        None,
        "Train on rollouts dumped by --save-debug-rollout-data; starts no engine (--debug-train-only).",
        metavar="TEMPLATE",
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "Keep this fraction of the loaded samples, half from either end.", metavar="FRACTION"
    )
    load_forge_rollout_data: str | None = flag(
        None,
        "Dump that --rollout-function-path slime.rollout.forge_load.generate_rollout replays while engines stay up.",
        metavar="TEMPLATE",
    )
    save_debug_train_data: str | None = flag(
        None,
        "Write the trainer's batches to this file; {rollout_id} and {rank} are replaced.",
        metavar="TEMPLATE",
    )
    dump_details: str | None = flag(
        None,
        "Dump samples and batches of every rollout, and the tokenizer, below this directory.",
        metavar="DIR",
    )
