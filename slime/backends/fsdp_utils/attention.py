"""Our packed attention inside models of transformers, through its registry of attention functions.

A model that is built with ``attn_implementation=PACKED`` calls :func:`packed_in_transformers` in every layer. The plan
of the micro-batch travels through the model as a keyword argument, which models hand on to their attention.
transformers makes no mask for a name that has no mask function.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from slime.backends.training.attention import AttentionPlan, packed_attention

__all__ = ["PACKED", "register_packed_attention"]

PACKED = "slime_packed"

_UNSUPPORTED = {
    "sliding_window": "sliding windows",
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "biased scores",
}


def register_packed_attention() -> None:
    """Make :data:`PACKED` a name that models can be built with; again is fine."""
    AttentionInterface.register(PACKED, packed_in_transformers)


def packed_in_transformers(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention_plan: AttentionPlan | None = None,
    cp_group: Any = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """query ``[1, heads, t, d]``, key and value ``[1, groups, t, d]`` -> ``[1, t, heads, d]``.

    Raises:
        NotImplementedError: the model's attention is not plainly causal, or does not hand keyword arguments on.
    """
    unsupported = [what for name, what in _UNSUPPORTED.items() if settings.get(name) is not None]
    if unsupported:
        raise NotImplementedError(f"packed attention has no {', '.join(unsupported)}: use --attn-implementation.")
    if attention_plan is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not know the packing of the batch: its model keeps keyword arguments from "
            "its attention. Use --attn-implementation."
        )
    out = packed_attention(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        attention_plan,
        scale=query.size(-1) ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        cp_group=cp_group,
    )
    return out.unsqueeze(0), None
