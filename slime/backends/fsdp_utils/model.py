"""Builds the model of transformers, without weights, and shards it over all ranks with torch's FSDP2.

    config.json -> modules on the meta device -> fully_shard(each layer), fully_shard(the rest) -> shards in memory

Every rank holds 1/N of each tensor in fp32, the master weights; a layer is gathered, in bf16 unless --fp32, while it
computes. Called by ``actor``. Weights come from ``hf_weights`` or ``checkpoint``.

slime's packed attention is one of the attention functions of transformers: a model with ``attn_implementation=PACKED``
calls :func:`packed_in_transformers` in every layer. The plan of the micro-batch is a keyword argument that models hand
on to their attention. transformers makes no mask for a name that has no mask function.

Low-rank adapters (LoRA) are layers of peft: ``base_layer`` is frozen and sharded in the precision that it computes in,
the adapter in ``lora_A`` and ``lora_B`` is sharded in fp32.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slime.backends import EVERY_RANK, NamedTensor, Recipients
from slime.backends.training.attention import AttentionPlan, packed_attention
from slime.backends.training.hf_files import TensorReader
from slime.models.lora import FILE_PREFIX, LoraConfig, adapted_layers
from slime.models.shape import ModelShape
from slime.utils import accelerator
from slime.utils.errors import ConfigError


def read_config(hf_checkpoint: str) -> Any:
    """The model's configuration of transformers without dropout. Of a multimodal model its text part."""
    config = AutoConfig.from_pretrained(hf_checkpoint, trust_remote_code=True).get_text_config()
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            # With dropout, a step's log-probs would differ from those of the weights that it starts from.
            setattr(config, name, 0.0)
    return config


def build_model(
    config: Any,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    attention: str | None = None,
    checkpoints_layers: bool = False,
    adapters: Adapters | None = None,
) -> PreTrainedModel:
    """The sharded model on the device, its parameters unset.

    Args:
        mesh: one dimension, all ranks.
        compute_dtype: of weights and activations inside a layer.
        attention: a name of transformers; None: ours.
        checkpoints_layers: the backward pass computes each layer's activations again.
        adapters: train these, and nothing else.

    Raises:
        ConfigError: transformers has no such model, or its layers cannot be sharded or read packed samples.
    """
    register_packed_attention()
    try:
        with init_empty_weights(include_buffers=False):  # no checkpoint holds the values of all buffers
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention or PACKED, trust_remote_code=True
            )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"--train-backend fsdp: transformers cannot build this model: {error}") from error
    model.tie_weights()  # before sharding: FSDP must see one parameter
    # Of pad_token_id torch would drop the gradient, also if the model sampled it or the template ends turns with it.
    model.get_input_embeddings().padding_idx = None
    model.config.use_cache = False
    if checkpoints_layers:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = _decoder_layers(model)
    if adapters is not None:
        add_adapters(model, adapters, compute_dtype)
    # Sums of gradients over the ranks are fp32.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in (*layers, model):
        # the root too gives its weights back after a pass: others may be swapped in before the next one
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    _allocate(model)
    return model


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the LM head is the embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded parameter or of a tensor made like it, as a view."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that a checkpoint holds, by name. A tied head is left out."""
    saved = model.state_dict().keys()  # without non-persistent buffers
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def local_tensors(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """This rank's part of everything that a checkpoint of the model holds."""
    yield from (local_tensor(tensor) for tensor in saved_tensors(model).values())


def _decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ConfigError(f"--train-backend fsdp: {type(model).__name__} does not say what its layers are.")
    others = set(model.config.to_dict().get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if others or model._is_stateful:
        raise ConfigError(
            f"--train-backend fsdp: {type(model).__name__} is not supported yet: its layers carry a state from "
            f"token to token ({', '.join(sorted(others)) or 'recurrent'}), which would leak between samples in one row."
        )
    return layers


@torch.no_grad()
def _allocate(model: PreTrainedModel) -> None:
    device = accelerator.current().device()

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    model._apply(place)  # FSDP follows tensors that ``_apply`` replaces, not those that are assigned
    model.tie_weights()  # each name got separate memory


PACKED = "slime_packed"

_UNSUPPORTED = {
    "sliding_window": "sliding windows",
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "biased scores",
}


def register_packed_attention() -> None:
    """Make :data:`PACKED` a name that models can be built with. Idempotent."""
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
    picks_again: bool = False,
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
        picks_again=picks_again,
    )
    return out.unsqueeze(0), None


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
    """Fill from ``--lora-adapter-path``, or as peft does: random ``A``, zero ``B``, equal for any number of ranks."""
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
