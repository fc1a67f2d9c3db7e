"""Flags that only the FSDP backend reads. Collected by ``slime.ray.arguments``; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from slime.backends.training.arguments import flag

__all__ = ["FsdpArgs"]


@dataclass(frozen=True)
class FsdpArgs:
    """Trainer on Hugging Face models (--train-backend fsdp)."""

    attn_implementation: str | None = flag(
        None,
        "--train-backend fsdp: attention of transformers (sdpa, eager, flash_attention_2, ...) instead of slime's own, "
        "which attends to packed samples without padding and under context parallelism.",
        metavar="NAME",
    )
