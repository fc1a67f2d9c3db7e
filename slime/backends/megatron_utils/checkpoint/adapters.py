"""The values of adapters on any parallel layout: where they come from, and their part of a checkpoint."""

from __future__ import annotations

import hashlib
import math
import re
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from slime.backends.megatron_utils.checkpoint.tensors import LocalTensor, ModelTensors, full_shape, shard, to_megatron
from slime.backends.megatron_utils.model.lora import Adapter
from slime.backends.training.hf_files import TensorReader, raise_everywhere
from slime.models.family import Rule
from slime.models.lora import FILE_PREFIX, LoraConfig, rows_of
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError

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
