"""A tiny language model without any download: a random Qwen3 and a tokenizer of one token per character.

Used by the task that ``slime new`` writes, by ``tools/make_tiny_task.py``, the demo and tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

PAD, UNKNOWN, START, END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
CHARACTERS = "0123456789+-*/=()?!.,:' \nabcdefghijklmnopqrstuvwxyz"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the Qwen3. The defaults make about a million parameters.

    ``init_std`` is that of all matrices: with 0.1 the model learns to copy in 200 steps, with 0.02 it takes far more.
    """

    hidden_size: int = 128
    num_layers: int = 4
    ffn_hidden_size: int = 512
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 512
    init_std: float = 0.02


def make_tiny_model(model: Path, *, seed: int = 0, shape: ModelShape | None = None, words: Sequence[str] = ()) -> str:
    """Write a Hugging Face checkpoint of about a million parameters into the directory ``model``. Returns it.

    Args:
        seed: decides the weights. The same seed makes the same files, byte for byte.
        words: more strings that are one token each, such as names and tags. Part of the text, not special tokens.
    """
    model.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tokenizer(model, words)
    _write_model(model, shape or ModelShape(), vocab_size, seed)
    return str(model)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(model: Path, more_words: Sequence[str]) -> int:
    """One token per character, per role, per further word and per special token. Returns the vocabulary's size."""
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = [PAD, UNKNOWN, START, END, *ROLES, *CHARACTERS, *more_words]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (PAD, UNKNOWN, START, END)])
    # Whole words, but no special tokens: decoding keeps them.
    tokenizer.add_tokens([AddedToken(role, normalized=False, single_word=True) for role in ROLES])
    tokenizer.add_tokens([AddedToken(word, normalized=False, single_word=word.isalpha()) for word in more_words])
    tokenizer.save(str(model / "tokenizer.json"))
    _write_json(
        model / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 512,
            "clean_up_tokenization_spaces": False,
            "pad_token": PAD,
            "unk_token": UNKNOWN,
            "eos_token": END,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return len(words)


def _write_model(model: Path, shape: ModelShape, vocab_size: int, seed: int) -> None:
    from safetensors.numpy import save_file

    end, pad = 3, 0  # positions in the tokenizer's list of words
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": shape.init_std,
        "use_cache": True,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "float32",
    }
    _write_json(model / "config.json", config)
    _write_json(model / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad, "do_sample": True})
    save_file(_weights(shape, vocab_size, seed), str(model / "model.safetensors"), metadata={"format": "pt"})


def _weights(shape: ModelShape, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Hugging Face names and shapes ([out, in]). Matrices are normal(0, init_std), norms are one."""
    import numpy as np

    rng = np.random.default_rng(seed)
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_norm": shape.head_dim,
        "self_attn.k_norm": shape.head_dim,
    }

    def normal(*size: int) -> np.ndarray:
        # The draws depend on the order of the tensors: a new matrix changes all later weights of a seed.
        return (rng.standard_normal(size) * shape.init_std).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": normal(*size) for name, size in matrices.items()}
        weights |= {f"{prefix}{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    return weights
