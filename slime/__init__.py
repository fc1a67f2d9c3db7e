"""slime: reinforcement learning post-training for large language models with Ray, Megatron and SGLang."""

__version__ = "0.1.0"

from slime import compat

compat.install()
