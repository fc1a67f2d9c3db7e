"""Memory of a node: the host's, and the least that a colocated run with adapters (LoRA) holds on its devices.

Host memory: pinned copies of weights, optimizer states, and the buffers of a save. Without GPUs also the model itself,
in trainer and engines, and the processes.

``slime plan`` estimates everything. The rule about devices refuses a run, so it counts only bytes that are on a device
at one moment in any case: no activations, no logits, no workspace.
"""

from __future__ import annotations

import subprocess
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime.config.plan.engine import EngineMemory, engine_memory, serves_adapter
from slime.config.plan.memory import StageMemory, stage_memory
from slime.config.plan.placement import Layout, Placement, PlanError, number, read, read_layout
from slime.config.plan.shape import read_shape
from slime.models.config_json import read_model_config
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError

_MARGIN = 1.05
"""The run is refused above this multiple of the device: drivers hold a few percent before an engine measures."""

# With one of these the sizes of the formulas may be too large.
_UNKNOWN_SIZE = (
    *("fp32", "fp8_param_gather", "use_megatron_fsdp", "use_torch_fsdp2", "cpu_offloading_weights"),
    *("custom_model_provider_path", "spec", "sglang_config", "sglang_quantization", "sglang_torchao_config"),
    *("sglang_cpu_offload_gb", "rollout_external_engine_addrs", "prefill_num_servers", "debug_train_only"),
)


def gpu_bytes(device: int | None = None) -> int:
    """Memory of this machine's NVIDIA GPU number ``device``, or of the largest one. 0 if no driver answers."""
    chosen = [] if device is None else [f"--id={device}"]
    command = ["nvidia-smi", *chosen, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    # One line per GPU. GPUs that share the memory of the host answer [N/A].
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return max((round(float(line) * 2**20) for line in done.stdout.split()), default=0)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def is_judged(args: Namespace) -> bool:
    """Whether :func:`colocation_problems` has a rule for this run."""
    shares = bool(read(args, "colocate")) and not read(args, "debug_rollout_only")
    if not (shares and read(args, "lora_rank") and number(args, "rollout_num_gpus", 0)):
        return False
    quantized = read_model_config(read(args, "hf_checkpoint")).get("quantization_config")
    return not quantized and not any(read(args, name) for name in _UNKNOWN_SIZE)


def colocation_problems(args: Namespace, device_bytes: int) -> Iterator[str]:
    """Why trainer and engines of a run with adapters cannot share devices of this size.

    Nothing if the size is unknown (0), if the run fits or may fit, or if its sizes are not known.
    """
    if not device_bytes or not is_judged(args):
        return
    try:
        # Prediction layers are in an engine only with speculative decoding.
        shape = replace(read_shape(args), num_mtp_layers=0)
        layout = read_layout(args)
        stages = _shared_stages(args, shape, layout)
        engine = engine_memory(args, shape, device_bytes)
    except (PlanError, ConfigError, ZeroDivisionError):  # another rule reports it
        return
    fullest = max(_moments(args, stages, engine), key=lambda moment: moment.total)
    if fullest.total > _MARGIN * device_bytes:
        yield _problem(args, fullest, device_bytes)


@dataclass(frozen=True)
class _Moment:
    """Bytes on one device at one time.

    Attributes:
        parts: of the trainer.
        engine: weights and memory for adapters, and ``pool`` for keys and values.
        fix: flags that change this moment. The layout changes all.
    """

    when: str
    parts: str
    trainer: int
    engine: int
    pool: int
    fix: str

    @property
    def total(self) -> int:
        return self.trainer + self.engine + self.pool


def _shared_stages(args: Namespace, shape: ModelShape, layout: Layout) -> Sequence[StageMemory]:
    """The stages with a rank on a device of an engine. Stages follow each other in the order of ranks."""
    stages = stage_memory(args, shape, layout)
    shared = min(layout.world, number(args, "rollout_num_gpus", 0))
    per_stage = max(1, layout.world // len(stages))
    return stages[: max(1, -(-shared // per_stage))]


def _moments(args: Namespace, stages: Sequence[StageMemory], engine: EngineMemory) -> Iterator[_Moment]:
    weights = max(stage.weights - stage.gathered_weights for stage in stages)
    # Moments of Adam exist from the first step on, so a rollout after it needs their memory.
    states = max(stage.resident for stage in stages)
    leaves = bool(read(args, "offload_train") or read(args, "release_train"))
    releases = bool(read(args, "offload_rollout"))
    yield _Moment("during a weight sync", "weights", weights, engine.weights, 0, "")
    all_parts = "weights, gradients and optimizer states"
    stays = "drop --no-offload-rollout"
    yield _Moment(
        "in a training step", all_parts, states, 0 if releases else engine.weights, 0, "" if releases else stays
    )
    # Only an engine that starts alone gets its share of the whole device.
    is_known = releases and read(args, "sglang_mem_fraction_static") is not None
    pool = engine.pool if is_known else 0
    fixes = [] if leaves else ["drop --no-offload-train"]
    fixes += [f"lower --sglang-mem-fraction-static {engine.fraction:g}"] if pool else []
    yield _Moment(
        "while engines generate", all_parts, 0 if leaves else states, engine.weights, pool, " or ".join(fixes)
    )


def _problem(args: Namespace, moment: _Moment, device_bytes: int) -> str:
    pool = f" and {_gib(moment.pool)} of its cache" if moment.pool else ""
    parts = [f"{_gib(moment.trainer)} of the trainer ({moment.parts} of a rank)"] if moment.trainer else []
    parts += [f"{_gib(moment.engine)} of an engine (weights{' and adapters' if not args.lora_merge else ''}){pool}"]
    flags = (
        f"--tensor-model-parallel-size {number(args, 'tensor_model_parallel_size', 1)}, "
        f"--pipeline-model-parallel-size {number(args, 'pipeline_model_parallel_size', 1)}"
    )
    if read(args, "train_backend") == "fsdp":
        flags = f"the {number(args, 'world_size', 1)} trainer ranks (--actor-num-gpus-per-node, --actor-num-nodes)"
    fix = f"{moment.fix}, or " if moment.fix else ""
    return (
        f"--colocate with --lora-rank {args.lora_rank}: a device has {_gib(device_bytes)}, and {moment.when} it would "
        f"hold {_gib(moment.total)}: {', '.join(parts)}. Activations come on top. To fit, {fix}raise {flags} or "
        f"--rollout-num-gpus-per-engine {number(args, 'rollout_num_gpus_per_engine', 1)}, which divide the weights, or "
        "drop --colocate."
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


_MIB = 1024**2
# Proportional set sizes of a run of a tiny model on a CPU at their peak, summed: 2487 MiB with one rank and one engine,
# 3583 MiB with two of each. Interpreters and libraries, without weights.
# Driver, Data Buffer, rollout manager, router, Ray, and the process that engines are forked from.
_RUN_BYTES = 1400 * _MIB
_RANK_BYTES = 400 * _MIB
# Per device of an engine: scheduler, HTTP process, detokenizer, Ray actor.
_ENGINE_BYTES = 690 * _MIB


@dataclass(frozen=True)
class HostMemory:
    """The node that needs the most, in bytes. Ray's object store and the page cache are not counted.

    Attributes:
        ranks: of the trainer on this node. With a critic, those of the actor.
        copies: pinned copies of weights, of the trainer and of engines that keep one.
        states: optimizer states that are on the host always, or while engines generate.
        save: buffers while a checkpoint is written.
        trainer: without GPUs: weights, gradients, optimizer states and logits of all ranks. Else 0, as the next two.
        engines: their weights.
        processes: interpreters and libraries.
    """

    node: int
    ranks: int
    copies: int
    states: int
    save: int
    trainer: int = 0
    engines: int = 0
    processes: int = 0

    @property
    def total(self) -> int:
        return self.copies + self.states + self.save + self.trainer + self.engines + self.processes


def host_memory(
    args: Namespace,
    layout: Layout,
    stages: Sequence[StageMemory],
    placement: Placement,
    engine: EngineMemory | None,
    *,
    is_cpu: bool = False,
) -> HostMemory | None:
    """The fullest node of the run. ``is_cpu``: this machine. None if there is nothing to count."""
    if is_cpu:
        return _cpu_memory(layout, stages, placement, engine)
    if not stages:
        return None
    kept = engine.weights if engine and _keeps_weights(args) else 0
    coordinates = layout.ranks
    found = []
    for node in placement.nodes:
        ranks = coordinates[node.ranks[0] : node.ranks[1] + 1] if node.ranks else []
        here = [stages[rank.pp if len(stages) > 1 else 0] for rank in ranks]
        num_devices = node.slots[1] - node.slots[0] + 1 if node.engines else 0
        found.append(
            HostMemory(
                node=node.node,
                ranks=len(ranks),
                copies=sum(stage.host_copies for stage in here) + kept * num_devices,
                states=sum(stage.host_states + stage.host_offloaded for stage in here),
                save=sum(stage.host_save for stage in here),
            )
        )
    return max(found, key=lambda one: one.total)


def _cpu_memory(
    layout: Layout, stages: Sequence[StageMemory], placement: Placement, engine: EngineMemory | None
) -> HostMemory:
    """The whole run on this machine without GPUs, where activations and the cache of engines reuse free pages."""
    ranks = layout.world if stages else 0
    engines = sum(group.num_devices for group in placement.engines)
    of_rank = max((stage.total - stage.activations for stage in stages), default=0)
    return HostMemory(
        node=0,
        ranks=ranks,
        copies=0,
        states=0,
        save=0,
        trainer=ranks * of_rank,
        engines=engines * engine.weights if engine else 0,
        processes=_RUN_BYTES + _RANK_BYTES * ranks + _ENGINE_BYTES * engines,
    )


def _keeps_weights(args: Namespace) -> bool:
    """Whether engines that release their memory keep a copy: not all weights are sent again before each rollout."""
    changed_only = bool(read(args, "update_weight_changed_only"))
    is_part_sent = changed_only or read(args, "update_weights_interval") not in (None, 1) or serves_adapter(args)
    return bool(read(args, "offload_rollout")) and is_part_sent
