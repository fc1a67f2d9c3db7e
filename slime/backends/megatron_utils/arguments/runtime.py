"""Megatron flags about how its processes run: accepted, because scripts and users' code know them."""

from __future__ import annotations

from dataclasses import dataclass

from slime.backends.training.arguments import flag

_OVERLAP = "communication is not overlapped with computation"
_SAVING = "decided by the writer of checkpoints"
_INIT = "every weight comes from a checkpoint"
_FUSION = "fused kernels are not used"
_GC = "python's own garbage collection runs"
_LOG = "metrics go to the trackers after every step"


@dataclass(frozen=True)
class RuntimeArgs:
    """Megatron's runtime, accepted for scripts."""

    train_iters: int | None = flag(None, "Optimizer steps of the run.", no_effect="computed from the rollouts")
    decoder_seq_length: int | None = flag(None, "Length of decoder sequences.", no_effect="lengths vary")
    overlap_grad_reduce: bool = flag(False, "Overlap the reduction of gradients.", no_effect=_OVERLAP)
    overlap_param_gather: bool = flag(False, "Overlap the gathering of parameters.", no_effect=_OVERLAP)
    align_grad_reduce: bool = flag(
        True, "Do not align reductions over stages.", off="--no-align-grad-reduce", no_effect=_OVERLAP
    )
    align_param_gather: bool = flag(
        True, "Do not align gathers over stages.", off="--no-align-param-gather", no_effect=_OVERLAP
    )
    overlap_p2p_comm: bool = flag(
        True, "Do not overlap exchanges of the pipeline.", off="--no-overlap-p2p-communication", no_effect=_OVERLAP
    )
    tp_comm_overlap: bool = flag(False, "Overlap tensor-parallel communication.", no_effect=_OVERLAP)
    enable_gloo_process_groups: bool = flag(
        True, "No gloo groups beside nccl.", off="--disable-gloo-process-groups", no_effect="there are none"
    )
    ckpt_assume_constant_structure: bool = flag(False, "Reuse plans of saving.", no_effect=_SAVING)
    ckpt_fully_parallel_load: bool = flag(False, "All ranks share the loading.", no_effect=_SAVING)
    ckpt_fully_parallel_save: bool = flag(
        True, "All ranks do not share the saving.", off="--no-ckpt-fully-parallel-save", no_effect=_SAVING
    )
    dist_ckpt_save_pre_mcore_014: bool = flag(False, "Older layout of optimizer states.", no_effect=_SAVING)
    use_persistent_ckpt_worker: bool = flag(False, "One process for all background saving.", no_effect=_SAVING)
    data_parallel_random_init: bool = flag(False, "Other initial weights per rank.", no_effect=_INIT)
    use_cpu_initialization: bool = flag(False, "Build the weights on the CPU.", no_effect=_INIT)
    perform_initialization: bool = flag(True, "Leave weights unset.", off="--no-initialization", no_effect=_INIT)
    te_rng_tracker: bool = flag(False, "TransformerEngine's generators.", no_effect="it is not used")
    inference_rng_tracker: bool = flag(False, "Generators of inference.", no_effect="nothing is sampled here")
    manual_gc: bool = flag(False, "Collect garbage by hand.", no_effect=_GC)
    manual_gc_interval: int = flag(0, "Steps between.", no_effect=_GC)
    bias_swiglu_fusion: bool = flag(True, "Unfused SwiGLU.", off="--no-bias-swiglu-fusion", no_effect=_FUSION)
    bias_gelu_fusion: bool = flag(True, "Unfused GELU.", off="--no-bias-gelu-fusion", no_effect=_FUSION)
    bias_dropout_fusion: bool = flag(True, "Unfused dropout.", off="--no-bias-dropout-fusion", no_effect=_FUSION)
    persist_layer_norm: bool = flag(True, "Other norm kernel.", off="--no-persist-layer-norm", no_effect=_FUSION)
    cross_entropy_loss_fusion: bool = flag(False, "Fused cross entropy.", no_effect=_FUSION)
    cross_entropy_fusion_impl: str = flag("native", "Kind of that kernel.", no_effect=_FUSION)
    use_flash_attn: bool = flag(False, "Flash attention.", no_effect="used wherever torch has it")
    log_interval: int = flag(100, "Steps between log lines.", no_effect=_LOG)
    log_throughput: bool = flag(False, "Log throughput.", no_effect=_LOG)
    log_progress: bool = flag(False, "Log progress to a file.", no_effect=_LOG)
    timing_log_level: int = flag(0, "Detail of timers.", no_effect=_LOG)
    barrier_with_L1_time: bool = flag(
        True, "No barriers for timers.", off="--no-barrier-with-level-1-timing", no_effect=_LOG
    )
    tensorboard_queue_size: int = flag(1000, "Events kept before they are written.", no_effect=_LOG)
