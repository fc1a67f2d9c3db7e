"""A command that is right in every respect, made without torch: the tests change one thing at a time."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.ray.arguments import parse_only

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}


@dataclass(frozen=True)
class TinyCommand:
    """Paths of the model and the prompts, and the flags of a run that works."""

    directory: Path
    model: str
    prompts: str

    @property
    def flags(self) -> list[str]:
        sizes = "--rollout-num-gpus 1 --actor-num-gpus-per-node 2 --num-rollout 2 --rollout-batch-size 8"
        more = "--n-samples-per-prompt 4 --rollout-max-response-len 8 --rm-type math"
        return ["--hf-checkpoint", self.model, "--prompt-data", self.prompts, *sizes.split(), *more.split()]

    def run(self, *more: Any, without: tuple[str, ...] = (), is_async: bool = False) -> tuple[Namespace | None, str]:
        """(resolved arguments, problems as text) of the flags with ``more`` and ``without``. Replaces {dir}."""
        words = [str(word).replace("{dir}", str(self.directory)) for word in more]
        flags, base = [], iter(self.flags)
        for flag, value in zip(base, base, strict=True):
            if flag not in without:
                flags += [flag, value]
        args, problems = parse_only([*flags, *words], is_async=is_async)
        return args, "\n".join(problems)

    def resolve(self, *more: Any, **kwargs: Any) -> Namespace:
        """The arguments of a command that must have no problem."""
        args, problems = self.run(*more, **kwargs)
        assert not problems
        assert args is not None
        return args

    def warnings(self, *more: Any, **kwargs: Any) -> str:
        args, _ = self.run(*more, **kwargs)
        assert args is not None
        return "\n".join(str(notice) for notice in args.notices if notice.level == "warning")

    def write(self, name: str, text: str) -> str:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)


def make_model(directory: Path, config: dict[str, Any] | None = None) -> str:
    """A directory with a config.json: all that the command line looks at."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or QWEN3))
    return str(directory)


def make_command(directory: Path) -> TinyCommand:
    prompts = directory / "prompts.jsonl"
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TinyCommand(directory, make_model(directory / "model"), str(prompts))
