"""Supervised training through the same loop: a rollout is a batch of conversations with their loss masks.

For ``--rollout-function-path slime.rollout.sft_rollout.generate_rollout`` with ``--loss-type sft_loss``. No engine is
asked. Evaluation generates as usual.
"""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from typing import Any

from slime.data.loss_masks import MultiTurnLossMaskGenerator, get_response_lengths
from slime.data.processing import load_tokenizer
from slime.data.sample import Sample, SampleGroup
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

# After so many draws nearly all rows lack an assistant message.
_MAX_DRAWS = 10


@functools.lru_cache(maxsize=2)
def _mask_generator(hf_checkpoint: str, loss_mask_type: str) -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(load_tokenizer(hf_checkpoint, trust_remote_code=True), loss_mask_type)


def generate_rollout(
    args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """``--rollout-batch-size`` conversations. Rows without anything to train on are replaced and counted.

    Raises:
        ConfigError: ``--n-samples-per-prompt`` other than 1, or no prompt data.
        DataError: prompts that are not message lists, or only rows without an assistant message.
    """
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_buffer, evaluation=True)
    if not args.rollout_global_dataset or args.n_samples_per_prompt != 1:
        raise ConfigError(
            "sft_rollout trains on every row of --prompt-data once: use --n-samples-per-prompt 1 (now "
            f"{args.n_samples_per_prompt}) and drop --disable-rollout-global-dataset"
        )
    generator = _mask_generator(args.hf_checkpoint, args.loss_mask_type)
    groups: list[SampleGroup] = []
    skipped = 0
    for _ in range(_MAX_DRAWS):
        for group in data_buffer.get_samples(args.rollout_batch_size - len(groups)):
            (sample,) = group
            if _fill(sample, generator):
                groups.append(group)
            else:
                skipped += 1
        if len(groups) == args.rollout_batch_size:
            break
    else:
        raise DataError(
            f"--prompt-data {args.prompt_data}: {skipped} rows without an assistant message after a prompt, found "
            f"while filling a batch of {args.rollout_batch_size}"
        )
    return RolloutFnTrainOutput(samples=groups, metrics={"rollout/skipped_rows": skipped} if skipped else None)


def _fill(sample: Sample, generator: MultiTurnLossMaskGenerator) -> bool:
    """Fill in tokens and mask of one conversation. Returns False if no token of it is trained."""
    if not isinstance(sample.prompt, list):
        raise DataError(
            f"row {sample.index}: supervised training needs message lists in --input-key, and no --apply-chat-template"
        )
    ids, mask = generator.get_loss_mask(sample.prompt, sample.metadata.get("tools"))
    mask[0] = 0  # no earlier token could predict the first one
    length = get_response_lengths([mask])[0]
    if length == 0:
        return False
    sample.tokens = ids
    sample.response_length = length
    sample.loss_mask = mask[-length:]
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED
    return True
