"""Public alias: ``from slime.utils.processing_utils import load_processor``."""

from slime.data.chat import load_tokenizer
from slime.data.media import (
    DEFAULT_PATCH_SIZE,
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    process_vision_info,
)

__all__ = [
    "DEFAULT_PATCH_SIZE",
    "build_processor_kwargs",
    "encode_image_for_rollout_engine",
    "load_processor",
    "load_tokenizer",
    "process_vision_info",
]
