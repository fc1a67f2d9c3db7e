"""The shape of a model as plain values: sizes and switches of every part, independent of the names in config.json.

``hf_shape`` makes it from config.json. The plan, the rules, the trainer and the FLOPs model read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from slime.models.family import Family


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1 rope scaling, as in ``rope_parameters`` of its config.json."""

    factor: float
    low_freq_factor: float  # wavelengths above original length / low_freq_factor are slowed down
    high_freq_factor: float  # those below original length / high_freq_factor are kept
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN rope scaling of multi-latent attention (arXiv 2309.00071), names as in the paper's reference code."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float  # rotations over the original length: faster columns keep their frequency
    beta_slow: float  # slower columns have it divided by ``factor``
    mscale: float  # of the rotated columns
    mscale_all_dim: float  # of all logits


@dataclass(frozen=True)
class MlaShape:
    """Multi-latent attention: ranks of the compressions and widths per head."""

    q_lora_rank: int | None  # None: queries are not compressed
    kv_lora_rank: int
    qk_head_dim: int  # the columns without rope
    qk_pos_emb_head_dim: int  # the columns with rope
    v_head_dim: int


@dataclass(frozen=True)
class SparseShape:
    """Sparse attention (DeepSeek-V3.2, arXiv:2512.02556): the indexer that chooses the keys a query attends to.

    Attributes:
        num_heads, head_dim: of the indexer.
        topk: the number of keys that a query attends to at most.
        is_rope_interleaved: rope rotates adjacent columns of the indexer's heads, not halves.
        layers: for each decoder layer whether it has an indexer. The others use the choice of the last one before them.
    """

    num_heads: int
    head_dim: int
    topk: int
    is_rope_interleaved: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class MoeShape:
    """Mixture of experts.

    Attributes:
        layers: for each decoder layer whether it has experts. The others have the dense MLP.
        shared_size: width of all shared experts together. None without. ``has_shared_gate``: a gate on their output.
        pre_softmax: scores are computed before the top-k choice, so the scores of the chosen experts do not sum to 1.
        num_groups, group_topk: the choice is limited to the best groups of experts; None without groups.
        scaling_factor: of the scores of the chosen experts; None means 1.
    """

    num_experts: int
    layers: tuple[bool, ...]
    ffn_hidden_size: int
    topk: int
    shared_size: int | None
    score_function: str
    pre_softmax: bool
    has_expert_bias: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float | None = None
    has_shared_gate: bool = False


@dataclass(frozen=True)
class DeltaNetShape:
    """Gated delta nets (arXiv:2412.06464), which replace attention in the layers whose entry of ``layers`` is true."""

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @property
    def key_width(self) -> int:
        """Columns of all keys together. The queries have as many."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class VisionShape:
    """The vision tower, and the tokens that mark images and videos.

    Attributes:
        config: ``vision_config`` of config.json, from which ``transformers`` builds the tower.
        num_deep_layers: number of the first decoder layers to whose output features of the tower are added (DeepStack).
        rope_sections: number of a head's frequencies that rotate with time, with height and with width, alternating.
        image_token, video_token, start_token: ids. A run of the first or the second is one image or frame, after the
            third.
        merge_size: patches along one side that become one token.
    """

    config: Mapping[str, Any]
    num_deep_layers: int
    rope_sections: tuple[int, int, int]
    image_token: int
    video_token: int
    start_token: int
    merge_size: int


@dataclass(frozen=True)
class ModelShape:
    """All sizes and switches of a model: they decide its tensors and its computation."""

    family: Family = field(repr=False)
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    rotary_base: float
    rotary_percent: float
    is_tied: bool
    max_position_embeddings: int
    llama3_rope: Llama3Rope | None = None
    yarn_rope: YarnRope | None = None
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_post_norms: bool = False
    is_rotary_interleaved: bool = False
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    sparse: SparseShape | None = None
    delta_net: DeltaNetShape | None = None
    vision: VisionShape | None = None  # also None if the checkpoint has a tower that the run does not build
    num_mtp_layers: int = 0  # those of the checkpoint; the plan puts in those that the run builds

    @property
    def model_type(self) -> str:
        return self.family.model_type

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        # Megatron checkpoints contain them: another value refuses older ones, another name skips the comparison.
        values: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "family"}
        plain = {name: vars(value) if is_dataclass(value) else value for name, value in values.items()}
        return {"model_type": self.model_type, **plain}

    @property
    def kv_channels(self) -> int:
        """Megatron's name of ``head_dim``."""
        return self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    def is_delta_net(self, layer: int) -> bool:
        return self.delta_net is not None and self.delta_net.layers[layer]

    @property
    def num_cached_layers(self) -> int:
        """Layers whose keys and values an engine caches."""
        return self.num_layers - (sum(self.delta_net.layers) if self.delta_net else 0)

    def padded_vocab_size(self, multiple: int) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to a multiple of ``multiple``."""
        return math.ceil(self.vocab_size / multiple) * multiple
