"""Public name of ``convert_to_hf`` for GLM 4."""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.backends.megatron_utils.conversion import convert_to_hf

__all__ = ["convert_glm4_to_hf"]


def convert_glm4_to_hf(args: Namespace, name: str, param: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """See :func:`slime.backends.megatron_utils.conversion.convert_to_hf`: ``args.hf_checkpoint`` says the family."""
    return convert_to_hf(args, "glm4", name, param)
