"""The loss of one micro-batch: dispatch by --loss-type, and scaling for a backend's step.

Called by the ``step`` of each backend. The formulas are in ``slime.algorithms``.

The convention is Megatron's, whose schedule computes ``loss / max(normalizer, 1) / num_micro_batches`` and whose
data-parallel wrapper averages gradients over the data- and context-parallel ranks, unless the config says per-token:
then it sums over ranks and divides by the sum of all normalizers. Hence the factors in :func:`micro_batch_loss`, which
leave

    rollout mean    grad = 1 / rollouts of the step * sum over rollouts of grad of the rollout's token mean
    per token       grad = sum over tokens of grad / trained tokens of the step

Context parallelism: each rank has the logits of some rows, makes the log-probs whole (``MicroBatch.gather``) and
computes the same loss as the others. The backward pass keeps its own rows' share. So the loss is the same number on all
of them, the gradients add up, and metrics must be counted once. A user's loss instead computes the part of its rank's
rows: the parts add up to the loss, and their gradients to its gradient. Metrics are summed over the ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.logprobs import log_probs_and_entropy
from slime.algorithms.policy_loss import PolicyTokens, policy_loss, sft_loss
from slime.algorithms.ppo import value_loss
from slime.algorithms.reduce import LossOutput, Samples, count_tokens
from slime.backends.training.context_parallel import held_tokens
from slime.backends.training.credit import CustomFunctions
from slime.backends.training.data import MicroBatch, RankPlace, TrainBatch
from slime.data.columns import SAMPLING_SETS, USER_LOSS_VALUES


@dataclass(frozen=True)
class Objective:
    """The part of the loss that stays the same over a run.

    Attributes:
        custom: the user's functions inside the objective.
        is_critic: the model has a value head and is trained on the value loss.
        recompute: only the logits are kept for the backward pass, which computes the loss again.
        skip_bad: a step whose gradients are not finite is skipped. Otherwise it raises.
    """

    settings: AlgorithmArgs
    vocab_size: int
    temperature: float = 1.0
    custom: CustomFunctions = field(default_factory=CustomFunctions)
    is_critic: bool = False
    recompute: bool = False
    skip_bad: bool = False

    @property
    def needs_all_rows(self) -> bool:
        """Whether the objective reads the logits of all rows, not only of those that predict response tokens."""
        return self.settings.loss_type == "custom_loss" and not self.is_critic

    def read_log_probs(
        self,
        micro_batch: MicroBatch,
        logits: torch.Tensor,
        *,
        tensor_group: dist.ProcessGroup | None,
        temperature: float | None = None,
        with_entropy: bool = False,
    ) -> torch.Tensor:
        """:func:`response_log_probs`, or ``[N, 2]`` with the entropies. ``temperature`` None: that of the run."""
        log_probs, entropy = response_log_probs(
            logits,
            micro_batch,
            vocab_size=self.vocab_size,
            temperature=self.temperature if temperature is None else temperature,
            chunk_size=self.settings.log_probs_chunk_size,
            tensor_group=tensor_group,
            with_entropy=with_entropy,
        )
        return log_probs if entropy is None else torch.stack([log_probs, entropy], dim=-1)


@dataclass(frozen=True)
class LossContext:
    """Everything that the loss of a micro-batch depends on besides the micro-batch and its logits.

    Attributes:
        num_micro_batches: of this rank in this step.
        num_rollouts: of the step, all ranks together.
        place: of this rank.
    """

    objective: Objective
    batch: TrainBatch
    num_micro_batches: int
    num_rollouts: int
    place: RankPlace

    @property
    def settings(self) -> AlgorithmArgs:
        """Flags of the algorithm."""
        return self.objective.settings


@dataclass(frozen=True)
class MicroBatchLoss:
    """The loss of one micro-batch, scaled for the step, and its metrics.

    Attributes:
        loss: scaled scalar with a graph.
        num_tokens: integer scalar, the normalizer.
        names: metric names.
        values: fp32 [1 + metrics]: trained tokens in per-token mode (else 0), then each metric in reducer space.
        log_probs: [N] detached. None if the objective computes none.
    """

    loss: torch.Tensor
    num_tokens: torch.Tensor
    names: list[str]
    values: torch.Tensor
    log_probs: torch.Tensor | None

    def values_of(self, names: Sequence[str]) -> torch.Tensor:
        """``values`` with the metrics in the order of ``names``. A missing metric is 0."""
        if names == self.names:
            return self.values
        known = dict(zip(self.names, self.values[1:], strict=True))
        return torch.stack([self.values[0], *(known.get(name, torch.zeros_like(self.values[0])) for name in names)])


def response_log_probs(
    logits: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    vocab_size: int,
    temperature: float,
    chunk_size: int | None,
    tensor_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    with_entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies ``[N]`` fp32 of the whole responses, samples in order.

    If top-p or top-k cut the vocabulary of the engine, the log-probs are of the same cut.

    Args:
        logits: ``[1, T, V/tp]``, or ``[n, V/tp]`` when only the rows that predict this rank's response tokens went
            through the LM head.
    """
    log_probs, entropy = log_probs_and_entropy(
        _response_rows(logits, micro_batch),
        micro_batch.packed.response_targets,
        group=tensor_group,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        with_entropy_grad=with_entropy_grad,
        keep=micro_batch.sampling,
    )
    return micro_batch.gather(log_probs), None if entropy is None else micro_batch.gather(entropy)


def response_values(output: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """A value head's output ``[1, T, 1]`` or ``[n, 1]`` -> ``[N]`` fp32 of the whole responses. No temperature."""
    return micro_batch.gather(_response_rows(output, micro_batch).squeeze(-1).float())


def _response_rows(output: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    # two dimensions: only the response rows went through the LM head
    return output if output.dim() == 2 else output.squeeze(0).index_select(0, micro_batch.packed.response_rows)


def micro_batch_loss(
    logits: torch.Tensor, micro_batch: MicroBatch, context: LossContext, *, packing: Any = None
) -> MicroBatchLoss:
    """The scaled loss of ``micro_batch`` from its logits (or, for the critic, its value head's output).

    Args:
        packing: the backend's description of the sample borders. Only users' losses see it.
    """
    compute = partial(_micro_batch_loss, micro_batch=micro_batch, context=context, packing=packing)
    if context.objective.recompute:
        # not reentrant: that form tracks tensors only, and the result is a record of them
        loss: MicroBatchLoss = checkpoint(compute, logits, use_reentrant=False)
        return loss
    return compute(logits)


def _micro_batch_loss(
    logits: torch.Tensor, micro_batch: MicroBatch, context: LossContext, packing: Any
) -> MicroBatchLoss:
    batch, settings = context.batch, context.settings
    samples = Samples(
        micro_batch.response_lengths,
        batch.masks(micro_batch.indices),
        batch.mask_sums(micro_batch.indices),
        per_token=settings.calculate_per_token_loss,
    )
    log_probs = None
    if context.objective.is_critic:
        output = _critic_loss(logits, micro_batch, context, samples)
    elif context.objective.needs_all_rows:
        output = _custom_loss(logits, micro_batch, context, samples, packing)
    else:
        log_probs, entropy = response_log_probs(
            logits,
            micro_batch,
            vocab_size=context.objective.vocab_size,
            temperature=context.objective.temperature,
            chunk_size=settings.log_probs_chunk_size,
            tensor_group=context.place.tensor_group,
            with_entropy=settings.loss_type == "policy_loss" and settings.wants_entropy,
            # a metric needs no graph, which costs a buffer of [chunk, V]
            with_entropy_grad=settings.entropy_coef != 0,
        )
        match settings.loss_type:
            case "policy_loss":
                output = _policy_loss(log_probs, entropy, micro_batch, context, samples)
            case "sft_loss":
                output = sft_loss(log_probs, samples.reducer())
            case other:
                raise ValueError(f"--loss-type {other} is not supported")
        log_probs = log_probs.detach()
    return _scaled(output, samples, context, log_probs)


def _scaled(
    output: LossOutput, samples: Samples, context: LossContext, log_probs: torch.Tensor | None
) -> MicroBatchLoss:
    """The loss and its normalizer. The module docstring derives the factors."""
    num_tokens = count_tokens(samples.loss_masks)
    if samples.per_token:
        # every context-parallel rank counts all tokens, so Megatron divides by that factor too much
        loss, normalizer = output.loss * context.place.cp_size, num_tokens
    else:
        # undoes Megatron's division by micro-batches and its mean over ranks
        num_ranks = context.place.dp_size * context.place.cp_size
        loss = output.loss * (context.num_micro_batches * num_ranks / context.num_rollouts)
        # Megatron's schedule divides by the normalizer, which must change nothing here
        normalizer, num_tokens = torch.ones_like(num_tokens), torch.zeros_like(num_tokens)
    metrics = [value.float() for value in output.metrics.values()]
    values = torch.stack([num_tokens.to(device=output.loss.device).float(), *metrics])
    return MicroBatchLoss(loss, normalizer.int(), list(output.metrics), values, log_probs)


def _policy_loss(
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    micro_batch: MicroBatch,
    context: LossContext,
    samples: Samples,
) -> LossOutput:
    batch, custom = context.batch, context.objective.custom
    indices = micro_batch.indices
    advantages = batch.flat("advantages", indices)
    if advantages is None:
        raise ValueError("--loss-type policy_loss needs advantages: drop --disable-compute-advantages-and-returns.")
    total_lengths = batch.select("total_lengths", indices)
    tokens = PolicyTokens(
        log_probs=log_probs,
        advantages=advantages,
        entropy=entropy,
        # missing if the pass was not needed: the policy loss then takes the current ones
        old_log_probs=batch.flat("log_probs", indices),
        rollout_log_probs=batch.flat("rollout_log_probs", indices),
        ref_log_probs=batch.flat("ref_log_probs", indices),
        opd_reverse_kl=batch.flat("opd_reverse_kl", indices),
    )
    return policy_loss(
        tokens,
        context.settings,
        samples,
        correct=custom.correct(samples, total_lengths),
        make_pg_reducer=custom.make_pg_reducer(samples, total_lengths),
    )


def _critic_loss(output: torch.Tensor, micro_batch: MicroBatch, context: LossContext, samples: Samples) -> LossOutput:
    old_values, returns = (context.batch.flat(name, micro_batch.indices) for name in ("values", "returns"))
    if old_values is None or returns is None:
        raise ValueError("the critic needs values and returns; its forward pass and the advantages come first.")
    values = response_values(output, micro_batch)
    return value_loss(values, old_values, returns, context.settings.value_clip, samples.reducer())


def _custom_loss(
    logits: torch.Tensor, micro_batch: MicroBatch, context: LossContext, samples: Samples, packing: Any
) -> LossOutput:
    """The user's loss of this rank's rows. Metrics of all context-parallel ranks together."""
    sharding = micro_batch.sharding
    held = _held(micro_batch, context.batch, samples)
    view = _user_batch(micro_batch, context.batch, samples, held, packing)
    output = context.objective.custom.run_loss(view, logits, held.reducer(), sharding)
    if sharding.cp_size == 1:
        return output
    loss = output.loss
    if not sum(held.response_lengths):
        loss = loss + logits[..., :0].sum()  # zero: the backward pass of a rank without tokens joins the collectives
    # a user's loss may leave metrics out on some ranks, and all_reduce needs the same shape on all
    names, nothing = names_of_all(output.metrics, sharding.cp_group), loss.new_zeros((), dtype=torch.float32)
    values = torch.stack([nothing, *(output.metrics.get(name, nothing).float() for name in names)])
    dist.all_reduce(values, group=sharding.cp_group)
    return LossOutput(loss=loss, metrics=dict(zip(names, values[1:].unbind(), strict=True)))


def names_of_all(names: Iterable[str], group: dist.ProcessGroup | None) -> list[str]:
    """The names of all ranks, in the same order on each. A collective."""
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everywhere, list(names), group=group)
    return list(dict.fromkeys(name for one in everywhere for name in one))


def _held(micro_batch: MicroBatch, batch: TrainBatch, samples: Samples) -> Samples:
    """The response tokens whose logits this rank has. Denominators stay those of whole rollouts."""
    sharding = micro_batch.sharding
    if sharding.cp_size == 1:
        return samples
    totals = batch.select("total_lengths", micro_batch.indices)
    pairs = zip(totals, samples.response_lengths, strict=True)
    lengths = [len(held_tokens([total], [response], sharding)) for total, response in pairs]
    masks = torch.split(torch.cat(list(samples.loss_masks))[micro_batch.part.response_index], lengths)
    return replace(samples, response_lengths=lengths, loss_masks=list(masks))


def _user_batch(
    micro_batch: MicroBatch, batch: TrainBatch, samples: Samples, held: Samples, packing: Any
) -> dict[str, Any]:
    """The micro-batch for users' loss functions. A missing column is None.

    Packed tokens and per-token values are those of this rank. Lengths, masks and ``unconcat_tokens`` are whole.
    """
    packed, indices = micro_batch.packed, micro_batch.indices

    def column(name: str) -> list[torch.Tensor] | None:
        flat = batch.flat(name, indices)
        if flat is not None and held is not samples:
            flat = flat[micro_batch.part.response_index]
        return None if flat is None else held.split(flat)

    masks = torch.zeros(packed.tokens.shape[1], dtype=torch.int32, device=packed.tokens.device)
    masks[packed.response_rows] = held.mask.int()
    return {
        "tokens": packed.tokens,
        "unconcat_tokens": batch.select("tokens", indices),
        "packed_seq_params": packing,
        "total_lengths": batch.select("total_lengths", indices),
        "response_lengths": list(micro_batch.response_lengths),
        "loss_masks": list(samples.loss_masks),
        "full_loss_masks": masks.unsqueeze(0),
        "rollout_mask_sums": samples.rollout_mask_sums,
        "multimodal_train_inputs": batch.media_inputs(indices) or None,
        **{name: column(name) for name in USER_LOSS_VALUES},
        **{name: batch.select(name, indices) for name in SAMPLING_SETS if batch.columns.get(name) is not None},
    }
