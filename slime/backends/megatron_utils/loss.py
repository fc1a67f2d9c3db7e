"""Functions that users' objectives call, with ``args`` and lists: log-probs from logits, losses, importance weights.

They wrap the functions of ``slime.algorithms``, which take settings and flat tensors. ``batch`` is the dictionary of a
``--custom-loss-function-path``. Under context parallelism logits, per-token values and losses are the rank's
part (``cp_utils``): the parts add up. Importable without megatron.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.arguments import AlgorithmArgs, DistillationArgs
from slime.algorithms.logprobs import SamplingMask, log_probs_and_entropy
from slime.algorithms.policy_loss import (
    Correction,
    MakeReducer,
    PolicyTokens,
    icepop,
    policy_loss,
    sft_loss,
    truncated_weights,
)
from slime.algorithms.ppo import value_loss
from slime.algorithms.reduce import Reducer, Samples
from slime.backends.megatron_utils.cp_utils import current_sharding, get_sum_of_sample_mean
from slime.backends.training.context_parallel import gather_parts, held_spans, held_tokens
from slime.backends.training.credit import CustomFunctions, add_credit
from slime.config.groups import from_args
from slime.data.columns import SAMPLING_SETS
from slime.data.engine_fields import FieldFlags
from slime.utils.errors import ConfigError

ROLLOUT_TOP_P_TOKEN_KEYS = SAMPLING_SETS

UserLoss = tuple[torch.Tensor, dict[str, torch.Tensor]]
TisResult = tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]


# ---------------------------------------------------------------------------------------------- from logits


def get_responses(
    logits: torch.Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    apply_temperature: bool = True,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Per sample (logits that predict its response ``[r_i, V / tensor ranks]``, response tokens ``[r_i]``).

    ``r_i`` is ``R_i``; under context parallelism it counts the tokens whose logits this rank has.

    Args:
        logits: ``[1, T, V / tensor ranks]`` of packed samples.
        apply_temperature: divide by ``--rollout-temperature``.
    """
    temperature = args.rollout_temperature if apply_temperature else 1
    for part, targets in _responses(logits, unconcat_tokens, total_lengths, response_lengths):
        yield part if temperature == 1 else part / temperature, targets


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[torch.Tensor] | None = None,
    top_p_token_offsets: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """(an empty tensor, ``log_probs`` and on request ``entropy``: one fp32 ``[r_i]`` per sample, with graph).

    Args:
        top_p_token_ids, top_p_token_offsets: the ids that tokens were sampled from, see
            :func:`get_rollout_top_p_logprob_kwargs`; the log-probs are of the same cut then.
    """
    del non_loss_data  # part of the signature that Megatron's schedule asks for
    parts, targets = zip(*_responses(logits, unconcat_tokens, total_lengths, response_lengths), strict=True)
    keep = None
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        sharding = current_sharding()
        select = held_tokens(total_lengths, response_lengths, sharding) if sharding.cp_size > 1 else None
        keep = SamplingMask.of(top_p_token_ids, top_p_token_offsets, select=select, device=logits.device)
    log_probs, entropy = log_probs_and_entropy(
        torch.cat(parts),
        torch.cat(targets),
        group=_tensor_group(),
        vocab_size=args.vocab_size,
        temperature=args.rollout_temperature,
        chunk_size=args.log_probs_chunk_size,
        with_entropy=with_entropy,
        with_entropy_grad=args.entropy_coef != 0,
        keep=keep,
    )
    lengths = [len(part) for part in parts]
    results = {"log_probs": list(torch.split(log_probs, lengths))}
    if entropy is not None:
        results["entropy"] = list(torch.split(entropy, lengths))
    return logits.new_empty(0), results


def get_rollout_top_p_logprob_kwargs(args: Namespace, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`get_log_probs_and_entropy` for a rollout with a cut vocabulary. Empty for any other.

    Raises:
        ValueError: the batch lacks the ids that the cut left.
    """
    if not from_args(FieldFlags, args).cuts_vocabulary:
        return {}
    missing = [name for name in ROLLOUT_TOP_P_TOKEN_KEYS if batch.get(name) is None]
    if missing:
        raise ValueError(f"--rollout-top-p {args.rollout_top_p}: the batch has no {' and no '.join(missing)}")
    return {name.removeprefix("rollout_"): batch[name] for name in ROLLOUT_TOP_P_TOKEN_KEYS}


def get_values(
    logits: torch.Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """(an empty tensor, ``values``: one fp32 ``[r_i]`` per sample) from a value head's ``[1, T, 1]``."""
    del with_entropy, non_loss_data
    responses = _responses(logits, unconcat_tokens, total_lengths, response_lengths)
    return logits.new_empty(0), {"values": [part.squeeze(-1).float() for part, _ in responses]}


def _responses(
    logits: torch.Tensor,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """:func:`get_responses` before the temperature, by which ``log_probs_and_entropy`` divides without a copy."""
    rows, sharding = logits.squeeze(0), current_sharding()
    start = 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        spans = held_spans(total, response, sharding)
        parts = [rows[start + held.start : start + held.stop] for held, _ in spans]
        targets = torch.cat([tokens[total - response :][held] for _, held in spans])
        # Segments are padded before they are divided.
        start += (total + -total % sharding.segment_multiple) // sharding.cp_size
        yield parts[0] if len(parts) == 1 else torch.cat(parts), targets.to(logits.device)


# ---------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class _UserSamples(Samples):
    """Whole samples of a user's batch, whose reducers take whole responses and reduce this rank's part of them.

    Attributes:
        given: the function that the user passes on.
        total_lengths: of prompt and response.
        held: which of the response tokens this rank has. None means all.
    """

    given: Reducer | None = None
    total_lengths: Sequence[int] = ()
    held: torch.Tensor | None = None

    def reducer(self, loss_masks: Sequence[torch.Tensor] | None = None) -> Reducer:
        masks, reduce = self.loss_masks if loss_masks is None else loss_masks, self.given
        if reduce is None or masks is not self.loss_masks:  # a correction has changed the masks
            reduce = get_sum_of_sample_mean(
                self.total_lengths, self.response_lengths, masks, self.rollout_mask_sums, self.per_token
            )
        held, of_part = self.held, reduce
        return of_part if held is None else lambda values: of_part(values[held])


def policy_loss_function(
    args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> UserLoss:
    """The loss of ``--loss-type policy_loss`` on a user's batch: (loss, metrics)."""
    settings, sharding = from_args(AlgorithmArgs, args), current_sharding()
    samples = _samples(batch, settings, sum_of_sample_mean)
    columns = _from_logits(args, batch, logits, with_entropy=settings.wants_entropy)
    known: dict[str, Any] = {
        "log_probs": torch.cat(columns["log_probs"]),
        "entropy": _flat(columns, "entropy"),
        "advantages": torch.cat(batch["advantages"]),
        "old_log_probs": _flat(batch, "log_probs"),
        "rollout_log_probs": _flat(batch, "rollout_log_probs"),
        "ref_log_probs": _flat(batch, "ref_log_probs"),
    }
    if sharding.cp_size > 1:  # objectives over sequences, corrections and reducers take whole responses
        known = {name: values for name, values in known.items() if values is not None}
        parts = torch.stack(list(known.values()), dim=-1)
        whole = gather_parts(parts, batch["total_lengths"], batch["response_lengths"], sharding)
        known = dict(zip(known, whole.unbind(-1), strict=True))
    custom = CustomFunctions.load(args)
    make_pg_reducer = custom.make_pg_reducer(samples, batch["total_lengths"])
    output = policy_loss(
        PolicyTokens(**known),
        settings,
        samples,
        correct=custom.correct(samples, batch["total_lengths"]),
        make_pg_reducer=None if make_pg_reducer is None else _shared(make_pg_reducer, sharding.cp_size),
    )
    return output.loss, output.metrics


def _shared(make: MakeReducer, num_ranks: int) -> MakeReducer:
    """A reducer whose results on all context-parallel ranks add up to that of the user's reducer."""

    def made(masks: Sequence[torch.Tensor]) -> Reducer:
        reduce = make(masks)
        return lambda values: reduce(values) / num_ranks  # it sees whole responses on every rank

    return made


def sft_loss_function(
    args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> UserLoss:
    """The loss of ``--loss-type sft_loss`` on a user's batch: (loss, metrics)."""
    log_probs = _from_logits(args, batch, logits, with_entropy=False)["log_probs"]
    output = sft_loss(torch.cat(log_probs), sum_of_sample_mean)
    return output.loss, output.metrics


def value_loss_function(
    args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> UserLoss:
    """The critic's loss on a user's batch, ``logits`` being the value head's ``[1, T, 1]``: (loss, metrics)."""
    responses = _responses(logits, batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"])
    values = torch.cat([part.squeeze(-1).float() for part, _ in responses])
    old_values, returns = torch.cat(batch["values"]), torch.cat(batch["returns"])
    output = value_loss(values, old_values, returns, args.value_clip, sum_of_sample_mean)
    return output.loss, output.metrics


def compute_advantages_and_returns(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Fill ``kl``, ``advantages`` and ``returns`` of a rank's batch, in place. See ``credit.add_credit``."""
    add_credit(
        rollout_data,
        from_args(AlgorithmArgs, args),
        from_args(DistillationArgs, args),
        CustomFunctions.load(args),
        _data_group(),
    )


# ---------------------------------------------------------------------------------------------- importance weights


def vanilla_tis_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **kwargs: Any,
) -> TisResult:
    """The weights of ``--use-tis``, with the signature of ``--custom-tis-function-path``."""
    bounds = args.tis_clip_low, args.tis_clip
    return _corrected(truncated_weights, bounds, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **kwargs: Any,
) -> TisResult:
    """IcePop for ``--custom-tis-function-path``: tokens whose weight leaves the --tis-clip bounds are dropped."""
    bounds = args.tis_clip_low, args.tis_clip
    return _corrected(icepop, bounds, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def _corrected(
    weigh: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float], Correction],
    bounds: tuple[float, float],
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> TisResult:
    flat = torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs))
    correction = weigh(pg_loss, *flat, *bounds)
    return correction.pg_loss, list(loss_masks), correction.metrics


# ---------------------------------------------------------------------------------------------- helpers


def _samples(batch: Mapping[str, Any], settings: AlgorithmArgs, reduce: Reducer) -> Samples:
    held, sharding = None, current_sharding()
    if sharding.cp_size > 1:
        held = held_tokens(batch["total_lengths"], batch["response_lengths"], sharding).to(
            batch["rollout_mask_sums"].device
        )
    return _UserSamples(
        batch["response_lengths"],
        batch["loss_masks"],
        batch["rollout_mask_sums"],
        per_token=settings.calculate_per_token_loss,
        given=reduce,
        total_lengths=batch["total_lengths"],
        held=held,
    )


def _from_logits(
    args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, *, with_entropy: bool
) -> dict[str, list[torch.Tensor]]:
    _, columns = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=with_entropy,
        **get_rollout_top_p_logprob_kwargs(args, batch),
    )
    return columns


def _flat(batch: Mapping[str, Any], name: str) -> torch.Tensor | None:
    rows = batch.get(name)
    return None if rows is None else torch.cat(list(rows))


def _tensor_group() -> dist.ProcessGroup | None:
    mpu = _megatron_groups()
    group: dist.ProcessGroup | None = None if mpu is None else mpu.get_tensor_model_parallel_group()
    return group


def _data_group() -> dist.ProcessGroup | None:
    mpu = _megatron_groups()
    if mpu is not None:
        group: dist.ProcessGroup = mpu.get_data_parallel_group(with_context_parallel=False)
        return group
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError("compute_advantages_and_returns works with --train-backend megatron only.")
    return None


def _megatron_groups() -> Any:
    """Megatron's module of process groups. None in a process that has none, such as a trainer of another backend."""
    mpu = sys.modules.get("megatron.core.parallel_state")
    return mpu if mpu is not None and mpu.model_parallel_is_initialized() else None
