"""One tensor between Hugging Face and Megatron: fuse and take apart, pad the vocabulary, cut and join shards.

Pure functions over whole tensors; ``hf_checkpoint`` knows which rank holds what. Used with the families' rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from slime.models.tables import Rule, Section

__all__ = ["Dimensions", "from_megatron", "full_shape", "join", "shard", "to_megatron"]


@dataclass(frozen=True)
class Dimensions:
    """What taking a fused tensor apart needs to know.

    Attributes:
        num_query_groups, head_dim: key/value heads of attention and the width of one.
        vocab_size: token ids without padding.
        num_key_heads, num_value_heads, key_dim, value_dim: of gated delta nets.
    """

    num_query_groups: int
    head_dim: int
    vocab_size: int
    num_key_heads: int = 1
    num_value_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1

    def rows(self, section: Section) -> int:
        """Rows of ``section`` per key head."""
        ratio = self.num_value_heads // self.num_key_heads
        values = ratio * self.value_dim
        widths = {"q": self.key_dim, "k": self.key_dim, "v": values, "z": values, "b": ratio, "a": ratio}
        return sum(widths[part] for part in section)


def to_megatron(parts: Sequence[torch.Tensor], rule: Rule, size: Dimensions, num_rows: int) -> torch.Tensor:
    """The whole Megatron tensor; ``num_rows`` are its rows with the padding of the vocabulary."""
    match rule.layout:
        case "copy":
            return parts[0]
        case "swapped_columns":
            left, right = parts[0].chunk(2, dim=1)
            return torch.cat([right, left], dim=1)
        case "vocab":
            missing = num_rows - parts[0].shape[0]
            if missing <= 0 or parts[0].shape[0] != size.vocab_size:
                return parts[0]
            return torch.cat([parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:])])
        case "gate_up":
            return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        case "qkv":
            groups = [part.reshape(size.num_query_groups, -1, *part.shape[1:]) for part in parts]
            return torch.cat(groups, dim=1).flatten(0, 1)
        case "gated_qkv":
            # [groups, heads of the group, query | gate, head_dim] -> all queries, then all gates
            query = parts[0].reshape(size.num_query_groups, -1, 2, size.head_dim, *parts[0].shape[1:])
            keys = [part.reshape(size.num_query_groups, -1, *part.shape[1:]) for part in parts[1:]]
            return torch.cat([query.transpose(1, 2).flatten(1, 3), *keys], dim=1).flatten(0, 1)
        case "by_key_head":
            pieces = [
                piece.reshape(size.num_key_heads, -1, *piece.shape[1:])
                for part, sections in zip(parts, rule.sections, strict=True)
                for piece in part.split([size.num_key_heads * size.rows(section) for section in sections])
            ]
            return torch.cat(pieces, dim=1).flatten(0, 1)
        case _:
            raise AssertionError(f"unknown layout {rule.layout}")


def from_megatron(tensor: torch.Tensor, rule: Rule, size: Dimensions) -> list[torch.Tensor]:
    """The Hugging Face tensors inside a whole Megatron tensor, in the order of ``rule.hf``. Mostly views."""
    match rule.layout:
        case "copy":
            return [tensor]
        case "swapped_columns":
            left, right = tensor.chunk(2, dim=1)
            return [torch.cat([right, left], dim=1)]
        case "vocab":
            return [tensor[: size.vocab_size]]
        case "gate_up":
            return list(tensor.chunk(len(rule.hf)))
        case "qkv":
            groups = tensor.reshape(size.num_query_groups, -1, *tensor.shape[1:])
            query_rows = groups.shape[1] - 2 * size.head_dim
            split = groups.split([query_rows, size.head_dim, size.head_dim], dim=1)
            return [part.flatten(0, 1) for part in split]
        case "gated_qkv":
            groups = tensor.reshape(size.num_query_groups, -1, *tensor.shape[1:])
            query_rows = groups.shape[1] - 2 * size.head_dim
            query, key, value = groups.split([query_rows, size.head_dim, size.head_dim], dim=1)
            query = query.reshape(size.num_query_groups, 2, -1, size.head_dim, *tensor.shape[1:]).transpose(1, 2)
            return [query.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)]
        case "by_key_head":
            heads = tensor.reshape(size.num_key_heads, -1, *tensor.shape[1:])
            widths = [size.rows(section) for section in chain.from_iterable(rule.sections)]
            pieces = iter(piece.flatten(0, 1) for piece in heads.split(widths, dim=1))
            return [torch.cat([next(pieces) for _ in sections]) for sections in rule.sections]
        case _:
            raise AssertionError(f"unknown layout {rule.layout}")


def full_shape(local: Sequence[int], rule: Rule, num_shards: int) -> list[int]:
    """Shape of the whole Megatron tensor of which a rank holds ``local``."""
    shape = list(local)
    match rule.split:
        case "none":
            pass
        case "column":
            shape[0] *= num_shards
        case "row":
            shape[1] *= num_shards
        case _:
            raise AssertionError(f"unknown split {rule.split}")
    return shape


def shard(tensor: torch.Tensor, rule: Rule, rank: int, num_shards: int) -> torch.Tensor:
    """Rank ``rank``'s share of a whole Megatron tensor."""
    if num_shards == 1 or rule.split == "none":
        return tensor
    if rule.layout == "gate_up":
        return torch.cat([half.chunk(num_shards)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(num_shards, dim=0 if rule.split == "column" else 1)[rank]


def join(shards: Sequence[torch.Tensor], rule: Rule) -> torch.Tensor:
    """The whole Megatron tensor; inverse of :func:`shard` over all ranks."""
    if len(shards) == 1 or rule.split == "none":
        return shards[0]
    if rule.layout == "gate_up":
        halves = [one.chunk(2) for one in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards), dim=0 if rule.split == "column" else 1)
