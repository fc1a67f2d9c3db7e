"""Public name of ``convert_to_hf`` for Qwen3-Next."""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.backends.megatron_utils.conversion import convert_to_hf

__all__ = ["convert_qwen3_next_to_hf"]


def convert_qwen3_next_to_hf(args: Namespace, name: str, param: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """See :func:`slime.backends.megatron_utils.conversion.convert_to_hf`: ``args.hf_checkpoint`` says the family."""
    return convert_to_hf(args, "qwen3_next", name, param)
