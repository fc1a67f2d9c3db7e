"""Public name of :mod:`slime.backends.megatron_utils.conversion`."""

from slime.backends.megatron_utils.conversion import convert_to_hf, remove_padding

__all__ = ["convert_to_hf", "remove_padding"]
