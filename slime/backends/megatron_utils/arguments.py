"""The Megatron flags that the trainer honours, in Megatron's spellings, as argument groups.

Only what works is declared: anything else is rejected by the parser. Flags that have no meaning without Megatron's
fused kernels but that every launch script passes are accepted, and say so. Imports neither torch nor megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CheckpointArgs", "ModelArgs", "OptimizerArgs", "ParallelArgs", "PrecisionArgs", "TrainerArgs"]


def _flag(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


_KERNEL = "Accepted for launch scripts written for Megatron's fused kernels; no effect here. "


@dataclass(frozen=True)
class ModelArgs:
    """Model shape (derived from --hf-checkpoint where left out, checked against it where given)."""

    num_layers: int | None = _flag(None, "Number of transformer layers.")
    hidden_size: int | None = _flag(None, "Width of the residual stream.")
    ffn_hidden_size: int | None = _flag(None, "Inner width of the MLP.")
    num_attention_heads: int | None = _flag(None, "Number of query heads.")
    group_query_attention: bool = _flag(False, "Query heads share key/value heads.")
    num_query_groups: int | None = _flag(None, "Number of key/value heads.")
    kv_channels: int | None = _flag(None, "Width of one attention head.")
    normalization: Literal["RMSNorm"] | None = _flag(None, "Kind of norm.")
    layernorm_epsilon: float | None = _flag(None, "Epsilon of the norms.", off="--norm-epsilon")
    qk_layernorm: bool = _flag(False, "Queries and keys are normalised per head.")
    swiglu: bool = _flag(False, "Gated SiLU MLP.")
    add_bias_linear: bool = _flag(True, "Linear layers have no bias.", off="--disable-bias-linear")
    add_qkv_bias: bool = _flag(False, "The query, key and value projections have a bias.")
    untie_embeddings_and_output_weights: bool = _flag(False, "The output layer has weights of its own.")
    position_embedding_type: Literal["rope"] | None = _flag(None, "Kind of position embedding.")
    use_rotary_position_embeddings: bool = _flag(False, "Older spelling of --position-embedding-type rope.")
    add_position_embedding: bool = _flag(True, "No table of absolute positions.", off="--no-position-embedding")
    rotary_base: int | None = _flag(None, "Theta of the rotary embedding.")
    rotary_percent: float | None = _flag(None, "Share of a head's width that is rotated.")
    use_rope_scaling: bool = _flag(False, "Llama 3 frequency scaling; its factors come from --hf-checkpoint.")
    vocab_size: int | None = _flag(None, "Number of token ids, without padding.")
    make_vocab_size_divisible_by: int = _flag(128, "The embedding is padded to a multiple of this many rows.")
    max_position_embeddings: int | None = _flag(None, "Longest sequence the model is meant for.")
    seq_length: int | None = _flag(None, "Nominal sequence length; actual lengths vary and are not limited by it.")
    attention_dropout: float = _flag(0.0, "Dropout on attention weights.")
    hidden_dropout: float = _flag(0.0, "Dropout on the residual branches.")
    init_method_std: float = _flag(0.02, "Standard deviation of initial weights, replaced by the checkpoint's.")
    transformer_impl: Literal["local", "transformer_engine"] = _flag(
        "transformer_engine", _KERNEL + "The local layers are used."
    )
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = _flag(
        "auto", _KERNEL + "Attention is variable-length flash attention on cuda where torch has it, else torch's SDPA."
    )
    attention_softmax_in_fp32: bool = _flag(False, "Softmax in fp32: always so in the attention that is used.")
    apply_rope_fusion: bool = _flag(True, _KERNEL + "Rope is never fused.", off="--no-rope-fusion")
    masked_softmax_fusion: bool = _flag(True, _KERNEL + "Softmax is never fused.", off="--no-masked-softmax-fusion")


@dataclass(frozen=True)
class ParallelArgs:
    """Parallelism of the trainer."""

    tensor_model_parallel_size: int = _flag(1, "Ranks that share every layer. Only 1 so far.")
    sequence_parallel: bool = _flag(False, "Shard norms along the sequence; no effect without tensor parallelism.")
    pipeline_model_parallel_size: int = _flag(1, "Pipeline stages. Only 1 so far.")
    context_parallel_size: int = _flag(1, "Ranks that share every sequence. Only 1 so far.")
    expert_model_parallel_size: int = _flag(1, "Ranks that share the experts. Only 1 so far.")
    expert_tensor_parallel_size: int | None = _flag(None, "Tensor-parallel size inside experts. Only 1 so far.")
    distributed_backend: Literal["nccl", "gloo"] | None = _flag(
        None, "Backend of the trainer's process groups. Default: nccl on cuda, gloo on cpu."
    )
    distributed_timeout_minutes: float = _flag(10.0, "Longest wait of a trainer rank for the others.")


@dataclass(frozen=True)
class PrecisionArgs:
    """Precision and memory of the trainer."""

    bf16: bool = _flag(False, "Train in bfloat16 with fp32 master weights: the default.")
    fp16: bool = _flag(False, "Train in float16 with fp32 master weights and a dynamic loss scale.")
    fp32: bool = _flag(False, "Train in float32; the engines then run in float32 as well.")
    accumulate_allreduce_grads_in_fp32: bool = _flag(False, "Gradient buffers in fp32; implied by bf16.")
    gradient_accumulation_fusion: bool = _flag(
        True, _KERNEL + "Gradient accumulation is never fused.", off="--no-gradient-accumulation-fusion"
    )
    recompute_granularity: Literal["full", "selective"] | None = _flag(
        None, "Recompute activations in the backward pass: whole layers, or the attention only."
    )
    recompute_method: Literal["uniform", "block"] | None = _flag(None, "How recomputed layers are chosen.")
    recompute_num_layers: int | None = _flag(None, "Layers per recompute unit.")


@dataclass(frozen=True)
class OptimizerArgs:
    """Optimizer and learning rate."""

    optimizer: Literal["adam", "sgd"] = _flag("adam", "Optimizer; adam decays weights decoupled (AdamW).")
    lr: float = _flag(1e-6, "Peak learning rate.")
    min_lr: float = _flag(0.0, "Learning rate at the end of the decay.")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = _flag(
        "linear", "Shape of the schedule after the warm-up."
    )
    lr_decay_iters: int | None = _flag(None, "Steps until --min-lr. Default: all steps of the run.")
    lr_warmup_iters: int = _flag(0, "Steps of linear warm-up.")
    lr_warmup_fraction: float | None = _flag(None, "Warm-up as a share of the decay steps, instead of steps.")
    weight_decay: float = _flag(0.01, "Weight decay; norms and biases are exempt.")
    adam_beta1: float = _flag(0.9, "Decay of Adam's first moment.")
    adam_beta2: float = _flag(0.999, "Decay of Adam's second moment.")
    adam_eps: float = _flag(1e-8, "Adam's epsilon.")
    sgd_momentum: float = _flag(0.9, "Momentum of sgd.")
    clip_grad: float = _flag(1.0, "Largest gradient norm; 0 switches clipping off.")
    use_distributed_optimizer: bool | None = _flag(
        None, "Shard the optimizer states over data-parallel ranks. Default: yes for adam."
    )
    check_for_nan_in_loss_and_grad: bool = _flag(
        True,
        "Skip a step whose gradients are not finite instead of stopping the run.",
        off="--no-check-for-nan-in-loss-and-grad",
    )


@dataclass(frozen=True)
class CheckpointArgs:
    """Checkpoints of the trainer."""

    load: str | None = _flag(None, "Checkpoint directory to resume from: Megatron's layout or Hugging Face.")
    save: str | None = _flag(None, "Directory that gets an iter_NNNNNNN directory per checkpoint.")
    save_interval: int | None = _flag(None, "Rollouts between checkpoints.")
    save_hf: str | None = _flag(
        None, "Also export Hugging Face checkpoints here; {rollout_id} is replaced.", metavar="TEMPLATE"
    )
    ckpt_step: int | None = _flag(None, "Iteration of --load to take instead of the latest.")
    finetune: bool = _flag(False, "Take the weights of --load only and start at rollout 0.")
    no_load_optim: bool = _flag(False, "Do not load the optimizer and schedule.")
    no_load_rng: bool = _flag(False, "Do not load the state of the random number generators.")
    no_save_optim: bool = _flag(False, "Do not save the optimizer and schedule.")
    no_save_rng: bool = _flag(False, "Do not save the state of the random number generators.")
    ref_load: str | None = _flag(
        None, "Checkpoint of the reference model; also where training starts while --load holds no checkpoint yet."
    )
    ref_ckpt_step: int | None = _flag(None, "Iteration of --ref-load to take instead of the latest.")


@dataclass(frozen=True)
class TrainerArgs:
    """Trainer."""

    seed: int = _flag(1234, "Seed of the trainer's random number generators.")
    micro_batch_size: int = _flag(1, "Samples per micro-batch where --use-dynamic-batch-size is off.")
    deterministic_mode: bool = _flag(False, "Only deterministic kernels; an operation that has none is an error.")
