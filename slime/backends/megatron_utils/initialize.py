"""Public name of :mod:`slime.backends.megatron_utils.conversion`."""

from slime.backends.megatron_utils.conversion import init

__all__ = ["init"]
