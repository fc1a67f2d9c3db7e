"""Assigns samples to micro-batches, ranks and optimizer steps. No tensors.

    rollouts in order ──▶ steps of global_batch_size rollouts ──▶ micro-batches ──▶ ranks
                          (the rest is dropped, and counted)      (packed first,    (strided, or balanced)
                                                                   counts aligned)

All samples of a rollout stay in one step. Every rank runs the same number of micro-batches in every step, because each
of them ends in collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime.batch.balance import (
    Bins,
    expand_bins_by_splitting,
    first_fit_pack,
    get_seqlen_balanced_partitions,
    split_bin,
)
from slime.batch.prefixes import PrefixTree
from slime.config.groups import from_args
from slime.models.cost import ModelDims, flops_of_length
from slime.utils.errors import ConfigError, DataError


class ScheduleError(DataError, AssertionError):
    """These samples cannot be scheduled. Also an AssertionError: callers of older versions catch that."""


@dataclass(frozen=True)
class MicroBatchArgs:
    """How micro-batches are formed; the names are those of the flags, so ``from_args(MicroBatchArgs, args)`` works."""

    micro_batch_size: int = 1
    use_dynamic_batch_size: bool = False
    max_tokens_per_gpu: int | None = None
    balance_data: bool = False
    balance_by_flops: bool = False
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        if self.use_dynamic_batch_size and not (self.max_tokens_per_gpu and self.max_tokens_per_gpu > 0):
            raise ConfigError(
                f"--use-dynamic-batch-size needs --max-tokens-per-gpu N with N > 0, got {self.max_tokens_per_gpu}."
            )
        if self.balance_by_flops and not self.use_dynamic_batch_size:
            raise ConfigError("--balance-by-flops forms dynamic micro-batches: it needs --use-dynamic-batch-size.")
        if self.micro_batch_size < 1:
            raise ConfigError(f"--micro-batch-size {self.micro_batch_size} must be at least 1.")

    @property
    def is_balanced(self) -> bool:
        return self.balance_data or self.balance_by_flops


@dataclass(frozen=True)
class StepPlan:
    """The schedule of one rollout.

    Attributes:
        partitions: ``[dp][n_r]`` global sample positions of rank r, in the order in which it trains them.
        micro_batch_indices: ``[dp][num micro-batches of all steps][samples]`` positions in the rank's partition.
        num_microbatches: micro-batches per rank, per step.
        global_batch_sizes: rollouts per step, all ranks together.
        num_dropped_rollouts, num_dropped_samples: trailing ones that do not fill a step.
    """

    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]
    num_dropped_rollouts: int = 0
    num_dropped_samples: int = 0

    def __post_init__(self) -> None:
        # a schedule that breaks one of these rules makes ranks wait for each other without an error
        positions = [p for partition in self.partitions for p in partition]
        assert len(set(positions)) == len(positions), "a sample is scheduled twice"
        assert len(self.num_microbatches) == len(self.global_batch_sizes), "steps disagree"
        for partition, micro_batches in zip(self.partitions, self.micro_batch_indices, strict=True):
            local = [i for items in micro_batches for i in items]
            assert local == list(range(len(partition))), "local indices are not consecutive"
            assert len(micro_batches) == sum(self.num_microbatches), "ranks run different numbers of micro-batches"
            assert all(micro_batches), "a micro-batch is empty"

    @property
    def num_steps(self) -> int:
        return len(self.num_microbatches)


def plan_steps(
    total_lengths: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    global_batch_size: int,
    layout: ParallelLayout,
    settings: MicroBatchArgs,
    dims: ModelDims | None = None,
    prefixes: PrefixTree | None = None,
) -> StepPlan:
    """Schedule the samples of one rollout.

    Args:
        total_lengths: tokens per sample.
        rollout_ids: one per sample. Samples with the same id are one rollout.
        global_batch_size: rollouts per optimizer step.
        layout: parallel sizes of the trainer.
        settings: how micro-batches are formed.
        dims: sizes of the model, needed to balance compute.
        prefixes: of the samples, if a prefix that samples of a micro-batch share is computed once.

    Raises:
        ScheduleError: fewer rollouts than one step, fewer samples than ranks, or counts that do not divide.
        ConfigError: balancing without ``dims``.
    """
    of_length = None
    if settings.is_balanced:
        if dims is None:
            raise ConfigError("--balance-data and --balance-by-flops need the sizes of the model.")
        of_length = flops_of_length(dims)
    costs = _Costs(total_lengths, of_length, prefixes)
    # dicts keep the order of insertion: steps take the rollouts in the order of their first samples
    rollouts: dict[int, list[int]] = {}
    for position, rollout_id in zip(range(len(total_lengths)), rollout_ids, strict=True):
        rollouts.setdefault(rollout_id, []).append(position)
    groups = list(rollouts.values())
    num_steps = len(groups) // global_batch_size
    if num_steps == 0:
        raise ScheduleError(
            f"num_rollouts {len(groups)} do not fill one step of --global-batch-size {global_batch_size}: collect more "
            "rollouts or lower it"
        )
    partitions: Bins = [[] for _ in range(layout.dp_size)]
    micro_batch_indices: list[Bins] = [[] for _ in range(layout.dp_size)]
    num_microbatches = []
    for step in range(num_steps):
        members = groups[step * global_batch_size : (step + 1) * global_batch_size]
        positions = [p for group in members for p in group]
        micro_batches = _form_micro_batches(positions, costs, layout, settings)
        for rank, mine in enumerate(_assign(micro_batches, costs, layout, settings)):
            for items in mine:
                # micro-batches index the rank's partition, not the batch
                start = len(partitions[rank])
                partitions[rank].extend(items)
                micro_batch_indices[rank].append(list(range(start, start + len(items))))
        # without remainder: _form_micro_batches returns a multiple of the ranks
        num_microbatches.append(len(micro_batches) // layout.dp_size)
    dropped = groups[num_steps * global_batch_size :]
    return StepPlan(
        partitions,
        micro_batch_indices,
        num_microbatches,
        [global_batch_size] * num_steps,
        num_dropped_rollouts=len(dropped),
        num_dropped_samples=sum(map(len, dropped)),
    )


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Public form of :func:`plan_steps` with flat arguments.

    Returns:
        (partitions, micro_batch_indices, num_microbatches, global_batch_sizes), see :class:`StepPlan`.
    """
    plan = plan_steps(
        total_lengths,
        rollout_indices,
        global_batch_size=global_batch_size,
        layout=ParallelLayout(**train_parallel_config),
        settings=from_args(MicroBatchArgs, args),
        dims=args,
    )
    return plan.partitions, plan.micro_batch_indices, plan.num_microbatches, plan.global_batch_sizes


class _Costs:
    """Tokens and FLOPs of micro-batches, and the samples that one of them should keep together."""

    def __init__(
        self, lengths: Sequence[int], of_length: Callable[[int], int] | None, prefixes: PrefixTree | None
    ) -> None:
        self._lengths = lengths
        self._of_length = of_length
        # known for every sample, because a step weighs it several times
        self._flops = None if of_length is None else list(map(of_length, lengths))
        self._prefixes = prefixes

    def units(self, positions: list[int], cap: int) -> Bins:
        return [[p] for p in positions] if self._prefixes is None else self._prefixes.units(positions, cap)

    def tokens(self, items: list[int]) -> int:
        return sum(self._lengths[p] for p in items) if self._prefixes is None else self._prefixes.cost(items)

    def flops(self, items: list[int]) -> int:
        """0 if nothing balances compute."""
        if self._flops is None or self._of_length is None:
            return 0
        if self._prefixes is None:
            return sum(self._flops[p] for p in items)
        return self._prefixes.cost(items, self._of_length)

    def expand(self, bins: Bins, target: int) -> None:
        """Split micro-batches in place until there are ``target`` of them, or each has one sample."""
        if self._prefixes is not None:
            self._prefixes.expand(bins, target)


def _form_micro_batches(positions: list[int], costs: _Costs, layout: ParallelLayout, settings: MicroBatchArgs) -> Bins:
    """The micro-batches of one step, all ranks together, as global positions. Their count fits the layout."""
    # a rank without samples would not join the collectives of the step
    if len(positions) < layout.dp_size:
        raise ScheduleError(
            f"a step of {len(positions)} samples cannot feed {layout.dp_size} data-parallel ranks: "
            "raise --global-batch-size"
        )
    multiple = layout.microbatch_multiple
    if settings.use_dynamic_batch_size:
        assert settings.max_tokens_per_gpu is not None
        # the flag counts tokens per rank, and context-parallel ranks share every sequence
        cap = settings.max_tokens_per_gpu * layout.cp_size
        units = costs.units(positions, cap)
        lengths = [costs.tokens(unit) for unit in units]
        if settings.balance_by_flops:
            bins = _pack_by_flops(lengths, [costs.flops(unit) for unit in units], cap)
        else:
            bins = first_fit_pack(lengths, cap)
        # every rank runs equally many micro-batches, and an interleaved pipeline takes them in groups
        target = max(1, math.ceil(len(bins) / multiple)) * multiple
        expand_bins_by_splitting(bins, target, lengths)
        micro_batches = [[p for i in items for p in units[i]] for items in bins]
        costs.expand(micro_batches, target)
        fix = (
            f"raise --max-tokens-per-gpu {settings.max_tokens_per_gpu} so that samples share micro-batches, or let "
            f"--global-batch-size give a multiple of {multiple} samples per step"
        )
    else:
        size = settings.micro_batch_size
        # a fixed size is never changed to fit: a wrong number of micro-batches raises below
        micro_batches = [positions[i : i + size] for i in range(0, len(positions), size)]
        target = max(1, math.ceil(len(micro_batches) / multiple)) * multiple
        fix = (
            f"let --global-batch-size be a multiple of --micro-batch-size {size} x {multiple}, "
            "or use --use-dynamic-batch-size"
        )
    if len(micro_batches) != target:
        raise ScheduleError(
            f"a step of {len(positions)} samples gives {len(micro_batches)} micro-batches, but their number must be a "
            f"multiple of {multiple} (data-parallel ranks x pipeline group): {fix}"
        )
    return micro_batches


def _pack_by_flops(lengths: Sequence[int], flops: Sequence[int], cap: int) -> Bins:
    """As few bins as tokens allow, with equal compute. A bin above the token cap is split until it fits."""
    k = max(1, math.ceil(sum(lengths) / cap))
    if k >= len(lengths):
        return [[i] for i in range(len(lengths))]
    bins = get_seqlen_balanced_partitions(flops, k, equal_size=False)
    position = 0
    while position < len(bins):
        items = bins[position]
        # the partition balances compute and does not know the cap on tokens
        if len(items) > 1 and sum(lengths[i] for i in items) > cap:
            bins[position], right = split_bin(items, lengths)
            bins.append(right)  # the position stays: the left half may still be above the cap
        else:
            position += 1
    return bins


def _assign(micro_batches: Bins, costs: _Costs, layout: ParallelLayout, settings: MicroBatchArgs) -> list[Bins]:
    """The micro-batches of each rank, ``[dp][micro-batches]``: strided, or balanced by compute."""
    if settings.is_balanced:
        weights = [costs.flops(items) for items in micro_batches]
        # equal_size: ranks must run equally many micro-batches
        chosen = get_seqlen_balanced_partitions(weights, layout.dp_size, equal_size=True)
    else:
        chosen = [list(range(rank, len(micro_batches), layout.dp_size)) for rank in range(layout.dp_size)]
    return [[micro_batches[m] for m in mine] for mine in chosen]


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes that decide which rank gets which samples.

    Attributes:
        dp_size: data-parallel ranks, context parallelism not counted. Each gets its own samples.
        cp_size: context-parallel ranks, which share the tokens of every sample.
        vpp_size: virtual pipeline stages per rank; 1 means no interleaving.
        microbatch_group_size_per_vp_stage: with interleaving, the micro-batches of a rank come in multiples of this.
    """

    dp_size: int
    cp_size: int = 1
    vpp_size: int = 1
    microbatch_group_size_per_vp_stage: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ConfigError(f"parallel layout: {name} is {size}, it must be at least 1.")

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        tensor: int,
        pipeline: int,
        context: int,
        virtual_stages: int | None = None,
        group_size: int | None = None,
    ) -> ParallelLayout:
        """The layout of ``world_size`` ranks, of which ``tensor * pipeline * context`` share the same samples.

        Args:
            virtual_stages: per pipeline rank; None without interleaving.
            group_size: ``--microbatch-group-size-per-virtual-pipeline-stage``; None means ``pipeline``.

        Raises:
            ConfigError: the sizes do not divide ``world_size``.
        """
        shared = tensor * pipeline * context
        if world_size % shared:
            raise ConfigError(
                f"{world_size} trainer ranks cannot be divided into groups of {shared}, the product of "
                f"--tensor-model-parallel-size {tensor}, --pipeline-model-parallel-size {pipeline} and "
                f"--context-parallel-size {context}."
            )
        return cls(
            dp_size=world_size // shared,
            cp_size=context,
            vpp_size=virtual_stages or 1,
            microbatch_group_size_per_vp_stage=(group_size or pipeline) if virtual_stages else 1,
        )

    @property
    def microbatch_multiple(self) -> int:
        """The micro-batches of a step, all ranks together, must be a multiple of this."""
        return self.dp_size * (self.microbatch_group_size_per_vp_stage if self.vpp_size > 1 else 1)
