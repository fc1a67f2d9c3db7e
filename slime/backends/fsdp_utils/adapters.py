"""Low-rank adapters (LoRA) of peft in a model of transformers that FSDP shards.

A layer of peft holds the base in ``base_layer`` and the adapter in ``lora_A`` and ``lora_B``. The base is frozen and
sharded in the precision that it computes in, adapters are sharded in fp32. Called by ``actor`` and ``hf_weights``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from peft import LoraConfig as PeftConfig
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from slime.backends.protocols import EVERY_RANK, NamedTensor, Recipients
from slime.backends.training.hf_files import TensorReader
from slime.models.lora import FILE_PREFIX, LoraConfig, adapted_layers
from slime.models.shape import ModelShape

_NAME = "default"  # of the adapter, a part of its parameters' names
_BASE = ".base_layer"


@dataclass(frozen=True)
class Adapters:
    """Settings of the adapters of a model.

    Attributes:
        layers: names of the linear layers that have one.
    """

    config: LoraConfig
    layers: list[str]

    @classmethod
    def of(cls, config: LoraConfig, shape: ModelShape) -> Adapters:
        """Those of a model of this shape."""
        return cls(config, [name.removesuffix(".weight") for name, _ in adapted_layers(shape, config)])


def add_adapters(model: PreTrainedModel, adapters: Adapters, dtype: torch.dtype) -> None:
    """Add adapters to a model without memory, and freeze everything else in ``dtype``."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.requires_grad_(False)
    config = adapters.config
    settings = PeftConfig(lora_dropout=config.dropout, use_rslora=config.rslora)
    for name in adapters.layers:
        # not inject_adapter_in_model(), which takes names of MLPs in models with experts for those of the experts
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        with init_empty_weights():
            alpha: Any = config.alpha  # peft annotates an integer and computes with any number
            layer = Linear(module.get_submodule(leaf), _NAME, config=settings, r=config.rank, lora_alpha=alpha)
        module.register_module(leaf, layer)


def is_adapter(name: str) -> bool:
    """Whether the parameter ``name`` belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """The Hugging Face name of a frozen parameter, or peft's name of an adapter's without prefix."""
    return name.replace(f".{_NAME}.weight", ".weight") if is_adapter(name) else name.replace(f"{_BASE}.", ".")


def adapter_parameters(model: PreTrainedModel) -> Iterator[NamedTensor]:
    """The adapters' parameters under peft's names without prefix, sharded or not."""
    yield from ((plain_name(name), value) for name, value in model.named_parameters() if is_adapter(name))


@torch.no_grad()
def fill_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Fill the adapters from ``--lora-adapter-path``, or as peft does: random ``A``, and ``B`` of zeros.

    The values do not depend on the number of ranks.
    """
    reader = None if config.adapter_path is None else TensorReader(config.adapter_path, "--lora-adapter-path")
    generator = torch.Generator().manual_seed(seed)
    for name, value in adapter_parameters(model):
        if reader is not None:
            whole = reader.get(FILE_PREFIX + name)
        elif ".lora_A." in name:
            bound = 1 / math.sqrt(value.shape[1])  # kaiming_uniform_ with a = sqrt(5)
            whole = torch.empty(value.shape).uniform_(-bound, bound, generator=generator)
        else:
            whole = torch.zeros(value.shape)
        copy_rows(value, whole)


def copy_rows(value: Any, whole: torch.Tensor) -> None:
    """Copy this rank's rows of ``whole`` to ``value``."""
    if isinstance(value, DTensor):
        mine = distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)  # no communication
        value.to_local().copy_(mine.to_local())
    else:
        value.copy_(whole)


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """The model computes as its base inside the block."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # not enable_adapters(), which would also change requires_grad of sharded parameters
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def export_adapters(
    model: PreTrainedModel, dtype: torch.dtype | None, recipients: Recipients = EVERY_RANK
) -> Iterator[NamedTensor]:
    """The adapters, whole. A collective. ``dtype`` None: that of training."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    for name, value in adapter_parameters(model):
        whole = whole_tensor(value if dtype is None else value.to(dtype))
        if is_first or not recipients.source_only:
            yield name, whole


def deltas(model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Name of a frozen parameter in the model -> its adapter's ``A`` and ``B``, sharded or not, and their scale."""
    return {
        f"{name}{_BASE}.weight": (module.lora_A[_NAME].weight, module.lora_B[_NAME].weight, module.scaling[_NAME])
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }


def whole_tensor(value: Any) -> torch.Tensor:
    """All rows, on every rank. A collective for a sharded tensor."""
    whole: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach()
