"""Flags of training: parallelism, precision and memory, optimizer, checkpoints, and the trainer's extension points.

They have Megatron's spellings, whatever the backend. Collected with Megatron's other flags by
``megatron_utils.arguments``. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.utils.misc import flag

_NO_FUSION = "fused kernels are not used"
_FUSED_LOSS = (
    "logits stay in 16 bits in any case, and sums over the vocabulary are taken in fp32 without a copy of them"
)
_ALWAYS_GATHERED = "keys and values of all ranks are gathered in any case, each rank with two chunks of every sequence"


@dataclass(frozen=True)
class ParallelArgs:
    """Parallelism of the trainer."""

    tensor_model_parallel_size: int = flag(1, "Ranks that share every layer.")
    sequence_parallel: bool = flag(
        False, "Tensor-parallel ranks share the norms along the sequence; off with one such rank."
    )
    pipeline_model_parallel_size: int = flag(1, "Pipeline stages.")
    decoder_first_pipeline_num_layers: int | None = flag(None, "Layers of the first stage.")
    decoder_last_pipeline_num_layers: int | None = flag(None, "Layers of the last stage.")
    account_for_embedding_in_pipeline_split: bool = flag(False, "The embedding counts as a layer of the first stage.")
    account_for_loss_in_pipeline_split: bool = flag(False, "The loss counts as a layer of the last stage.")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Interleaved pipeline: layers of one chunk of a stage."
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "Interleaved pipeline: chunks of a stage.")
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        "Interleaved pipeline: micro-batches a chunk runs before the next one. Default: pipeline stages.",
        off="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    virtual_pipeline_model_parallel_size: int | None = flag(None, "Chunks of a stage.", derived=True)
    context_parallel_size: int = flag(1, "Ranks that share every sequence.")
    expert_model_parallel_size: int = flag(1, "Ranks that share the experts of a layer.")
    expert_tensor_parallel_size: int | None = flag(
        None, "Ranks that share one expert. Default: --tensor-model-parallel-size."
    )
    use_tp_pp_dp_mapping: bool = flag(
        False, "Number the ranks tensor, context, pipeline, data, instead of data before pipeline."
    )
    allgather_cp: bool = flag(
        False, "Context parallelism of sparse attention, by gathering keys and values.", no_effect=_ALWAYS_GATHERED
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, "Backend of the trainer's process groups. Default: nccl on cuda, gloo on cpu."
    )
    overlap_grad_reduce: bool = flag(
        False, "Reduce gradients bucket by bucket during the last backward pass of a step instead of after it."
    )
    overlap_param_gather: bool = flag(
        False,
        "Gather updated weights during the next forward pass; after the last step of a rollout they are gathered at "
        "once. Needs --overlap-grad-reduce and the sharded optimizer.",
    )
    align_grad_reduce: bool = flag(
        True, "Do not align these reductions over pipeline stages.", off="--no-align-grad-reduce"
    )
    align_param_gather: bool = flag(
        True, "Do not align these gathers over pipeline stages.", off="--no-align-param-gather"
    )
    ddp_bucket_size: int | None = flag(
        None, "Weights per bucket. Default: 40 million, with more than 40 data-parallel ranks a million per rank."
    )
    distributed_timeout_minutes: float = flag(
        30.0, "Longest wait of a trainer rank for the others in a collective. Waits for files have two hours."
    )

    @property
    def tensor_ranks_of_experts(self) -> int:
        """``--expert-tensor-parallel-size``, by default that of the other layers."""
        size = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if size is None else size


@dataclass(frozen=True)
class PrecisionArgs:
    """Precision and memory of the trainer."""

    bf16: bool = flag(False, "Train in bfloat16 with fp32 master weights: the default.")
    fp16: bool = flag(False, "Train in float16 with fp32 master weights and a dynamic loss scale.")
    fp32: bool = flag(False, "Train in float32; the engines then run in float32 as well.")
    fp8: Literal["e4m3", "hybrid"] | None = flag(
        None, "Linear layers compute in FP8; needs a GPU and TransformerEngine.", off="--fp8-format"
    )
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = flag("delayed", "Scaling of FP8.")
    fp8_quantizer_factory: str | None = flag(
        None, "package.module.function that makes the quantizers of --fp8-recipe custom, as TransformerEngine calls it."
    )
    fp8_param_gather: bool = flag(
        False, "The model's weights are kept and gathered in FP8; main weights stay in fp32. See docs/low_precision.md."
    )
    int4_group_size: int | None = flag(None, "Values that share a scale in experts of fake INT4.", derived=True)
    kv_fp8_block_size: int | None = flag(None, "Columns that share a scale in latents of fake FP8.", derived=True)
    fp16_lm_cross_entropy: bool = flag(False, "Cross entropy in half precision.", no_effect=_FUSED_LOSS)
    accumulate_allreduce_grads_in_fp32: bool = flag(False, "Gradient buffers in fp32; implied by bf16.")
    gradient_accumulation_fusion: bool = flag(
        True, "Unfused gradient accumulation.", off="--no-gradient-accumulation-fusion", no_effect=_NO_FUSION
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "Recompute activations in the backward pass: whole layers, or parts of them."
    )
    recompute_activations: bool = flag(False, "Older spelling of --recompute-granularity selective.")
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "How recomputed layers are chosen. Default with --recompute-granularity full: uniform."
    )
    recompute_num_layers: int | None = flag(
        None, "Layers per recompute unit. Default with --recompute-granularity full: 1."
    )
    recompute_modules: list[str] | None = flag(
        None, "Parts that selective recomputation covers. Default: the core attention."
    )
    recompute_loss_function: bool = flag(
        False,
        "Compute the loss again in the backward pass instead of keeping its activations in between.",
    )


@dataclass(frozen=True)
class OptimizerArgs:
    """Optimizer and learning rate."""

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = flag(
        "adam",
        "Optimizer; adam decays weights decoupled (AdamW). muon orthogonalizes the updates of matrices and leaves the "
        "rest to adam; dist_muon also divides its states among data-parallel ranks, matrix by matrix.",
    )
    lr: float = flag(1e-6, "Peak learning rate.")
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", "Shape of the schedule after the warm-up; WSD is constant and decays at the end."
    )
    lr_decay_iters: int | None = flag(None, "Steps until --min-lr. Default: all steps of the run.")
    lr_warmup_iters: int = flag(0, "Steps of linear warm-up.")
    lr_warmup_fraction: float | None = flag(None, "Warm-up as a share of the decay steps, instead of steps.")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.")
    lr_wsd_decay_iters: int | None = flag(None, "WSD: steps of the decay at the end.")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "WSD: shape of that decay."
    )
    weight_decay: float = flag(0.01, "Weight decay; norms and biases are exempt.")
    start_weight_decay: float | None = flag(None, "Weight decay at the first step, if it changes.")
    end_weight_decay: float | None = flag(None, "Weight decay at the last step, if it changes.")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "How weight decay goes from the one to the other."
    )
    adam_beta1: float = flag(0.9, "Decay of Adam's first moment.")
    adam_beta2: float = flag(0.999, "Decay of Adam's second moment.")
    adam_eps: float = flag(1e-8, "Adam's epsilon.")
    sgd_momentum: float = flag(0.9, "Momentum of sgd.")
    clip_grad: float = flag(1.0, "Largest gradient norm; 0 switches clipping off.")
    use_distributed_optimizer: bool | None = flag(
        None, "Shard the optimizer states over data-parallel ranks. Default: yes for adam."
    )
    num_distributed_optimizer_instances: int = flag(
        1, "Groups of data-parallel ranks, each with all states: sharding stays inside a group, say a node."
    )
    use_precision_aware_optimizer: bool = flag(
        False,
        "Optimizer states in configurable types.",
        no_effect="states are kept in fp32, the default of that optimizer too; --optimizer-cpu-offload asks for it",
    )
    optimizer_cpu_offload: bool = flag(False, "Main weights and optimizer states, and their update, on the CPU.")
    optimizer_offload_fraction: float = flag(1.0, "Share of them that is on the CPU.")
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, "Copies to and from the host run during the updates of --optimizer-cpu-offload."
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "The checkpoint's schedule beats the command line.",
        off="--use-checkpoint-opt_param-scheduler",
        flags=("--use-checkpoint-opt-param-scheduler",),
    )
    override_opt_param_scheduler: bool = flag(
        False,
        "The command line beats the checkpoint's schedule.",
        off="--override-opt_param-scheduler",
        flags=("--override-opt-param-scheduler",),
        no_effect="the default",
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "Skip a step whose gradients are not finite instead of stopping the run.",
        off="--no-check-for-nan-in-loss-and-grad",
    )

    @property
    def is_distributed(self) -> bool:
        """Whether data-parallel ranks share the optimizer states."""
        given = self.use_distributed_optimizer
        return self.optimizer == "adam" if given is None else given


@dataclass(frozen=True)
class LoraArgs:
    """Low-rank adapters (LoRA)."""

    lora_rank: int = flag(0, "Train adapters of this rank and freeze the weights of --hf-checkpoint; 0 trains all.")
    lora_alpha: float = flag(32.0, "An adapter's output is multiplied by alpha / rank.")
    lora_dropout: float = flag(0.0, "Dropout of the inputs of adapters in training steps.")
    lora_target_modules: list[str] | None = flag(
        None,
        "Linear layers with adapters, by their Hugging Face names, such as q_proj down_proj. Default: "
        "all-linear: every one, or in a model with experts those of attention unless --lora-experts is given.",
    )
    lora_adapter_path: str | None = flag(
        None, "Directory of a peft adapter that training starts from. The reference stays the base.", metavar="DIR"
    )
    lora_experts: bool = flag(False, "Routed experts that --lora-target-modules match have adapters, too.")
    lora_use_rslora: bool = flag(False, "Multiply by alpha / sqrt(rank) instead (rsLoRA).")
    lora_merge: bool = flag(
        False, "Engines get merged weights instead of adapters, and --save-hf writes them instead of an adapter."
    )


@dataclass(frozen=True)
class CheckpointArgs:
    """Checkpoints of the trainer."""

    load: str | None = flag(None, "Checkpoint directory to resume from: Megatron's layout or Hugging Face.")
    save: str | None = flag(None, "Directory that gets an iter_NNNNNNN directory per checkpoint.")
    save_interval: int | None = flag(None, "Rollouts between checkpoints.")
    save_hf: str | None = flag(
        None,
        "Export Hugging Face checkpoints here, with every checkpoint and at the end; {rollout_id} is replaced.",
        metavar="TEMPLATE",
    )
    push_to_hub: str | None = flag(
        None,
        "Upload every export of --save-hf to this repository of the Hugging Face Hub, with a model card.",
        metavar="OWNER/NAME",
    )
    ckpt_step: int | None = flag(None, "Iteration of --load to take instead of the latest.")
    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = flag(
        "torch_dist", "Format of checkpoints.", no_effect="checkpoints are written as torch_dist"
    )
    finetune: bool = flag(False, "Take the weights of --load only and start at rollout 0.")
    no_load_optim: bool = flag(False, "Do not load the optimizer and schedule.")
    no_load_rng: bool = flag(False, "Do not load the state of the random number generators.")
    no_save_optim: bool = flag(False, "Do not save the optimizer and schedule.")
    no_save_rng: bool = flag(False, "Do not save the state of the random number generators.")
    async_save: bool = flag(False, "Write checkpoints in the background; training waits only for the copy.")
    keep_last_checkpoints: int | None = flag(None, "Delete all but this many newest checkpoints under --save.")
    ref_load: str | None = flag(
        None, "Checkpoint of the reference model; training starts there, too, while --load holds no checkpoint."
    )
    ref_ckpt_step: int | None = flag(None, "Iteration of --ref-load to take instead of the latest.")
    pretrained_checkpoint: str | None = flag(
        None, "Checkpoint whose weights training starts from while --load holds none yet."
    )


@dataclass(frozen=True)
class TrainerArgs:
    """Trainer."""

    seed: int = flag(1234, "Seed of the trainer's random number generators.")
    micro_batch_size: int = flag(1, "Samples per micro-batch without --use-dynamic-batch-size.")
    deterministic_mode: bool = flag(False, "Only deterministic kernels; an operation that has none is an error.")
    rampup_batch_size: list[str] | None = flag(None, "Grow the batch: start, increment, samples.", nargs="*")
    tokenizer_model: str | None = flag(None, "Tokenizer; only --hf-checkpoint, the default.", metavar="DIR")
    tokenizer_type: str | None = flag(None, "Kind of tokenizer; only HuggingFaceTokenizer, the default.")
    trust_remote_code: bool = flag(False, "Code of the tokenizer's directory may run.", no_effect="always allowed")


@dataclass(frozen=True)
class PluginArgs:
    """Extension points and special parts of the trainer."""

    custom_model_provider_path: str | None = flag(
        None, "Function f(pre_process, post_process, vp_stage, config, args) that builds a rank's part of the model."
    )
    custom_megatron_init_path: str | None = flag(
        None, "Function f(args) called on every trainer rank once the process groups exist."
    )
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, "Function f(args, model, store_prefix) called before every pass that computes log-probs or values."
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None, "Function f(args, rollout_id, step_id, model, optimizer, scheduler) called before every optimizer step."
    )
    only_train_params_name_list: list[str] | None = flag(
        None, "Regular expressions of parameters to train; all others are frozen.", nargs="*"
    )
    freeze_params_name_list: list[str] | None = flag(None, "Regular expressions of parameters to freeze.", nargs="*")
    freeze_indexer: bool = flag(False, "Freeze the indexer of sparse attention. It has no gradient: always on.")
    qwen_gdn_backend: Literal["fla", "flashqla"] = flag(
        "fla", "Kernels of gated delta-net layers on a GPU; without the package of fla they run in plain torch."
    )
    megatron_deepgemm_forward_layers: list[int] | None = flag(
        None,
        "Layers, from 0, whose linear layers multiply with deep_gemm as engines do: in 8 bits if "
        "--hf-checkpoint is, else in bf16.",
    )
    megatron_deepgemm_forward_modules: list[str] | None = flag(
        None, "Only these of their modules, such as self_attention.linear_proj."
    )
    megatron_deepgemm_moe_forward_layers: list[int] | None = flag(
        None, "Layers, from 0, whose experts multiply together, with deep_gemm."
    )
    megatron_deepgemm_moe_forward_modules: list[str] | None = flag(
        None, "Only these of their modules. Default: mlp.experts."
    )
