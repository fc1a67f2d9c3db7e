"""Public alias: ``from slime.utils.arguments import parse_args``."""

from slime.config.roles import parse_megatron_role_args
from slime.ray.arguments import parse_args

__all__ = ["parse_args", "parse_megatron_role_args"]
