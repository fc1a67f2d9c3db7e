"""Memory of the devices that a colocated run with adapters (LoRA) certainly holds, against the memory that they have.

``slime plan`` estimates everything. The rule below refuses a run, so it counts only bytes that are on a device at one
moment in any case: no activations, no logits, no workspace.
"""

from __future__ import annotations

import subprocess
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime.config.plan.engine import EngineMemory, engine_memory
from slime.config.plan.layout import Layout, PlanError, number, read, read_layout
from slime.config.plan.memory import StageMemory, stage_memory
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
