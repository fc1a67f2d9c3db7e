"""The vision tower of Qwen's vision-language models, and the names of the language model beside it.

The tower is the module of ``transformers``, so every tensor is a copy; tensor-parallel ranks all hold it.
"""

from __future__ import annotations

from dataclasses import replace

from slime.models.tables import Rule

__all__ = ["DEEPSTACK_MERGERS", "VISION_TOWER", "in_language_model"]


def _tower(*names: str) -> tuple[Rule, ...]:
    """Weight and bias of each; ``{layer}`` counts the tower's blocks, or its mergers."""
    return tuple(
        Rule(f"vision_model.{name}.{kind}", (f"model.visual.{name}.{kind}",))
        for name in names
        for kind in ("weight", "bias")
    )


_BLOCK = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")
_MERGER = ("norm", "linear_fc1", "linear_fc2")

VISION_TOWER = (
    *_tower("patch_embed.proj"),
    Rule("vision_model.pos_embed.weight", ("model.visual.pos_embed.weight",)),
    *_tower(*(f"blocks.{{layer}}.{name}" for name in _BLOCK)),
    *_tower(*(f"merger.{name}" for name in _MERGER)),
)

DEEPSTACK_MERGERS = _tower(*(f"deepstack_merger_list.{{layer}}.{name}" for name in _MERGER))
"""What makes features for the first decoder layers out of blocks in the middle of the tower (DeepStack)."""


def in_language_model(rule: Rule) -> Rule:
    """The same tensors where ``model.language_model`` takes the place of ``model``."""

    def prefixed(name: str) -> str:
        inner = name.removeprefix("model.")
        return name if inner == name else f"model.language_model.{inner}"

    stacked = None if rule.stacked is None else prefixed(rule.stacked)
    return replace(rule, hf=tuple(prefixed(name) for name in rule.hf), stacked=stacked)
