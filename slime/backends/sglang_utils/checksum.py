"""The names, the layout and the checksums of SGLang's parameters, as ``/weights_checker`` reports them.

SGLang fuses query, key and value projections, gate and up projections, and the experts of a layer into one tensor each,
and tensor-parallel ranks hold slices. The trainer's tensors are divided and combined in the same way, so every engine
tensor has a counterpart. SGLang 0.5.23 hashes it with SHA-256 on a CPU, and with a kernel on a GPU (``gpu_checksum``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.backends.protocols import DRAFT, Piece, Place, TensorHash

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

# Modules whose weights and biases are divided by rows, and those whose weights are divided by columns. All others are
# equal on all ranks.
_BY_ROWS = ("q_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "linear_fc1")
_BY_HEADS = ("k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_BY_COLUMNS = ("o_proj", "down_proj", "linear_fc2", "out_proj")

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
# The parts of a quantized tensor: the engine's checksum is of the product.
_QUANTIZED = re.compile(r".*\.(weight_scale(_inv)?|weight_packed|weight_shape)")

# SGLang pads the rows of embeddings with zeros to a multiple of this.
_EMBEDDING_PADDING = 64
_EMBEDDINGS = ("embed_tokens", "lm_head", "visual.pos_embed")
_MLP_PADDING = 32  # on a CPU SGLang pads the inner size of MLPs with zeros to a multiple of this on each rank


@dataclass(frozen=True)
class SGLangTensors:
    """The rules of SGLang (protocol EngineTensors) for a model.

    Attributes:
        num_layers: decoder layers. Those after them predict further tokens: engines use them in drafts.
        num_kv_heads: if an engine has more ranks, several of them hold the same head.
        num_experts: of a layer.
        on_cpu: the trainer's tensors, and so the engines', are in host memory.
    """

    num_layers: int
    num_kv_heads: int
    num_experts: int = 0
    on_cpu: bool = True

    def pieces(self, name: str, tensor: torch.Tensor, place: Place) -> Iterator[Piece]:
        """The parts of parameters that ``place`` holds of one tensor under its Hugging Face name."""
        # before the other rules: an engine with a draft may load the layer under a name of its family
        if self._is_prediction(name):
            yield Piece(f"{DRAFT}.{name}", 0, tensor)
            return
        for part, engine_part in _VISION_LANGUAGE:
            name = name.replace(part, engine_part)
        if tensor.dtype.itemsize == 1 or _QUANTIZED.fullmatch(name):
            return
        if expert := _EXPERT.fullmatch(name):
            yield from self._expert(expert, tensor, place)
            return
        prefix, module, kind = _split(name)
        if name.startswith("visual."):
            yield from _vision(name, module, kind, tensor, place)
        elif any(part in name for part in _EMBEDDINGS):
            yield Piece(name, 0, _embedding(tensor, place))
        else:
            engine_module, position = _FUSED.get(module, (module, 0))
            yield Piece(f"{prefix}{engine_module}{kind}", position, self._slice(module, kind, tensor, place))

    def hash(self) -> TensorHash:
        """The checksum of a parameter."""
        if self.on_cpu:
            return Sha256()
        from slime.backends.sglang_utils.gpu_checksum import TileHash  # imports triton

        return TileHash()

    def _is_prediction(self, name: str) -> bool:
        layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        return ".mtp_layers." in name or name.startswith("mtp.") or (layer and int(layer[1]) >= self.num_layers) is True

    def _slice(self, module: str, kind: str, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        if module in _MLP and (kind == ".weight" or module != "down_proj"):
            tensor = self._padded_inner(tensor, int(module == "down_proj"), place)
        if module in _BY_HEADS:
            # with more ranks than heads, neighbors hold the same head
            count = min(place.size, self.num_kv_heads)
            return _part(tensor, 0, place.rank * count // place.size, count)
        if module in _BY_ROWS:
            return _part(tensor, 0, place.rank, place.size)
        return _part(tensor, 1, place.rank, place.size) if module in _BY_COLUMNS and kind == ".weight" else tensor

    def _padded_inner(self, tensor: torch.Tensor, dim: int, place: Place) -> torch.Tensor:
        return _padded(tensor, dim=dim, to=_MLP_PADDING * place.size) if self.on_cpu else tensor

    def _expert(self, expert: re.Match[str], tensor: torch.Tensor, place: Place) -> Iterator[Piece]:
        # [experts of the rank, 2 * ffn, hidden] and [experts of the rank, hidden, ffn]
        engine_name, position = _EXPERT_MODULES[expert["module"]]
        block = place.rank * place.blocks // place.size
        first, end = (number * self.num_experts // place.blocks for number in (block, block + 1))
        index = int(expert["number"]) - first
        if not 0 <= index < end - first:
            return
        is_down = engine_name == "w2_weight"
        width = place.size // place.blocks
        # the inner size is dimension 0 of gate and up, and dimension 1 of down
        inner = self._padded_inner(tensor, int(is_down), place)
        order = index if is_down else 2 * index + position
        yield Piece(expert["prefix"] + engine_name, order, _part(inner, int(is_down), place.rank % width, width))


def read_checksums(ranks: list[Any]) -> list[tuple[int, dict[str, str]]]:
    """The ranks in an answer of ``/weights_checker``: number, and checksums by name. LookupError if it has none."""
    found = []
    for rank in ranks:
        # modules with an adapter hold their weight one level deeper
        held = {name.replace(".base_layer.", "."): checksum for name, checksum in rank["checksums"].items()}
        found.append((int(rank["parallelism_info"][0]["tp_rank"]), held))
    if not found:
        raise LookupError("no rank")
    return found


class Sha256:
    """First eight bytes of the SHA-256 of a tensor's bytes, in hex."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tensor: torch.Tensor) -> None:
        from slime.utils.memory_utils import bytes_of

        self._hash.update(bytes_of(tensor).data)

    def digest(self) -> str:
        return self._hash.digest()[:8].hex()


def _vision(name: str, module: str, kind: str, tensor: torch.Tensor, place: Place) -> Iterator[Piece]:
    if module == "pos_embed":
        yield Piece(name, 0, _padded(tensor, dim=0, to=_EMBEDDING_PADDING))
    elif module == "qkv_proj":
        for position, part in enumerate(tensor.chunk(3)):  # queries, keys and values, each divided by heads
            yield Piece(name, position, _part(part, 0, place.rank, place.size))
    elif module == "linear_fc1":
        yield Piece(name, 0, _part(tensor, 0, place.rank, place.size))
    elif kind == ".weight" and (module == "linear_fc2" or name.endswith(".attn.proj.weight")):
        yield Piece(name, 0, _part(tensor, 1, place.rank, place.size))
    else:
        yield Piece(name, 0, tensor)


def _embedding(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    padding = _EMBEDDING_PADDING
    if -(-tensor.shape[0] // padding) * padding % place.size:
        padding *= place.size
    return _part(_padded(tensor, dim=0, to=padding), 0, place.rank, place.size)


def _part(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    """Part ``index`` of ``count`` equal ones."""
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, index * size, size) if count > 1 else tensor


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
