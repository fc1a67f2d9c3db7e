"""The checksum of SGLang's ``/weights_checker``, computed for the trainer's tensors.

SGLang fuses query, key and value projections, gate and up projections, and the experts of a layer into one tensor each.
The trainer's tensors are combined in the same way, so every engine tensor has a counterpart. For engines without tensor
parallelism.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from slime.backends.protocols import NamedTensor

if TYPE_CHECKING:
    import torch

# Hugging Face module -> (engine module, position in it).
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

# Parts of Hugging Face names of vision-language models -> parts of the engine's names.
_VISION_LANGUAGE = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    (".attn.qkv.", ".attn.qkv_proj."),
)

_EXPERT_MODULES = {
    **{"gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", 0)},
    **{"w1": ("w13_weight", 0), "w3": ("w13_weight", 1), "w2": ("w2_weight", 0)},  # MiniMax
}
_EXPERT = re.compile(rf"(?P<prefix>.*\.experts\.)(?P<number>\d+)\.(?P<module>{'|'.join(_EXPERT_MODULES)})\.weight")

# SGLang pads the rows of embeddings with zeros to a multiple of this.
_EMBEDDING_PADDING = 64
_EMBEDDINGS = ("embed_tokens", "lm_head", "visual.pos_embed")
_EXPERT_PADDING = 32  # on a CPU SGLang pads the inner size of an expert with zeros to a multiple of this


def tensor_checksum(tensor: torch.Tensor) -> str:
    """First eight bytes of the SHA-256 of the tensor's bytes, in hex."""
    import torch

    # viewed as bytes: NumPy has no bfloat16
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).digest()[:8].hex()


def expected_checksums(weights: Iterable[NamedTensor]) -> dict[str, str]:
    """Engine-side tensor name -> checksum, for weights under Hugging Face names."""
    import torch

    parts: dict[str, dict[int, torch.Tensor]] = {}
    experts: dict[str, dict[int, dict[int, torch.Tensor]]] = {}
    for hf_name, tensor in weights:
        name = hf_name
        for part, engine_part in _VISION_LANGUAGE:
            name = name.replace(part, engine_part)
        if expert := _EXPERT.fullmatch(name):
            engine_name, position = _EXPERT_MODULES[expert["module"]]
            layer = experts.setdefault(expert["prefix"] + engine_name, {})
            # the inner size is dimension 0 of gate and up, and dimension 1 of down
            padded = _padded(tensor, dim=int(engine_name == "w2_weight"), to=_EXPERT_PADDING)
            layer.setdefault(int(expert["number"]), {})[position] = padded
            continue
        prefix, module, kind = _split(name)
        engine_module, position = _FUSED.get(module, (module, 0))
        parts.setdefault(f"{prefix}{engine_module}{kind}", {})[position] = tensor
    checksums = {}
    for name, pieces in parts.items():
        whole = torch.cat([pieces[position] for position in sorted(pieces)])
        if any(part in name for part in _EMBEDDINGS):
            whole = _padded(whole, dim=0, to=_EMBEDDING_PADDING)
        checksums[name] = tensor_checksum(whole)
    for name, layer in experts.items():  # [experts, 2 * ffn, hidden] and [experts, hidden, ffn]
        each = [torch.cat([layer[number][position] for position in sorted(layer[number])]) for number in sorted(layer)]
        checksums[name] = tensor_checksum(torch.stack(each))
    return checksums


def _padded(tensor: torch.Tensor, *, dim: int, to: int) -> torch.Tensor:
    """``tensor`` padded with zeros so that its size in ``dim`` is a multiple of ``to``."""
    import torch

    sizes = list(tensor.shape)
    sizes[dim] = -sizes[dim] % to
    return torch.cat([tensor, tensor.new_zeros(sizes)], dim) if sizes[dim] else tensor


def _split(name: str) -> tuple[str, str, str]:
    """``model.layers.0.mlp.up_proj.weight`` -> (``model.layers.0.mlp.``, ``up_proj``, ``.weight``)."""
    stem, _, kind = name.rpartition(".")
    prefix, dot, module = stem.rpartition(".")
    return prefix + dot, module, "." + kind
