"""What the pages show a reader: code blocks and commands, and the model that the commands name."""

from __future__ import annotations

import json
import re
from pathlib import Path

__all__ = ["QWEN3_4B", "bash_blocks", "blocks", "commands", "make_model"]

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of ``language`` on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def bash_blocks(page: Path) -> list[str]:
    return blocks(page, "bash")


def commands(block: str) -> list[str]:
    """Its lines, continued ones joined, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def make_model(directory: Path) -> Path:
    """A directory with the config.json of Qwen3-4B: all that reading a command looks at."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(QWEN3_4B))
    return directory
