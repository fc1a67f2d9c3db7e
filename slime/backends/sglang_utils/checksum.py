"""The names, the layout and the checksums of SGLang's parameters, as ``/weights_checker`` reports them.

SGLang fuses query, key and value projections, gate and up projections, and the experts of a layer into one tensor each,
and tensor-parallel ranks hold slices. The trainer's tensors are divided and combined in the same way, so every engine
tensor has a counterpart. SGLang 0.5.23 hashes it with a kernel on a GPU (``gpu_checksum``), and on a CPU with SHA-256,
which slime's plugin replaces by a hash that is ten times as fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from slime.backends import DRAFT, Piece, Place, TensorHash

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


class _Division(NamedTuple):
    """A division into ``size`` equal shares, of which some ranks hold those with the numbers ``held``.

    Attributes:
        groups: the ranks that hold each of them.
    """

    size: int
    held: tuple[int, ...]
    groups: tuple[tuple[Place, ...], ...]

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The held shares, ``[held, ...]``. A view if possible."""
        return _chosen(tensor, dim, self.size, self.held)


def _chosen(tensor: torch.Tensor, dim: int, size: int, numbers: Sequence[int]) -> torch.Tensor:
    """Shares ``numbers`` of ``size`` equal ones."""
    width = tensor.shape[dim] // size
    if len(numbers) == 1:
        return tensor.narrow(dim, numbers[0] * width, width)[None]
    shares: torch.Tensor = tensor.narrow(dim, 0, size * width).unflatten(dim, (size, width)).movedim(dim, 0)
    return shares if list(numbers) == list(range(size)) else shares[list(numbers)]


def _divisions(shares: Iterable[tuple[Place, int, int]]) -> list[_Division]:
    """One for each size among (place, number, size)."""
    found: dict[int, dict[int, list[Place]]] = {}
    for place, number, size in shares:
        found.setdefault(size, {}).setdefault(number, []).append(place)
    return [_Division(size, tuple(each), tuple(map(tuple, each.values()))) for size, each in found.items()]


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

    def cuts(self, places: Sequence[Place]) -> Callable[[str, torch.Tensor], Iterator[Piece]]:
        """The function that makes of a tensor under its Hugging Face name the parts that ``places`` hold."""
        return _Cuts(self, places).pieces

    def hash(self, num_shares: int = 1) -> TensorHash:
        """The checksums of a parameter."""
        if self.on_cpu:
            return HostHash(num_shares)
        from slime.backends.sglang_utils.gpu_checksum import TileHash  # imports triton

        return TileHash(num_shares)

    def digests(self, hashes: Sequence[Any]) -> list[list[str]]:
        """The checksums as the engine reports them."""
        if self.on_cpu:
            return [each.digests() for each in hashes]
        from slime.backends.sglang_utils.gpu_checksum import tile_digests

        return tile_digests(hashes)

    def is_prediction(self, name: str) -> bool:
        layer = _LAYER.match(name)
        return ".mtp_layers." in name or name.startswith("mtp.") or (layer and int(layer[1]) >= self.num_layers) is True

    def fused(self, module: str) -> tuple[str, int]:
        """(engine module, position in it)."""
        alone = module, 0
        if self.mla is None or module in _MLP:
            return _FUSED.get(module, alone)
        return alone if self.mla.q_lora_rank is None else _FUSED_LATENT.get(module, alone)

    def padded_inner(self, tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        return _padded(tensor, dim=dim, to=_MLP_PADDING * size) if self.on_cpu else tensor


class _Cuts:
    """The shares of ``places``, worked out once for all tensors: an update has tens of thousands."""

    def __init__(self, rules: SGLangTensors, places: Sequence[Place]) -> None:
        self._rules = rules
        self._whole = [_Division(1, (0,), (tuple(places),))]

        def copied(copies: Callable[[Place], int]) -> list[_Division]:
            sizes = ((place, place.size // copies(place)) for place in places)
            return _divisions((place, place.rank % size, size) for place, size in sizes)

        self._all_ranks = copied(lambda place: 1)
        self._attention = copied(lambda place: place.attention_copies)
        self._head = copied(lambda place: place.head_copies)
        # (first expert of the block, ranks of the engine) -> its ranks
        blocks: dict[tuple[int, int, int], list[tuple[Place, int, int]]] = {}
        for place in places:
            number, width = place.rank * place.blocks // place.size, place.size // place.blocks
            first, end = (each * rules.num_experts // place.blocks for each in (number, number + 1))
            blocks.setdefault((first, end, place.size), []).append((place, place.rank % width, width))
        self._experts: list[list[tuple[int, int, _Division]]] = [[] for _ in range(rules.num_experts)]
        for (first, end, size), shares in blocks.items():
            for expert in range(first, end):
                self._experts[expert] += [(first, size, division) for division in _divisions(shares)]

    def pieces(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        draft = f"{DRAFT}." if self._rules.is_prediction(name) else ""
        for part, engine_part in _VISION_LANGUAGE:
            name = name.replace(part, engine_part)
        if tensor.dtype.itemsize == 1 or _QUANTIZED.fullmatch(name):
            return
        for piece in self._pieces(name, tensor):
            yield piece._replace(name=draft + piece.name) if draft else piece

    def _pieces(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        if expert := _EXPERT.fullmatch(name):
            yield from self._expert(expert, tensor)
            return
        prefix, module, kind = _split(name)
        if name.startswith("visual."):
            yield from self._vision(name, module, kind, tensor)
        elif any(part in name for part in _EMBEDDINGS):
            for division in self._head if "lm_head" in name else self._attention:
                yield Piece(name, division.groups, 0, division.of(_embedding(tensor, division.size), 0))
        elif module == "gate_up_proj":
            for half, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield from self._pieces(f"{prefix}{half}{kind}", rows)
        else:
            engine_module, position = self._rules.fused(module)
            for groups, part in self._divided(module, kind, tensor):
                yield Piece(f"{prefix}{engine_module}{kind}", groups, position, part)

    def _divided(
        self, module: str, kind: str, tensor: torch.Tensor
    ) -> Iterator[tuple[tuple[tuple[Place, ...], ...], torch.Tensor]]:
        by_columns = module in _BY_COLUMNS and kind == ".weight"
        is_divided = by_columns or module in _BY_ROWS or module in _BY_HEADS
        is_mlp = module in _MLP
        for division in self._whole if not is_divided else self._all_ranks if is_mlp else self._attention:
            if module in _BY_HEADS:
                # with more ranks than heads, neighbors hold the same head
                count = min(division.size, self._rules.num_kv_heads)
                heads = [number * count // division.size for number in division.held]
                yield division.groups, _chosen(tensor, 0, count, heads)
            else:
                pads = is_mlp and is_divided
                whole = self._rules.padded_inner(tensor, int(by_columns), division.size) if pads else tensor
                yield division.groups, division.of(whole, int(by_columns))

    def _expert(self, expert: re.Match[str], tensor: torch.Tensor) -> Iterator[Piece]:
        # [experts of the rank, 2 * ffn, hidden] and [experts of the rank, hidden, ffn]
        engine_name, position = _EXPERT_MODULES[expert["module"]]
        number, is_down = int(expert["number"]), engine_name == "w2_weight"
        for first, size, division in self._experts[number]:
            # the inner size is dimension 0 of gate and up, and dimension 1 of down
            inner = self._rules.padded_inner(tensor, int(is_down), size)
            order = number - first if is_down else 2 * (number - first) + position
            part = division.of(inner, int(is_down))
            yield Piece(expert["prefix"] + engine_name, division.groups, order, part, is_equal=True)

    def _vision(self, name: str, module: str, kind: str, tensor: torch.Tensor) -> Iterator[Piece]:
        if module == "pos_embed":
            tensor = _padded(tensor, dim=0, to=_EMBEDDING_PADDING)
        by_columns = kind == ".weight" and (module == "linear_fc2" or name.endswith(".attn.proj.weight"))
        is_divided = by_columns or module in ("qkv_proj", "linear_fc1")
        for division in self._all_ranks if is_divided else self._whole:
            # queries, keys and values, each divided by heads
            for position, part in enumerate(tensor.chunk(3) if module == "qkv_proj" else (tensor,)):
                yield Piece(name, division.groups, position, division.of(part, int(by_columns)))


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
    """xxh3-64 of the bytes of each share, in hex (protocol TensorHash)."""

    needs_order = True

    def __init__(self, num_shares: int = 1) -> None:
        import xxhash  # not at the top: the driver does not hash

        self._hashes = [xxhash.xxh3_64() for _ in range(num_shares)]

    def add(self, tensor: torch.Tensor, order: int | None = None) -> None:
        from slime.utils.memory_utils import bytes_of

        for share, hasher in zip(tensor, self._hashes, strict=True):
            hasher.update(bytes_of(share).data)

    def digests(self) -> list[str]:
        return [each.hexdigest() for each in self._hashes]


def _embedding(tensor: torch.Tensor, size: int) -> torch.Tensor:
    padding = _EMBEDDING_PADDING
    if -(-tensor.shape[0] // padding) * padding % size:
        padding *= size
    return _padded(tensor, dim=0, to=padding)


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
