"""Parallel layout of the trainer: sizes of the dimensions, coordinates of every rank, layers of every stage."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rank:
    """Coordinates of one trainer rank."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class Layout:
    """World = TP x CP x DP x PP. For experts the same ranks are world = ETP x EP x EDP x PP (ranks: TP fastest)."""

    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    vpp: int
    has_sequence_parallel: bool

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Copies of an expert: the ranks among which its optimizer states are sharded."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def ranks(self) -> list[Rank]:
        """Order "tp-cp-ep-dp-pp": tensor-parallel ranks are neighbors, pipeline stages are farthest apart."""
        return [self._rank(index) for index in range(self.world)]

    def _rank(self, index: int) -> Rank:
        rest, tp = divmod(index, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        # Experts divide the same ranks in another order: ETP fastest, then EP.
        return Rank(index, tp, cp, dp, pp, index // self.etp % self.ep)


def read_layout(args: Namespace) -> Layout:
    """The layout that the flags ask for.

    Raises:
        PlanError: the world does not divide.
    """
    tp = number(args, "tensor_model_parallel_size", 1)
    pp = number(args, "pipeline_model_parallel_size", 1)
    cp = number(args, "context_parallel_size", 1)
    ep = number(args, "expert_model_parallel_size", 1)
    etp = number(args, "expert_tensor_parallel_size", tp)
    world = number(args, "world_size", 1)
    if min(tp, pp, cp, ep, etp, world) < 1:
        raise PlanError("a parallel size is below 1.")
    if world % (tp * pp * cp):
        raise PlanError(f"{world} trainer ranks do not divide by TP {tp} x PP {pp} x CP {cp}.")
    if ep > 1 and world % (etp * ep * pp):
        raise PlanError(f"{world} trainer ranks do not divide by ETP {etp} x EP {ep} x PP {pp}.")
    return Layout(
        world=world,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp if ep > 1 or read(args, "expert_tensor_parallel_size") is not None else tp,
        vpp=number(args, "virtual_pipeline_model_parallel_size", 1),
        has_sequence_parallel=bool(read(args, "sequence_parallel")) and tp > 1,
    )


def _extra_layers(args: Namespace) -> tuple[int, int]:
    """Layers that the split counts on the first and on the last stage for embedding and loss: 0 or 1."""
    first, last = (
        read(args, "account_for_embedding_in_pipeline_split"),
        read(args, "account_for_loss_in_pipeline_split"),
    )
    return int(bool(first)), int(bool(last))


def stage_layers(args: Namespace, num_layers: int, pp: int) -> Sequence[range]:
    """Layers of each pipeline stage. The first and last may be given, the others share the rest evenly.

    Raises:
        PlanError: they cannot.
    """
    if read(args, "pipeline_model_parallel_layout") is not None:
        raise PlanError("--pipeline-model-parallel-layout: free layouts are not covered by the formulas.")
    first, last = read(args, "decoder_first_pipeline_num_layers"), read(args, "decoder_last_pipeline_num_layers")
    if pp == 1:
        return [range(num_layers)]
    ends = [item for item in (first, last) if item is not None]
    extra = _extra_layers(args)
    middle, rest = pp - len(ends), num_layers + sum(extra) - sum(ends)
    if rest < 0 or (middle and rest % middle) or (not middle and rest):
        raise PlanError(f"{num_layers} layers do not divide over {pp} pipeline stages.")
    sizes = [rest // middle if middle else 0] * pp
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    # Embedding and loss took the place of these layers.
    sizes[0], sizes[-1] = sizes[0] - extra[0], sizes[-1] - extra[1]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


# ---- reading the namespace: a flag that no room declares reads as "not given"


class PlanError(ValueError):
    """A section cannot be computed. The text is the reason. The rest of the plan is still printed."""


def read(args: Namespace, name: str) -> Any:
    """The value of ``name``, or None if the namespace lacks it."""
    return vars(args).get(name)


def number(args: Namespace, name: str, default: int) -> int:
    """An integer flag, or ``default`` if it is unset."""
    value = read(args, name)
    return default if value is None else int(value)
