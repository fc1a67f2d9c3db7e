"""A checkpoint directory without weights, made by code: the processor of a tiny model with vision."""

from __future__ import annotations

import json
from pathlib import Path

from examples.tiny.vision import TEMPLATE
from slime.utils.accelerator import allow_torchvision_on_cpu


def make_vision_checkpoint(folder: Path) -> str:
    """A Qwen2-VL processor whose patches are 4 pixels. An image of 16 x 16 becomes (16 / 4 / 2)^2 = 4 tokens."""
    allow_torchvision_on_cpu()
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    words = ["<unk>", *map(chr, range(32, 127))]
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", pad_token="<unk>")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]}
    )
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(**sizes), tokenizer, Qwen2VLVideoProcessor(**sizes), chat_template=TEMPLATE
    )
    processor.save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", "vocab_size": len(tokenizer)}))
    return str(folder)
