"""A tiny Qwen3-VL with random weights and its processor, made by code, and pictures of rectangles to measure."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import torch

from slime.utils.accelerator import allow_torchvision_on_cpu

__all__ = ["AREA_FLAGS", "END", "TEMPLATE", "area_problem", "as_text", "make_vision_model"]

END = "<|im_end|>"
AREA_FLAGS = ("--multimodal-keys", '{"image": "images"}', "--apply-chat-template")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for item in message.content %}{% if item.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", END)
_TEXT = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "max_position_embeddings": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    | {"mrope_interleaved": True},
}
_TOWER = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
    **{"num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": [0, 1]},
}
_CELL, _CELLS, _LARGEST_SIDE = 4, 4, 3
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)


def make_vision_model(folder: Path) -> str:
    """Write a checkpoint directory and return its path.

    The vocabulary is one token per character. An image of 16 x 16 pixels becomes (16 / 4 / 2)^2 = 4 tokens.
    """
    # Before the import of transformers, which imports torchvision.
    allow_torchvision_on_cpu()
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = ["<unk>", *map(chr, range(32, 127))]
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", pad_token="<unk>", eos_token=END
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    sizes["size"] = {"shortest_edge": 64, "longest_edge": 1024}
    images, videos = transformers.Qwen2VLImageProcessor(**sizes), transformers.Qwen3VLVideoProcessor(**sizes)
    transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE).save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)

    names = ("vision_start", "vision_end", "image", "video")
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, _SPECIAL, strict=False)
    }
    config = transformers.Qwen3VLConfig(
        text_config=_TEXT | {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id},
        vision_config=_TOWER,
        **ids,
    )
    torch.manual_seed(7)
    model = transformers.Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            is_gain = "norm" in name and name.endswith("weight")
            # Larger than the library's initial weights, with which a picture hardly changes the logits.
            parameter.copy_(1 + 0.1 * noise if is_gain else 0.12 * noise)
    model.save_pretrained(folder)
    return str(folder)


def area_problem(draw: random.Random) -> tuple[Any, str]:
    """A PIL image of 4 x 4 cells with a black rectangle on them, and the number of black cells."""
    from PIL import Image

    width, height = draw.randint(1, _LARGEST_SIDE), draw.randint(1, _LARGEST_SIDE)
    left, top = draw.randint(0, _CELLS - width), draw.randint(0, _CELLS - height)
    image = Image.new("RGB", (_CELL * _CELLS, _CELL * _CELLS), _WHITE)
    image.paste(_BLACK, (_CELL * left, _CELL * top, _CELL * (left + width), _CELL * (top + height)))
    return image, str(width * height)


def as_text(image: Any) -> str:
    """A PIL image as base64, the form of a data row."""
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()
