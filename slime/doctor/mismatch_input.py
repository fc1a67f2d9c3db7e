"""Input of the mismatch diagnosis: recorded samples with both log-probs, and the referee model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.data.dump_file import load_saved
from slime.observability.run_info import read_run_info
from slime.observability.sample_record import FOLDER, read_rows, record_file, train_files
from slime.utils.errors import DataError


@dataclass(frozen=True)
class Row:
    """One sample.

    Attributes:
        tokens: prompt and response ids, ``[L]``.
        num_prompt: of the prompt.
        mask: True for tokens with loss, ``[R]``.
        all_trainer: log-probs of the response tokens by the trainer, ``[R]``, natural log.
        all_engine: the same by the engine.
        versions: weight versions that the engine reported.
    """

    tokens: list[int]
    num_prompt: int
    mask: torch.Tensor
    all_trainer: torch.Tensor
    all_engine: torch.Tensor
    versions: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        return len(self.mask)

    @property
    def trainer(self) -> torch.Tensor:
        """Of trained tokens only."""
        return self.all_trainer[self.mask]

    @property
    def engine(self) -> torch.Tensor:
        return self.all_engine[self.mask]

    def with_prompt(self, prompt: Sequence[int]) -> Row:
        """The same response after another prompt."""
        tokens = [*prompt, *self.tokens[self.num_prompt :]]
        return dataclasses.replace(self, tokens=tokens, num_prompt=len(prompt))


def read_rows_of(path: Path, rollout: int | None, limit: int) -> list[Row]:
    """Samples of a run's folder, or of a file of ``--save-debug-train-data``.

    Args:
        rollout: of a run's folder. None for the last that was trained on.
        limit: most samples.

    Raises:
        DataError: no sample has the log-probs of both sides.
    """
    rows = list(_of_run(path, rollout) if path.is_dir() else _of_dump(path))
    if not rows:
        raise DataError(
            f"{path}: no sample has log-probs of trainer and engine. A run has those of the trainer with "
            "--use-rollout-entropy, and those of the engine if its custom generate function passes them to "
            "Sample.append_response_tokens."
        )
    return rows[:limit]


def _of_run(run: Path, rollout: int | None) -> Iterable[Row]:
    read_run_info(run)
    number = _last_trained(run) if rollout is None else rollout
    path = record_file(run, "rollout", number)
    if not path.is_file():
        raise DataError(f"{run}: rollout {number} is not recorded (--record-samples).")
    trained = {row["position"]: row for file in train_files(run, number) for row in read_rows(file)}
    for row in read_rows(path):
        found = trained.get(row["position"])
        if found is not None and found["sample_index"] == row["index"]:
            columns = {"log_probs": found["log_probs"], "rollout_log_probs": row["rollout_log_probs"]}
            mask = row["loss_mask"] if row["loss_mask"] is not None else [1] * row["response_length"]
            yield from _row(row["tokens"], mask, columns, row["weight_versions"])


def _last_trained(run: Path) -> int:
    files = sorted((run / FOLDER).glob("train_*_dp*.parquet"))
    if not files:
        raise DataError(f"{run}: nothing was trained on yet, or the run records no samples (--record-samples).")
    return int(files[-1].name.split("_")[1])


def _of_dump(path: Path) -> Iterable[Row]:
    try:
        samples = load_saved(path)["samples"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a file of --save-debug-train-data: {error}") from None
    for sample in samples:
        yield from _row(sample["tokens"], sample["loss_masks"], sample, sample.get("weight_versions"))


def _row(tokens: Any, mask: Any, columns: Mapping[str, Any], versions: Any) -> Iterable[Row]:
    """One row. None if one side is missing or no token is trained."""
    if columns.get("log_probs") is None or columns.get("rollout_log_probs") is None:
        return
    kept = torch.as_tensor(mask).bool()
    if kept.any():
        yield Row(
            tokens=[int(token) for token in tokens],
            num_prompt=len(tokens) - len(kept),
            mask=kept,
            # float64: the differences may be as small as the rounding of fp32.
            all_trainer=torch.as_tensor(columns["log_probs"], dtype=torch.float64),
            all_engine=torch.as_tensor(columns["rollout_log_probs"], dtype=torch.float64),
            versions=tuple(map(str, versions or ())),
        )


@dataclass(frozen=True)
class Opinion:
    """The model's distributions for one response.

    Attributes:
        logits: of the distributions that the response tokens were drawn from, ``[R, V]``, float32.
        ids: the response tokens, ``[R]``.
        router_margin: smallest gap, over the layers, between the last expert that was chosen and the first that was
            not, in router logits, ``[R]``. None for models without experts.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    router_margin: torch.Tensor | None = None

    def log_probs(self, temperature: float) -> torch.Tensor:
        """Of the response tokens, ``[R]``."""
        return self._chosen(torch.log_softmax(self.logits.double() / temperature, -1))

    def nucleus(self, temperature: float, share: float) -> torch.Tensor:
        """Log-probs if only the most likely tokens with a total of ``share`` can be drawn, ``[R]``.

        Tokens outside of this nucleus keep their log-probs.
        """
        log_probs = torch.log_softmax(self.logits.double() / temperature, -1)
        ranked, order = log_probs.exp().sort(-1, descending=True)
        is_kept = ranked.cumsum(-1) - ranked < share  # up to the one that reaches the share
        mass = (ranked * is_kept).sum(-1)
        in_nucleus = torch.zeros_like(is_kept).scatter(-1, order, is_kept)
        kept = in_nucleus.gather(-1, self.ids[:, None]).squeeze(-1)
        return self._chosen(log_probs) - torch.where(kept, mass.log(), torch.zeros_like(mass))

    def _chosen(self, log_probs: torch.Tensor) -> torch.Tensor:
        return log_probs.gather(-1, self.ids[:, None]).squeeze(-1)


class Referee:
    """A Hugging Face model that computes log-probs in float32, one sample at a time."""

    def __init__(self, model: Any, checkpoint: str) -> None:
        self._model = model
        self.checkpoint = checkpoint

    @classmethod
    def load(cls, checkpoint: str) -> Referee:
        """Raises DataError for a checkpoint that transformers cannot load."""
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise DataError(f"{checkpoint} cannot be the referee: {error}") from None
        return cls(model.eval(), checkpoint)

    def in_bfloat16(self) -> Referee:
        return Referee(copy.deepcopy(self._model).to(torch.bfloat16), self.checkpoint)

    @torch.no_grad()
    def opinion(self, row: Row) -> Opinion:
        """One forward pass over the whole sample."""
        ids = torch.tensor([row.tokens])
        experts = getattr(self._model.config, "num_experts_per_tok", None)
        extra = {"output_router_logits": True} if experts else {}
        output = self._model(input_ids=ids, **extra)
        places = slice(row.num_prompt - 1, len(row.tokens) - 1)  # logits at a position predict the next token
        router = output.get("router_logits")
        margin = None
        # If all experts are chosen, the margin does not exist.
        if router and experts is not None and experts < router[0].shape[-1]:
            margin = _margin(router, experts)[places]
        return Opinion(output.logits[0, places].float(), ids[0, row.num_prompt :], margin)


def _margin(router_logits: tuple[torch.Tensor, ...], num_chosen: int) -> torch.Tensor:
    """``[L]``, from one ``[L, experts]`` per layer."""
    gaps = []
    for logits in router_logits:
        ranked = logits.float().sort(-1, descending=True).values
        gaps.append(ranked[:, num_chosen - 1] - ranked[:, num_chosen])
    return torch.stack(gaps).min(0).values
