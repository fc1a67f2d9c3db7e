"""Layer specs by the names that launch scripts pass as ``--spec``. Model families build the same layers without it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any


def decoder_layers(model_type: str) -> Callable[..., Any]:
    """The function that ``--spec`` names for the family ``model_type``."""

    def get_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
        """Megatron's spec of the decoder layers of this pipeline stage.

        Args:
            args: for sparse attention, ``hf_checkpoint`` decides which layers have an indexer.
            config: from ``slime.backends.megatron_utils.transformer_config.build_config``.
        """
        # Imports torch and megatron: the name must be importable without them.
        from slime.backends.megatron_utils.layer_specs import block_spec
        from slime.models.family import families
        from slime.models.hf_shape import read_shape

        family = families()[model_type]
        sparse = read_shape(args.hf_checkpoint).sparse if family.is_sparse else None
        return block_spec(config, family, vp_stage, sparse=sparse)

    return get_spec
