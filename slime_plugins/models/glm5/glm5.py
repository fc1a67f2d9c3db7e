"""The layers of GLM-5: latent attention to the keys that an indexer chooses."""

from slime_plugins.models import decoder_layers

__all__ = ["get_glm5_spec"]

get_glm5_spec = decoder_layers("glm_moe_dsa")
