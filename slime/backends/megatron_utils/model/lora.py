"""Low-rank adapters beside the linear layers of Megatron: ``y + scale B (A x)``, on every parallel layout.

    layer        lora_A                           A x                            lora_B
    column       whole on every tensor rank       gathered with the sequence     divided by rows, like the weight
    row          divided by columns               summed over the tensor ranks   whole on every tensor rank
    replicated   whole                            -                              whole
    experts      one below the other, like the weights of ``ExpertLinear``

A fused layer has the ``A`` of each Hugging Face layer in it one below the other. Its ``lora_B`` has the rows of the
weight, and each row multiplies the ``A x`` of its own layer only. Thus the tables of ``slime.models`` describe both.

The last functions fill adapters, and describe their part of a checkpoint, on any parallel layout.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from slime.backends.megatron_utils.checkpoint.tensors import (
    LocalTensor,
    ModelTensors,
    chunks_of,
    full_shape,
    shard,
    to_megatron,
)
from slime.backends.megatron_utils.model.experts import multiply
from slime.backends.training.hf_files import TensorReader, raise_everywhere
from slime.models.family import Rule
from slime.models.lora import FILE_PREFIX, Linear, LoraConfig, rows_of
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError

ADAPTERS = (r"\.adapter\.",)
"""Regular expressions that find the parameters of adapters."""


class Adapter(torch.nn.Module):
    """The adapter of one module. Adds to its output by a forward hook.

    Args:
        rows: the column of ``uses`` of each row of the module's weight, -1 for a row without an adapter.
        num_inputs: Hugging Face layers with an adapter in the module.
    """

    is_on = True

    def __init__(
        self, linear: Any, rule: Rule, rows: torch.Tensor, num_inputs: int, lora: LoraConfig, num_experts: int = 1
    ) -> None:
        super().__init__()
        self.rule, self._lora, self.num_experts = rule, lora, num_experts
        like = linear.weight
        self.lora_A = torch.nn.Parameter(like.new_empty(num_experts * num_inputs * lora.rank, like.shape[1]))
        self.lora_B = torch.nn.Parameter(like.new_empty(like.shape[0], lora.rank))
        self._group = None if rule.is_expert or rule.split == "none" else linear.tp_group
        self._slices_rows = not rule.is_expert and _slices_rows(linear)
        uses = rows.unsqueeze(1) == torch.arange(num_inputs)
        mask = None if uses.all() else uses.to(like.device, like.dtype)
        self.uses: torch.Tensor | None
        self.register_buffer("uses", mask, persistent=False)
        self._mark(linear)
        linear.adapter = self
        vars(like)["adapter"] = self  # for the export of merged weights
        # Calls the adapter as a module: Megatron's hooks then wait for a gather of its parameters.
        linear.register_forward_hook(lambda module, inputs, output: self(inputs, output))

    def _mark(self, linear: Any) -> None:
        """What Megatron's optimizer and gradient reduction must know about the parameters."""
        split = self.rule.split
        if self.rule.is_expert:
            for parameter in (self.lora_A, self.lora_B):
                vars(parameter).update(vars(linear.weight))  # also counts the experts
            return
        for parameter, dim in ((self.lora_A, 1 if split == "row" else None), (self.lora_B, 0)):
            if dim is not None and split == ("row" if dim else "column"):
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
            elif self._slices_rows:
                # A tensor rank has seen its slice of the rows only: Megatron sums the gradients.
                vars(parameter)["sequence_parallel"] = True

    def forward(self, inputs: tuple[Any, ...], output: Any) -> Any:
        """``output`` of the module plus the adapter's. None, which changes nothing, if it is off."""
        if not self.is_on:
            return None
        if self.rule.is_expert:
            rows, ends = inputs
            inner = multiply(self._dropped(rows), self.lora_A, ends) * self._lora.scale
            return output + multiply(inner, self._fused(), ends)
        out, *rest = output
        inner = self._complete(F.linear(self._dropped(inputs[0]), self.lora_A) * self._lora.scale)
        added = torch.addmm(out.flatten(0, -2), inner.flatten(0, -2), self._fused().t())
        return added.view_as(out), *rest

    def _dropped(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.training or self._lora.dropout == 0:
            return rows
        if self._slices_rows or self.rule.split == "row":  # tensor ranks have other rows or columns
            with get_cuda_rng_tracker().fork():
                return F.dropout(rows, self._lora.dropout)
        return F.dropout(rows, self._lora.dropout)

    def _complete(self, inner: torch.Tensor) -> Any:
        """``A x`` ``[.., rank]`` as ``lora_B`` reads it on this tensor rank."""
        if self._group is None or self._group.size() == 1:
            return inner
        if self.rule.split == "row":
            if self._slices_rows:
                return reduce_scatter_to_sequence_parallel_region(inner, group=self._group)
            return reduce_from_tensor_model_parallel_region(inner, group=self._group)
        if self._slices_rows:
            return gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=self._group)
        return copy_to_tensor_model_parallel_region(inner, group=self._group)

    def _fused(self) -> torch.Tensor:
        """``[out, inputs * rank]``: ``lora_B`` with zeros for the inputs that a row does not use."""
        if self.uses is None:
            return self.lora_B
        of_expert = self.lora_B.unflatten(0, (self.num_experts, -1)).unsqueeze(2) * self.uses.unsqueeze(-1)
        return of_expert.flatten(2).flatten(0, 1)

    @torch.no_grad()
    def delta(self, expert: int = 0) -> torch.Tensor:
        """The change of this rank's share of the weight, of one expert, in fp32."""
        matrices = [part.chunk(self.num_experts)[expert].float() for part in (self.lora_A, self._fused())]
        return self._lora.scale * (matrices[1] @ matrices[0])


def _slices_rows(linear: Any) -> bool:
    """Whether tensor ranks have different rows before a column layer, or after a row layer."""
    return bool(vars(linear).get("sequence_parallel", linear.config.sequence_parallel))


def add_adapters(model: Any, shape: ModelShape, lora: LoraConfig) -> None:
    """Give this rank's part of ``model`` its adapters, without values.

    Args:
        shape: of ``LoraConfig.with_adapters``.
    """
    targets: dict[Rule, list[Linear]] = {}
    for linear in lora.targets(shape):
        targets.setdefault(linear.rule, []).append(linear)
    tensors = ModelTensors(model, shape.family, shape.vocab_size, shape.is_tied)
    modules = {id(each.weight): each for chunk in chunks_of(model) for each in chunk.modules() if _has_weight(each)}
    for local in tensors.local.values():
        rule, module = tensors.rule(local.place), modules.get(id(local.owner))
        if rule not in targets or local.place.expert > 0:
            continue
        parts = [linear.part for linear in targets[rule]]
        rows = _inputs_of_rows(shape, tensors, rule, parts)
        num_experts = tensors.num_local_experts if rule.is_expert else 1
        Adapter(module, rule, rows, len(parts), lora, num_experts)


def _has_weight(module: torch.nn.Module) -> bool:
    return isinstance(vars(module)["_parameters"].get("weight"), torch.nn.Parameter)


def _inputs_of_rows(shape: ModelShape, tensors: ModelTensors, rule: Rule, parts: list[int]) -> torch.Tensor:
    """For each row of this rank's weight the position of its Hugging Face layer in ``parts``, or -1."""
    sizes = rows_of(shape, rule)
    numbers = [torch.full((rows,), parts.index(part) if part in parts else -1) for part, rows in enumerate(sizes)]
    whole = to_megatron(numbers, rule, tensors.size, 0)
    return shard(whole, rule, tensors.shard_rank(rule), tensors.num_shards(rule)) if rule.split == "column" else whole


def adapters_of(model: Any) -> Iterator[Adapter]:
    """Every adapter of this rank."""
    for chunk in chunks_of(model):
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")


@torch.no_grad()
def fill_adapters(model: Any, shape: ModelShape, lora: LoraConfig, seed: int) -> None:
    """Give every adapter the values of ``lora.adapter_path``, or initial ones. A collective.

    ``A`` begins as in peft, uniform in ``+-1 / sqrt(in)``, and ``B`` as zeros. A tensor's values depend on its name and
    ``seed`` only, so that they are equal on every layout.

    Raises:
        ConfigError: the file lacks tensors, or they have other shapes.
    """
    problems: list[str] = []
    try:
        reader = None if lora.adapter_path is None else TensorReader(lora.adapter_path, "--lora-adapter-path")
        values = _Values(shape, lora.rank, seed, reader)
        tensors = ModelTensors(model, shape.family, shape.vocab_size, shape.is_tied)
        for local in tensors.local.values():
            if tensors.rule(local.place).is_adapter:
                _fill(local, tensors, values)
    except (ConfigError, KeyError, RuntimeError) as error:
        problems += [f"--lora-adapter-path {lora.adapter_path}: {error}"]
    raise_everywhere(problems)


class _Values:
    """Whole tensors by their Hugging Face names."""

    def __init__(self, shape: ModelShape, rank: int, seed: int, reader: TensorReader | None) -> None:
        self._rank, self._seed, self._reader = rank, seed, reader
        self.base_rows = {
            rule.megatron.removesuffix("weight"): rows_of(shape, rule) for rule in shape.family.rules if rule.hf
        }

    def input(self, name: str, columns: int) -> torch.Tensor:
        if self._reader is not None:
            return self._reader.get(FILE_PREFIX + name)
        number = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8], "big") >> 1
        bound = 1 / math.sqrt(columns)
        generator = torch.Generator().manual_seed(number)
        return torch.empty(self._rank, columns).uniform_(-bound, bound, generator=generator)

    def output(self, name: str, rows: int) -> torch.Tensor:
        if self._reader is None or not name:
            return torch.zeros(rows, self._rank)
        return self._reader.get(FILE_PREFIX + name)


def _fill(local: LocalTensor, tensors: ModelTensors, values: _Values) -> None:
    rule, ranks = tensors.rule(local.place), tensors.num_shards
    names = tensors.hf_names(local.place, mpu.get_expert_model_parallel_rank())
    needed = full_shape(local.value.shape, rule, ranks(rule))
    base, matrix = rule.megatron.split("adapter.lora_")
    if matrix == "A":
        parts = [values.input(name, needed[1]) for name in names]
    else:
        parts = [values.output(name, rows) for name, rows in zip(names, values.base_rows[base], strict=True)]
    whole = to_megatron(parts, rule, tensors.size, needed[0])
    if list(whole.shape) != needed:
        raise ConfigError(f"{' + '.join(names)} makes {list(whole.shape)}, but the model needs {needed}.")
    local.value.copy_(shard(whole, rule, tensors.shard_rank(rule), ranks(rule)))


def sharded_adapters(chunk: Any) -> dict[str, Any]:
    """The adapters of a chunk as parts of whole tensors, by their names in the chunk, for Megatron's checkpoints."""
    sharded: dict[str, Any] = {}
    for path, module in chunk.named_modules():
        if not isinstance(module, Adapter):
            continue
        for name, parameter in module.named_parameters():
            # layer_number counts from 1 over the whole model, on any pipeline layout
            number = chunk.decoder.layers[int(_layer(path))].layer_number - 1
            key = f"{_LAYER.sub(str(number), path)}.{name}"
            sharded[f"{path}.{name}"] = _sharded(key, parameter, module.rule, is_output=name == "lora_B")
    return sharded


def _layer(path: str) -> str:
    found = _LAYER.search(path)
    assert found is not None, f"{path} belongs to no decoder layer"
    return found.group()


def _sharded(key: str, parameter: torch.Tensor, rule: Rule, *, is_output: bool) -> Any:
    if rule.is_expert:  # one expert below the other, those of a rank in one piece
        where = (0, mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size())
        replica = (0, 0, mpu.get_expert_data_parallel_rank())
        return ShardedTensor.from_rank_offsets(key, parameter, where, replica_id=replica)
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    copy = mpu.get_data_parallel_rank(with_context_parallel=True)
    if rule.split != ("column" if is_output else "row"):
        return ShardedTensor.from_rank_offsets(key, parameter, replica_id=(0, rank, copy))
    if is_output and rule.layout == "gate_up":
        return ShardedTensorFactory(key, parameter, partial(_halves, rank, size), torch.cat, (0, 0, copy))
    return ShardedTensor.from_rank_offsets(key, parameter, (0 if is_output else 1, rank, size), replica_id=(0, 0, copy))


def _halves(
    rank: int, size: int, key: str, tensor: torch.Tensor, replica: Any, flattened: Any = None
) -> list[ShardedTensor]:
    """The rows of the gate and those of the up-projection, which the ranks divide separately."""
    return [
        ShardedTensor.from_rank_offsets(key, half, (0, rank + number * size, 2 * size), replica_id=replica)
        for number, half in enumerate(tensor.chunk(2))
    ]
