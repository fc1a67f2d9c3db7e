"""Tiny random vision-language models of ``transformers``, and samples with images for them. All made by code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from slime.models.family import families
from slime.utils.accelerator import allow_torchvision_on_cpu
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_batch, schedule

START, IMAGE, VIDEO = 57, 58, 59
_PATCH = 2 * 2 * 2 * 3  # values: two instants of 2 x 2 pixels in three colors
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_TOWER = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 2,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def _rope(sections: list[int], share: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, "mrope_interleaved": True}
    return {"rope_parameters": rope | {"partial_rotary_factor": share}}


# class of transformers' config, settings of its text and of its tower
VISION_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ("Qwen3VLConfig", _rope([4, 2, 2], 1.0), {"deepstack_visual_indexes": [0, 2]}),
    "qwen3_5": ("Qwen3_5Config", _DELTA | _rope([2, 1, 1], 0.5), {}),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", _DELTA | _EXPERTS | _rope([2, 1, 1], 0.5), {}),
}


def make_vision_model(kind: str, path: Path, dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    """A random model of ``kind``, saved at ``path``. Every part of it matters for its logits."""
    allow_torchvision_on_cpu()
    import transformers

    class_name, own, tower = VISION_KINDS[kind]
    settings = _TEXT | own | text
    config = getattr(transformers, class_name)(
        text_config=settings,
        vision_config=_TOWER | tower,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        tie_word_embeddings=settings["tie_word_embeddings"],
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    is_zero_centered = families()[kind].has_zero_centered_norms
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            is_around_zero = is_zero_centered and "visual" not in name and "linear_attn" not in name
            is_gain = "norm" in name and name.endswith("weight")
            parameter.copy_((not is_around_zero) + 0.1 * noise if is_gain else 0.15 * noise)
    model.save_pretrained(path)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"model_type": kind}))
    return model.eval()


def make_vision_batch(
    grids: list[list[list[int]]], *, seed: int = 0, videos: dict[int, list[int]] | None = None
) -> Any:
    """A batch of one rank and one step: a sample for every entry of ``grids``, with an image for each grid in it.

    Args:
        grids: per sample, per image: patches along time, height and width.
        videos: sample -> the grid of a video after its images, passed frame by frame.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(len(grids), seed=seed)
    inputs = []
    for index, of_sample in enumerate(grids):
        tokens = batch["tokens"][index] % START  # words only
        media: dict[str, torch.Tensor] = {}
        runs = [(IMAGE, grid) for grid in of_sample]
        if of_sample:
            media |= _pixels("pixel_values", "image_grid_thw", of_sample, generator)
        if videos is not None and index in videos:
            time, height, width = videos[index]
            runs += [(VIDEO, [1, height, width])] * time
            media |= _pixels("pixel_values_videos", "video_grid_thw", [videos[index]], generator)
        pieces = [tokens[:1]]
        for token, (_, height, width) in runs:
            pieces += [torch.tensor([START] + [token] * (height * width // 4)), tokens[:1] + 1]
        batch["tokens"][index] = torch.cat([*pieces, tokens[1:]])
        inputs.append(media or None)
    batch["total_lengths"] = [len(tokens) for tokens in batch["tokens"]]
    return schedule(batch | {"multimodal_train_inputs": inputs}, [list(range(len(grids)))])


def _pixels(name: str, grid_name: str, grids: list[list[int]], generator: torch.Generator) -> dict[str, torch.Tensor]:
    num_patches = sum(time * height * width for time, height, width in grids)
    return {name: torch.randn(num_patches, _PATCH, generator=generator), grid_name: torch.tensor(grids)}


def reference_logits(model: Any, batch: dict[str, Any], index: int) -> torch.Tensor:
    """``[L, VOCAB]`` of one sample by ``transformers``."""
    tokens = batch["tokens"][index]
    kinds = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
    inputs = batch["multimodal_train_inputs"][index] or {}
    return model(input_ids=tokens[None], mm_token_type_ids=kinds[None], use_cache=False, **inputs).logits[0]
