"""The layers of Qwen3.5: gated delta nets and gated attention. What ``--spec`` of its launch scripts names."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

__all__ = ["get_qwen3_5_spec"]


def get_qwen3_5_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's spec of the decoder layers of this pipeline stage.

    Args:
        config: what ``slime.backends.megatron_utils.transformer_config.build_config`` makes of ``args``.
    """
    from slime.backends.megatron_utils.layer_specs import block_spec
    from slime.models.families.qwen3_5 import QWEN3_5

    return block_spec(config, QWEN3_5, vp_stage)
