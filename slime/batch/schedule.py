"""Which sample is trained in which micro-batch, on which rank, in which step. Pure; the same answer everywhere.

Pack first, then distribute: the samples of a step are packed into micro-batches, their number is raised to a multiple of
the ranks, and every rank gets equally many, because all ranks run their collectives in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.batch.arguments import BatchArgs
from slime.batch.balance import balanced_partitions, expand_bins_by_splitting, first_fit
from slime.data.layout import ParallelLayout
from slime.utils.errors import ConfigError

__all__ = ["StepPlan", "plan_steps"]


class ScheduleError(ConfigError, AssertionError):
    """The samples of a rollout cannot be divided as the flags ask. An AssertionError too, as older callers expect."""


@dataclass(frozen=True)
class StepPlan:
    """The work of one rollout.

    Attributes:
        partitions: per rank, positions of its samples in the rollout.
        micro_batch_indices: per rank, per micro-batch of all steps in order, positions in the rank's partition.
        num_microbatches: per step, micro-batches of every rank.
        global_batch_sizes: per step, number of rollouts (executions) in it.
        dropped: positions that fill no step.
    """

    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]
    dropped: list[int]

    def __post_init__(self) -> None:
        for partition, batches in zip(self.partitions, self.micro_batch_indices, strict=True):
            assert [i for batch in batches for i in batch] == list(range(len(partition))), "a sample is lost or doubled"
            assert len(batches) == sum(self.num_microbatches), "ranks have different numbers of micro-batches"


def plan_steps(
    total_lengths: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    global_batch_size: int,
    micro_batch_size: int,
    settings: BatchArgs,
    layout: ParallelLayout,
) -> StepPlan:
    """Divide samples of the given token lengths into steps of ``global_batch_size`` rollouts each."""
    by_rollout: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_ids):
        by_rollout.setdefault(rollout_id, []).append(position)
    rollouts = list(by_rollout.values())
    num_steps = len(rollouts) // global_batch_size
    if num_steps == 0:
        raise ScheduleError(
            f"num_rollouts {len(rollouts)} is below --global-batch-size {global_batch_size}: not even one step is full."
        )
    partitions: list[list[int]] = [[] for _ in range(layout.dp_size)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(layout.dp_size)]
    counts = []
    for step in range(num_steps):
        chosen = rollouts[step * global_batch_size : (step + 1) * global_batch_size]
        positions = [position for rollout in chosen for position in rollout]
        bins = _micro_batches(positions, total_lengths, micro_batch_size, settings, layout)
        counts.append(len(bins) // layout.dp_size)
        sums = [sum(total_lengths[position] for position in batch) for batch in bins]
        for rank, mine in enumerate(_assign(sums, settings, layout)):
            for index in mine:
                start = len(partitions[rank])
                partitions[rank].extend(bins[index])
                micro_batches[rank].append(list(range(start, len(partitions[rank]))))
    dropped = [position for rollout in rollouts[num_steps * global_batch_size :] for position in rollout]
    return StepPlan(partitions, micro_batches, counts, [global_batch_size] * num_steps, dropped)


def _micro_batches(
    positions: list[int], lengths: Sequence[int], micro_batch_size: int, settings: BatchArgs, layout: ParallelLayout
) -> list[list[int]]:
    if len(positions) < layout.dp_size:
        raise ScheduleError(
            f"a step has {len(positions)} samples for {layout.dp_size} data-parallel ranks: raise --global-batch-size."
        )
    multiple = layout.dp_size * (layout.microbatch_group_size_per_vp_stage if layout.vpp_size > 1 else 1)
    if not settings.use_dynamic_batch_size:
        bins = [positions[i : i + micro_batch_size] for i in range(0, len(positions), micro_batch_size)]
        if len(bins) % multiple:
            raise ScheduleError(
                f"{len(positions)} samples make {len(bins)} micro-batches of --micro-batch-size {micro_batch_size}, "
                f"which is not a multiple of {multiple}: change one of them, or use --use-dynamic-batch-size."
            )
        return bins
    assert settings.max_tokens_per_gpu is not None, "checked with the command line"
    local = [lengths[position] for position in positions]
    bins = first_fit(local, settings.max_tokens_per_gpu * layout.cp_size)
    target = max(1, -(-len(bins) // multiple)) * multiple
    expand_bins_by_splitting(bins, target, local)
    if len(bins) < target:
        raise ScheduleError(f"{len(positions)} samples cannot fill {target} micro-batches: raise --global-batch-size.")
    return [[positions[i] for i in batch] for batch in bins]


def _assign(sums: Sequence[int], settings: BatchArgs, layout: ParallelLayout) -> list[list[int]]:
    if settings.balance_data:
        return balanced_partitions(sums, layout.dp_size, equal_size=True)
    return [list(range(rank, len(sums), layout.dp_size)) for rank in range(layout.dp_size)]
