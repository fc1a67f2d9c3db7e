"""The tensors of this rank and of the whole model, each with its rule in the family's table, and their layouts.

    ModelTensors.local      the rank's parameters and router biases, by place in the whole model
    ModelTensors.plan       every place in the order of export, and its pipeline stage (a collective)
    to_megatron ... join    one tensor between Hugging Face and Megatron: fuse, pad, cut, and their inverses

A *place* is a tensor of the whole model, cut by tensor parallelism only. Experts are the exception: one place is the
expert with the same local number on every expert-parallel rank, so that all ranks iterate over the same list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.model.experts import experts_of
from slime.backends.megatron_utils.model.gpt import VALUE_HEAD_PARAMETERS, ValueHead, unwrap
from slime.models.family import Family, Rule, Section, local_name
from slime.utils.errors import ConfigError

_DECODER_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_MTP_LAYER = re.compile(r"(?<=^mtp\.layers\.)\d+")
_VISION_LAYER = re.compile(r"(?:(?<=^vision_model\.blocks\.)|(?<=^vision_model\.deepstack_merger_list\.))\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_BUFFER = "expert_bias"
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, order=True)
class Place:
    """A tensor of the whole model, see the module docstring. Ordered as exported.

    ``layer``, of the decoder or the vision tower, and ``mtp`` are -1 if not applicable, and ``expert`` is 0.
    """

    mtp: int
    layer: int
    rule: int
    expert: int


@dataclass(frozen=True)
class LocalTensor:
    """This rank's share of a place, under its name in the chunk.

    Attributes:
        owner: the parameter or buffer that has the value. Experts are views of one parameter.
    """

    place: Place
    name: str
    value: torch.Tensor
    owner: torch.Tensor


def stored(tensor: LocalTensor) -> torch.Tensor:
    """The value as it is in memory."""
    return tensor.value


def merged(tensor: LocalTensor) -> torch.Tensor:
    """The value plus the change by its adapter, if it has one, rounded once."""
    adapter = vars(tensor.owner).get("adapter")
    if adapter is None:
        return tensor.value
    summed: torch.Tensor = tensor.value.float() + adapter.delta(tensor.place.expert)
    return summed.to(tensor.value.dtype)


@dataclass(frozen=True)
class Owned:
    """A place of the whole model, the stage that owns it, and the share each of its ranks holds."""

    place: Place
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def chunks_of(model: Any) -> list[Any]:
    """The GPTModels inside the wrappers: one, or with interleaved pipelines one per virtual stage."""
    chunks = list(model) if isinstance(model, Sequence | torch.nn.ModuleList) else [model]
    return [unwrap(chunk) for chunk in chunks]


def dimensions_of(config: Any, vocab_size: int) -> Dimensions:
    """Of a ``TransformerConfig``."""
    return Dimensions(
        config.num_query_groups or config.num_attention_heads,
        config.kv_channels,
        vocab_size,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )


@dataclass
class ModelTensors:
    """The tensors of ``model`` under the table of ``family``.

    Raises:
        ConfigError: a parameter has no line in the table.
    """

    model: Any
    family: Family
    vocab_size: int
    is_tied: bool
    local: dict[Place, LocalTensor] = field(init=False)

    def __post_init__(self) -> None:
        self._patterns = {rule.megatron: index for index, rule in enumerate(self.family.rules)}
        self._chunks = chunks_of(self.model)
        self.config = self._chunks[0].config
        self.local = {tensor.place: tensor for tensor in self._walk()}

    @property
    def size(self) -> Dimensions:
        return dimensions_of(self.config, self.vocab_size)

    def rule(self, place: Place) -> Rule:
        return self.family.rules[place.rule]

    @property
    def num_local_experts(self) -> int:
        return (self.config.num_moe_experts or 0) // mpu.get_expert_model_parallel_world_size()

    def num_shards(self, rule: Rule) -> int:
        if rule.is_expert:
            return int(mpu.get_expert_tensor_parallel_world_size())
        return int(mpu.get_tensor_model_parallel_world_size())

    def shard_rank(self, rule: Rule) -> int:
        if rule.is_expert:
            return int(mpu.get_expert_tensor_parallel_rank())
        return int(mpu.get_tensor_model_parallel_rank())

    def hf_names(self, place: Place, expert_rank: int) -> list[str]:
        """Hugging Face names of a place. An expert's name depends on its expert-parallel rank ``expert_rank``."""
        return [self._format(name, place, expert_rank) for name in self.rule(place).hf]

    @property
    def embedding_names(self) -> list[str]:
        return [name for rule in self.family.rules if rule.megatron == _EMBEDDING for name in rule.hf]

    def stacked_name(self, place: Place) -> str | None:
        """The Hugging Face name of the tensor that stacks all experts, or None if the family has no such tensor."""
        stacked = self.rule(place).stacked
        return None if stacked is None else self._format(stacked, place, 0)

    def expert(self, place: Place, expert_rank: int) -> int:
        """The number of the place's expert in the layer, on ``expert_rank``."""
        return place.expert + expert_rank * self.num_local_experts

    def _format(self, name: str, place: Place, expert_rank: int) -> str:
        return name.format(
            layer=place.layer,
            mtp=place.mtp,
            mtp_layer=self.config.num_layers + place.mtp,
            expert=self.expert(place, expert_rank),
        )

    def plan(self) -> list[Owned]:
        """All places of the whole model, in the order of export. A collective over the pipeline stages."""
        mine = [(t.place, tuple(t.value.shape), t.value.dtype) for t in self.local.values()]
        num_stages = mpu.get_pipeline_model_parallel_world_size()
        stages: list[Any] = [mine]
        if num_stages > 1:
            stages = [None] * num_stages
            dist.all_gather_object(stages, mine, group=mpu.get_pipeline_model_parallel_group())
        owned: dict[Place, Owned] = {}
        for stage, places in enumerate(stages):
            for place, shape, dtype in places:
                # The first stage that has a tensor owns it.
                owned.setdefault(place, Owned(place, stage, shape, dtype))
        kept = [owned[place] for place in sorted(owned) if not self._is_copy(place)]
        # Tensors with a rare dtype (router biases) come last, so that nearly all buckets have one dtype.
        usual = Counter(one.dtype for one in kept).most_common(1)[0][0] if kept else None
        return sorted(kept, key=lambda one: one.dtype != usual)

    def all_hf_names(self, plan: Sequence[Owned]) -> set[str]:
        """Every name under which a checkpoint may have a tensor of the model."""
        names: set[str] = set()
        for one in plan:
            ranks = mpu.get_expert_model_parallel_world_size() if self.rule(one.place).is_expert else 1
            for rank in range(ranks):
                names.update(self.hf_names(one.place, rank))
            if (stacked := self.stacked_name(one.place)) is not None:
                names.add(stacked)
        return names

    def _is_copy(self, place: Place) -> bool:
        """With tied embeddings the last pipeline stage has a copy of the embedding as its output layer."""
        return self.is_tied and self.rule(place).megatron == "output_layer.weight"

    def _walk(self) -> Iterator[LocalTensor]:
        for chunk in self._chunks:
            has_value_head = isinstance(dict(chunk.named_children()).get("output_layer"), ValueHead)
            for name, parameter in chunk.named_parameters():
                if has_value_head and name in VALUE_HEAD_PARAMETERS:
                    continue  # a critic's head is in no Hugging Face checkpoint
                for single, value in experts_of(name, parameter):
                    yield LocalTensor(self._place(chunk, single), single, value, parameter)
            for name, buffer in chunk.named_buffers():
                if name.endswith(_BUFFER) and buffer is not None:
                    yield LocalTensor(self._place(chunk, name), name, buffer, buffer)

    def _place(self, chunk: Any, name: str) -> Place:
        layer, mtp, expert = -1, -1, 0
        pattern = name = local_name(name)
        if found := _DECODER_LAYER.search(name):
            # layer_number counts from 1 over the whole model, on any pipeline layout
            layer = chunk.decoder.layers[int(found.group())].layer_number - 1
            pattern = _DECODER_LAYER.sub("{layer}", pattern)
        elif found := _VISION_LAYER.search(name):
            layer = int(found.group())
            pattern = _VISION_LAYER.sub("{layer}", pattern)
        elif found := _MTP_LAYER.search(name):
            mtp = int(found.group())
            pattern = _MTP_LAYER.sub("{mtp}", pattern)
        if found := _EXPERT.search(name):
            expert = int(found.group())
            pattern = _EXPERT.sub("{expert}", pattern)
        rule = self._patterns.get(pattern)
        if rule is None:
            raise ConfigError(
                f"model_type {self.family.model_type}: the family's table has no line for parameter {name}."
            )
        return Place(mtp, layer, rule, expert)


@dataclass(frozen=True)
class Dimensions:
    """The sizes needed to split a fused tensor.

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
        ratio = self.num_value_heads // self.num_key_heads  # value heads per key head
        values = ratio * self.value_dim
        widths = {"q": self.key_dim, "k": self.key_dim, "v": values, "z": values, "b": ratio, "a": ratio}
        return sum(widths[part] for part in section)


def to_megatron(parts: Sequence[torch.Tensor], rule: Rule, size: Dimensions, num_rows: int) -> torch.Tensor:
    """The whole Megatron tensor. ``num_rows``: its rows with the padding of the vocabulary."""
    match rule.layout:
        case "copy":
            return parts[0]
        case "swapped_columns":
            left, right = parts[0].chunk(2, dim=1)
            return torch.cat([right, left], dim=1)
        case "vocab":
            missing = num_rows - parts[0].shape[0]
            # The caller compares shapes and reports a wrong one.
            if missing <= 0 or parts[0].shape[0] != size.vocab_size:
                return parts[0]
            return torch.cat([parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:])])
        case "gate_up":
            return torch.cat(list(parts)) if len(parts) > 1 else parts[0]  # one part: it already has gate above up
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
            # [groups, query | gate, heads of the group, head_dim] -> per head its query, then its gate.
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
        # A rank needs gate and up of the same columns.
        return torch.cat([half.chunk(num_shards)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(num_shards, dim=0 if rule.split == "column" else 1)[rank]


def join(shards: Sequence[torch.Tensor], rule: Rule) -> torch.Tensor:
    """The whole Megatron tensor: the inverse of :func:`shard` over all ranks."""
    if len(shards) == 1 or rule.split == "none":
        return shards[0]
    if rule.layout == "gate_up":
        halves = [one.chunk(2) for one in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards), dim=0 if rule.split == "column" else 1)
