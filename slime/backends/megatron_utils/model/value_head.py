"""The critic's head: a value per token where the policy has logits. Put in place by ``setup``, before the wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from slime.backends.megatron_utils.model.gpt import unwrap

__all__ = ["VALUE_HEAD_PARAMETERS", "ValueHead", "add_value_head"]

VALUE_HEAD_PARAMETERS = ("output_layer.weight", "output_layer.bias")


class ValueHead(torch.nn.Linear):
    """``[..., h]`` -> fp32 ``[..., 1]``, called as Megatron calls its output layer.

    Every tensor-parallel rank has the whole head and sees the whole hidden states, so values and gradients are equal on
    all of them and nothing is summed.
    """

    sequence_parallel = False

    def __init__(self, hidden_size: int, *, init_std: float, seed: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)  # the same head on every rank
        with torch.no_grad():
            self.weight.copy_(torch.randn(1, hidden_size, generator=generator) * init_std)
            self.bias.zero_()
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]  # no matrix for muon

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()), None


def add_value_head(chunks: Sequence[torch.nn.Module], *, init_std: float, seed: int) -> None:
    """Replace the output layer of the chunk that has one (last pipeline stage only)."""
    for chunk in chunks:
        model: Any = unwrap(chunk)
        assert isinstance(model, GPTModel), f"a {type(model).__name__} has no output layer to replace"
        if model.post_process:
            old = next(model.decoder.parameters())
            head = ValueHead(model.config.hidden_size, init_std=init_std, seed=seed, dtype=old.dtype)
            model.output_layer = head.to(old.device)
