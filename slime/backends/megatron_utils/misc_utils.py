"""Public name of :mod:`slime.backends.megatron_utils.conversion`."""

from slime.backends.megatron_utils.conversion import strip_param_name_prefix

__all__ = ["strip_param_name_prefix"]
