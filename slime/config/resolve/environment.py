"""Variables of the environment that launch scripts set: one for the trainer's allocator, and those without meaning."""

from __future__ import annotations

import os
from argparse import Namespace

from slime.config import notices
from slime.utils.errors import ConfigError

__all__ = ["allocator", "unread_variables"]

_SEGMENTS = "SLIME_ENABLE_EXPANDABLE_SEGMENTS"

_UNREAD = {
    "SLIME_DESTROY_WORLD_PROCESS_GROUP": "process groups stay while a trainer has given its memory away",
    "SLIME_GRAD_COALESCE_CHUNK_BYTES": "gradients are reduced by Megatron's buckets: see --ddp-bucket-size",
    "SLIME_LAYERWISE_ALIGNMENT_": "outputs of layers are not written; slime doctor mismatch compares log-probs",
    "SLIME_DEEPGEMM_MOE_": "grouped products take all experts of a rank, backward is that of the usual layers",
    "MEGATRON_USE_SGLANG_": "the trainer has none of SGLang's kernels",
    "INDEXER_ROPE_NEOX_STYLE": "config.json says how the indexer's heads turn (indexer_rope_interleave)",
}
"""What names begin with -> why they have no effect. Those that would make a run train something else are no part."""


def allocator(args: Namespace) -> None:
    """Trainers' memory in segments that grow: less fragmentation where micro-batches differ in size.

    Raises:
        ConfigError: the variable is neither on nor off.
    """
    value = os.environ.get(_SEGMENTS, "0")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{_SEGMENTS}={value} in the environment: 1 is on, 0 is off.")
    if value == "1":
        args.train_env_vars = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | args.train_env_vars


def unread_variables(args: Namespace) -> None:
    """Tell which variables that are set have no effect."""
    for name, value in sorted(os.environ.items()):
        why = next((why for beginning, why in _UNREAD.items() if name.startswith(beginning)), None)
        if why is not None and value not in ("", "0"):
            notices.warn(args, name, f"has no effect: {why}.")
