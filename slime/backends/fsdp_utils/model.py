"""Builds the model of transformers, without weights, and shards it over all ranks with torch's FSDP2.

    config.json -> modules on the meta device -> fully_shard(each layer), fully_shard(the rest) -> shards in memory

Every rank holds 1/N of each tensor in fp32, the master weights; a layer is gathered, in bf16 unless --fp32, while it
computes. Called by ``actor``. Weights come from ``hf_weights`` or ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slime.backends.fsdp_utils.attention import PACKED, register_packed_attention
from slime.utils import accelerator
from slime.utils.errors import ConfigError

__all__ = ["build_model", "is_tied", "local_tensor", "local_tensors", "read_config", "saved_tensors"]


def read_config(hf_checkpoint: str) -> Any:
    """The model's configuration of transformers without dropout; of a multimodal model its text part.

    With dropout the log-probs of a training step would not be those of the weights it starts from.
    """
    config = AutoConfig.from_pretrained(hf_checkpoint, trust_remote_code=True).get_text_config()
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def build_model(
    config: Any,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    attention: str | None = None,
    checkpoints_layers: bool = False,
) -> PreTrainedModel:
    """The sharded model on the device, its parameters unset.

    Args:
        mesh: one dimension, all ranks.
        compute_dtype: of weights and activations inside a layer; gradients are summed in fp32.
        attention: a name of transformers; None: ours.
        checkpoints_layers: the backward pass computes each layer's activations again.

    Raises:
        ConfigError: transformers has no such model, or its layers cannot be sharded or read packed samples.
    """
    register_packed_attention()
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention or PACKED, trust_remote_code=True
            )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"--train-backend fsdp: transformers cannot build this model: {error}") from error
    model.tie_weights()
    model.config.use_cache = False
    if checkpoints_layers:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = _decoder_layers(model)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in (*layers, model):
        # the root too gives its weights back after a pass: others may be swapped in before the next one
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    _allocate(model)
    return model


def is_tied(model: PreTrainedModel) -> bool:
    """The LM head is the embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded parameter or of what was made like it; they share memory."""
    return parameter.to_local().detach() if hasattr(parameter, "to_local") else parameter.detach()


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that a checkpoint holds, by name; a tied head is left out."""
    saved = model.state_dict().keys()
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
    others = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others or model._is_stateful:
        raise ConfigError(
            f"--train-backend fsdp: {type(model).__name__} is not supported yet: its layers carry a state from "
            f"token to token ({', '.join(sorted(others)) or 'recurrent'}), which would leak between samples in one row."
        )
    return layers


@torch.no_grad()
def _allocate(model: PreTrainedModel) -> None:
    """Memory for the shards; buffers have their values already. FSDP follows what ``_apply`` replaces."""
    device = accelerator.current().device()

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    model._apply(place)
    model.tie_weights()  # each name got memory of its own
