"""The layers of MiniMax-M2: one norm over all query heads, one over all key heads."""

from slime_plugins.models import decoder_layers

__all__ = ["get_minimax_m2_layer_spec"]

get_minimax_m2_layer_spec = decoder_layers("minimax_m2")
