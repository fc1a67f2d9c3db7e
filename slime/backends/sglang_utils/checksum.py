"""The names, the layout and the checksums of SGLang's parameters, as ``/weights_checker`` reports them.

SGLang fuses query, key and value projections, gate and up projections, and the experts of a layer into one tensor each,
and tensor-parallel ranks hold slices. The trainer's tensors are divided and combined in the same way, so every engine
tensor has a counterpart. SGLang 0.5.23 hashes it with a kernel on a GPU (``gpu_checksum``), and on a CPU with SHA-256,
which slime's plugin replaces by a hash that is ten times as fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from slime.backends.protocols import DRAFT, Piece, Place, TensorHash

if TYPE_CHECKING:
    import torch

    from slime.models.shape import MlaShape, ModelShape

# Hugging Face module -> (engine module, position in it).
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

# Latent attention with compressed queries. Without, both of its other projections stay alone.
_FUSED_LATENT = {
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1),
}

# Modules whose weights and biases are divided by rows, and those whose weights are divided by columns. All others are
# equal on all ranks.
_BY_ROWS = ("q_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj")
_BY_HEADS = ("k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_BY_COLUMNS = ("o_proj", "down_proj", "out_proj")

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
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_QUANTIZED = re.compile(r".*\.(weight_scale(_inv)?|weight_packed|weight_shape)")

# SGLang pads the rows of embeddings with zeros to a multiple of this.
_EMBEDDING_PADDING = 64
_EMBEDDINGS = ("embed_tokens", "lm_head", "visual.pos_embed")
_MLP_PADDING = 32  # on a CPU SGLang pads the inner size of MLPs with zeros to a multiple of this on each rank


class _Share(NamedTuple):
    """Part ``rank`` of ``size`` equal ones."""

    rank: int
    size: int


_Shares: TypeAlias = Iterable[tuple[_Share, tuple[Place, ...]]]
"""Each share, and the places that hold it."""


@dataclass(frozen=True)
class SGLangTensors:
    """The rules of SGLang (protocol EngineTensors) for a model.

    Attributes:
        num_layers: decoder layers. Those after them predict further tokens: engines use them in drafts.
        num_kv_heads: if an engine has more ranks, several of them hold the same head.
        num_experts: of a layer.
        mla: of models with latent attention.
        on_cpu: the trainer's tensors, and so the engines', are in host memory.
    """

    num_layers: int
    num_kv_heads: int
    num_experts: int = 0
    mla: MlaShape | None = None
    on_cpu: bool = True

    @classmethod
    def of(cls, shape: ModelShape, *, on_cpu: bool = True) -> SGLangTensors:
        num_experts = 0 if shape.moe is None else shape.moe.num_experts
        return cls(shape.num_layers, shape.num_query_groups, num_experts, shape.mla, on_cpu)

    def pieces(self, name: str, tensor: torch.Tensor, places: Sequence[Place]) -> Iterator[Piece]:
        """The parts of parameters that ``places`` hold of one tensor under its Hugging Face name."""
        draft = f"{DRAFT}." if self._is_prediction(name) else ""
        for part, engine_part in _VISION_LANGUAGE:
            name = name.replace(part, engine_part)
        if tensor.dtype.itemsize == 1 or _QUANTIZED.fullmatch(name):
            return
        for piece in self._pieces(name, tensor, places):
            yield piece._replace(name=draft + piece.name)

    def _pieces(self, name: str, tensor: torch.Tensor, places: Sequence[Place]) -> Iterator[Piece]:
        if expert := _EXPERT.fullmatch(name):
            yield from self._expert(expert, tensor, places)
            return
        prefix, module, kind = _split(name)
        if name.startswith("visual."):
            yield from _vision(name, module, kind, tensor, places)
        elif any(part in name for part in _EMBEDDINGS):
            shares = _shares(places, "head_copies" if "lm_head" in name else "attention_copies")
            yield from (Piece(name, group, 0, _embedding(tensor, share)) for share, group in shares)
        elif module == "gate_up_proj":
            for half, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield from self._pieces(f"{prefix}{half}{kind}", rows, places)
        else:
            engine_module, position = self._fused(module)
            for part, group in self._slices(module, kind, tensor, places):
                yield Piece(f"{prefix}{engine_module}{kind}", group, position, part)

    def hash(self) -> TensorHash:
        """The checksum of a parameter."""
        if self.on_cpu:
            return HostHash()
        from slime.backends.sglang_utils.gpu_checksum import TileHash  # imports triton

        return TileHash()

    def digests(self, hashes: Sequence[Any]) -> list[str]:
        """The checksums as the engine reports them."""
        if self.on_cpu:
            return [each.digest() for each in hashes]
        from slime.backends.sglang_utils.gpu_checksum import tile_digests

        return tile_digests(hashes)

    def _is_prediction(self, name: str) -> bool:
        layer = _LAYER.match(name)
        return ".mtp_layers." in name or name.startswith("mtp.") or (layer and int(layer[1]) >= self.num_layers) is True

    def _fused(self, module: str) -> tuple[str, int]:
        """(engine module, position in it)."""
        alone = module, 0
        if self.mla is None or module in _MLP:
            return _FUSED.get(module, alone)
        return alone if self.mla.q_lora_rank is None else _FUSED_LATENT.get(module, alone)

    def _slices(
        self, module: str, kind: str, tensor: torch.Tensor, places: Sequence[Place]
    ) -> Iterator[tuple[torch.Tensor, tuple[Place, ...]]]:
        is_by_columns = module in _BY_COLUMNS and kind == ".weight"
        if not (is_by_columns or module in _BY_ROWS or module in _BY_HEADS):
            yield tensor, tuple(places)
            return
        for share, group in _shares(places, None if module in _MLP else "attention_copies"):
            whole = self._padded_inner(tensor, int(is_by_columns), share) if module in _MLP else tensor
            if module in _BY_HEADS:
                # with more ranks than heads, neighbors hold the same head
                count = min(share.size, self.num_kv_heads)
                yield _part(whole, 0, _Share(share.rank * count // share.size, count)), group
            else:
                yield _part(whole, int(is_by_columns), share), group

    def _padded_inner(self, tensor: torch.Tensor, dim: int, share: _Share) -> torch.Tensor:
        return _padded(tensor, dim=dim, to=_MLP_PADDING * share.size) if self.on_cpu else tensor

    def _expert(self, expert: re.Match[str], tensor: torch.Tensor, places: Sequence[Place]) -> Iterator[Piece]:
        # [experts of the rank, 2 * ffn, hidden] and [experts of the rank, hidden, ffn]
        engine_name, position = _EXPERT_MODULES[expert["module"]]
        is_down = engine_name == "w2_weight"
        found: dict[tuple[int, int, _Share], list[Place]] = {}
        for place in places:
            block = place.rank * place.blocks // place.size
            first, end = (number * self.num_experts // place.blocks for number in (block, block + 1))
            if first <= int(expert["number"]) < end:
                width = place.size // place.blocks
                key = first, place.size, _Share(place.rank % width, width)
                found.setdefault(key, []).append(place)
        for (first, size, share), group in found.items():
            # the inner size is dimension 0 of gate and up, and dimension 1 of down
            inner = self._padded_inner(tensor, int(is_down), _Share(0, size))
            index = int(expert["number"]) - first
            order = index if is_down else 2 * index + position
            part = _part(inner, int(is_down), share)
            yield Piece(expert["prefix"] + engine_name, tuple(group), order, part, is_equal=True)


def read_checksums(ranks: list[Any]) -> list[tuple[int, dict[str, str]]]:
    """The ranks in an answer of ``/weights_checker``: number, and checksums by name. LookupError if it has none."""
    found = {}
    for rank in ranks:
        # with data-parallel attention every scheduler reports all ranks
        number = int(rank["parallelism_info"][0]["tp_rank"])
        if number not in found:
            # modules with an adapter hold their weight one level deeper
            found[number] = {name.replace(".base_layer.", "."): each for name, each in rank["checksums"].items()}
    if not found:
        raise LookupError("no rank")
    return sorted(found.items())


class HostHash:
    """xxh3-64 of a tensor's bytes, in hex (protocol TensorHash)."""

    needs_order = True

    def __init__(self) -> None:
        import xxhash  # not at the top: the driver does not hash

        self._hash = xxhash.xxh3_64()

    def add(self, tensor: torch.Tensor, order: int | None = None) -> None:
        from slime.utils.memory_utils import bytes_of

        self._hash.update(bytes_of(tensor).data)

    def digest(self) -> str:
        return self._hash.hexdigest()


def _shares(places: Sequence[Place], copies: Literal["attention_copies", "head_copies"] | None) -> _Shares:
    """The shares of a tensor that all ranks of an engine divide, or those of each of its copies."""
    found: dict[_Share, list[Place]] = {}
    for place in places:
        size = place.size // (1 if copies is None else getattr(place, copies))
        found.setdefault(_Share(place.rank % size, size), []).append(place)
    return [(share, tuple(group)) for share, group in found.items()]


def _vision(name: str, module: str, kind: str, tensor: torch.Tensor, places: Sequence[Place]) -> Iterator[Piece]:
    if module == "pos_embed":
        yield Piece(name, tuple(places), 0, _padded(tensor, dim=0, to=_EMBEDDING_PADDING))
        return
    is_by_columns = kind == ".weight" and (module == "linear_fc2" or name.endswith(".attn.proj.weight"))
    if not (is_by_columns or module in ("qkv_proj", "linear_fc1")):
        yield Piece(name, tuple(places), 0, tensor)
        return
    for share, group in _shares(places, None):
        # queries, keys and values, each divided by heads
        for position, part in enumerate(tensor.chunk(3) if module == "qkv_proj" else (tensor,)):
            yield Piece(name, group, position, _part(part, int(is_by_columns), share))


def _embedding(tensor: torch.Tensor, share: _Share) -> torch.Tensor:
    padding = _EMBEDDING_PADDING
    if -(-tensor.shape[0] // padding) * padding % share.size:
        padding *= share.size
    return _part(_padded(tensor, dim=0, to=padding), 0, share)


def _part(tensor: torch.Tensor, dim: int, share: _Share) -> torch.Tensor:
    size = tensor.shape[dim] // share.size
    return tensor.narrow(dim, share.rank * size, size) if share.size > 1 else tensor


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
