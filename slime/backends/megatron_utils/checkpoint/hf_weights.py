"""Weights between a Hugging Face checkpoint and the live model, in both directions, on any parallel layout.

    load     every rank reads the tensors of its shards, one at a time
    export   bucket by bucket, see ``gather``

``actor`` and the conversion tools call it on all ranks at once. A model larger than the host's memory never
has to exist twice. Layouts are handled here, architectures in ``slime.models``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slime.backends import EVERY_RANK, SOURCE, NamedTensor, Recipients
from slime.backends.megatron_utils.checkpoint.gather import Gather, groups_of_rank
from slime.backends.megatron_utils.checkpoint.tensors import (
    LocalTensor,
    ModelTensors,
    Place,
    from_megatron,
    full_shape,
    join,
    merged,
    shard,
    stored,
    to_megatron,
)
from slime.backends.training.adapter_files import save_adapter
from slime.backends.training.hf_files import TensorReader, raise_everywhere
from slime.models.lora import LoraConfig
from slime.models.shape import ModelShape
from slime.utils.distributed_utils import files_group
from slime.utils.errors import ConfigError

Content = Literal["weights", "adapters", "merged"]

_BUCKET_BYTES = 512 * 1024**2

_NEVER_READ = (r".*\.rotary_emb\.inv_freq",)


@torch.no_grad()
def load_weights(model: Any, shape: ModelShape, directory: str, flag: str, *, has_lm_head: bool = True) -> None:
    """Fill every parameter of ``model`` from the safetensors files in ``directory``. A collective.

    Args:
        model: one model or the chunks of an interleaved pipeline, wrapped or not.
        flag: the flag that named the directory, for messages.
        has_lm_head: False for a critic, whose value head takes the place of the LM head: that of the files is not read.

    Raises:
        ConfigError: tensors are missing, unknown, or of another shape than the model's (both are named). Raised
            on all ranks, with the problems of all of them.
    """
    problems: list[str] = []
    try:
        reader = TensorReader(directory, flag)
        tensors = ModelTensors(model, shape.family, shape.vocab_size, shape.is_tied or not has_lm_head)
    except ConfigError as error:
        problems += error.problems
    raise_everywhere(problems)  # before the collective of ``plan``, which a rank that has failed would not enter
    with _collected(problems):
        for local in tensors.local.values():
            if not tensors.rule(local.place).is_adapter:
                problems += _fill(local, tensors, reader)
    dist.barrier(group=files_group())  # ranks read for different times, and ``plan`` waits in a group of training
    unknown = sorted(reader.names - tensors.all_hf_names(tensors.plan()))
    problems += _unknown(unknown, tensors, reader, shape.num_mtp_layers)
    if has_lm_head and mpu.is_pipeline_last_stage(ignore_virtual=True) and mpu.get_tensor_model_parallel_rank() == 0:
        with _collected(problems):
            problems += reader.tied_head(shape.is_tied)
    raise_everywhere(problems)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Add the problems of an error to the list, so that this rank still meets the others."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def _fill(local: LocalTensor, tensors: ModelTensors, reader: TensorReader) -> list[str]:
    rule = tensors.rule(local.place)
    names = tensors.hf_names(local.place, mpu.get_expert_model_parallel_rank())
    if "lm_head.weight" in names and (tensors.is_tied or "lm_head.weight" not in reader):
        names = tensors.embedding_names  # the last stage's copy, or an untied head from a tied checkpoint
    stacked = tensors.stacked_name(local.place)
    if stacked is not None and stacked in reader:
        parts = [reader.row(stacked, tensors.expert(local.place, mpu.get_expert_model_parallel_rank()))]
    elif missing := [name for name in names if name not in reader]:
        return [f"{reader.where}: tensor {name} is missing in its .safetensors files." for name in missing]
    elif problems := reader.integers(names):
        return problems
    else:
        parts = [reader.get(name) for name in names]
    num_shards = tensors.num_shards(rule)
    needed = full_shape(local.value.shape, rule, num_shards)
    has: list[Any]
    try:
        whole = to_megatron(parts, rule, tensors.size, needed[0])
        has = list(whole.shape)
    except RuntimeError:  # the parts do not fit together
        has = [list(part.shape) for part in parts]
    if has != needed:
        return [
            f"{reader.where}: {' + '.join(names)} makes {has}, but the model that config.json describes needs "
            f"{needed} for {local.name}: config.json and weights do not belong together."
        ]
    # In place: wrappers and gradient buffers refer to this tensor.
    local.value.copy_(shard(whole, rule, tensors.shard_rank(rule), num_shards))
    return []


def _unknown(names: Sequence[str], tensors: ModelTensors, reader: TensorReader, num_mtp_layers: int) -> list[str]:
    """Problems: tensors of the checkpoint without a parameter, so that the model would differ from the saved one."""
    patterns = [*_NEVER_READ, *tensors.family.untouched]
    if tensors.is_tied:
        patterns.append(r"lm_head\.weight")
    first_ignored = tensors.config.num_layers
    num_mtp = tensors.config.mtp_num_layers or 0
    for pattern in tensors.family.ignored:
        if num_mtp:  # of layers that are built only copies of the embedding and the head go unread
            pattern = pattern.removesuffix(".*") + r"(embed_tokens|shared_head\.head)\.weight"
        layers = range(first_ignored, first_ignored + max(num_mtp, num_mtp_layers))
        patterns.append(pattern.replace("{num_layers}", "(" + "|".join(map(str, layers)) + ")"))
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return [
        f"{reader.where}: tensor {name} has no place in the model that config.json describes."
        for name in names
        if not ignored.fullmatch(name)
    ]


@torch.no_grad()
def export_weights(
    model: Any,
    shape: ModelShape,
    bucket_bytes: int = _BUCKET_BYTES,
    recipients: Recipients = EVERY_RANK,
    *,
    layout_of: str | None = None,
    content: Content = "weights",
) -> Iterator[NamedTensor]:
    """All weights under Hugging Face names, whole and without vocabulary padding. A collective.

    Tensors may be views of live parameters: use or copy them before the next optimizer step.

    Args:
        bucket_bytes: bytes gathered at a time. A larger tensor is gathered alone.
        recipients: the ranks that get the tensors. The others get none.
        layout_of: a checkpoint. If it stacks the experts of a layer in one tensor, so does the export.
        content: the weights without adapters, the adapters alone under peft's names, or the weights with them.
    """
    tensors = ModelTensors(model, shape.family, shape.vocab_size, shape.is_tied)
    stacks = _Stacks(tensors, layout_of)
    gather = Gather(tensors, groups_of_rank(), recipients, merged if content == "merged" else stored)
    plan = [one for one in tensors.plan() if tensors.rule(one.place).is_adapter == (content == "adapters")]
    for bucket in gather.buckets(plan, bucket_bytes):
        for owned, expert_rank, shards in gather.pieces(bucket):
            rule = tensors.rule(owned.place)
            whole = join(shards, rule)
            if stacks.has(owned.place):
                yield from stacks.add(owned.place, expert_rank, whole)
                continue
            parts = from_megatron(whole, rule, tensors.size)
            named = zip(tensors.hf_names(owned.place, expert_rank), parts, strict=True)
            yield from ((name, part) for name, part in named if name)  # rows without an adapter have no name


def save_adapters(model: Any, shape: ModelShape, lora: LoraConfig, hf_checkpoint: str, path: str) -> None:
    """Write the adapters as a directory of peft. A collective."""
    weights = export_weights(model, shape, recipients=SOURCE, content="adapters")
    save_adapter(weights, lora, shape, hf_checkpoint, path)


class _Stacks:
    """Collects the experts of a layer into one tensor. Holds one layer at a time."""

    def __init__(self, tensors: ModelTensors, layout_of: str | None) -> None:
        self._tensors = tensors
        has_stacks = any(rule.stacked for rule in tensors.family.rules)
        # a directory may have a config and no weights
        if layout_of is not None and has_stacks and any(Path(layout_of).glob("*.safetensors")):
            self._names = TensorReader(layout_of, "--hf-checkpoint").names
        else:
            self._names = set()
        self._experts: dict[int, torch.Tensor] = {}

    def has(self, place: Place) -> bool:
        return self._tensors.stacked_name(place) in self._names

    def add(self, place: Place, expert_rank: int, whole: torch.Tensor) -> Iterator[NamedTensor]:
        """``whole``: one expert, with the gate above the up-projection as in the stack."""
        name = self._tensors.stacked_name(place)
        assert name is not None, "has() says so"
        self._experts[self._tensors.expert(place, expert_rank)] = whole
        # The experts of a layer may come in several buckets.
        if len(self._experts) == self._tensors.config.num_moe_experts:
            yield name, torch.stack([self._experts[expert] for expert in sorted(self._experts)])
            self._experts = {}
