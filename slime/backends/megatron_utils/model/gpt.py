"""GPTModel on packed sequences: LM head on selected rows, a critic's value head, multi-token prediction.

The logits are by far the largest activation. Only the rows that predict response tokens go through the head: prompts,
padding and the rows of other context-parallel ranks cost nothing.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): at depth k (from 1) position i combines the hidden
state of depth k - 1 with the embedding of token i + k and predicts token i + k + 1. Depth 0 is the decoder. Without a
mask of tokens to learn from, the layers do not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor

from slime.algorithms.logprobs import log_probs_and_entropy


class PackedGPTModel(GPTModel):
    """Called with packed sequences only: ``packed_seq_params`` is a ``PackedSegments``.

    Returns logits ``[1, n, V/tp]`` in the dtype of the weights for the n rows in ``packed_seq_params.head_rows`` (all
    rows if that is None), or hidden states on other pipeline stages than the last. Multi-token-prediction layers run if
    ``packed_seq_params.prediction_mask`` is given.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # ``_postprocess`` gathers the slices of all tensor ranks before it picks rows. The head's backward then
        # all-reduces ``[n, 1, h]``, and the gather's backward only cuts each rank's slice out: the sum happens once.
        if self.post_process and self.output_layer.sequence_parallel:
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True
        # ``_preprocess`` replaces Megatron's angles, which keep a table of every length that they have seen.
        self.position_embedding_type = "none"
        for layer in self.mtp.layers if self.mtp_process else ():
            layer.transformer_layer.register_forward_pre_hook(_mask_padding, with_kwargs=True)

    def _preprocess(self, *args: Any, packed_seq_params: Any, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        segments = packed_seq_params
        segments.prepare(position_ids, self.config)
        decoder_input, rotary, cosines, sines, offset, _, *rest = super()._preprocess(
            *args, packed_seq_params=segments, position_ids=position_ids, **kwargs
        )
        if not self.config.multi_latent_attention:
            rotary = self.rope_table(segments)
        return decoder_input, rotary, cosines, sines, offset, segments.is_padding, *rest

    def rope_table(self, segments: Any) -> torch.Tensor:
        """The table of ``model.attention`` for this rank's rows."""
        table: torch.Tensor = segments.rotation(self.rotary_pos_emb, self.config.params_dtype)
        return table

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.post_process:
            return super()._postprocess(hidden_states, *args, **kwargs)
        segments = kwargs["packed_seq_params"]
        # Not in passes for log-probs.
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


def _mask_padding(layer: Any, inputs: Any, kwargs: dict[str, Any]) -> Any:
    """Megatron's prediction layers do not pass the mask on to their routers."""
    return inputs, kwargs | {"padding_mask": kwargs["packed_seq_params"].is_padding}


def unwrap(model: Any) -> GPTModel:
    """The model inside Megatron's wrappers."""
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.module
    return model


VALUE_HEAD_PARAMETERS = ("output_layer.weight", "output_layer.bias")


class ValueHead(torch.nn.Linear):
    """``[..., h]`` -> fp32 ``[..., 1]``, called as Megatron calls its output layer.

    Every tensor-parallel rank has the whole head and sees the whole hidden states, so values and gradients are equal on
    all of them and nothing is summed.
    """

    sequence_parallel = False

    def __init__(self, hidden_size: int, *, init_std: float, seed: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)  # the same head on every rank
        with torch.no_grad():
            self.weight.copy_(torch.randn(1, hidden_size, generator=generator) * init_std)
            self.bias.zero_()
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]  # keeps it out of Muon's matrices

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()), None


def add_value_head(chunks: Sequence[torch.nn.Module], *, init_std: float, seed: int) -> None:
    """Replace the output layer of the chunk that has one (last pipeline stage only)."""
    for chunk in chunks:
        model: Any = unwrap(chunk)
        assert isinstance(model, GPTModel), f"a {type(model).__name__} has no output layer to replace"
        if model.post_process:
            old = next(model.decoder.parameters())
            head = ValueHead(model.config.hidden_size, init_std=init_std, seed=seed, dtype=old.dtype)
            model.output_layer = head.to(old.device)


def attach_prediction_loss(
    model: Any, hidden: torch.Tensor, mask: torch.Tensor, vocab_size: int, inputs: dict[str, Any]
) -> torch.Tensor:
    """Return ``hidden``. Its backward pass also starts that of the prediction loss.

    Args:
        hidden: ``[t, 1, h]`` after the decoder's last norm, this rank's rows.
        mask: ``[1, T]``, 1 if the decoder's next token is trained on.
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
        rows = mask[0].nonzero().squeeze(1)  # other tokens have no loss: their logits are not computed
        picked = _whole_sequence(state, model).index_select(0, rows)
        logits = _logits(model, picked)
        log_probs, _ = log_probs_and_entropy(
            logits, targets[0, rows], group=group if group.size() > 1 else None, vocab_size=vocab_size
        )
        loss = -(log_probs * mask[0, rows])
        segments.prediction_losses.append(torch.stack([loss.detach().sum(), mask.sum()]).float())
        # Gradients are averaged over context-parallel ranks, and each of them has only its share of the tokens.
        factor = scale * segments.cp_size
        if not config.calculate_per_token_loss:
            total = num_tokens.float()
            if segments.cp_size > 1:
                dist.all_reduce(total, group=segments.cp_group)
            factor = factor / total.clamp(min=1.0)
        losses.append(loss * factor)
    return MTPLossAutoScaler.apply(hidden, torch.cat(losses))


def predicted_hidden_states(model: Any, hidden: torch.Tensor, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """``[t, 1, h]`` of every depth, after its last norm."""
    names = ("input_ids", "position_ids", "attention_mask", "packed_seq_params")
    ropes = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
    states = model.mtp(
        **{name: inputs[name] for name in (*names, *ropes)},
        # Detached like the embedding and the head, so that the policy's gradient does not change.
        hidden_states=hidden.detach(),
        embedding=lambda **tokens: model.embedding(**tokens).detach(),
    )
    return list(states.chunk(1 + len(model.mtp.layers), dim=0))[1:]  # the first is the decoder's


def _roll(tensor: torch.Tensor, segments: Any, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(``tensor`` shifted left by one inside every sequence, with 0 at its end; the sum of this rank's result)."""
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
