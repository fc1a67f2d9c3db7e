"""Public name of :mod:`slime.backends.megatron_utils.conversion`."""

from slime.backends.megatron_utils.conversion import save_hf_model_direct_to_path

__all__ = ["save_hf_model_direct_to_path"]
