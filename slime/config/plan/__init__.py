"""The plan of a train command, computed from its arguments alone: ``slime plan`` and ``train.py --plan``.

Pure arithmetic over the resolved namespace: nothing is started, no torch, no Ray. :func:`build` assembles the sections
that the arguments allow to be worked out, and the problems. ``render`` prints them. ``Plan.as_dict`` is the ``--json``
output, whose keys are stable. All sizes in it are bytes. docs/plan.md has every formula with its source.

Two sections are computed here: the batch identity (prompts x samples = global batch x steps, and the share of one
data-parallel rank), and the files that a run writes (path, time and size).
"""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from slime.config.groups import Notice
from slime.config.plan.devices import HostMemory, host_memory
from slime.config.plan.engine import EngineMemory, WeightSync, engine_memory, weight_sync
from slime.config.plan.memory import (
    Precision,
    StageMemory,
    Tokens,
    num_trainable,
    padded_vocab_size,
    precision_of,
    stage_memory,
    tokens_per_micro_batch,
)
from slime.config.plan.placement import (
    Layout,
    Placement,
    PlanError,
    Turn,
    number,
    plan_placement,
    plan_turns,
    read,
    read_layout,
)
from slime.config.plan.shape import read_shape, shape_section
from slime.config.resolve.paths import PATH_FLAGS
from slime.models.cost import num_parameters
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError
from slime.utils.prompt_sources import has_names, parse_path, parse_sources

# Grows when a key changes its meaning.
SCHEMA = 1
HOST_GIB = 2000
"""Memory of a node, unless it is given. Nodes of eight GPUs of 80 GB usually have 2 TB."""
Section = TypeVar("Section")


@dataclass(frozen=True)
class Plan:
    """The plan of a command. A section that could not be computed is None, with the reason in ``gaps``.

    Attributes:
        device_bytes, host_bytes: memory of one device and of one node, for which the estimates are judged.
        is_cpu: the run is on this machine, without GPUs. ``device_bytes`` is 0.
        ignored: (flag, why) of flags that were given and have no effect.
        problems: why the command would not start anywhere.
        missing: requirements that this machine does not meet.
        num_trainable: parameters in adapters, of the whole model. 0 if all weights are trained.
    """

    title: str
    device_bytes: int
    host_bytes: int
    is_cpu: bool = False
    batch: BatchPlan | None = None
    layout: Layout | None = None
    placement: Placement | None = None
    shape: ModelShape | None = None
    padded_vocab: int = 0
    precision: Precision | None = None
    tokens: Tokens | None = None
    stages: list[StageMemory] = field(default_factory=list)
    host: HostMemory | None = None
    engine: EngineMemory | None = None
    sync: WeightSync | None = None
    turns: list[Turn] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    num_trainable: int = 0

    @property
    def is_startable(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``. See docs/plan.md."""
        result = {"schema": SCHEMA, "is_startable": self.is_startable, **dataclasses.asdict(self)}
        padded_vocab = result.pop("padded_vocab")
        result["shape"] = self.shape and shape_section(self.shape, padded_vocab)
        if self.layout:
            result["layout"] |= {"dp": self.layout.dp, "edp": self.layout.edp}
        for stage, values in zip(self.stages, result["stages"], strict=True):
            values["total"] = stage.total
        if self.host:
            result["host"]["total"] = self.host.total
        return result


def build(
    args: Namespace,
    *,
    title: str,
    device_bytes: int,
    host_bytes: int = HOST_GIB * 2**30,
    is_cpu: bool = False,
    ignored: Sequence[tuple[str, str]] = (),
    problems: Sequence[str] = (),
    missing: Sequence[str] = (),
    unique_in_dump: float | None = None,
) -> Plan:
    """Work out the plan. Never raises for a user's mistake, which becomes a gap in the plan.

    Args:
        device_bytes, host_bytes, is_cpu: as in :class:`Plan`.
        unique_in_dump: see :func:`slime.config.plan.plan_batch`.
    """
    gaps: list[str] = []
    layout = _attempt(gaps, "layout", lambda: read_layout(args))
    shape = _attempt(gaps, "parameters and memory", lambda: read_shape(args))
    batch = _attempt(gaps, "batch", lambda: plan_batch(args, layout, unique_in_dump)) if layout else None
    placement = _attempt(gaps, "placement", lambda: plan_placement(args, layout, is_cpu=is_cpu)) if layout else None
    trains, generates = not read(args, "debug_rollout_only"), bool(placement and placement.engines)
    stages, sync, engine, host = None, None, None, None
    if shape and layout and trains:
        stages = _attempt(gaps, "trainer memory", lambda: stage_memory(args, shape, layout))
    if shape and generates:
        engine = _attempt(gaps, "engine memory", lambda: engine_memory(args, shape, device_bytes, is_cpu=is_cpu))
    if layout and placement:
        found, place, parts = layout, placement, stages or []
        host = _attempt(gaps, "host memory", lambda: host_memory(args, found, parts, place, engine, is_cpu=is_cpu))
    if shape and layout and trains and generates:
        rollouts = batch.num_rollouts if batch else None
        free = _free_at_sync(args, device_bytes, stages or [], engine)
        sync = _attempt(gaps, "weight sync", lambda: weight_sync(args, shape, layout, rollouts, free, is_cpu=is_cpu))
    return Plan(
        title=title,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        is_cpu=is_cpu,
        batch=batch,
        layout=layout,
        placement=placement,
        shape=shape,
        padded_vocab=padded_vocab_size(args, shape) if shape else 0,
        precision=precision_of(args),
        tokens=tokens_per_micro_batch(args),
        stages=stages or [],
        host=host,
        engine=engine,
        sync=sync,
        turns=plan_turns(args),
        outputs=plan_files(args, shape),
        ignored=list(ignored),
        notices=list(read(args, "notices") or []),
        problems=list(problems),
        missing=list(missing),
        gaps=gaps,
        num_trainable=num_trainable(args, shape) if shape and trains else 0,
    )


def _attempt(gaps: list[str], what: str, make: Callable[[], Section]) -> Section | None:
    """The result of ``make``. A mistake of the user that prevents it is added to ``gaps``."""
    try:
        return make()
    except (PlanError, ConfigError, ZeroDivisionError) as error:
        # A size of 0 is a problem that the checks report.
        gaps.append(f"{what}: {error}")
        return None


def _free_at_sync(
    args: Namespace, device_bytes: int, stages: Sequence[StageMemory], engine: EngineMemory | None
) -> int:
    """Memory of the fullest device that neither the trainer nor an engine on it holds during a weight sync."""
    moves = bool(read(args, "offload_train") or read(args, "release_train"))
    held = [stage.weights + (0 if moves else stage.gradients + stage.optimizer) for stage in stages]
    shared = engine.weights if engine and read(args, "colocate") else 0
    return max(0, device_bytes - max(held, default=0) - shared)


# Counting the lines of larger files takes seconds.
_COUNT_LINES_BELOW_BYTES = 64 * 1024**2
_ROWS_TO_MEASURE = 1000
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of one rollout and of the run.

    Attributes:
        micro_batches: per rank and step with a fixed micro-batch size; None with a token budget.
        token_budget: most tokens of a micro-batch over all context-parallel ranks. None without --use-dynamic-...
        num_prompts: rows of the prompt data, if counting them is cheap.
        sources: name, path, rows and share of the draws, if there are several sources.
        unique: share of tokens that pass the trainer with --share-prefixes, and where the lengths come from. None if
            they are unknown.
        num_rollouts: of the whole run, None if unknown.
    """

    prompts: int
    samples_per_prompt: int
    samples: int
    global_batch: int
    steps: int
    is_consistent: bool
    over_sampling: int
    dp: int
    samples_per_rank: float
    micro_batch_size: int | None
    micro_batches: int | None
    token_budget: int | None
    max_response: int | None
    num_prompts: int | None
    num_rollouts: int | None
    run_length: str
    sources: tuple[tuple[str, str, int | None, float], ...] = ()
    unique: tuple[float, str] | None = None


def plan_batch(args: Namespace, layout: Layout, unique_in_dump: float | None = None) -> BatchPlan:
    """The batch of every rollout.

    Args:
        unique_in_dump: share of the tokens of a dump that pass the trainer with --share-prefixes.
    """
    prompts, per_prompt = number(args, "rollout_batch_size", 1), number(args, "n_samples_per_prompt", 1)
    samples = prompts * per_prompt
    steps = number(args, "num_steps_per_rollout", 1)
    global_batch = number(args, "global_batch_size", samples)
    budget = read(args, "max_tokens_per_gpu") if read(args, "use_dynamic_batch_size") else None
    size = None if budget else number(args, "micro_batch_size", 1)
    sources = _sources(read(args, "prompt_data"))
    counts = [count for _, _, count, _ in sources]
    rows = None if None in counts or not counts else sum(count or 0 for count in counts)
    rollouts, why = _num_rollouts(args, rows, prompts)
    return BatchPlan(
        prompts=prompts,
        samples_per_prompt=per_prompt,
        samples=samples,
        global_batch=global_batch,
        steps=steps,
        is_consistent=samples == global_batch * steps,
        over_sampling=number(args, "over_sampling_batch_size", prompts),
        dp=layout.dp,
        samples_per_rank=global_batch / layout.dp,
        micro_batch_size=size,
        micro_batches=None if size is None else global_batch // (size * layout.dp),
        # The flag is per rank, and context-parallel ranks share a sample.
        token_budget=budget * layout.cp if budget else None,
        max_response=read(args, "rollout_max_response_len"),
        num_prompts=rows,
        num_rollouts=rollouts,
        run_length=why,
        sources=sources if has_names(read(args, "prompt_data") or "") else (),
        unique=_unique(args, per_prompt) if unique_in_dump is None else (unique_in_dump, "rollout 0 of the dump"),
    )


def _unique(args: Namespace, per_prompt: int) -> tuple[float, str] | None:
    length, path = read(args, "rollout_max_response_len"), (read(args, "prompt_data") or "").split(",")[0]
    file, _ = parse_path(path)
    if not length or per_prompt < 2 or not file.endswith(".jsonl") or not os.path.isfile(file):
        return None
    with open(file, "rb") as lines:
        sizes = [len(line) for line in islice(lines, _ROWS_TO_MEASURE)]
    prompt = sum(sizes) / max(1, len(sizes)) / _BYTES_PER_TOKEN
    share = (prompt + per_prompt * length) / (per_prompt * (prompt + length))
    return share, f"at most, with responses of {length:,} tokens and {_BYTES_PER_TOKEN} bytes per token of a row"


def _num_rollouts(args: Namespace, rows: int | None, prompts: int) -> tuple[int | None, str]:
    """The number of rollouts, and the flags that decide it."""
    if read(args, "num_rollout") is not None:
        return int(args.num_rollout), "--num-rollout"
    epochs = read(args, "num_epoch")
    if epochs is None:
        return None, "neither --num-rollout nor --num-epoch"
    if rows is None:
        return None, f"--num-epoch {epochs} x (rows of the prompt file // {prompts})"
    return epochs * (rows // prompts), f"--num-epoch {epochs} x ({rows} rows // {prompts} prompts)"


def _sources(prompt_data: str | None) -> tuple[tuple[str, str, int | None, float], ...]:
    found = parse_sources(prompt_data) if prompt_data else []
    total = sum(source.weight for source in found)
    return tuple((source.name, source.path, _num_rows(source.path), source.weight / total) for source in found)


def _num_rows(path: str) -> int | None:
    """Rows of a Parquet file or a small .jsonl file, or of a slice of them. None for a large file and a data set."""
    file, part = parse_path(path)
    if not os.path.isfile(file):
        return None
    if file.endswith(".parquet"):
        try:
            from pyarrow import parquet

            count = parquet.read_metadata(file).num_rows
        except (ImportError, OSError, ValueError):  # the checks report it
            return None
    elif file.endswith(".jsonl") and os.path.getsize(file) <= _COUNT_LINES_BELOW_BYTES:
        with open(file, "rb") as lines:
            count = sum(1 for line in lines if line.strip())
    else:
        return None
    return len(range(count)[part]) if part else count


_ADAM_IN_CHECKPOINT = 12  # fp32 main weight and two fp32 moments


@dataclass(frozen=True)
class Output:
    """One output. ``bytes`` of one writing, None if it depends on the data."""

    what: str
    where: str
    when: str
    bytes: int | None = None


def plan_files(args: Namespace, shape: ModelShape | None) -> list[Output]:
    """Everything that ends on disk."""
    return [*_metrics(args), *_written(args, shape), *_snapshots(args)]


def _metrics(args: Namespace) -> Iterator[Output]:
    run = Path(str(read(args, "output_dir"))) / str(read(args, "experiment_name"))
    yield Output("metrics", str(run / "metrics.jsonl"), "during the run")
    if read(args, "use_tensorboard") or not read(args, "use_wandb"):
        yield Output("TensorBoard events", os.environ.get("TENSORBOARD_DIR") or _events(args, run), "during the run")
    if read(args, "use_wandb"):
        yield Output("W&B run", str(read(args, "wandb_dir") or "wandb/"), "during the run")
    for name in read(args, "trackers") or ():
        yield Output(f"{name} run", "its own folder or server", "during the run")
    if read(args, "record_samples"):
        yield Output("samples for the board", str(run / "samples"), "every rollout")
    if read(args, "use_pytorch_profiler"):
        yield Output("profiles", str(read(args, "tensorboard_dir") or run / "profile"), "from --profile-step-start")


def _events(args: Namespace, run: Path) -> str:
    if not read(args, "use_tensorboard"):
        return str(run)
    experiment = str(read(args, "tb_experiment_name") or read(args, "experiment_name"))
    return str(Path("tensorboard_log") / (read(args, "tb_project_name") or "slime") / experiment)


def _written(args: Namespace, shape: ModelShape | None) -> Iterator[Output]:
    interval = read(args, "save_interval")
    when = "at the end" if interval is None else f"every {interval} rollouts, and last"
    is_disk = read(args, "update_weight_transport") == "disk"
    size, sent = _exported_bytes(args, shape)
    sizes = {"save": (_checkpoint_bytes(args, shape), when), "save_hf": (size, when)}
    if is_disk:
        sizes |= dict.fromkeys(
            ("update_weight_disk_dir", "update_weight_local_checkpoint_dir"), (sent, "every weight sync")
        )
    sizes |= dict.fromkeys(("save_debug_rollout_data", "save_debug_train_data"), (None, "every rollout"))
    for flag in PATH_FLAGS:
        if flag.name in sizes and read(args, flag.name):
            num_bytes, when = sizes[flag.name]
            yield Output(flag.what, str(read(args, flag.name)), when, num_bytes)


def _exported_bytes(args: Namespace, shape: ModelShape | None) -> tuple[int, int] | tuple[None, None]:
    """Bytes of ``--save-hf``, and of a weight sync by files."""
    if shape is None:
        return None, None
    width = precision_of(args).weights
    numbers = 0 if read(args, "lora_merge") else num_trainable(args, shape)
    if not numbers:
        return (num_parameters(shape) * width,) * 2
    # FSDP trains adapters in fp32.
    return numbers * (4 if read(args, "train_backend") == "fsdp" else width), numbers * width


def _checkpoint_bytes(args: Namespace, shape: ModelShape | None) -> int | None:
    if shape is None:
        return None
    precision = precision_of(args)
    states = 0 if read(args, "no_save_optim") else min(precision.states, _ADAM_IN_CHECKPOINT)
    return (num_trainable(args, shape) or num_parameters(shape)) * (precision.weights + states)


def _snapshots(args: Namespace) -> Iterator[Output]:
    if read(args, "memory_snapshot_num_steps"):
        yield Output("memory snapshots", str(read(args, "memory_snapshot_dir")), "first steps")
