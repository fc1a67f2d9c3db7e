"""The Megatron flags, in Megatron's spellings, as argument groups.

Megatron-LM is not installed, only megatron-core. Flags that this trainer reads are declared here and in
``slime.backends.training.arguments``. Every other option of Megatron is known by name, so that its values are consumed
and using it is an error instead of a typo. Two tables have them: the fields of megatron-core's dataclasses
(``core_options.json``, written by ``tools/make_megatron_options.py`` and kept current by a test), and
``launcher_options.csv``:

    flag       its spelling without dashes
    name       attribute of args, if it does not follow from the flag
    kind       int, float, str, ints, strs, switch, off; "core": the option itself is in core_options.json
    no_effect  reason why it is accepted without effect; empty: using it is an error
    help       text for --help; options without one are hidden

Imports neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal

from slime.backends.training.arguments import (
    CheckpointArgs,
    LoraArgs,
    OptimizerArgs,
    ParallelArgs,
    PluginArgs,
    PrecisionArgs,
    TrainerArgs,
)
from slime.config.groups import flags_of
from slime.utils.misc import flag

_NOT_READ = "this trainer does not have that part of Megatron"
_TYPES: dict[str, Any] = {
    "int": int | None,
    "float": float | None,
    "str": str | None,
    "ints": list[int] | None,
    "strs": list[str] | None,
    "switch": bool,
    "off": bool,
}
_FOLDER = Path(__file__).resolve().parent
_NO_FUSION = "fused kernels are not used"
_GROUPED = "the experts of a rank are always grouped matrix products"
_SORTED = "tokens are sorted by expert and gathered; the flex dispatcher always has the kernel"
_NO_DROPS = "no token is ever dropped"


@dataclass(frozen=True)
class ModelArgs:
    """Model shape (derived from --hf-checkpoint if left out, checked against it if given)."""

    num_layers: int | None = flag(None, "Number of transformer layers.")
    hidden_size: int | None = flag(None, "Width of the residual stream.")
    ffn_hidden_size: int | None = flag(None, "Inner width of the MLP of dense layers.")
    num_attention_heads: int | None = flag(None, "Number of query heads.")
    group_query_attention: bool = flag(False, "Query heads share key/value heads.")
    num_query_groups: int | None = flag(None, "Number of key/value heads.")
    kv_channels: int | None = flag(None, "Width of one attention head.")
    normalization: Literal["LayerNorm", "RMSNorm"] | None = flag(None, "Kind of norm.")
    layernorm_epsilon: float | None = flag(None, "Epsilon of the norms.", off="--norm-epsilon")
    layernorm_zero_centered_gamma: bool = flag(
        False, "Norm weights are stored around zero and used as 1 + w.", off="--apply-layernorm-1p"
    )
    qk_layernorm: bool = flag(False, "Queries and keys are normalized per head.")
    post_self_attn_layernorm: bool = flag(False, "A norm after the output of attention (GLM-4).")
    post_mlp_layernorm: bool = flag(False, "A norm after the output of the MLP (GLM-4).")
    swiglu: bool = flag(False, "Gated SiLU MLP.")
    # A flag with ``off`` switches its field off, and its help describes the model without the feature.
    add_bias_linear: bool = flag(True, "Linear layers have no bias.", off="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "The query, key and value projections have a bias.")
    untie_embeddings_and_output_weights: bool = flag(
        False, "The output layer does not share the weights of the embedding."
    )
    vocab_size: int | None = flag(None, "Number of token ids, without padding.")
    make_vocab_size_divisible_by: int = flag(
        128, "The embedding is padded to a multiple of this many rows per tensor-parallel rank."
    )
    padded_vocab_size: int | None = flag(None, "Rows of the embedding, instead of that multiple.")
    attention_output_gate: bool = flag(False, "A sigmoid gate on the output of attention (Qwen3-Next).")
    use_gated_attention: bool = flag(False, "Gated attention as Qwen3-Next defines it.")
    spec: list[str] | None = flag(
        None, "Module and function (args, config, vp_stage) of custom layers. Model families need none.", nargs="*"
    )
    attention_dropout: float = flag(0.0, "Dropout on attention weights.")
    hidden_dropout: float = flag(0.0, "Dropout on the residual branches.")
    init_method_std: float = flag(0.02, "Standard deviation of initial weights, replaced by the checkpoint's.")
    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] = flag(
        "local",
        "Implementation of linear layers, norms, attention and experts; --fp8-format implies transformer_engine.",
    )
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto", "fa3", "fa4"] = flag(
        "auto",
        "Attention kernel on CUDA. unfused and local: torch's SDPA. fa3 and fa4: FlashAttention 3 or 4 inside torch's "
        "variable-length attention, which need their package. Otherwise FlashAttention 2 there. With "
        "--transformer-impl transformer_engine, flash, fused, unfused and auto choose among its kernels.",
    )
    attention_softmax_in_fp32: bool = flag(
        False, "Softmax of attention in fp32.", no_effect="always so in the attention that is used"
    )
    bias_swiglu_fusion: bool = flag(
        True,
        "SwiGLU as single operators. Without the flag, CUDA has one kernel for it, and a CPU one function.",
        off="--no-bias-swiglu-fusion",
    )
    bias_dropout_fusion: bool = flag(
        True,
        "Dropout and residual sum as single operators. Without the flag, CUDA has one kernel for both.",
        off="--no-bias-dropout-fusion",
    )
    masked_softmax_fusion: bool = flag(
        True, "Unfused masked softmax.", off="--no-masked-softmax-fusion", no_effect=_NO_FUSION
    )
    enable_experimental: bool = flag(
        False, "Megatron's experimental features.", no_effect="no feature here depends on it"
    )


@dataclass(frozen=True)
class PositionArgs:
    """Positions (derived from --hf-checkpoint as well)."""

    position_embedding_type: Literal["learned_absolute", "rope", "mrope", "relative", "none"] | None = flag(
        None, "Kind of position embedding; models that can be trained have rope."
    )
    use_rotary_position_embeddings: bool = flag(False, "Older spelling of --position-embedding-type rope.")
    add_position_embedding: bool = flag(True, "No table of absolute positions.", off="--no-position-embedding")
    rotary_base: int | None = flag(None, "Theta of the rotary embedding.")
    rotary_percent: float | None = flag(None, "Share of a head's width that is rotated.")
    rotary_interleaved: bool = flag(False, "Neighbouring columns are rotated together, instead of halves.")
    use_rope_scaling: bool = flag(False, "Llama 3 frequency scaling; its factors come from --hf-checkpoint.")
    rope_scaling_factor: float | None = flag(None, "Factor of that scaling.")
    rotary_scaling_factor: float | None = flag(None, "Factor of YaRN scaling (or of Llama 3 scaling).")
    rope_type: Literal["rope", "yarn"] | None = flag(None, "Kind of rope scaling of latent attention.")
    mscale: float | None = flag(None, "YaRN: weight of the scale of the rotated columns.")
    mscale_all_dim: float | None = flag(None, "YaRN: weight of the scale of the logits.")
    apply_rope_fusion: bool = flag(True, "Unfused rope.", off="--no-rope-fusion", no_effect=_NO_FUSION)
    max_position_embeddings: int | None = flag(None, "Longest sequence the model is meant for.")
    seq_length: int | None = flag(
        None, "Nominal sequence length (4096); actual lengths vary and are not limited by it."
    )


@dataclass(frozen=True)
class LatentAttentionArgs:
    """Multi-latent attention (derived from --hf-checkpoint as well)."""

    multi_latent_attention: bool = flag(False, "Keys and values are expanded from a compressed vector (DeepSeek).")
    q_lora_rank: int | None = flag(None, "Width of compressed queries; none without compression.")
    kv_lora_rank: int | None = flag(None, "Width of compressed keys and values.")
    qk_head_dim: int | None = flag(None, "Width per query and key head that is not rotated.")
    qk_pos_emb_head_dim: int | None = flag(None, "Width per query and key head that is rotated.")
    v_head_dim: int | None = flag(None, "Width per value head.")


@dataclass(frozen=True)
class ExpertArgs:
    """Mixture of experts (the shape is derived from --hf-checkpoint as well)."""

    num_experts: int | None = flag(None, "Routed experts per layer; none for dense models.")
    moe_layer_freq: str | None = flag(
        None, "Layers with experts: N for every N-th, or a list of 0 and 1 such as [0]*3+[1]*58.", metavar="PATTERN"
    )
    moe_ffn_hidden_size: int | None = flag(None, "Inner width of one expert.")
    moe_shared_expert_intermediate_size: int | None = flag(None, "Inner width of all shared experts together.")
    moe_shared_expert_gate: bool = flag(False, "A sigmoid gate on the output of the shared experts.")
    moe_router_topk: int | None = flag(None, "Experts per token.")
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = flag(None, "What turns logits into scores.")
    moe_router_pre_softmax: bool = flag(False, "Scores are taken before the choice of experts.")
    moe_router_enable_expert_bias: bool = flag(False, "A bias per expert takes part in the choice only.")
    moe_router_bias_update_rate: float | None = flag(
        None, "Step by which that bias follows the load after every optimizer step. Default: 0, it stays."
    )
    moe_router_num_groups: int | None = flag(None, "Groups of experts; the choice is limited to some of them.")
    moe_router_group_topk: int | None = flag(None, "Groups a token may choose from.")
    moe_router_topk_scaling_factor: float | None = flag(None, "Factor on the scores of the chosen experts.")
    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(
        None, "Precision of the router. Default: fp32 for sigmoid routers, else the model's type."
    )
    moe_router_load_balancing_type: (
        list[Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]] | None
    ) = flag(None, "Kind of load balancing; without effect while --moe-aux-loss-coeff is 0.")
    moe_aux_loss_coeff: list[float] | None = flag(None, "Weight of the load-balancing loss. Default: 0.")
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag(
        "alltoall", "How tokens reach the experts. flex needs --transformer-impl transformer_engine and DeepEP."
    )
    moe_enable_deepep: bool = flag(False, "DeepEP kernels; needs --moe-token-dispatcher-type flex.")
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = flag(
        "deepep", "Backend of the flex dispatcher. hybridep needs the branch of DeepEP of that name."
    )
    moe_grouped_gemm: bool = flag(False, "One grouped matrix product for local experts.", no_effect=_GROUPED)
    moe_use_legacy_grouped_gemm: bool = flag(False, "Older grouped matrix product.", no_effect=_GROUPED)
    moe_permute_fusion: bool = flag(False, "Fused permutation of tokens.", no_effect=_SORTED)
    moe_router_fusion: bool = flag(
        False, "Fused router.", no_effect="the fused router does not replay recorded choices"
    )
    moe_token_drop_policy: Literal["probs", "position"] = flag(
        "probs", "Which tokens an expert drops.", no_effect=_NO_DROPS
    )
    moe_use_upcycling: bool = flag(
        False, "Experts start as copies of a dense MLP: tools/upcycle_hf.py makes such a checkpoint beforehand."
    )


@dataclass(frozen=True)
class PredictionArgs:
    """Multi-token prediction."""

    mtp_num_layers: int | None = flag(
        None,
        "Prediction layers to build. Without, --save-hf copies those of --hf-checkpoint.",
    )
    mtp_loss_scaling_factor: float = flag(0.2, "Weight of their loss.")
    enable_mtp_training: bool = flag(
        False, "Train the prediction layers on the trained tokens; otherwise they are frozen."
    )


@dataclass(frozen=True)
class MuonArgs:
    """Muon (--optimizer muon or dist_muon)."""

    muon_momentum: float = flag(0.95, "Momentum.")
    muon_use_nesterov: bool = flag(False, "Nesterov's momentum.")
    muon_num_ns_steps: int = flag(5, "Newton-Schulz iterations.")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "spectral", "Factor on the update of a matrix [m, n]: sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n))."
    )
    muon_extra_scale_factor: float = flag(1.0, "Another factor; 0.2 with spectral gives updates of the size of adam's.")
    muon_split_qkv: bool = flag(
        True,
        "Queries, keys and values are one matrix instead of three.",
        off="--no-muon-split-qkv",
        flags=("--disable-muon-split-qkv", "--muon-no-split-qkv"),
    )
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = flag(
        "duplicated",
        "With tensor parallelism: a rank's part is treated as a matrix, or every rank gathers the whole matrix, or its "
        "products are summed over the ranks.",
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = flag(
        "medium", "Precision of matrix products on a GPU, as in torch.set_float32_matmul_precision. A CPU uses fp32."
    )


def core_options() -> Iterator[dict[str, Any]]:
    """The options that megatron-core's dataclasses imply: ``flags``, ``dest``, ``kind``, ``default``."""
    yield from json.loads((_FOLDER / "core_options.json").read_text(encoding="utf-8"))["options"]


@functools.cache
def _rows() -> dict[str, dict[str, str]]:
    with (_FOLDER / "launcher_options.csv").open(encoding="utf-8", newline="") as file:
        return {f"--{row['flag']}": row for row in csv.DictReader(file)}


def launcher_options(*, documented: bool = False) -> Iterator[dict[str, Any]]:
    """The options of Megatron-LM's own parser, in the form of :func:`core_options`; most defaults are "not given"."""
    for spelling, row in _rows().items():
        if row["kind"] != "core" and bool(row["help"]) == documented:
            default: Any = {"switch": False, "off": True}.get(row["kind"])  # None: not given
            if row["default"]:
                default = {"int": int, "float": float, "str": str}[row["kind"]](row["default"])
            yield {
                "flags": [spelling],
                "dest": row["name"] or row["flag"].replace("-", "_"),
                "kind": row["kind"],
                "default": default,
            }


def _runtime_flags() -> type:
    """The group of documented options that have no effect."""
    fields = [
        (option["dest"], _type(option), _field(option, option["flags"])) for option in launcher_options(documented=True)
    ]
    namespace = {"__doc__": "Megatron's runtime, accepted for scripts."}
    return make_dataclass("RuntimeArgs", fields, frozen=True, namespace=namespace)


def other_flags(groups: Iterable[type]) -> type:
    """The group of every other option of Megatron that none of ``groups`` declares. Hidden in ``--help``.

    Using one is "not supported yet", unless it could not change a number; its default changes nothing and is allowed.
    """
    dests: set[str] = set()
    spellings: set[str] = set()
    for declared in flags_of(list(groups)):
        dests.add(declared.name)
        spellings.update(declared.spellings)
        spellings.add("--no-" + declared.spellings[0].removeprefix("--"))
    fields = []
    for option in (*core_options(), *launcher_options()):
        free = [spelling for spelling in option["flags"] if spelling not in spellings]
        if not free or option["dest"] in dests:
            continue
        dests.add(option["dest"])
        spellings.update(free)
        fields.append((option["dest"], _type(option), _field(option, free)))
    return make_dataclass("OtherMegatronArgs", fields, repr=False, eq=False, namespace={"__doc__": "Megatron, other."})


def _type(option: dict[str, Any]) -> Any:
    return _TYPES[option["kind"]]


def _field(option: dict[str, Any], spellings: list[str]) -> Any:
    row = _rows().get(spellings[0], {})
    metadata = {"help": row.get("help") or argparse.SUPPRESS, "off": spellings[0], "flags": tuple(spellings[1:])}
    reason = row.get("no_effect")
    return field(
        default=option["default"], metadata=metadata | ({"no_effect": reason} if reason else {"later": _NOT_READ})
    )


RuntimeArgs = _runtime_flags()

GROUPS = (
    CheckpointArgs,
    ExpertArgs,
    LatentAttentionArgs,
    LoraArgs,
    ModelArgs,
    MuonArgs,
    OptimizerArgs,
    ParallelArgs,
    PluginArgs,
    PositionArgs,
    PrecisionArgs,
    PredictionArgs,
    RuntimeArgs,
    TrainerArgs,
)
