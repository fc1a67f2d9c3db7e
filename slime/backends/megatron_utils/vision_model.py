"""GPTModel with a vision tower, for runs with images.

    first pipeline stage    pixels -> tower -> features, which replace the embeddings of image tokens;
                            with DeepStack, features of blocks in the middle are added to the output of the first layers
    every stage             rope rotates with three positions: time, height, width

Every rank of the first stage computes all features of the micro-batch and keeps those of its rows. With context and
sequence parallelism, its gradients are a part of the whole, and Megatron sums them as it does for norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.model.attention import DeepFeatures, PackedSegments, table_of
from slime.backends.megatron_utils.model.gpt import PackedGPTModel
from slime.backends.training.context_parallel import zigzag_rows
from slime.backends.training.media import Media
from slime.models.shape import VisionShape
from slime.utils.accelerator import allow_torchvision_on_cpu


class VisionGPTModel(PackedGPTModel):
    """A :class:`PackedGPTModel` whose micro-batches may have ``packed_seq_params.media``.

    Args:
        vision: shape of the tower, which is ``vision_model`` on the first pipeline stage.
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
            # Each rank has the gradient of its rows only; Megatron sums the gradients of marked parameters.
            parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        assert len(self.decoder.layers) >= vision.num_deep_layers, "a rule checks it"
        for layer in self.decoder.layers[: vision.num_deep_layers]:
            layer.register_forward_hook(_add_deep_features, with_kwargs=True)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The frequencies of the tower's rope stay fp32: in 16 bits, neighboring positions would get equal angles.
        rope: Any = self.vision_model.rotary_pos_emb if self.pre_process else None
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
        return decoder_input, rotary, *rest

    def rope_table(self, segments: PackedSegments) -> torch.Tensor:
        if segments.media is None:
            return super().rope_table(segments)
        angles = rope_angles(segments.media.positions, self.rotary_pos_emb.inv_freq, self._vision.rope_sections)
        return table_of(angles[_held_rows(segments, angles.size(0), angles.device)], self.config.params_dtype)

    def _with_features(self, embedded: torch.Tensor, media: Media, segments: PackedSegments) -> torch.Tensor:
        """``embedded`` ``[t, 1, h]`` with the features of this rank's image tokens in their places."""
        vision_model: Any = self.vision_model
        output = vision_model(media.pixel_values.to(vision_model.dtype), grid_thw=media.grids, return_dict=True)
        mine, rows = _local_rows(media, segments, has_slices=self.config.sequence_parallel)
        features = output.pooler_output[mine].to(embedded.dtype)
        embedded = embedded.index_copy(0, rows, features.unsqueeze(1))
        deep = [feature[mine].to(embedded.dtype) for feature in output.get("deepstack_features") or ()]
        # The layers' backward passes end here, see _DeepGradients.
        leaves = [feature.detach().requires_grad_(feature.requires_grad) for feature in deep]
        segments.deep_features = DeepFeatures(rows, leaves)
        if any(leaf.requires_grad for leaf in leaves):
            joined: torch.Tensor = _DeepGradients.apply(embedded, leaves, *deep)  # type: ignore[no-untyped-call]
            return joined
        return embedded


class _DeepGradients(torch.autograd.Function):
    """The identity on embeddings; backward also returns the gradients that the first layers left in the deep features.

    The layers read detached copies. If activations are recomputed, each layer runs a separate backward pass, which must
    end there and not continue through the tower. Those gradients are complete when that of the embeddings is.
    """

    @staticmethod
    def forward(ctx: Any, embedded: torch.Tensor, leaves: list[torch.Tensor], *deep: torch.Tensor) -> torch.Tensor:
        ctx.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, *(leaf.grad for leaf in ctx.leaves)


def _add_deep_features(layer: Any, inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """DeepStack (arXiv:2406.04334): h <- layer(h) + features of a middle block, at image tokens."""
    deep = kwargs["packed_seq_params"].deep_features
    if deep is None:
        return output
    hidden, context = output
    return hidden.index_add(0, deep.rows, deep.values[layer.layer_number - 1].unsqueeze(1)), context


def _local_rows(media: Media, segments: PackedSegments, *, has_slices: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the features that this rank needs, and their rows in its ``[t, 1, h]``."""
    num_tokens = media.positions.size(1)
    device = media.rows.device
    held = _held_rows(segments, num_tokens, device)
    if has_slices:
        held = held.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
    local_row = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    local_row[held] = torch.arange(held.numel(), device=device)
    rows = local_row[media.rows]
    mine = (rows >= 0).nonzero().squeeze(1)
    return mine, rows[mine]


def _held_rows(segments: PackedSegments, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Rows of the whole micro-batch that this context-parallel rank has."""
    if segments.cp_size == 1:
        return torch.arange(num_tokens, device=device)
    assert segments.cu_seqlens_q is not None, "packed_segments sets it"
    return zigzag_rows(segments.cu_seqlens_q, segments.cp_rank, segments.cp_size)


def rope_angles(positions: torch.Tensor, frequencies: torch.Tensor, sections: tuple[int, int, int]) -> torch.Tensor:
    """The angles of multimodal rope with alternating axes: time, height, width, time, ... for both halves of a head.

    Args:
        positions: int64 ``[3, T]``.
        frequencies: fp32 ``[d / 2]``. Of the first ``3 * sections[1]``, those with an index of 1 modulo 3 rotate with
            the height, likewise 2 modulo 3 with the width. All others rotate with the time.

    Returns:
        fp32 ``[T, d]``.
    """
    by_axis = positions.float().unsqueeze(-1) * frequencies.to(positions.device)
    angles = by_axis[0].clone()
    for axis in (1, 2):
        columns = slice(axis, 3 * sections[axis], 3)
        angles[:, columns] = by_axis[axis, :, columns]
    return torch.cat([angles, angles], dim=-1)


def build_tower(model_type: str, config: Mapping[str, Any], *, recomputes: bool) -> torch.nn.Module:
    """The module of ``transformers`` without weights: ``(pixel_values, grid_thw=...)`` -> ``pooler_output`` ``[f, h]``.

    Args:
        model_type: of the tower in transformers. That of ``config`` is ignored: older checkpoints have another one.
        recomputes: the backward pass recomputes the activations of the blocks.
    """
    allow_torchvision_on_cpu()
    from transformers import AutoConfig, AutoModel

    settings = {name: value for name, value in config.items() if name != "model_type"}
    tower: Any = AutoModel.from_config(
        AutoConfig.for_model(model_type, **settings), dtype=torch.float32, attn_implementation="sdpa"
    )
    if recomputes:
        tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert isinstance(tower, torch.nn.Module)
    return tower
