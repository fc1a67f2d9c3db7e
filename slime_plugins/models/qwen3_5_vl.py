"""Qwen3.5 with its vision tower, named by ``--spec`` of launch scripts with images."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

__all__ = ["get_qwen3_5_vl_model_provider"]


def get_qwen3_5_vl_model_provider(
    args: Namespace, config: Any = None, vp_stage: int | None = None
) -> Callable[..., Any]:
    """A function that makes this rank's part of the model: decoder layers, and the tower on the first pipeline stage.

    Args:
        config: ignored, it follows from ``args``.
        vp_stage: default of the chunk of an interleaved pipeline.
    """
    from slime.backends.megatron_utils.conversion import get_model_provider_func

    with_tower = Namespace(**vars(args) | {"spec": [__name__, get_qwen3_5_vl_model_provider.__name__]})
    provide = get_model_provider_func(with_tower)

    def provide_stage(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = vp_stage) -> Any:
        return provide(pre_process, post_process, vp_stage)

    return provide_stage
