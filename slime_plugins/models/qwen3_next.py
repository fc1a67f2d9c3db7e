"""The layers of Qwen3-Next: gated delta nets and gated attention."""

from slime_plugins.models import decoder_layers

__all__ = ["get_qwen3_next_spec"]

get_qwen3_next_spec = decoder_layers("qwen3_next")
