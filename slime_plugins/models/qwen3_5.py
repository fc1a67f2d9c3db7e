"""The layers of Qwen3.5: gated delta nets and gated attention."""

from slime_plugins.models import decoder_layers

__all__ = ["get_qwen3_5_spec"]

get_qwen3_5_spec = decoder_layers("qwen3_5")
