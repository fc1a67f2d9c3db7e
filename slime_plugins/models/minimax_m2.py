"""The layers of MiniMax-M2: a norm over all heads of queries and of keys. What ``--spec`` of its script names."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

__all__ = ["get_minimax_m2_layer_spec"]


def get_minimax_m2_layer_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's spec of the decoder layers of this pipeline stage.

    Args:
        config: what ``slime.backends.megatron_utils.transformer_config.build_config`` makes of ``args``.
    """
    from slime.backends.megatron_utils.layer_specs import block_spec
    from slime.models.families.minimax_m2 import MINIMAX_M2

    return block_spec(config, MINIMAX_M2, vp_stage)
