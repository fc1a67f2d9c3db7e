"""Public alias: ``from slime.utils.arguments import parse_args``."""

from slime.ray.arguments import parse_args

__all__ = ["parse_args"]
