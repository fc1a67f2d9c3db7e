"""How a family maps Hugging Face tensors to Megatron parameters: a table of rules that works in both directions.

Names are those of megatron-core's local layer spec; ``{layer}`` stands for the global layer number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime.backends.megatron_utils.model_shape import ModelShape

__all__ = ["Concat", "Copy", "Family", "QKV", "Rule"]


@dataclass(frozen=True)
class Copy:
    """One tensor, unchanged."""

    megatron: str
    hf: str

    @property
    def sources(self) -> Sequence[str]:
        return (self.hf,)

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        return tensors[0]

    def to_hf(self, tensor: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]:
        return (tensor,)


@dataclass(frozen=True)
class Concat:
    """Equal parts stacked along dimension 0: gate and up projections of a gated MLP."""

    megatron: str
    sources: Sequence[str]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        return torch.cat(list(tensors))

    def to_hf(self, tensor: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]:
        return tensor.chunk(len(self.sources))


@dataclass(frozen=True)
class QKV:
    """Query, key and value projections: Megatron stacks, per key-value group, [its queries | key | value]."""

    megatron: str
    sources: Sequence[str]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        groups = shape.num_query_groups
        grouped = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(grouped, dim=1).reshape(-1, *tensors[0].shape[1:])

    def to_hf(self, tensor: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]:
        groups, size = shape.num_query_groups, shape.kv_channels
        queries = shape.num_attention_heads // groups * size
        grouped = tensor.reshape(groups, -1, *tensor.shape[1:])
        return [part.reshape(-1, *tensor.shape[1:]) for part in grouped.split([queries, size, size], dim=1)]


Rule = Copy | Concat | QKV


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        layer_rules: rules of one transformer layer; names contain ``{layer}``.
    """

    name: str
    layer_rules: Sequence[Rule]

    def rules(self, shape: ModelShape) -> dict[str, Rule]:
        """Every Megatron parameter of a model of this shape -> its rule with final names."""
        top: list[Rule] = [
            Copy("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            Copy("decoder.final_layernorm.weight", "model.norm.weight"),
        ]
        if not shape.tie_embeddings:
            top.append(Copy("output_layer.weight", "lm_head.weight"))
        layers = [_numbered(rule, layer) for layer in range(shape.num_layers) for rule in self.layer_rules]
        return {rule.megatron: rule for rule in (*top, *layers)}


def _numbered(rule: Rule, layer: int) -> Rule:
    megatron = rule.megatron.format(layer=layer)
    if isinstance(rule, Copy):
        return Copy(megatron, rule.hf.format(layer=layer))
    return type(rule)(megatron, tuple(source.format(layer=layer) for source in rule.sources))
