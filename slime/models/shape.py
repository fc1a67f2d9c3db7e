"""What a model is made of, as plain values: the sizes and switches of every part, whatever config.json calls them.

Filled by ``hf_shape``; read by the command line, the trainer and the plan. Imports neither torch nor megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.models.registry import FAMILIES
from slime.models.tables import Family

__all__ = [
    "DeltaNetShape",
    "Llama3Rope",
    "MlaShape",
    "ModelShape",
    "MoeShape",
    "SparseShape",
    "VisionShape",
    "YarnRope",
]


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1 rope scaling, as in ``rope_parameters`` of its config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN rope scaling of multi-latent attention (arXiv 2309.00071), names as in the paper's reference code."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class MlaShape:
    """Multi-latent attention: ranks of the compressions and widths per head."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class SparseShape:
    """Sparse attention: the indexer that chooses which keys a query sees.

    Attributes:
        num_heads, head_dim: of the indexer.
        topk: how many keys a query sees at most.
        is_rope_interleaved: rope turns neighbouring columns of the indexer's heads, not halves.
        layers: per decoder layer whether it has an indexer; the others take the choice of the last one before them.
    """

    num_heads: int
    head_dim: int
    topk: int
    is_rope_interleaved: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class MoeShape:
    """The layers of experts.

    Attributes:
        layers: per decoder layer whether it has experts.
        shared_size: width of all shared experts together; None without. ``has_shared_gate``: a gate on their output.
        pre_softmax: scores are taken before the choice of the top k, so that the kept ones do not add up to one.
        num_groups, group_topk: the choice is limited to the best groups of experts; None without groups.
        scaling_factor: of the kept scores; None is 1.
    """

    num_experts: int
    layers: tuple[bool, ...]
    ffn_hidden_size: int
    topk: int
    shared_size: int | None
    score_function: str
    pre_softmax: bool
    has_expert_bias: bool
    num_groups: int | None
    group_topk: int | None
    scaling_factor: float | None
    has_shared_gate: bool = False


@dataclass(frozen=True)
class DeltaNetShape:
    """The gated delta nets in the place of attention. ``layers``: per decoder layer whether it is one."""

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int


@dataclass(frozen=True)
class VisionShape:
    """The vision tower, and how images and videos are told among the tokens.

    Attributes:
        config: ``vision_config`` of config.json, which ``transformers`` builds the tower from.
        num_deep_layers: so many of the first decoder layers have features of their own added to their output.
        rope_sections: how many frequencies of a head turn with time, with height and with width; they alternate.
        image_token, video_token, start_token: ids; a run of the first two is one image or frame, behind the third.
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
    """Everything that decides which tensors the model has and what they compute.

    ``num_mtp_layers`` counts the multi-token-prediction layers that the checkpoint has, whether they are built or not.
    ``vision`` is None where no tower is built, also of a checkpoint that has one.
    """

    model_type: str
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
    vision: VisionShape | None = None
    num_mtp_layers: int = 0

    @property
    def kv_channels(self) -> int:
        """Megatron's name of ``head_dim``."""
        return self.head_dim

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def padded_vocab_size(self, multiple: int) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to a multiple of ``multiple``."""
        return math.ceil(self.vocab_size / multiple) * multiple
