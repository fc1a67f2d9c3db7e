"""Qwen3.5: dense and with experts. Layers as Qwen3-Next's, the delta nets' projections kept apart.

The checkpoints are those of a vision-language model: names have a prefix, and a vision tower stands beside them, which
is built for runs with images. They have the experts of a layer as one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from slime.models.families.qwen3_next import GATED_ATTENTION, HYBRID_DEFAULTS, MTP_NAMES, delta_net
from slime.models.tables import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    GATED_SHARED_EXPERT,
    Family,
    Rule,
    mtp_rules,
)
from slime.models.vision_tables import VISION_TOWER, in_language_model

__all__ = ["QWEN3_5", "QWEN3_5_MOE"]

_DELTA_NET = delta_net(
    {
        "in_proj_qkv": (("q",), ("k",), ("v",)),
        "in_proj_z": (("z",),),
        "in_proj_b": (("b",),),
        "in_proj_a": (("a",),),
    }
)


def _stacked(rule: Rule) -> Rule:
    if not rule.is_expert:
        return rule
    name = "gate_up_proj" if rule.layout == "gate_up" else "down_proj"
    return replace(rule, stacked=f"model.layers.{{layer}}.mlp.experts.{name}")


def _table(mlps: tuple[Rule, ...]) -> tuple[Rule, ...]:
    decoder = EMBEDDINGS + GATED_ATTENTION + _DELTA_NET + mlps
    prediction = mtp_rules(GATED_ATTENTION + mlps, "mtp.", MTP_NAMES, layer_prefix="mtp.layers.{mtp}.")
    return tuple(map(in_language_model, decoder)) + prediction + VISION_TOWER


QWEN3_5 = Family(
    model_type="qwen3_5",
    rules=_table(DENSE_MLP),
    has_qk_norm=True,
    has_delta_nets=True,
    has_output_gate=True,
    has_zero_centred_norms=True,
    vision_tower="qwen3_5_vision",
    defaults=HYBRID_DEFAULTS,
    refuses=(("attention_bias", "biases in attention"),),
    ignored=(r"mtp\..*",),
    untouched=(r"model\.visual\..*",),
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe",
    # every layer has experts; DENSE_MLP brings the norm in front of them
    rules=_table(DENSE_MLP[:1] + tuple(map(_stacked, EXPERTS)) + GATED_SHARED_EXPERT),
    has_shared_gate=True,
    is_moe=True,
    vision_tower="qwen3_5_moe_vision",
)
