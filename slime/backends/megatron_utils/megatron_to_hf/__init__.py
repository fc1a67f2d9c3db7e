"""Public name of :mod:`slime.backends.megatron_utils.conversion`, and of its ``convert_to_hf`` for each family."""

from slime.backends.megatron_utils.conversion import convert_to_hf, remove_padding

__all__ = ["convert_to_hf", "remove_padding"]
