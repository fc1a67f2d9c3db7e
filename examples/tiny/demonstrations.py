"""A rollout function for the warm start of the examples: given responses, with tool output masked.

    --rollout-function-path examples.tiny.demonstrations.generate_rollout --loss-type sft_loss

A row's ``metadata.segments`` lists the parts of its response in order: ``[text, 1]`` for text of the model and
``[text, 0]`` for text of a tool. Chat conversations do not need it: ``slime.rollout.sft_rollout`` masks them.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data.processing import load_processor, load_tokenizer
from slime.data.sample import Sample
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.engine_request import prepare_prompt_ids

__all__ = ["generate_rollout"]


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """``--rollout-batch-size`` demonstrations as samples."""
    assert not evaluation, "the warm start has no evaluation set"
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
    groups = data_source.get_samples(args.rollout_batch_size)
    for (sample,) in groups:
        fill(sample, tokenizer, processor)
    return RolloutFnTrainOutput(samples=groups)


def fill(sample: Sample, tokenizer: Any, processor: Any = None) -> None:
    """Tokens, mask and text of one demonstration."""
    sample.tokens = prepare_prompt_ids(sample, tokenizer, processor)
    sample.loss_mask = []
    for text, is_trained in sample.metadata["segments"]:
        # Each part alone, so that no token spans a border of the mask.
        ids = tokenizer.encode(text, add_special_tokens=False)
        sample.tokens += ids
        # Over the response only: prompt tokens have no entry.
        sample.loss_mask += [int(is_trained)] * len(ids)
        sample.response += text
    sample.response_length = len(sample.loss_mask)
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED
