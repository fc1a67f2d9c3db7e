"""How much compute a sequence costs in a forward pass of a dense decoder: weights for balancing, and for TFLOP/s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["ModelDims", "calculate_fwd_flops"]


class ModelDims(Protocol):
    """The sizes that matter; the flat arguments and the trainer's model shape both have them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_query_groups(self) -> int: ...
    @property
    def kv_channels(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def calculate_fwd_flops(seqlens: Sequence[int], args: ModelDims) -> int:
    """Floating-point operations of one forward pass over packed sequences, a multiply-add counted as two.

    Per layer and sequence of length L: projections ``2 L h d (heads + 2 groups)``, causal attention ``2 L^2 heads d``
    (half of it is masked), output ``2 L h^2``, gated MLP ``6 L h ffn``; plus the head ``2 L h V``.
    """
    h, d, heads = args.hidden_size, args.kv_channels, args.num_attention_heads
    per_token = 2 * h * d * (heads + 2 * args.num_query_groups) + 2 * h * h + 6 * h * args.ffn_hidden_size
    return sum(
        args.num_layers * (length * per_token + 2 * heads * length * length * d) + 2 * length * h * args.vocab_size
        for length in seqlens
    )
