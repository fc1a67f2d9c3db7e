"""Results of optimizer steps and of whole rollouts: metrics, log-probs and bad gradients.

Called by the ``step`` of each backend and by ``trainer``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from slime.algorithms.reduce import make_reducer
from slime.backends.training.checkpoint_files import FAILED_STEPS
from slime.backends.training.data import MicroBatch, RankPlace, TrainBatch
from slime.backends.training.loss import LossContext, MicroBatchLoss, names_of_all
from slime.batch.arguments import ReplayArgs
from slime.config.groups import RunConfig
from slime.data.columns import TOKEN_VALUES
from slime.data.dump_file import save_debug_train_data
from slime.observability.sample_record import record_training
from slime.observability.tracking import run_directory
from slime.utils import accelerator
from slime.utils.errors import SlimeError, named, translated

ReadOutput: TypeAlias = Callable[[MicroBatch, torch.Tensor], torch.Tensor]
"""(micro-batch, output of the model) -> ``[N, ...]`` for its response tokens, samples in order."""

NO_TRAINED_TOKENS = "none of its tokens is trained on (loss masks, remove_sample)"
"""The reason for not applying a step without trained tokens."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        metrics: equal on all ranks that compute the loss. The others only know norm, rates and batch size.
        log_probs: before the update, by position in the rank's batch. Empty on ranks that do not compute the loss.
        skipped: why nothing was applied. Empty: fp16 gradients overflowed. None: the update was made.
    """

    metrics: dict[str, float]
    log_probs: dict[int, torch.Tensor] = field(repr=False)
    skipped: str | None = None


class NonFiniteGradients(RuntimeError):
    """Gradients hold NaN or infinity, and nothing was applied. The message names ranks and samples."""


def num_trained_tokens(batch: TrainBatch, step: int, group: dist.ProcessGroup | None) -> int:
    """Trained tokens of a step, all data-parallel ranks together. A collective of ``group``."""
    indices = [index for micro_batch in batch.indices(step) for index in micro_batch]
    trained = torch.stack([mask.sum() for mask in batch.masks(indices)]).sum()
    dist.all_reduce(trained, group=group)
    return int(trained)


def split_by_sample(flat: torch.Tensor, indices: Sequence[int], lengths: list[int]) -> dict[int, torch.Tensor]:
    """``[N, ...]`` -> position in the rank's batch -> ``[R_i, ...]`` on the cpu."""
    # one copy for all samples: each would wait for the device
    return dict(zip(indices, torch.split(flat.detach().cpu(), lengths), strict=True))


@dataclass
class StepRecord:
    """The results of the micro-batches of a step, in order.

    Attributes:
        samples: positions in the rank's batch, by micro-batch.
        losses: without graph and log-probs.
    """

    samples: list[Sequence[int]] = field(default_factory=list)
    losses: list[MicroBatchLoss] = field(default_factory=list)
    _log_probs: list[tuple[torch.Tensor, Sequence[int], list[int]]] = field(default_factory=list)

    def add(self, micro_batch: MicroBatch, loss: MicroBatchLoss) -> None:
        """Keep a result on the device: a copy to the host would wait before the backward pass is given to it."""
        self.samples.append(micro_batch.indices)
        self.losses.append(replace(loss, loss=loss.loss.detach(), log_probs=None))
        if loss.log_probs is not None:
            self._log_probs.append((loss.log_probs, micro_batch.indices, micro_batch.response_lengths))

    def log_probs(self) -> dict[int, torch.Tensor]:
        """Those before the update, by position in the rank's batch, on the cpu."""
        parts: dict[int, torch.Tensor] = {}
        for flat, indices, lengths in self._log_probs:
            parts |= split_by_sample(flat, indices, lengths)
        return parts

    def metrics(self, *, per_token: bool, num_rollouts: int, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Sum over micro-batches and ranks, divided by the step's trained tokens or rollouts.

        Args:
            group: data-parallel ranks. Those that share samples compute the same, so only one of them is counted.
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
    param_groups: Sequence[dict[str, Any]],
    is_bad: bool,
    update: Callable[[], tuple[float, str | None]],
) -> StepResult:
    """Apply the gradients of a step, unless it trains no token, and complete its metrics. A collective.

    Args:
        metrics: of the losses.
        is_bad: gradients are not finite.
        update: applies the gradients. Returns (norm before clipping, reason if nothing was applied or None).

    Raises:
        NonFiniteGradients: on all ranks, before anything was applied.
    """
    rates = {f"lr-pg_{i}": float(group["lr"]) for i, group in enumerate(param_groups)}
    # users' losses decide which tokens they read, so their gradient may not be zero without trained tokens
    reads_masks = not context.objective.needs_all_rows
    norm: float = 0.0
    skipped: str | None
    # momentum and weight decay would move the weights although the gradient is zero
    if reads_masks and not is_bad and num_trained_tokens(context.batch, step, context.place.dp_group) == 0:
        skipped = NO_TRAINED_TOKENS
    else:
        norm, skipped = update()
        if skipped and not context.objective.skip_bad:
            raise NonFiniteGradients(skipped)
    metrics |= {"grad_norm": norm, **rates, "global_batch_size": float(context.num_rollouts)}
    return StepResult(metrics, record.log_probs(), skipped)


logger = logging.getLogger(__name__)

# largest difference between log-probs of the same weights and tokens, if the kernels of both sides are aligned
_SAME = 1e-6

_PER_SAMPLE = ("rewards", "response_lengths", "total_lengths", "truncated")


def rollout_report(
    columns: dict[str, Any], num_rollouts: int, group: dist.ProcessGroup | None, *, log_correct: bool = False
) -> dict[str, float]:
    """Per-token columns: mean over rollouts of each rollout's mean over trained tokens. Others: mean over samples.

    ``logprob_abs_diff_max`` is the largest ``|trainer - engine|`` over all trained tokens. Every rank must have the
    same columns. With ``log_correct`` also the mean entropy of the samples whose raw reward is 1.
    """
    masks = columns["loss_masks"]
    device = accelerator.current().device()  # of the group's communication. The columns are on the cpu
    reduce = make_reducer(columns["response_lengths"], masks, columns["rollout_mask_sums"], per_token=False)
    names = [name for name in TOKEN_VALUES if columns.get(name) is not None]
    sums = [float(reduce(_flat(columns[name]))) / num_rollouts for name in names]
    plain = [name for name in _PER_SAMPLE if columns.get(name) is not None]
    sums += [float(sum(columns[name])) for name in plain]
    # one all-reduce for all sums, in fp64
    totals = torch.tensor([*sums, len(masks)], dtype=torch.float64, device=device)
    dist.all_reduce(totals, group=group)
    *values, num_samples = totals.tolist()
    report = dict(zip(names, values[: len(names)], strict=True))
    report |= {name: value / num_samples for name, value in zip(plain, values[len(names) :], strict=True)}
    if columns.get("raw_reward"):
        # not reduced: every rank has this column for the whole batch
        report["raw_reward"] = sum(columns["raw_reward"]) / len(columns["raw_reward"])
    if log_correct and columns.get("entropy") is not None:
        report |= _correct_entropy(columns, group, device)
    if "log_probs" in names and "rollout_log_probs" in names:
        report["logprob_abs_diff_max"] = _largest_difference(columns, group, device)
    return report


def warn_if_off_policy(rollout_id: int, report: dict[str, float]) -> None:
    """Warn if the log-probs of trainer and engine differ, for ``--true-on-policy-mode``."""
    difference = report.get("logprob_abs_diff_max")
    if difference is None:
        logger.warning("--true-on-policy-mode: rollout %d has no log-probs of the engine to compare with.", rollout_id)
    elif difference > _SAME:
        logger.warning(
            "--true-on-policy-mode: in rollout %d the log-probs of trainer and engine differ by up to %.1e.",
            rollout_id,
            difference,
        )


def _flat(rows: list[torch.Tensor]) -> torch.Tensor:
    # a hook may have put its tensors on the device
    return torch.cat([row.cpu() for row in rows])


def _correct_entropy(
    columns: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    """Mean over the right samples of each one's mean over trained tokens, all ranks together. Nothing without one."""
    raw = [columns["raw_reward"][position] for position in columns["partition"]]
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for reward, entropy, mask in zip(raw, columns["entropy"], columns["loss_masks"], strict=True):
        if reward == 1 and bool(mask.any()):
            sums += torch.tensor([float(entropy.cpu()[mask.cpu() != 0].mean()), 1.0], dtype=sums.dtype, device=device)
    dist.all_reduce(sums, group=group)
    total, count = sums.tolist()
    return {"correct_entropy": total / count} if count else {}


def _largest_difference(columns: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> float:
    difference = (_flat(columns["log_probs"]) - _flat(columns["rollout_log_probs"])).abs()
    trained = difference[_flat(columns["loss_masks"]) != 0]
    largest = (trained.max() if trained.numel() else torch.zeros(())).to(device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return float(largest)


# ---- batches on disk: those of steps that failed or were skipped, and those that the flags ask for
#
#     a step raises                     its batch is dumped, the run ends
#     gradients are not finite          the same. --no-check-for-nan-in-loss-and-grad skips, counts
#                                       (train/skipped_steps) and dumps the step. Ten in a row end the run
#
# Dumps are ``failed_steps/rollout_<id>_rank_<rank>.pt`` under --save, else --output-dir. Every rank writes its part.


_MOST_IN_A_ROW = 10  # skipped steps
_MORE_ROOM = (
    " The device's memory is full: lower --max-tokens-per-gpu (or --micro-batch-size), recompute activations "
    "(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1), cut the softmax into chunks "
    "(--log-probs-chunk-size), share sequences or the model among more ranks (--context-parallel-size, "
    "--tensor-model-parallel-size), or keep the optimizer on the host (--optimizer-cpu-offload)."
)


class BadSteps:
    """The bad steps of one rank.

    Args:
        directory: parent of ``failed_steps``.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self._directory = Path(directory) / FAILED_STEPS
        self._rank = rank
        self._num_skipped = 0
        self._num_in_a_row = 0

    @contextmanager
    def dumping(self, rollout_id: int, batch: dict[str, Any]) -> Iterator[None]:
        """Dump ``batch`` if the block raises, and raise a SlimeError that names the file."""

        def failed(error: BaseException) -> SlimeError:
            dump = self._dump(rollout_id, batch, str(error))
            fix = _MORE_ROOM if isinstance(error, torch.OutOfMemoryError) else ""
            where = f"trainer rank {self._rank} failed on rollout {rollout_id}"
            return SlimeError(f"{where}: {named(error)} Its batch {dump}.{fix}")

        with translated(failed):  # of users' functions
            yield

    def count(self, rollout_id: int, step: int, batch: dict[str, Any], reason: str | None) -> float:
        """Count a step. Returns the number of skipped steps of the run, this one included.

        Args:
            reason: why the step was skipped. None: it was applied. Empty: fp16 gradients overflowed.

        Raises:
            SlimeError: too many in a row.
        """
        if reason is None:
            self._num_in_a_row = 0
            return float(self._num_skipped)
        self._num_skipped += 1
        # overflows are how fp16 finds its loss scale: any number of them in a row is normal
        if not reason:
            return float(self._num_skipped)
        self._num_in_a_row += 1
        if self._num_in_a_row >= _MOST_IN_A_ROW:
            raise SlimeError(
                f"rollout {rollout_id}, step {step}: {reason}; the step was skipped, as were the "
                f"{self._num_in_a_row - 1} before it. The weights do not change any more."
            )
        dump = self._dump(rollout_id, batch, reason)
        logger.warning("rollout %d, step %d skipped: %s; its batch %s", rollout_id, step, reason, dump)
        return float(self._num_skipped)

    def _dump(self, rollout_id: int, batch: dict[str, Any], error: str) -> str:
        """Write the batch. Returns the result as the end of a sentence. Never raises."""
        path = self._directory / f"rollout_{rollout_id}_rank_{self._rank}.pt"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            torch.save({"rollout_id": rollout_id, "rank": self._rank, "error": error, "batch": batch}, path)
        # the error that led to the dump must not be replaced. PyTorch raises RuntimeError for a full disk.
        except (OSError, RuntimeError) as failure:
            return f"could not be written to {path} ({failure})"
        return f"is in {path}"


@dataclass(frozen=True)
class BatchRecord:
    """The files of this rank's trained samples.

    Attributes:
        directory: the run's folder.
        limit: samples of each rollout in the run's record. 0 keeps none.
        template: ``--save-debug-train-data``.
    """

    directory: Path
    limit: int
    template: str | None

    @classmethod
    def of(cls, run: RunConfig) -> BatchRecord:
        limit = run.values["record_samples"]
        directory = run_directory(run.args) if limit > 0 else Path()
        return cls(directory, limit, run[ReplayArgs].save_debug_train_data)

    def keep(self, rollout_id: int, columns: dict[str, Any], place: RankPlace) -> None:
        """Write the rank's columns, with whole responses, log-probs and advantages included."""
        # ranks that share samples have the same columns: one of them writes
        if not place.keeps_batch:
            return
        if self.limit > 0:
            directory, rank = self.directory, place.dp_rank
            record_training(directory, columns, rollout_id=rollout_id, limit=self.limit, data_parallel_rank=rank)
        if self.template is not None:
            save_debug_train_data(self.template, rollout_id=rollout_id, rollout_data=columns, group=place.dp_group)
