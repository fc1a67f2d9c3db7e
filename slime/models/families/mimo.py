"""MiMo-7B: Qwen2 with a multi-token-prediction layer."""

from dataclasses import replace

from slime.models.families.qwen2 import QWEN2
from slime.models.family import mtp_rules

_MTP = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight")

MIMO = replace(
    QWEN2,
    model_type="mimo",
    models="MiMo-7B",
    particulars="Qwen2 with a prediction layer",
    # The columns of MiMo's projection are [hidden state | embedding], Megatron's are [embedding | hidden state].
    rules=QWEN2.rules + mtp_rules(QWEN2.rules, "model.mtp_layers.{mtp}.", _MTP, "swapped_columns"),
    ignored=(r"model\.mtp_layers\..*",),
)
