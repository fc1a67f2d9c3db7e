"""MiMo-7B: Qwen2 with a multi-token-prediction layer."""

from __future__ import annotations

from slime.models.tables import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDINGS,
    QKV_BIAS,
    Family,
    mtp_rules,
)

__all__ = ["MIMO"]

_DECODER = ATTENTION + QKV_BIAS + DENSE_MLP
_MTP_NAMES = {
    "enorm": "token_layernorm.weight",
    "hnorm": "hidden_layernorm.weight",
    "eh_proj": "input_proj.weight",
    "final_layernorm": "final_layernorm.weight",
}

MIMO = Family(
    model_type="mimo",
    # MiMo's projection takes [hidden state | embedding], Megatron's [embedding | hidden state]
    rules=EMBEDDINGS + _DECODER + mtp_rules(_DECODER, "model.mtp_layers.{mtp}.", _MTP_NAMES, "swapped_columns"),
    has_qkv_bias=True,
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    refuses=(("use_sliding_window", "sliding-window attention"),),
    ignored=(r"model\.mtp_layers\..*",),
)
