"""A mixture of experts for the tiny task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tools.make_tiny_task import TinyTask

__all__ = ["make_moe_model"]


def make_moe_model(task: TinyTask, directory: Path) -> Path:
    """A random Qwen3 mixture of 8 experts, of which a token goes to 2, with the task's tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(task.model, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8}
    vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
    torch.manual_seed(11)
    config = Qwen3MoeConfig(**sizes, **heads, num_experts_per_tok=2, norm_topk_prob=True, vocab_size=vocab)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return directory
