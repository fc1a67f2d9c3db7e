"""A tiny Qwen3-VL with random weights, its processor, and prompts with images; all made by code."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import torch

from slime.utils.torchvision_cpu import install as allow_torchvision_on_cpu
from tests.unit.data.tiny_vision import TEMPLATE

__all__ = ["make_vision_prompts", "make_vision_task"]

_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_end|>")
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


def make_vision_task(folder: Path) -> None:
    """A checkpoint directory; an image of 16 x 16 pixels becomes (16 / 4 / 2)^2 = 4 tokens."""
    allow_torchvision_on_cpu()
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = ["<unk>", *map(chr, range(32, 127))]
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", pad_token="<unk>", eos_token="<|im_end|>"
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
            parameter.copy_(1 + 0.1 * noise if is_gain else 0.12 * noise)
    model.save_pretrained(folder)


def make_vision_prompts(path: Path, count: int) -> str:
    """One row after the other has no image, one, or two; of different sizes and colours."""
    from PIL import Image

    rows = []
    for row in range(count):
        images = []
        for index in range(row % 3):
            size = [(16, 24), (24, 16), (16, 16), (32, 24)][(row + index) % 4]
            stream = io.BytesIO()
            Image.new("RGB", size, ((40 * row) % 256, (90 * index) % 256, 50)).save(stream, format="PNG")
            images.append(base64.b64encode(stream.getvalue()).decode())
        message = {"role": "user", "content": "<image>" * len(images) + "What?"}
        rows.append(json.dumps({"prompt": [message], "images": images, "label": "7"}))
    path.write_text("\n".join(rows))
    return str(path)
