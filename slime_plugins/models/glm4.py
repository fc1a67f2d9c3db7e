"""The layers of GLM-4: norms after attention and MLP too."""

from slime_plugins.models import decoder_layers

__all__ = ["get_glm_spec"]

get_glm_spec = decoder_layers("glm4")
