"""Which tensors this rank holds and which the whole model has, each with its line of the family's table.

    local_tensors   the rank's parameters and router biases, by place in the whole model
    plan            every place, in the order of export, and the pipeline stage that owns it (a collective)

A *place* is a tensor of the whole model, cut by tensor parallelism only. Experts are the exception: one place is the
expert with the same local number on every expert-parallel rank, so that all ranks walk through the same list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.checkpoint.tensor_layouts import Dimensions
from slime.backends.megatron_utils.model.gpt import unwrap
from slime.backends.megatron_utils.model.value_head import VALUE_HEAD_PARAMETERS, ValueHead
from slime.models.family import Family
from slime.models.tables import Rule
from slime.utils.errors import ConfigError

__all__ = ["LocalTensor", "ModelTensors", "Place", "chunks_of", "dimensions_of"]

_DECODER_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_MTP_LAYER = re.compile(r"(?<=^mtp\.layers\.)\d+")
_VISION_LAYER = re.compile(r"(?:(?<=^vision_model\.blocks\.)|(?<=^vision_model\.deepstack_merger_list\.))\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_BUFFER = "expert_bias"
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, order=True)
class Place:
    """See the module docstring; ordered as exported. ``layer``, of the decoder or the vision tower, and ``mtp`` are -1,
    ``expert`` is 0, where they mean nothing."""

    mtp: int
    layer: int
    rule: int
    expert: int


@dataclass(frozen=True)
class LocalTensor:
    """This rank's share of a place."""

    place: Place
    name: str
    value: torch.Tensor


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
        """Hugging Face names of a place; of an expert as ``expert_rank`` of expert parallelism holds it."""
        return [self._format(name, place, expert_rank) for name in self.rule(place).hf]

    @property
    def embedding_names(self) -> list[str]:
        return [name for rule in self.family.rules if rule.megatron == _EMBEDDING for name in rule.hf]

    def stacked_name(self, place: Place) -> str | None:
        """The Hugging Face name of the tensors of all experts as one, where the family knows such a thing."""
        stacked = self.rule(place).stacked
        return None if stacked is None else self._format(stacked, place, 0)

    def expert(self, place: Place, expert_rank: int) -> int:
        """Which of all experts of the layer the place is on ``expert_rank``."""
        return place.expert + expert_rank * self.num_local_experts

    def _format(self, name: str, place: Place, expert_rank: int) -> str:
        return name.format(
            layer=place.layer,
            mtp=place.mtp,
            mtp_layer=self.config.num_layers + place.mtp,
            expert=self.expert(place, expert_rank),
        )

    def plan(self) -> list[Owned]:
        """All places of the whole model. A collective over the pipeline stages.

        In their order, except that those of another dtype than most (router biases) come last: what travels together
        has one dtype.
        """
        mine = [(t.place, tuple(t.value.shape), t.value.dtype) for t in self.local.values()]
        num_stages = mpu.get_pipeline_model_parallel_world_size()
        stages: list[Any] = [mine]
        if num_stages > 1:
            stages = [None] * num_stages
            dist.all_gather_object(stages, mine, group=mpu.get_pipeline_model_parallel_group())
        owned: dict[Place, Owned] = {}
        for stage, places in enumerate(stages):
            for place, shape, dtype in places:
                owned.setdefault(place, Owned(place, stage, shape, dtype))
        kept = [owned[place] for place in sorted(owned) if not self._is_copy(place)]
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
            has_value_head = isinstance(getattr(chunk, "output_layer", None), ValueHead)
            for name, parameter in chunk.named_parameters():
                if has_value_head and name in VALUE_HEAD_PARAMETERS:
                    continue  # a critic's own, which no Hugging Face checkpoint knows
                yield LocalTensor(self._place(chunk, name), name, parameter)
            for name, buffer in chunk.named_buffers():
                if name.endswith(_BUFFER) and buffer is not None:
                    yield LocalTensor(self._place(chunk, name), name, buffer)

    def _place(self, chunk: Any, name: str) -> Place:
        layer, mtp, expert = -1, -1, 0
        pattern = name
        if found := _DECODER_LAYER.search(name):
            # layer_number counts from 1 over the whole model, whatever the pipeline layout
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
