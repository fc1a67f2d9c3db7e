"""Credit on a rank: the advantages of its batch, the forward passes that they need, and the user's functions.

Called by ``trainer`` between the forward passes and the optimizer steps. The formulas are in
``slime.algorithms.credit``. Every context-parallel rank does the same work on whole responses.

``CustomFunctions`` are the functions of the user inside the objective: loss, advantages, importance weights, reducer of
the policy gradient. ``trainer`` loads them once per process. They see lists with one tensor per sample and the whole
``args``, the formulas see flat tensors and settings; this module translates. Responses are whole on every rank, under
context parallelism too. Only the loss sees the rank's part of them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms import Credit, CreditData, Ragged
from slime.algorithms import credit as formulas
from slime.algorithms.arguments import AlgorithmArgs, DistillationArgs, needs_reference
from slime.algorithms.policy_loss import Correct, Correction, MakeReducer
from slime.algorithms.reduce import LossOutput, Reducer, Samples
from slime.backends.training.context_parallel import WHOLE, Sharding, seen_as
from slime.config.groups import from_args, with_values
from slime.hooks import can_be_called, load_optional
from slime.utils import accelerator
from slime.utils.errors import ConfigError, DataError

UserFunction = Callable[..., Any]


@dataclass(frozen=True)
class CustomFunctions:
    """The functions of ``--custom-*-function-path``. None for a flag that is not given.

    Attributes:
        args: handed to every function.
        loss, advantages, tis, pg_reducer, postprocess: see ``CustomLoss``, ``CustomAdvantage``, ``CustomTis``,
            ``CustomPgLossReducer`` and ``RolloutDataPostprocess`` in ``slime.hooks.protocols``.
    """

    args: Namespace | None = None
    loss: UserFunction | None = None
    advantages: UserFunction | None = None
    tis: UserFunction | None = None
    pg_reducer: UserFunction | None = None
    postprocess: UserFunction | None = None

    @classmethod
    def load(cls, args: Namespace, *, vocab_size: int | None = None) -> CustomFunctions:
        """Load every function that ``args`` names.

        Args:
            vocab_size: of the model. The functions get it as ``args.vocab_size``.

        Raises:
            ConfigError: a path that cannot be loaded.
        """
        paths = from_args(AlgorithmArgs, args)
        return cls(
            # padding of the vocabulary must stay out of users' log-probs, also if --vocab-size is not given
            args=args if vocab_size is None else with_values(args, vocab_size=vocab_size),
            loss=load_optional(paths.custom_loss_function_path),
            advantages=load_optional(paths.custom_advantage_function_path),
            tis=load_optional(paths.custom_tis_function_path),
            pg_reducer=load_optional(paths.custom_pg_loss_reducer_function_path),
            postprocess=load_optional(paths.rollout_data_postprocess_path),
        )

    def correct(self, samples: Samples, total_lengths: Sequence[int]) -> Correct | None:
        """The user's importance weights as the policy loss calls them."""
        if self.tis is None:
            return None
        user_tis = self.tis

        def correct(pg_loss: torch.Tensor, train: torch.Tensor, engine: torch.Tensor) -> Correction:
            with seen_as(WHOLE):
                result = user_tis(
                    self.args,
                    pg_loss=pg_loss,
                    train_log_probs=samples.split(train),
                    rollout_log_probs=samples.split(engine),
                    loss_masks=list(samples.loss_masks),
                    total_lengths=list(total_lengths),
                    response_lengths=list(samples.response_lengths),
                )
            return self._correction(result, pg_loss, samples)

        return correct

    def make_pg_reducer(self, samples: Samples, total_lengths: Sequence[int]) -> MakeReducer | None:
        """The user's reducer of the policy-gradient term as the policy loss calls it."""
        if self.pg_reducer is None:
            return None
        user_reducer = self.pg_reducer

        def make(masks: Sequence[torch.Tensor]) -> Reducer:
            lengths = list(samples.response_lengths)
            with seen_as(WHOLE):
                # masks that the importance weights may have changed, not those of the batch
                reducer = user_reducer(list(total_lengths), lengths, list(masks), samples.per_token)

            def reduce(values: torch.Tensor) -> torch.Tensor:
                with seen_as(WHOLE):
                    # called later, outside of the block above
                    result: torch.Tensor = reducer(values)
                return result

            return reduce

        return make

    def run_loss(
        self, batch: Mapping[str, Any], logits: torch.Tensor, reduce: Reducer, sharding: Sharding = WHOLE
    ) -> LossOutput:
        """The user's objective on all of this rank's rows of the logits: the rank's part of it.

        Args:
            sharding: how ``batch`` and ``logits`` are divided.

        Raises:
            ConfigError: no function is given, or it does not return (scalar loss, metrics).
        """
        if self.loss is None:
            raise ConfigError("--loss-type custom_loss needs --custom-loss-function-path.")
        with seen_as(sharding):
            result = self.loss(self.args, batch, logits, reduce)
        where = f"--custom-loss-function-path {self._path('custom_loss_function_path')}"
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
            raise ConfigError(f"{where} must return (loss tensor, dict of metrics), got {type(result).__name__}.")
        loss, metrics = result
        if loss.numel() != 1:
            raise ConfigError(f"{where} must return a scalar loss, got shape {tuple(loss.shape)}.")
        # users may return plain numbers
        values = {name: torch.as_tensor(value, device=loss.device).detach() for name, value in metrics.items()}
        return LossOutput(loss=loss.reshape(()), metrics={name: value.reshape(()) for name, value in values.items()})

    def fill_advantages(self, columns: dict[str, Any]) -> None:
        """Let the user's function put ``advantages`` and ``returns`` into the batch.

        Raises:
            ConfigError: one of them is missing or has not one entry per response token.
        """
        assert self.advantages is not None, "called only with a function"
        with seen_as(WHOLE):
            self.advantages(self.args, columns)
        where = f"--custom-advantage-function-path {self._path('custom_advantage_function_path')}"
        for name in ("advantages", "returns"):
            rows = columns.get(name)
            if rows is None:
                raise ConfigError(f"{where} must set rollout_data[{name!r}]: one tensor per sample.")
            lengths = [len(row) for row in rows]
            if lengths != list(columns["response_lengths"]):
                raise ConfigError(
                    f"{where} set rollout_data[{name!r}] with lengths {lengths}; the responses have "
                    f"{list(columns['response_lengths'])} tokens."
                )

    def run_postprocess(self, rollout_id: int, columns: dict[str, Any]) -> None:
        """Call the user's function between advantages and the first step. It may change ``columns`` in place."""
        if self.postprocess is None:
            return
        with seen_as(WHOLE):
            # both signatures are supported
            if can_be_called(self.postprocess, ("args", "rollout_id", "rollout_data")):
                self.postprocess(self.args, rollout_id, columns)
            else:
                self.postprocess(self.args, columns)

    def _correction(self, result: Any, pg_loss: torch.Tensor, samples: Samples) -> Correction:
        where = f"--custom-tis-function-path {self._path('custom_tis_function_path')}"
        if not isinstance(result, tuple) or len(result) != 3:
            raise ConfigError(f"{where} must return (pg_loss, masks, metrics), got {type(result).__name__}.")
        corrected, masks, metrics = result
        if corrected.shape != pg_loss.shape:
            raise ConfigError(f"{where}: pg_loss must keep its shape {tuple(pg_loss.shape)}, got {corrected.shape}.")
        for name, values in metrics.items():
            if values.shape != pg_loss.shape:
                raise ConfigError(f"{where}: metric {name!r} must have one value per token, got {tuple(values.shape)}.")
        if len(masks) != len(samples.loss_masks):
            raise ConfigError(f"{where}: {len(masks)} masks for {len(samples.loss_masks)} samples.")
        return Correction(corrected, list(masks), {name: values.detach() for name, values in metrics.items()})

    def _path(self, name: str) -> Any:
        return vars(self.args).get(name) if self.args is not None else None


@dataclass(frozen=True)
class Passes:
    """Forward passes before the steps of a rollout.

    Attributes:
        reference: log-probs under the reference model.
        teacher: log-probs under the teacher that the trainer holds.
        old: log-probs under the weights that the steps start from.
        credit: advantages are computed at all.
    """

    reference: bool = False
    teacher: bool = False
    old: bool = False
    credit: bool = False


def passes_needed(
    settings: AlgorithmArgs, distillation: DistillationArgs, *, num_steps: int, has_custom_advantages: bool = False
) -> Passes:
    """The passes that must run before the steps.

    One step per rollout needs no pass for the old policy, unless something reads its log-probs before the step.
    """
    if settings.loss_type == "sft_loss" or not settings.compute_advantages_and_returns:
        return Passes()
    credit_reads_policy = settings.kl_coef != 0 or distillation.use_opd or has_custom_advantages
    # the log-probs of the only step are those of the weights that it starts from: the ratio is exactly 1
    is_reused = num_steps == 1 and settings.loss_type == "policy_loss"
    if settings.use_rollout_logprobs:
        old = settings.get_mismatch_metrics and not is_reused
    else:
        old = credit_reads_policy or not is_reused
    return Passes(
        reference=needs_reference(settings),
        teacher=distillation.use_opd and distillation.opd_type == "megatron",
        old=old or settings.use_rollout_entropy,
        credit=True,
    )


def add_credit(
    columns: dict[str, Any],
    settings: AlgorithmArgs,
    distillation: DistillationArgs,
    custom: CustomFunctions,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill ``kl``, ``advantages``, ``returns`` and under distillation ``opd_reverse_kl``.

    Args:
        columns: the rank's batch with the log-probs that :func:`passes_needed` asked for. A critic's has ``kl``.
        group: data-parallel ranks without context parallelism. All of them call this.

    Raises:
        DataError: log-probs are missing.
    """
    data = _credit_data(columns, settings)
    try:
        if "kl" not in columns:
            columns["kl"] = formulas.reward_kl(data, settings)
        if custom.advantages is None:
            credit = formulas.estimate(data, columns["kl"], settings)
    except ValueError as error:
        raise DataError(str(error)) from error
    if custom.advantages is not None:
        custom.fill_advantages(columns)
        credit = Credit(list(columns["advantages"]), list(columns["returns"]))
    if distillation.use_opd:
        student, teacher = _distilled_pair(data.log_probs, columns.get("teacher_log_probs"))
        credit, columns["opd_reverse_kl"] = formulas.distilled(credit, student, teacher, distillation.opd_kl_coef)
    advantages = credit.advantages
    if settings.normalize_advantages:
        # the group's backend may not take tensors on the cpu, on which the columns are
        device = accelerator.current().device()
        advantages = formulas.normalize(advantages, columns["loss_masks"], group, device=device)
    columns["advantages"], columns["returns"] = advantages, credit.returns


def reward_kl(columns: Mapping[str, Any], settings: AlgorithmArgs) -> list[torch.Tensor]:
    """The KL divergence that enters the rewards, ``[R_i]`` per sample, of a batch whose passes have run."""
    return formulas.reward_kl(_credit_data(columns, settings), settings)


def _credit_data(columns: Mapping[str, Any], settings: AlgorithmArgs) -> CreditData:
    return CreditData(
        rewards=columns["rewards"],
        response_lengths=columns["response_lengths"],
        loss_masks=columns["loss_masks"],
        log_probs=columns.get("rollout_log_probs" if settings.use_rollout_logprobs else "log_probs"),
        ref_log_probs=columns.get("ref_log_probs"),
        values=columns.get("values"),
    )


def _distilled_pair(student: Ragged | None, teacher: Ragged | None) -> tuple[Ragged, Ragged]:
    if teacher is None:
        raise DataError(
            "--use-opd: the batch has no teacher_log_probs; with --opd-type sglang the reward function must set "
            "Sample.teacher_log_probs."
        )
    if student is None:
        raise DataError("--use-opd: the batch has no log-probs of the student.")
    return student, teacher
