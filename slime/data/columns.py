"""The columns of a training batch, in one table: the only list of their names.

``TrainData`` is a plain dict (hooks add to it) with one list entry per sample and column. Compiling, splitting,
shipping, recording and the losses read the table. A key that is not in the table and has one entry per sample is
carried along like any per-sample column.

``n`` is the number of samples, ``L_i`` prompt + response tokens of sample i, ``R_i`` its response tokens.
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

TrainData: TypeAlias = dict[str, Any]
"""Column name -> list with one entry per sample of the whole rollout."""

RankBatch: TypeAlias = dict[str, Any]
"""The batch of one data-parallel rank: its share of ``TrainData`` as CPU tensors, and its part of the schedule."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        form: on the training rank: ``ragged`` list of one tensor per sample; ``vector`` one tensor ``[n_local]``;
            ``plain`` list of Python values; ``fixed`` one value for the rank.
        dtype: torch dtype name of a tensor form; "" for other forms, and for tensors that keep their dtype.
        per: ``sample`` is split by the schedule, ``batch`` goes whole to every rank, ``rank`` is made by the schedule.
        axis: length of a ragged entry: ``tokens`` (L_i), ``inputs`` (L_i - 1, all but the last), ``response`` (R_i),
            ``borders`` (R_i + 1) or ``sets`` (the last border).
        required: always there.
        sample_field: an optional column is copied from this field of ``Sample``.
        by_trainer: a result of the trainer's own passes.
        in_user_loss: users' loss functions get it; None if it does not exist.
    """

    name: str
    form: Literal["ragged", "vector", "plain", "fixed"]
    dtype: str = ""
    per: Literal["sample", "batch", "rank"] = "sample"
    axis: Literal["", "tokens", "inputs", "response", "sets", "borders"] = ""
    required: bool = True
    sample_field: str = ""
    by_trainer: bool = False
    in_user_loss: bool = False


def _optional(name: str, form: Literal["ragged", "plain"] = "plain", **kwargs: Any) -> Column:
    return Column(name, form, required=False, **kwargs)


def _tokens(name: str, *, in_user_loss: bool = True, **kwargs: Any) -> Column:
    """One number per response token."""
    return _optional(name, "ragged", dtype="float32", axis="response", in_user_loss=in_user_loss, **kwargs)


def _copied(name: str, form: Literal["ragged", "plain"] = "plain", **kwargs: Any) -> Column:
    return _optional(name, form, sample_field=name, **kwargs)


_TABLE = (
    Column("tokens", "ragged", "int64", axis="tokens"),  # prompt and response ids
    Column("response_lengths", "plain"),  # R_i
    Column("total_lengths", "plain"),  # L_i
    Column("loss_masks", "ragged", "int32", axis="response"),  # 1 = trained
    Column("rewards", "plain"),  # after group normalization
    Column("raw_reward", "plain", per="batch"),  # from the grader
    Column("truncated", "plain"),  # 1 = the response was cut at its maximum length
    Column("sample_indices", "plain"),  # Sample.index
    Column("rollout_ids", "plain"),  # execution that the sample came from
    # trained tokens of all samples with the same rollout id: the loss denominator
    Column("rollout_mask_sums", "vector", "float32"),
    _tokens("rollout_log_probs", sample_field="rollout_log_probs"),  # the engine sampled with them
    _tokens("teacher_log_probs", sample_field="teacher_log_probs"),  # a reward hook, or a pass of the trainer
    # experts that the engine chose, [L_i - 1, layers, topk], in the smallest integers that hold them
    _copied("rollout_routed_experts", "ragged", axis="inputs"),
    # if top-p or top-k cut the vocabulary: the ids that each response token was sampled from, concatenated, and where
    # each token's ids begin; a token that was not sampled has none
    _optional("rollout_top_p_token_ids", "ragged", dtype="int32", axis="sets"),
    _optional("rollout_top_p_token_offsets", "ragged", dtype="int32", axis="borders"),
    _copied("weight_versions"),  # that generated the response, one per request
    _copied("multimodal_train_inputs"),  # processor outputs besides the ids
    _optional("metadata", sample_field="train_metadata"),
    _optional("round_number"),  # turns of a conversation, from metadata["round_number"]
    _optional("local_raw_reward"),  # raw_reward of the rank's samples, added on the rank
    _optional("source_names"),  # data source of the prompt
    Column("partition", "fixed", per="rank"),  # global positions of the rank's samples
    Column("micro_batch_indices", "fixed", per="rank"),  # local positions per micro-batch, all steps in order
    Column("num_microbatches", "fixed", per="rank"),  # of this rank, per step
    Column("global_batch_sizes", "fixed", per="rank"),  # rollouts per step, all ranks together
    _tokens("log_probs", by_trainer=True),  # under the weights at the start of the rollout's training
    _tokens("ref_log_probs", by_trainer=True),  # under the reference model
    _tokens("entropy", by_trainer=True, in_user_loss=False),  # of the next-token distribution
    _tokens("advantages", by_trainer=True),  # credit per token
    _tokens("returns", by_trainer=True),  # target of a value function
    _tokens("values", by_trainer=True),  # estimate of the critic
    _tokens("kl", by_trainer=True, in_user_loss=False),  # from the reference inside the rewards; 0 without --kl-coef
    _tokens("opd_reverse_kl", by_trainer=True, in_user_loss=False),  # log-prob of the student minus that of the teacher
)

COLUMNS: dict[str, Column] = {item.name: item for item in _TABLE}

TOKEN_VALUES = tuple(item.name for item in _TABLE if item.axis == "response" and item.dtype == "float32")
"""Columns with one number per response token."""

TRAINER_VALUES = tuple(item.name for item in _TABLE if item.by_trainer)
"""The :data:`TOKEN_VALUES` that the trainer's passes fill."""

USER_LOSS_VALUES = tuple(item.name for item in _TABLE if item.in_user_loss)
"""The :data:`TOKEN_VALUES` that users' loss functions get."""

SAMPLING_SETS = tuple(item.name for item in _TABLE if item.axis in ("sets", "borders"))
"""(ids, offsets) of the sets that tokens were sampled from."""


def column(name: str) -> Column:
    """The table's entry for ``name``. A key that a hook added counts as a plain optional per-sample column."""
    known = COLUMNS.get(name)
    return known if known is not None else _optional(name)
