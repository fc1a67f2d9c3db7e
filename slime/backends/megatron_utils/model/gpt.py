"""GPTModel whose LM head only sees the rows it is asked for. Built by ``model``.

The logits are by far the largest activation. Of a packed micro-batch only the rows that predict response tokens are
needed, so the others are dropped before the head: prompts, padding and the rows of other context-parallel ranks cost
nothing.

Under sequence parallelism each tensor rank holds a slice of the rows. The slices are gathered first and the rows picked
from the whole; then the head's backward all-reduces ``[n, 1, h]`` over the tensor ranks, and the gather's backward only
cuts each rank's slice out: the sum happens once.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from slime.backends.megatron_utils.model.mtp import attach_prediction_loss

__all__ = ["PackedGPTModel", "unwrap"]


class PackedGPTModel(GPTModel):
    """Called with packed sequences only; ``packed_seq_params`` is a ``PackedSegments``.

    Returns logits ``[1, n, V/tp]`` in the dtype of the weights for the n rows in ``packed_seq_params.head_rows`` (all
    rows if that is None); hidden states on other pipeline stages than the last. Multi-token-prediction layers run where
    ``packed_seq_params.prediction_mask`` says which tokens they learn from.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process and self.output_layer.sequence_parallel:
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.post_process:
            return super()._postprocess(hidden_states, *args, **kwargs)
        segments = kwargs["packed_seq_params"]
        if self.mtp_process and segments.prediction_mask is not None and torch.is_grad_enabled():
            mask, vocab_size = segments.prediction_mask, segments.vocab_size
            hidden_states = attach_prediction_loss(self, hidden_states, mask, vocab_size, kwargs)
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        if segments.head_rows is not None:
            hidden_states = hidden_states.index_select(0, segments.head_rows)
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_states, weight=tied)
        return logits.transpose(0, 1).contiguous()


def unwrap(model: Any) -> GPTModel:
    """The model inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
