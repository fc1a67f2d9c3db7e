"""Megatron's flags that slime honours, under Megatron's own names. Read by this room; importable without megatron.

Shape flags may all be left out: they then come from the ``config.json`` of ``--hf-checkpoint`` (``model_shape``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CheckpointArgs", "MegatronTrainingArgs", "ModelShapeArgs", "OptimizerArgs", "ParallelArgs"]


def _flag(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True)
class ModelShapeArgs:
    """Model shape (Megatron). Left out, it is read from --hf-checkpoint."""

    num_layers: int | None = _flag(None, "Transformer layers.")
    hidden_size: int | None = _flag(None, "Width of the residual stream.")
    ffn_hidden_size: int | None = _flag(None, "Width of the MLP.")
    num_attention_heads: int | None = _flag(None, "Query heads.")
    group_query_attention: bool = _flag(False, "Key and value heads are shared; --num-query-groups says how many.")
    num_query_groups: int | None = _flag(None, "Key and value heads.")
    kv_channels: int | None = _flag(None, "Size of one head.")
    normalization: Literal["RMSNorm"] = _flag("RMSNorm", "Norm of the layers.")
    norm_epsilon: float | None = _flag(None, "Epsilon of the norms.")
    qk_layernorm: bool = _flag(False, "Normalise queries and keys per head.")
    swiglu: bool = _flag(False, "Gated SiLU MLP.")
    add_bias_linear: bool = _flag(True, "No bias in linear layers.", off="--disable-bias-linear")
    add_qkv_bias: bool = _flag(False, "Bias in the query, key and value projections only.")
    untie_embeddings_and_output_weights: bool = _flag(False, "The output layer has weights of its own.")
    position_embedding_type: Literal["rope"] = _flag("rope", "Position embedding.")
    use_rotary_position_embeddings: bool = _flag(False, "Same as --position-embedding-type rope.")
    rotary_base: float | None = _flag(None, "Base of the rotary frequencies.")
    rotary_percent: float = _flag(1.0, "Part of a head that is rotated.")
    vocab_size: int | None = _flag(None, "Vocabulary size, before padding.")
    make_vocab_size_divisible_by: int = _flag(128, "The embedding is padded to a multiple of this.")
    max_position_embeddings: int | None = _flag(None, "Longest sequence the model is built for.")
    seq_length: int | None = _flag(None, "Accepted for launch scripts; lengths vary here.")
    attention_dropout: float = _flag(0.0, "Dropout of attention weights.")
    hidden_dropout: float = _flag(0.0, "Dropout of the residual stream.")


@dataclass(frozen=True)
class ParallelArgs:
    """Parallelism and memory (Megatron)."""

    tensor_model_parallel_size: int = _flag(1, "Tensor parallel size.")
    pipeline_model_parallel_size: int = _flag(1, "Pipeline parallel size.")
    context_parallel_size: int = _flag(1, "Context parallel size.")
    expert_model_parallel_size: int = _flag(1, "Expert parallel size.")
    expert_tensor_parallel_size: int = _flag(1, "Tensor parallel size of experts.")
    sequence_parallel: bool = _flag(False, "Sequence parallelism; without effect at tensor parallel size 1.")
    distributed_timeout_minutes: int = _flag(10, "Deadline of a collective operation, in minutes.")
    recompute_granularity: Literal["full"] | None = _flag(None, "Recompute activations in the backward pass.")
    recompute_method: Literal["uniform", "block"] | None = _flag(None, "How layers are grouped for recomputation.")
    recompute_num_layers: int | None = _flag(None, "Layers per recomputed group.")


@dataclass(frozen=True)
class MegatronTrainingArgs:
    """Precision and batching (Megatron)."""

    bf16: bool = _flag(False, "Weights and activations in bfloat16 (the default).")
    fp16: bool = _flag(False, "Weights and activations in float16.")
    fp32: bool = _flag(False, "Weights and activations in float32, in the trainer and in the engines.")
    micro_batch_size: int = _flag(1, "Samples per micro-batch, unless --use-dynamic-batch-size.")
    data_pad_size_multiplier: int = _flag(1, "Packed micro-batches are padded to a multiple of this many tokens.")
    seed: int = _flag(1234, "Seed of the trainer, and of the engines' samplers.")
    attention_softmax_in_fp32: bool = _flag(False, "Softmax of attention in float32; always so here.")
    accumulate_allreduce_grads_in_fp32: bool = _flag(False, "Gradients are summed in float32; always so here.")


@dataclass(frozen=True)
class OptimizerArgs:
    """Optimizer (Megatron)."""

    optimizer: Literal["adam", "sgd"] = _flag("adam", "Optimizer.")
    lr: float = _flag(1e-6, "Learning rate.")
    min_lr: float = _flag(0.0, "Learning rate at the end of the decay.")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = _flag("linear", "Decay of the rate.")
    lr_decay_iters: int | None = _flag(None, "Optimizer steps of the decay; all steps of the run by default.")
    lr_warmup_iters: int = _flag(0, "Optimizer steps of the warm-up.")
    lr_warmup_fraction: float | None = _flag(None, "Share of the decay steps used for the warm-up.")
    weight_decay: float = _flag(0.01, "Weight decay of matrices.")
    adam_beta1: float = _flag(0.9, "First Adam moment.")
    adam_beta2: float = _flag(0.999, "Second Adam moment.")
    adam_eps: float = _flag(1e-8, "Adam epsilon.")
    clip_grad: float = _flag(1.0, "Largest norm of the gradient; 0 switches clipping off.")


@dataclass(frozen=True)
class CheckpointArgs:
    """Checkpoints."""

    load: str | None = _flag(None, "Checkpoint to continue from: a directory that --save wrote, or a Hugging Face one.")
    save: str | None = _flag(None, "Directory for checkpoints.")
    save_interval: int | None = _flag(None, "Save every N rollouts, and after the last.")
    save_hf: str | None = _flag(None, "Also write a Hugging Face checkpoint; may contain {rollout_id}.")
    ckpt_step: int | None = _flag(None, "Iteration to load instead of the latest.")
    ref_load: str | None = _flag(None, "Hugging Face directory of the reference model.")
    no_load_optim: bool = _flag(False, "Do not load the optimizer state.")
    no_load_rng: bool = _flag(False, "Do not load the random number generators.")
    no_save_optim: bool = _flag(False, "Do not save the optimizer state.")
    no_save_rng: bool = _flag(False, "Do not save the random number generators.")
    finetune: bool = _flag(False, "Load weights only and start at rollout 0.")
