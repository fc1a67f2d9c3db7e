"""GPTModel with a vision tower. Built by ``model`` for runs with images.

    first pipeline stage    pixels -> tower -> features, which take the place of the embeddings of image tokens
                            and, from blocks in its middle, features that the first layers add to their outputs
    every stage             rope turns with three positions: time, height, width

Every rank of the first stage computes all features of the micro-batch and keeps those of its own rows: under context
and sequence parallelism its gradients are a part of the whole, which Megatron sums as it does for norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.model.attention import DeepFeatures, PackedSegments
from slime.backends.megatron_utils.model.gpt import PackedGPTModel
from slime.backends.training.context_parallel import zigzag_rows
from slime.backends.training.media import Media
from slime.models.shape import VisionShape
from slime.utils.torchvision_cpu import install as allow_torchvision_on_cpu


class VisionGPTModel(PackedGPTModel):
    """A :class:`PackedGPTModel` whose micro-batches may have ``packed_seq_params.media``; without, it is no other.

    Args:
        vision: its tower, ``vision_model``, is on the first pipeline stage.
        tower_type: ``model_type`` of the tower in transformers.
    """

    def __init__(self, *args: Any, vision: VisionShape, tower_type: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._vision = vision
        if not self.pre_process:
            return
        self.vision_model = build_tower(
            tower_type, vision.config, recomputes=self.config.recompute_granularity == "full"
        )
        for parameter in self.vision_model.parameters():
            parameter.sequence_parallel = self.config.sequence_parallel  # each rank's gradient is that of its rows
        assert len(self.decoder.layers) >= vision.num_deep_layers, "a rule says so"
        for layer in self.decoder.layers[: vision.num_deep_layers]:
            layer.register_forward_hook(_add_deep_features, with_kwargs=True)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Casting leaves the frequencies of the tower's rope in fp32: positions of 16 bits would collide."""
        rope = self.vision_model.rotary_pos_emb if self.pre_process else None
        frequencies = None if rope is None else rope.inv_freq
        super()._apply(fn, recurse)
        if rope is not None and frequencies is not None:
            rope.inv_freq = frequencies.to(rope.inv_freq.device)
        return self

    def _preprocess(self, *args: Any, packed_seq_params: PackedSegments, **kwargs: Any) -> Any:
        decoder_input, rotary, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        media = packed_seq_params.media
        if media is None:
            return decoder_input, rotary, *rest
        if self.pre_process:
            decoder_input = self._with_features(decoder_input, media, packed_seq_params)
        rotary = rope_angles(media.positions, self.rotary_pos_emb.inv_freq, self._vision.rope_sections)
        return decoder_input, rotary, *rest

    def _with_features(self, embedded: torch.Tensor, media: Media, segments: PackedSegments) -> torch.Tensor:
        """``embedded`` ``[t, 1, h]`` with the features of this rank's image tokens in their places."""
        vision_model = self.vision_model
        output = vision_model(media.pixel_values.to(vision_model.dtype), grid_thw=media.grids, return_dict=True)
        mine, rows = _local_rows(media, segments, has_slices=self.config.sequence_parallel)
        features = output.pooler_output[mine].to(embedded.dtype)
        embedded = embedded.index_copy(0, rows, features.unsqueeze(1))
        deep = [feature[mine].to(embedded.dtype) for feature in getattr(output, "deepstack_features", None) or ()]
        leaves = [feature.detach().requires_grad_(feature.requires_grad) for feature in deep]
        segments.deep_features = DeepFeatures(rows, leaves)
        if any(leaf.requires_grad for leaf in leaves):
            joined: torch.Tensor = _DeepGradients.apply(embedded, leaves, *deep)  # type: ignore[no-untyped-call]
            return joined
        return embedded


class _DeepGradients(torch.autograd.Function):
    """Passes the embeddings on, and in backward the gradients that the first layers left with the deep features.

    The layers read detached copies: where activations are recomputed, each layer runs a backward pass of its own, which
    must end there and not run through the tower. Their gradients are complete once that of the embeddings is.
    """

    @staticmethod
    def forward(ctx: Any, embedded: torch.Tensor, leaves: list[torch.Tensor], *deep: torch.Tensor) -> torch.Tensor:
        ctx.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, *(leaf.grad for leaf in ctx.leaves)


def _add_deep_features(layer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """DeepStack (arXiv:2406.04334): h <- layer(h) + features of a middle block, at image tokens."""
    deep = kwargs["packed_seq_params"].deep_features
    if deep is None:
        return output
    hidden, context = output
    return hidden.index_add(0, deep.rows, deep.values[layer.layer_number - 1].unsqueeze(1)), context


def _local_rows(media: Media, segments: PackedSegments, *, has_slices: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Which features this rank needs, and the rows of its ``[t, 1, h]`` that they belong to."""
    num_tokens = media.positions.size(1)
    device = media.rows.device
    held = torch.arange(num_tokens, device=device)
    if segments.cp_size > 1:
        assert segments.cu_seqlens_q is not None, "packed_segments sets it"
        held = zigzag_rows(segments.cu_seqlens_q, segments.cp_rank, segments.cp_size)
    if has_slices:
        held = held.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
    local_row = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    local_row[held] = torch.arange(held.numel(), device=device)
    rows = local_row[media.rows]
    mine = (rows >= 0).nonzero().squeeze(1)
    return mine, rows[mine]


def rope_angles(positions: torch.Tensor, frequencies: torch.Tensor, sections: tuple[int, int, int]) -> torch.Tensor:
    """The angles of multimodal rope whose axes alternate: time, height, width, time, ... as Megatron wants them.

    Args:
        positions: int64 ``[3, T]``.
        frequencies: fp32 ``[d / 2]``; the first three times ``sections[1]`` of them turn with the height where their
            number is 1 modulo 3, likewise with the width; all others with the time.

    Returns:
        fp32 ``[T, 1, 1, d]``.
    """
    by_axis = positions.float().unsqueeze(-1) * frequencies.to(positions.device)
    angles = by_axis[0].clone()
    for axis in (1, 2):
        columns = slice(axis, 3 * sections[axis], 3)
        angles[:, columns] = by_axis[axis, :, columns]
    return torch.cat([angles, angles], dim=-1)[:, None, None, :]


def build_tower(model_type: str, config: Mapping[str, Any], *, recomputes: bool) -> torch.nn.Module:
    """The module of ``transformers`` without weights: ``(pixel_values, grid_thw=...)`` -> ``pooler_output`` ``[f, h]``.

    Args:
        model_type: of the tower in transformers. That of ``config`` is ignored: older checkpoints have another one.
        recomputes: the backward pass recomputes the activations of the blocks.
    """
    allow_torchvision_on_cpu()
    from transformers import AutoConfig, AutoModel

    settings = {name: value for name, value in config.items() if name != "model_type"}
    tower = AutoModel.from_config(
        AutoConfig.for_model(model_type, **settings), dtype=torch.float32, attn_implementation="sdpa"
    )
    if recomputes:
        tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return tower
