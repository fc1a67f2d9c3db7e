"""The layers of GLM-4: norms after attention and MLP too. What ``--spec`` of its launch scripts names."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

__all__ = ["get_glm_spec"]


def get_glm_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's spec of the decoder layers of this pipeline stage.

    Args:
        config: what ``slime.backends.megatron_utils.transformer_config.build_config`` makes of ``args``.
    """
    from slime.backends.megatron_utils.layer_specs import block_spec
    from slime.models.families.glm4 import GLM4

    return block_spec(config, GLM4, vp_stage)
