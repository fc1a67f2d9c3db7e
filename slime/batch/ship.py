"""Groups of samples become one dict per data-parallel rank, with columns of CPU tensors for the object store.

Used in the rollout process. The trainer receives the dicts. ``slime.data.columns`` decides the form of each column.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from slime.batch.compile import ConvertHook, PostProcessHook, compile_train_data
from slime.batch.prefixes import PrefixTree, prefix_tree
from slime.batch.rewards import RewardArgs, SignalWatch
from slime.batch.schedule import MicroBatchArgs, ParallelLayout, StepPlan, plan_steps
from slime.config.groups import RunConfig
from slime.config.resolve.cluster import is_group_relative
from slime.data.columns import RankBatch, TrainData, column
from slime.models.cost import ModelDims, forward_flops
from slime.models.hf_shape import read_shape

logger = logging.getLogger(__name__)

# numpy converts lists of these dtypes twice as fast as torch.tensor
_FROM_LISTS = {torch.int64: numpy.int64, torch.int32: numpy.int32, torch.float32: numpy.float32}


@dataclass(frozen=True)
class Shipment:
    """Everything the ranks receive for one rollout.

    Attributes:
        ranks: one batch per data-parallel rank.
        plan: the schedule.
        total_lengths: tokens of every sample, also of those that are not scheduled.
        prefixes: of the samples, if a prefix that samples of a micro-batch share is computed once.
    """

    ranks: list[RankBatch]
    plan: StepPlan
    total_lengths: Sequence[int] = ()
    prefixes: PrefixTree | None = None

    @property
    def num_dropped_samples(self) -> int:
        """Samples of trailing rollouts that do not fill a step. They are not trained on."""
        return self.plan.num_dropped_samples

    @property
    def num_tokens(self) -> int:
        """Tokens of the scheduled samples."""
        return sum(sum(rank["total_lengths"]) for rank in self.ranks)

    def cost(self, of_length: Callable[[int], int] = int) -> int | None:
        """Tokens that pass the model, or another cost of the same by length. None if no prefix is shared."""
        if self.prefixes is None:
            return None
        ranks = zip(self.plan.partitions, self.plan.micro_batch_indices, strict=True)
        return sum(
            self.prefixes.cost([partition[i] for i in items], of_length)
            for partition, micro_batches in ranks
            for items in micro_batches
        )

    def forward_flops(self, hf_checkpoint: str) -> float:
        """Floating-point operations of one forward pass over all samples."""
        return forward_flops(self.total_lengths, hf_checkpoint, self.cost)


class Shipper:
    """Makes the batches of every rollout of a run.

    Args:
        post_process, convert: see :func:`slime.batch.compile.compile_train_data`.
    """

    def __init__(
        self, config: RunConfig, post_process: PostProcessHook | None = None, convert: ConvertHook | None = None
    ) -> None:
        self._config, self._args = config, config.args
        self._post_process, self._convert = post_process, convert
        self._signal = SignalWatch(is_group_relative(self._args))
        is_balanced = self._args.balance_data or self._args.balance_by_flops
        self._dims = read_shape(self._args.hf_checkpoint) if is_balanced else None
        self._layout = self._trainer_layout()

    def _trainer_layout(self) -> ParallelLayout:
        args = self._args
        if not args.world_size:
            return ParallelLayout(dp_size=1)  # no trainer
        return ParallelLayout.of(
            args.world_size,
            tensor=args.tensor_model_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            context=args.context_parallel_size,
            virtual_stages=args.virtual_pipeline_model_parallel_size,
            group_size=args.microbatch_group_size_per_vp_stage,
        )

    def ship(self, rollout_id: int, groups: Sequence[Any]) -> Shipment:
        """The batches of a rollout's groups."""
        rewards, settings = self._config[RewardArgs], self._config[MicroBatchArgs]
        data = compile_train_data(
            groups, rewards=rewards, post_process=self._post_process, convert=self._convert, args=self._args
        )
        self._signal.check(rollout_id, data["rewards"], data["raw_reward"])
        size = self._args.global_batch_size
        return split_by_dp(data, layout=self._layout, global_batch_size=size, settings=settings, dims=self._dims)


def split_by_dp(
    data: TrainData,
    *,
    layout: ParallelLayout,
    global_batch_size: int,
    settings: MicroBatchArgs,
    dims: ModelDims | None = None,
) -> Shipment:
    """Schedule a compiled batch and cut it into the batches of the ranks.

    Args:
        data: columns from ``compile_train_data``.
        layout, global_batch_size, settings, dims: see :func:`slime.batch.schedule.plan_steps`.

    Returns:
        Per-rank batches and the plan. The plan counts dropped samples, and a warning is logged.
    """
    prefixes = prefix_tree(data) if settings.share_prefixes else None
    plan = plan_steps(
        data["total_lengths"],
        data["rollout_ids"],
        global_batch_size=global_batch_size,
        layout=layout,
        settings=settings,
        dims=dims,
        prefixes=prefixes,
    )
    if plan.num_dropped_samples:
        logger.warning(
            "%d trailing rollouts (%d of %d samples) do not fill a step of --global-batch-size %d: not trained on.",
            plan.num_dropped_rollouts,
            plan.num_dropped_samples,
            len(data["tokens"]),
            global_batch_size,
        )
    _warn_of_long_samples(data["total_lengths"], settings, layout)
    ranks = [tensorize(slice_batch(data, plan, rank)) for rank in range(layout.dp_size)]
    return Shipment(ranks, plan, data["total_lengths"], prefixes)


def _warn_of_long_samples(total_lengths: Sequence[int], settings: MicroBatchArgs, layout: ParallelLayout) -> None:
    if not settings.use_dynamic_batch_size or settings.max_tokens_per_gpu is None:
        return
    # ranks of one context-parallel group share every sample, and no sample is cut
    budget = settings.max_tokens_per_gpu * layout.cp_size
    if too_long := [length for length in total_lengths if length > budget]:
        logger.warning(
            "%d samples, the longest of %d tokens, exceed --max-tokens-per-gpu %d x --context-parallel-size %d: each "
            "is a micro-batch of its own and may not fit the device.",
            *(len(too_long), max(too_long), settings.max_tokens_per_gpu, layout.cp_size),
        )


def slice_batch(data: TrainData, plan: StepPlan, rank: int) -> RankBatch:
    """Rank's share of every per-sample column, the whole-batch columns, and its part of the plan."""
    partition = plan.partitions[rank]
    num_samples = len(data["tokens"])
    batch: RankBatch = {}
    for name, values in data.items():
        # columns that a hook added may have any form: without one row per sample they go to every rank
        is_per_sample = column(name).per == "sample" and _has_rows(values, num_samples)
        batch[name] = [values[p] for p in partition] if is_per_sample else values
    batch["partition"] = list(partition)
    batch["micro_batch_indices"] = plan.micro_batch_indices[rank]
    batch["num_microbatches"] = list(plan.num_microbatches)
    batch["global_batch_sizes"] = list(plan.global_batch_sizes)
    return batch


def tensorize(batch: RankBatch) -> RankBatch:
    """The batch with its tensor columns as contiguous CPU tensors of the dtypes in the table."""
    out: RankBatch = {}
    for name, values in batch.items():
        spec = column(name)
        dtype = getattr(torch, spec.dtype) if spec.dtype else None
        match spec.form:
            case "ragged":
                out[name] = [_tensor(value, dtype) for value in values]
            case "vector":
                out[name] = _tensor(values, dtype)
            case "plain" | "fixed":
                out[name] = values
            case _:
                raise AssertionError(f"column {name} has unknown form {spec.form}")
    return out


def _tensor(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        # clone: a view must not drag the storage of the whole rollout through the object store
        return value.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
    if dtype in _FROM_LISTS and isinstance(value, list):
        return torch.from_numpy(numpy.array(value, dtype=_FROM_LISTS[dtype]))
    return torch.tensor(value, dtype=dtype)


def _has_rows(values: Any, num_samples: int) -> bool:
    """Whether ``values`` have one row per sample."""
    if isinstance(values, (str, bytes, dict)):
        return False  # their length does not count samples
    try:
        return len(values) == num_samples
    except TypeError:  # a number: every rank gets it unchanged
        return False
