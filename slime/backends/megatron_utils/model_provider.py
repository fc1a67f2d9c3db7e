"""Public name of :mod:`slime.backends.megatron_utils.conversion`."""

from slime.backends.megatron_utils.conversion import get_model_provider_func

__all__ = ["get_model_provider_func"]
