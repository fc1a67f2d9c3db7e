"""Public name of :mod:`slime.backends.megatron_utils.conversion`."""

from slime.backends.megatron_utils.conversion import load_hf_weights

__all__ = ["load_hf_weights"]
