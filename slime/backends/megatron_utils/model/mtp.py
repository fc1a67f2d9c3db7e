"""Multi-token prediction: layers behind the decoder that predict one token further each, and the loss they learn from.

DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2. At depth k (from 1) position i combines the hidden state
of depth k - 1 with the embedding of token i + k and predicts token i + k + 1; depth 0 is the decoder.

Only the prediction layers learn from this loss: hidden states, embedding and head are taken as they are, so that the
policy's own gradient does not change. Without a mask of tokens to learn from, the layers do not run at all. Called by
``gpt``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor

from slime.algorithms.logprobs import log_probs_and_entropy

__all__ = ["attach_prediction_loss", "predicted_hidden_states"]


def attach_prediction_loss(
    model: Any, hidden: torch.Tensor, mask: torch.Tensor, vocab_size: int, inputs: dict[str, Any]
) -> torch.Tensor:
    """``hidden``, whose backward also starts that of the prediction loss.

    Args:
        hidden: ``[t, 1, h]`` behind the decoder's last norm, this rank's rows.
        mask: ``[1, T]`` 1 where the decoder's next token is trained on.
        inputs: the keyword arguments of Megatron's ``_postprocess``.
    """
    config, segments = model.config, inputs["packed_seq_params"]
    group = model.pg_collection.tp
    targets, _ = _roll(inputs["input_ids"], segments, model)
    states = predicted_hidden_states(model, hidden, inputs)
    scale = config.mtp_loss_scaling_factor / len(states)
    losses = []
    for state in states:
        targets, _ = _roll(targets, segments, model)
        mask, num_tokens = _roll(mask, segments, model)
        rows = mask[0].nonzero().squeeze(1)
        picked = _whole_sequence(state, model).index_select(0, rows)
        logits = _logits(model, picked)
        log_probs, _ = log_probs_and_entropy(
            logits, targets[0, rows], group=group if group.size() > 1 else None, vocab_size=vocab_size
        )
        loss = -(log_probs * mask[0, rows])
        segments.prediction_losses.append(torch.stack([loss.detach().sum(), mask.sum()]).float())
        # every context-parallel rank has its share of the tokens, and gradients are averaged over them
        factor = scale * segments.cp_size
        if not config.calculate_per_token_loss:
            total = num_tokens.float()
            if segments.cp_size > 1:
                dist.all_reduce(total, group=segments.cp_group)
            factor = factor / total.clamp(min=1.0)
        losses.append(loss * factor)
    return MTPLossAutoScaler.apply(hidden, torch.cat(losses))


def predicted_hidden_states(model: Any, hidden: torch.Tensor, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """``[t, 1, h]`` of every depth, behind its own last norm."""
    names = ("input_ids", "position_ids", "attention_mask", "packed_seq_params")
    ropes = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
    states = model.mtp(
        **{name: inputs[name] for name in (*names, *ropes)},
        hidden_states=hidden.detach(),
        embedding=lambda **tokens: model.embedding(**tokens).detach(),
    )
    return list(states.chunk(1 + len(model.mtp.layers), dim=0))[1:]


def _roll(tensor: torch.Tensor, segments: Any, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One position to the left inside every sequence, 0 at its end; and the sum of this rank's result."""
    rolled, total = roll_tensor(tensor, shifts=-1, dims=-1, cp_group=model.cp_group, packed_seq_params=segments)
    return rolled, total


def _whole_sequence(state: torch.Tensor, model: Any) -> torch.Tensor:
    if not model.config.sequence_parallel:
        return state
    return gather_from_sequence_parallel_region(state, tensor_parallel_output_grad=False, group=model.pg_collection.tp)


def _logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """``[n, 1, h]`` -> ``[n, V/tp]`` with the head's weights held fixed."""
    tied = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    weight = (model.output_layer.weight if tied is None else tied).detach()
    logits, _ = model.output_layer(hidden, weight=weight)
    return logits.squeeze(1)
