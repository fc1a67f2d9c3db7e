"""The plan of a command: every section that the arguments allow to be worked out, and the problems.

Called by ``slime.cli`` with the resolved namespace. ``Plan.as_dict`` is the ``--json`` output, whose keys are stable.
All sizes in it are bytes.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slime.config.notices import Notice
from slime.config.plan.batch import BatchPlan, plan_batch
from slime.config.plan.engine import EngineMemory, WeightSync, engine_memory, weight_sync
from slime.config.plan.files import Output, plan_files
from slime.config.plan.host import HostMemory, host_memory
from slime.config.plan.layout import Layout, PlanError, read, read_layout
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
from slime.config.plan.placement import Placement, Turn, plan_placement, plan_turns
from slime.config.plan.shape import read_shape, shape_section
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError

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
        unique_in_dump: see :func:`slime.config.plan.batch.plan_batch`.
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
