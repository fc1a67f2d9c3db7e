"""The layers of GLM-5: latent attention over the keys that an indexer chose. What ``--spec`` of its scripts names."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

__all__ = ["get_glm5_spec"]


def get_glm5_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's spec of the decoder layers of this pipeline stage.

    Args:
        args: ``hf_checkpoint`` says which layers have an indexer.
        config: what ``slime.backends.megatron_utils.transformer_config.build_config`` makes of ``args``.
    """
    from slime.backends.megatron_utils.layer_specs import block_spec
    from slime.models.hf_shape import read_shape

    shape = read_shape(args.hf_checkpoint)
    return block_spec(config, shape.family, vp_stage, sparse=shape.sparse)
