"""Flags about the command line itself, read by the parser and by ``train.py``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from slime.utils.misc import flag


@dataclass(frozen=True)
class CommandArgs:
    """Command line."""

    custom_config_path: str | None = flag(
        None,
        "YAML mapping of argument names to values. Explicit flags win; other keys become attributes.",
        metavar="FILE",
    )
    strict_args: bool = flag(False, "Warnings about the command line (unknown flags, guessed values) become errors.")
    plan: bool = flag(False, "Print what this command would do, and stop: needs no GPU, Ray or torch.")


# Flags about who runs where and how the parts talk: cluster, weight synchronisation, health, network, CI.
#
# Read by the wiring in this room. Standard library only.


@dataclass(frozen=True)
class ClusterArgs:
    """Cluster."""

    train_backend: Literal["megatron", "fsdp"] = flag(
        "megatron", "Training backend: megatron-core, or models of transformers sharded by torch's FSDP2."
    )
    actor_num_nodes: int = flag(1, "Nodes of the trainer.")
    actor_num_gpus_per_node: int = flag(
        8, "Trainer ranks on each of its nodes. Without a GPU a slot is one CPU process."
    )
    rollout_num_gpus: int | None = flag(
        None,
        "Device slots for inference engines. Default: those of --sglang-config, else as many as the trainer has. 0 "
        "starts the router only: engines register with it later.",
    )
    rollout_num_gpus_per_engine: int = flag(1, "Tensor-parallel size of one engine.")
    num_gpus_per_node: int = flag(8, "Devices of a node that hosts engines.")
    colocate: bool = flag(False, "Trainer and engines take turns on the same devices.")
    offload: bool = flag(False, "Short for --offload-train --offload-rollout.")
    offload_train: bool | None = flag(
        None, "The trainer's state is in host memory while engines generate. Default: with --colocate."
    )
    offload_communicators: bool = flag(
        False, "With --offload-train, NCCL gives its memory back, too (NCCL 2.29.7 or later; not tried on a GPU yet)."
    )
    offload_rollout: bool | None = flag(
        None, "Engines on the trainer's devices release their memory while it works. Default: with --colocate."
    )
    release_train: bool = flag(
        False, "The trainer's processes end while engines generate, and start again from the last checkpoint."
    )
    train_env_vars: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "JSON object of environment variables for trainer processes."}
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None, "Running engines to use instead of starting any.", metavar="HOST:PORT"
    )
    rollout_data_transport: Literal["object-store", "nixl"] = flag(
        "object-store",
        "How batches reach the trainer: through Ray's shared memory, or from memory to memory (package nixl).",
    )
    debug_rollout_only: bool = flag(False, "Generate and score only; start no trainer.")
    debug_train_only: bool = flag(False, "Train only; start no engine and no router.")
    placement_timeout: float = flag(600.0, "Seconds to wait until Ray has the requested devices.")
    trainer_start_timeout: float = flag(
        7200.0,
        "Seconds until the model is built and its checkpoint is loaded. The wait for engines at the start is also "
        "longer than --engine-start-timeout.",
    )
    rollout_timeout: float = flag(14400.0, "Seconds one rollout or evaluation may take.")
    train_timeout: float = flag(14400.0, "Seconds training on one rollout may take.")


# Filled by slime.weight_sync, which this room does not import.
TRANSPORTS: dict[str, Any] = {}


@dataclass(frozen=True)
class SyncArgs:
    """Weight sync."""

    update_weight_mode: Literal["full", "delta"] = flag(
        "full", "Send all weights, or only the changes since the last sync (with --update-weight-transport disk)."
    )
    update_weight_transport: str = flag(
        "nccl",
        "Collectives (gloo without a GPU; shared memory between processes of one device), or a shared directory.",
        choices=TRANSPORTS,
    )
    update_weight_buffer_size: int | None = flag(
        None,
        "Largest bucket of weights sent at once, in bytes. Default: 512 MiB; on GPUs an eighth of the memory that is "
        "free on the fullest trainer device when the sync begins, from 512 MiB to 2 GiB.",
    )
    update_weight_changed_only: bool = flag(
        False,
        "Do not send tensors again that have not changed since the last time (frozen ones, for instance). Costs a "
        "checksum of all weights at every sync.",
    )
    update_weights_interval: int = flag(1, "Send weights to the engines every N rollouts.")
    update_weight_disk_dir: str | None = flag(
        None, "Directory shared by all nodes for --update-weight-transport disk. Old weights in it are deleted."
    )
    update_weight_disk_keep_files: bool = flag(False, "Keep weight files that engines have loaded.")
    update_weight_delta_encoding: Literal["xor", "overwrite"] = flag(
        "xor", "Form of a delta: changed bits, or positions and new values."
    )
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = flag(
        "xxh3-128", "Checksum of each tensor that is sent through files."
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None, "Directory on each engine host for a copy of the weights, which deltas are applied to."
    )
    custom_update_weight_post_write_path: str | None = flag(
        None, "Function f(args, version_dir, rollout_engines) called after weight files are written."
    )
    model_name: str | None = flag(
        None, "Name of the weight converter. It follows from --hf-checkpoint; another one is an error."
    )
    check_weight_update_equal: bool = flag(
        False,
        "Overwrite the engines with random values at the start, so that only complete syncs make them right, and allow "
        "no tensor with an unexpected layout (--weight-sync-proof). GPU engines also compare themselves with their "
        "checkpoint, after the first sync of a run without --load.",
    )
    weight_sync_proof: Literal["full", "canary", "none"] = flag(
        "full",
        "Proof of every weight sync: full compares checksums of every tensor on every rank of the engines and the "
        "log-probs of a canary prompt, canary the latter only.",
    )
    weight_sync_timeout: float = flag(
        1800.0, "Seconds that one weight sync may take, and each call to engines that moves or changes memory."
    )


@dataclass(frozen=True)
class AsyncArgs:
    """Asynchronous training."""

    async_buffer_size: int = flag(
        1,
        "train_async.py: rollouts that may be running, or finished and not trained on yet. 0 generates when the new "
        "weights serve, as train.py does.",
    )


@dataclass(frozen=True)
class ConvenienceArgs:
    """Short forms of trainer flags."""

    gradient_checkpointing: bool = flag(
        False, "Recompute all layers in the backward pass; given --recompute-* flags take precedence."
    )
    initial_megatron_checkpoint: str | None = flag(
        None,
        "Weights to start with while --load holds no checkpoint; also the reference model without --ref-load.",
        metavar="DIR",
    )


@dataclass(frozen=True)
class FaultToleranceArgs:
    """Fault tolerance."""

    use_fault_tolerance: bool = flag(
        False,
        "Engines that die are started again, up to three times each, and the run goes on; with --save, it is begun "
        "again from its last checkpoint when another of its processes dies.",
    )
    engines_port: int | None = flag(
        None,
        "Port of the driver on 127.0.0.1 at which engines join and leave while the run goes on; 0: any free one.",
    )
    heartbeat_timeout: float = flag(
        10.0,
        "Seconds after which a process of the run that gives no sign of life and was stopped counts as dead, and is "
        "killed; one that hangs in native code, six times as long. 0: never.",
    )
    rollout_health_check_interval: float = flag(
        30.0, "Seconds between two health checks of an engine. One whose process ended is noticed within a second."
    )
    rollout_health_check_timeout: float = flag(
        30.0, "Seconds until a health check counts as failed; after three in a row the engine counts as dead."
    )
    rollout_health_check_first_wait: float | None = flag(
        None,
        "Seconds without health checks after an engine starts, and after each weight sync. Default: 300 after a start "
        "on GPUs, where the first batches compile kernels, else 0.",
    )


@dataclass(frozen=True)
class NetworkArgs:
    """Network."""

    use_distributed_post: bool = flag(
        False,
        "Processes on every node send the requests that the rollout manager makes; as many as the node has device "
        "slots. For clusters whose requests are too many for one process. On GPUs, --use-rollout-routing-replay "
        "sets it.",
    )
    http_proxy: str | None = flag(
        None, "Proxy for HTTP requests.", no_effect="engines, router and trainer talk to each other without a proxy"
    )


@dataclass(frozen=True)
class CiArgs:
    """Continuous integration."""

    ci_test: bool = flag(
        False,
        "End the run if its numbers are not those of a run with a trained model. With --use-fault-tolerance, the first "
        "engine is also stopped once.",
    )
    ci_disable_kl_checker: bool = flag(
        False, "Do not expect a KL divergence of zero if no training step came in between."
    )
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "Largest difference allowed between log-probs of trainer and engine, on average over a step."
    )
    ci_save_grad_norm: str | None = flag(
        None,
        "Write each gradient norm to a file; {role}, {rollout_id} and {step_id} are replaced.",
        metavar="TEMPLATE",
    )
    ci_load_grad_norm: str | None = flag(
        None, "Compare gradient norms with those that an earlier run wrote.", metavar="TEMPLATE"
    )
