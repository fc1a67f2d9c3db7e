"""Qwen3.5, dense and with experts: the layers of Qwen3-Next, with separate projections in the delta nets.

The checkpoints are those of a vision-language model: names have a prefix, and there is a vision tower, which is built
for runs with images. A checkpoint holds all experts of a layer as one tensor.
"""

from dataclasses import replace

from slime.models.families.qwen3_next import HYBRID_DEFAULTS, QWEN3_NEXT
from slime.models.family import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    GATED_ATTENTION,
    GATED_SHARED_EXPERT,
    MLP_NORM,
    QWEN_MTP,
    VISION_TOWER,
    Rules,
    delta_net,
    in_language_model,
    mtp_rules,
    stacked_experts,
)

_DELTA_NET = delta_net(
    {
        "in_proj_qkv": (("q",), ("k",), ("v",)),
        "in_proj_z": (("z",),),
        "in_proj_b": (("b",),),
        "in_proj_a": (("a",),),
    }
)


def _table(mlps: Rules) -> Rules:
    decoder = EMBEDDINGS + GATED_ATTENTION + _DELTA_NET + mlps
    # Names of prediction layers have no prefix of the language model.
    prediction = mtp_rules(GATED_ATTENTION + mlps, "mtp.", QWEN_MTP, layer_prefix="mtp.layers.{mtp}.")
    return in_language_model(decoder) + prediction + VISION_TOWER


QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5",
    models="Qwen3.5 dense",
    particulars="the layers of Qwen3-Next, rope with three positions; [images](#images)",
    rules=_table(DENSE_MLP),
    routing=None,
    has_shared_gate=False,
    vision_tower="qwen3_5_vision",
    spec="slime_plugins.models.qwen3_5",
    vision_spec="slime_plugins.models.qwen3_5_vl",
    defaults=HYBRID_DEFAULTS,
    untouched=(r"model\.visual\..*",),
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe",
    models="Qwen3.5-35B-A3B, Qwen3.6-35B-A3B",
    particulars="as `qwen3_5`, with experts and a gated shared expert",
    rules=_table(MLP_NORM + stacked_experts(EXPERTS) + GATED_SHARED_EXPERT),  # every layer has experts
    routing="softmax",
    has_shared_gate=True,
    vision_tower="qwen3_5_moe_vision",
)
