"""What an optimizer step tells, whatever the backend: its metrics, the log-probs it saw, and what went wrong.

Called by the ``step`` of each backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from slime.backends.training.data import MicroBatch, TrainBatch
from slime.backends.training.loss import LossContext, MicroBatchLoss, names_of_all
from slime.backends.training.place import RankPlace

__all__ = [
    "NO_TRAINED_TOKENS",
    "NonFiniteGradients",
    "ReadOutput",
    "StepRecord",
    "StepResult",
    "finish_step",
    "num_trained_tokens",
    "split_by_sample",
]

ReadOutput: TypeAlias = Callable[[MicroBatch, torch.Tensor], torch.Tensor]
"""(micro-batch, output of the model) -> ``[N, ...]`` for its response tokens, samples in order."""

NO_TRAINED_TOKENS = "none of its tokens is trained on (loss masks, remove_sample)"
"""Why a step is not applied whose gradient is zero: momentum and weight decay would move the weights all the same."""


@dataclass(frozen=True)
class StepResult:
    """What one step tells.

    Attributes:
        metrics: equal on all ranks that compute the loss; the others only know norm, rates and batch size.
        log_probs: what the step saw before the update, by position in the rank's batch; where the loss is computed.
        skipped: why nothing was applied; empty where fp16 gradients overflowed; None: the update was made.
    """

    metrics: dict[str, float]
    log_probs: dict[int, torch.Tensor] = field(repr=False)
    skipped: str | None = None


class NonFiniteGradients(RuntimeError):
    """Gradients hold NaN or infinity; nothing was applied. Says on which ranks, and in which samples it began."""


def num_trained_tokens(batch: TrainBatch, step: int, group: dist.ProcessGroup | None) -> int:
    """Of a step, all data-parallel ranks together. A collective of ``group``, which has them."""
    indices = [index for micro_batch in batch.indices(step) for index in micro_batch]
    trained = torch.stack([mask.sum() for mask in batch.masks(indices)]).sum()
    dist.all_reduce(trained, group=group)
    return int(trained)


def split_by_sample(flat: torch.Tensor, micro_batch: MicroBatch) -> dict[int, torch.Tensor]:
    """``[N, ...]`` -> position in the rank's batch -> ``[R_i, ...]`` on the cpu."""
    parts = torch.split(flat.detach().cpu(), micro_batch.response_lengths)
    return dict(zip(micro_batch.indices, parts, strict=True))


@dataclass
class StepRecord:
    """What the micro-batches of a step leave behind, in order.

    Attributes:
        samples: positions in the rank's batch, by micro-batch.
        losses: without graph and log-probs.
        log_probs: what the step saw before the update, by position in the rank's batch.
    """

    samples: list[Sequence[int]] = field(default_factory=list)
    losses: list[MicroBatchLoss] = field(default_factory=list)
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, micro_batch: MicroBatch, loss: MicroBatchLoss) -> None:
        self.samples.append(micro_batch.indices)
        self.losses.append(replace(loss, loss=loss.loss.detach(), log_probs=None))
        if loss.log_probs is not None:
            self.log_probs.update(split_by_sample(loss.log_probs, micro_batch))

    def metrics(self, *, per_token: bool, num_rollouts: int, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Sum over micro-batches and ranks, divided by the step's trained tokens or rollouts.

        Args:
            group: data-parallel ranks; those that share samples compute the same, so only one of them is counted.
        """
        names = names_of_all(dict.fromkeys(name for loss in self.losses for name in loss.names), group)
        values = torch.stack([loss.values_of(names) for loss in self.losses]).sum(0)
        dist.all_reduce(values, group=group)
        tokens, *sums = values.tolist()
        divisor = max(tokens, 1.0) if per_token else num_rollouts
        return {name: total / divisor for name, total in zip(names, sums, strict=True)}

    def describe_bad(self, batch: TrainBatch, dp_rank: int) -> str:
        """The micro-batches and samples whose loss is not finite, of all ranks. A collective over all of them."""
        mine = [
            f"loss of micro-batch {number} of rank {dp_rank}, samples {batch.select('sample_indices', indices)}"
            for number, (indices, loss) in enumerate(zip(self.samples, self.losses, strict=True))
            if not bool(torch.isfinite(loss.loss).all())
        ]
        everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, mine)
        named = list(dict.fromkeys(one for of_rank in everywhere for one in of_rank))  # ranks that share samples agree
        return "; ".join(named) or "all losses are finite: it began in the backward pass"


def finish_step(
    context: LossContext,
    step: int,
    record: StepRecord,
    metrics: dict[str, float],
    *,
    place: RankPlace,
    param_groups: Sequence[dict[str, Any]],
    is_bad: bool,
    update: Callable[[], tuple[float, str | None]],
) -> StepResult:
    """Apply the gradients of a step, unless it trains no token, and complete its metrics. A collective.

    Args:
        metrics: of the losses.
        is_bad: gradients are not finite.
        update: applies the gradients; (their norm before clipping, why nothing was applied or None).

    Raises:
        NonFiniteGradients: on all ranks, before anything was applied.
    """
    rates = {f"lr-pg_{i}": float(group["lr"]) for i, group in enumerate(param_groups)}
    # users' losses decide which tokens they read, so their gradient may not be zero without trained tokens
    reads_masks = not context.objective.needs_all_rows
    norm: float = 0.0
    skipped: str | None
    if reads_masks and not is_bad and num_trained_tokens(context.batch, step, place.dp_group) == 0:
        skipped = NO_TRAINED_TOKENS
    else:
        norm, skipped = update()
        if skipped and not context.objective.skip_bad:
            raise NonFiniteGradients(skipped)
    metrics |= {"grad_norm": norm, **rates, "global_batch_size": float(context.scale.num_rollouts)}
    return StepResult(metrics, record.log_probs, skipped)
