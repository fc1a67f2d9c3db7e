#!/usr/bin/env python3
"""Make a tiny language model and a task it can learn, without any download.

    python tools/make_tiny_task.py --output DIR [--seed 0]

The model is a randomly initialized Qwen3 of about a million parameters with a character-level tokenizer and a chat
template, in the files a Hugging Face checkpoint has. The task is the addition of two two-digit numbers, in three
disjoint sets: ``sft.jsonl`` (solved, for a supervised warm start), ``train.jsonl`` and ``eval.jsonl`` (question and
label). The same seed makes the same files, byte for byte.

The solutions of the warm start come from a sloppy teacher, who mostly forgets to carry (48 + 37 = 75). A model that
imitates it writes numbers and adds digits, but is wrong if there is a carry. Sometimes it still samples the right
answer, which reinforcement learning has to find and to prefer. So the accuracy after the warm start is a plateau, about
the share of problems without a carry, however long the warm start is.

The demo and the end-to-end tests call :func:`make_tiny_task`. Imports nothing of slime.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
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
SMALLEST, LARGEST = 10, 99


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


@dataclass(frozen=True)
class TinyTask:
    """Paths of the files, as strings for a command line."""

    model: str
    sft: str
    train: str
    eval: str


def make_tiny_task(
    output: str | Path,
    *,
    seed: int = 0,
    num_sft: int = 4000,
    num_eval: int = 256,
    forgotten_carries: float = 0.8,
    shape: ModelShape | None = None,
    words: Sequence[str] = (),
) -> TinyTask:
    """Write model and data below ``output``.

    Args:
        output: directory, made when missing. Files of an earlier call are replaced.
        seed: decides the weights and which problem is in which set.
        num_sft: solved problems for the warm start. With few hundred the model learns them by heart and cannot add.
        num_eval: held-out problems. All others, about 3,800 with the defaults, are for training.
        forgotten_carries: share of the solutions with a carry that forget it. 0 makes all of them right.
        shape: sizes of the model.
        words: more strings that are one token each, such as names and tags. Part of the text, not special tokens.

    Raises:
        ValueError: the sets do not fit into the problems there are.
    """
    output = Path(output)
    model = output / "model"
    model.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tokenizer(model, words)
    _write_model(model, shape or ModelShape(), vocab_size, seed)
    sft, train, held_out = _split_problems(seed, num_sft, num_eval)
    paths = {name: output / f"{name}.jsonl" for name in ("sft", "train", "eval")}
    # Drawn for every solution, also for those without a carry, so that the order of the draws stays fixed.
    sloppy = random.Random(seed)
    _write_jsonl(paths["sft"], (_solved(a, b, forgets=sloppy.random() < forgotten_carries) for a, b in sft))
    _write_jsonl(paths["train"], (_asked(a, b) for a, b in train))
    _write_jsonl(paths["eval"], (_asked(a, b) for a, b in held_out))
    return TinyTask(str(model), str(paths["sft"]), str(paths["train"]), str(paths["eval"]))


def _split_problems(seed: int, num_sft: int, num_eval: int) -> tuple[list[tuple[int, int]], ...]:
    problems = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(SMALLEST, LARGEST + 1)]
    if num_sft < 1 or num_eval < 1 or num_sft + num_eval >= len(problems):
        raise ValueError(
            f"num_sft {num_sft} and num_eval {num_eval} must be positive and leave some of the {len(problems)} "
            "problems for training"
        )
    random.Random(seed).shuffle(problems)
    # The held-out problems come first: a larger warm start takes from the training set, never from them.
    return problems[num_eval : num_eval + num_sft], problems[num_eval + num_sft :], problems[:num_eval]


def _question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{a}+{b}="}


def _asked(a: int, b: int) -> dict[str, Any]:
    return {"prompt": [_question(a, b)], "label": str(a + b)}


def _solved(a: int, b: int, *, forgets: bool) -> dict[str, Any]:
    carry = 10 if a % 10 + b % 10 >= 10 else 0
    # The label stays right also if the solution forgets the carry.
    messages = [_question(a, b), {"role": "assistant", "content": str(a + b - carry * forgets)}]
    return {"prompt": messages, "messages": messages, "label": str(a + b)}


def _write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="Directory to write to.")
    parser.add_argument("--seed", type=int, default=0, help="Same seed, same files.")
    parser.add_argument("--num-sft", type=int, default=4000, help="Solved problems for the warm start.")
    parser.add_argument("--num-eval", type=int, default=256, help="Held-out problems.")
    options = parser.parse_args()
    try:
        task = make_tiny_task(options.output, seed=options.seed, num_sft=options.num_sft, num_eval=options.num_eval)
    except ValueError as error:
        parser.error(str(error))
    for name, path in vars(task).items():
        print(f"{name:>6}  {path}")


if __name__ == "__main__":
    main()
