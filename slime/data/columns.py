"""The columns of a training batch, in one table. Nobody else keeps a list of their names.

``TrainData`` is a plain dict (hooks add to it) with one list entry per sample and column. The table says what each
column holds, who fills it, which Python value or tensor it becomes on the training rank, and whether context
parallelism slices it. Compiling, splitting, shipping, moving to the device and dumping all read it. A key that is not
in the table and has one entry per sample is carried along like any per-sample column.

``n`` is the number of samples, ``L_i`` prompt + response tokens of sample i, ``R_i`` its response tokens.
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["COLUMNS", "Column", "RankBatch", "TrainData", "column"]

TrainData: TypeAlias = dict[str, Any]
"""Column name -> list with one entry per sample of the whole rollout."""

RankBatch: TypeAlias = dict[str, Any]
"""What one data-parallel rank receives: its share of ``TrainData`` as CPU tensors, and its part of the schedule."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: key in the dict.
        meaning: one line, with unit where there is one.
        form: on the training rank: ``ragged`` list of one tensor per sample; ``vector`` one tensor ``[n_local]``;
            ``plain`` list of Python values; ``fixed`` one value for the rank.
        dtype: torch dtype name of a tensor form; "" for other forms, and for tensors that keep their own.
        per: ``sample`` is split by the schedule; ``batch`` goes whole to every rank; ``rank`` is made by the schedule.
        axis: length of a ragged entry: ``tokens`` (L_i), ``inputs`` (L_i - 1, all but the last), ``response`` (R_i),
            ``borders`` (R_i + 1) or ``sets`` (what the last border says).
        on_device: the trainer moves it to its device.
        cp_sliced: only the context-parallel rank's own positions stay.
        producer: module that fills it.
        required: always there; otherwise ``when`` says when it is.
        when: condition, for people.
        sample_field: an optional column is copied from this field of ``Sample``.
    """

    name: str
    meaning: str
    form: Literal["ragged", "vector", "plain", "fixed"]
    dtype: str = ""
    per: Literal["sample", "batch", "rank"] = "sample"
    axis: Literal["", "tokens", "inputs", "response", "sets", "borders"] = ""
    on_device: bool = False
    cp_sliced: bool = False
    producer: str = "batch.compile"
    required: bool = True
    when: str = "always"
    sample_field: str = ""


def _optional(name: str, meaning: str, form: Literal["ragged", "plain"], when: str, **kwargs: Any) -> Column:
    return Column(name, meaning, form, required=False, when=when, **kwargs)


def _trained(name: str, meaning: str, when: str = "policy_loss") -> Column:
    """A per-token result of the trainer's own passes."""
    return _optional(
        name,
        meaning,
        "ragged",
        when,
        dtype="float32",
        axis="response",
        on_device=True,
        cp_sliced=True,
        producer="trainer",
    )


def _scheduled(name: str, meaning: str) -> Column:
    return Column(name, meaning, "fixed", per="rank", producer="batch.schedule")


_TABLE = (
    Column("tokens", "prompt and response ids", "ragged", "int64", axis="tokens", on_device=True),
    Column("response_lengths", "R_i", "plain"),
    Column("total_lengths", "L_i", "plain"),
    Column("loss_masks", "1 = trained", "ragged", "int32", axis="response", on_device=True),
    Column("rewards", "reward after group normalisation", "plain"),
    Column("raw_reward", "reward as the grader gave it", "plain", per="batch"),
    Column("truncated", "1 = the response was cut at its maximum length", "plain"),
    Column("sample_indices", "Sample.index", "plain"),
    Column("rollout_ids", "execution that the sample came from", "plain"),
    Column(
        "rollout_mask_sums",
        "trained tokens of all samples with the same rollout id: the loss denominator",
        "vector",
        "float32",
        on_device=True,
    ),
    _optional(
        "rollout_log_probs",
        "log-probs that the engine sampled with",
        "ragged",
        "the engine returned them",
        dtype="float32",
        axis="response",
        on_device=True,
        cp_sliced=True,
        sample_field="rollout_log_probs",
    ),
    _optional(
        "teacher_log_probs",
        "log-probs of a teacher model",
        "ragged",
        "a reward hook set them",
        dtype="float32",
        axis="response",
        on_device=True,
        cp_sliced=True,
        sample_field="teacher_log_probs",
    ),
    _optional(
        "rollout_routed_experts",
        "experts that the engine chose, [L_i - 1, layers, topk], in the smallest integers that hold them",
        "ragged",
        "the engine returned them (--use-rollout-routing-replay)",
        axis="inputs",
        sample_field="rollout_routed_experts",
    ),
    _optional(
        "rollout_top_p_token_ids",
        "ids that the response tokens were sampled from, one token's behind the other's",
        "ragged",
        "top-p or top-k cut the vocabulary",
        dtype="int32",
        axis="sets",
    ),
    _optional(
        "rollout_top_p_token_offsets",
        "where each response token's ids begin, [R_i + 1]; a token that was not sampled has none",
        "ragged",
        "top-p or top-k cut the vocabulary",
        dtype="int32",
        axis="borders",
    ),
    _optional(
        "weight_versions",
        "weight versions that generated the response, one per request",
        "plain",
        "the engine reported them",
        sample_field="weight_versions",
    ),
    _optional(
        "multimodal_train_inputs",
        "processor outputs besides the ids",
        "plain",
        "a sample has them",
        sample_field="multimodal_train_inputs",
    ),
    _optional("metadata", "Sample.train_metadata", "plain", "a sample has it", sample_field="train_metadata"),
    _optional("round_number", "turns of a conversation", "plain", "metadata['round_number'] is set"),
    _optional(
        "local_raw_reward", "raw_reward of the rank's samples", "plain", "with raw_reward", producer="ray.shards"
    ),
    _optional("source_names", "data source of the prompt", "plain", "a sample names its source"),
    _scheduled("partition", "global positions of the rank's samples"),
    _scheduled("micro_batch_indices", "local positions per micro-batch, all steps in order"),
    _scheduled("num_microbatches", "micro-batches of this rank, per step"),
    _scheduled("global_batch_sizes", "rollouts per step, all ranks together"),
    _trained("log_probs", "log-probs under the weights at the start of the rollout's training"),
    _trained("ref_log_probs", "log-probs under the reference model", "use_kl_loss or kl_coef"),
    _trained("entropy", "entropy of the next-token distribution"),
    _trained("advantages", "credit per token"),
    _trained("returns", "target of a value function"),
    _trained("values", "estimate of the critic", "with a critic"),
    _trained("kl", "KL from the reference model inside the rewards, 0 without --kl-coef"),
    _trained("opd_reverse_kl", "log-prob of the student minus that of the teacher", "use_opd"),
)

COLUMNS: dict[str, Column] = {item.name: item for item in _TABLE}


def column(name: str) -> Column:
    """The table's entry for ``name``; a key that a hook added counts as a plain optional per-sample column."""
    known = COLUMNS.get(name)
    return (
        known if known is not None else _optional(name, "added by a hook", "plain", "a hook added it", producer="hook")
    )
