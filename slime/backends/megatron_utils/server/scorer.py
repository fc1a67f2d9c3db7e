"""One rank of the log-prob server: the trainer's model without an optimizer, which scores sequences.

Called by an actor of ``slime.ray.logprob_server`` on all ranks at once. Knows no HTTP and no queue. The pass is that of
the trainer (``forward``), so that a teacher's log-probs are the numbers a trainer would compute.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.patches.install import install
from slime.backends.megatron_utils.server.requests import Score, ScoreRequest
from slime.backends.megatron_utils.server.vocabulary import Vocabulary, label_log_probs, sample
from slime.backends.training.arguments import ParallelArgs, TrainerArgs
from slime.backends.training.checkpoint_source import find_start, inspect_checkpoint
from slime.backends.training.data import MicroBatch, TrainBatch
from slime.backends.training.loss import response_log_probs
from slime.config.groups import from_args
from slime.utils import accelerator
from slime.utils.errors import ConfigError, SlimeError

__all__ = ["MegatronScorer"]

_NOTHING = ScoreRequest([0, 0])
"""Scored by a rank that has no request left, while others have."""


class MegatronScorer(MegatronTrainer):
    """See the module docstring. Of the trainer it has the model, its place among the ranks, and how weights are read.

    Args:
        args: the resolved command line of the server.
    """

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool = False) -> None:
        super().__init__(args, rank=rank, world_size=world_size, with_ref=with_ref)
        self._generator: torch.Generator | None = None

    def setup(self) -> int:
        """Build the model and load its weights: those that a trainer would start with. Returns 0."""
        install()
        from slime.backends.megatron_utils.setup import build_model_state, init_distributed

        init_distributed(from_args(ParallelArgs, self._args), from_args(TrainerArgs, self._args))
        self._state = build_model_state(self._args, self._shape)
        self._fill(self._readable(find_start(self._checkpoint, self._args.hf_checkpoint)))
        device = accelerator.current().device()
        self._generator = torch.Generator(device).manual_seed(self._args.seed + self._rank)
        return 0

    def load(self, path: str) -> None:
        """Take the weights of a checkpoint of Megatron or Hugging Face.

        Raises:
            ConfigError: there is none that can be read; the weights are the old ones then.
            SlimeError: it does not fit the model; the weights are of neither then.
        """
        source = inspect_checkpoint("model_path", path)
        if source is None:
            raise ConfigError(f"model_path {path} does not exist or holds no checkpoint.")
        source = self._readable(source)
        try:
            self._fill(source)
        except ConfigError as error:
            raise SlimeError(str(error)) from error

    def score(self, micro_batches: Sequence[Sequence[ScoreRequest]]) -> list[list[Score]] | None:
        """Score requests. A collective over all ranks, each with the same number of micro-batches.

        Args:
            micro_batches: of this data-parallel rank; an empty one takes part for the sake of the others.

        Returns:
            The answers, in the same places, on one of the ranks that share the requests; None on the others.
        """
        from slime.backends.megatron_utils.step import outputs_of_last_stage

        filled = [list(requests) or [_NOTHING] for requests in micro_batches]
        requests = [request for part in filled for request in part]
        layout = _Layout.of(requests)
        read = partial(self._read, requests, layout)
        rows = outputs_of_last_stage(self._ready.chunks, self._batch(filled), read)
        if not self._place.keeps_batch:
            return None
        scores = iter([layout.answer(request, rows[position]) for position, request in enumerate(requests)])
        answers = [[next(scores) for _ in part] for part in filled]
        return [part if asked else [] for part, asked in zip(answers, micro_batches, strict=True)]

    def _batch(self, micro_batches: Sequence[Sequence[ScoreRequest]]) -> TrainBatch:
        ends = 0
        indices = []
        for part in micro_batches:
            indices.append(list(range(ends, ends + len(part))))
            ends += len(part)
        requests = [request for part in micro_batches for request in part]
        columns: dict[str, Any] = {
            "tokens": [torch.tensor(request.input_ids, dtype=torch.int64) for request in requests],
            "total_lengths": [len(request.input_ids) for request in requests],
            "response_lengths": [request.num_scored for request in requests],
            "micro_batch_indices": indices,
            "num_microbatches": [len(indices)],
            "global_batch_sizes": [len(requests)],
        }
        return self._train_batch(columns)

    def _read(
        self, requests: Sequence[ScoreRequest], layout: _Layout, micro_batch: MicroBatch, logits: torch.Tensor
    ) -> torch.Tensor:
        """``[N, layout.width]`` float64 of the micro-batch."""
        from slime.backends.megatron_utils.step import tensor_group

        args = self._args
        vocabulary = Vocabulary(self._shape.vocab_size, args.rollout_temperature, tensor_group())
        log_probs, _ = response_log_probs(
            logits,
            micro_batch,
            vocab_size=vocabulary.size,
            temperature=vocabulary.temperature,
            chunk_size=args.log_probs_chunk_size,
            tensor_group=vocabulary.group,
        )
        parts = [log_probs.unsqueeze(1)]
        if layout.num_labels:
            labels = layout.labels([requests[index] for index in micro_batch.indices])
            labels = labels.to(logits.device)[micro_batch.part.response_index]
            chunk_size = args.teacher_label_reduction_chunk_size
            parts.append(micro_batch.gather(label_log_probs(logits, labels, vocabulary, chunk_size=chunk_size)))
        if layout.num_draws:
            assert self._generator is not None, "setup() comes first"
            chunk_size = args.teacher_sample_reduction_chunk_size
            drawn = sample(logits, layout.num_draws, vocabulary, chunk_size=chunk_size, generator=self._generator)
            parts += [micro_batch.gather(values) for values in drawn]
        return torch.cat([part.double() for part in parts], dim=1)


@dataclass(frozen=True)
class _Layout:
    """How everything that is said about a token fits into one row, which is what travels between ranks.

        log-prob | those of the labels | ids that were drawn | their log-probs

    In float64, which holds every id exactly. Requests that ask for less than others leave the rest of a part unused.
    """

    num_labels: int
    num_draws: int

    @classmethod
    def of(cls, requests: Sequence[ScoreRequest]) -> _Layout:
        return cls(max(request.num_labels for request in requests), max(request.sample_n for request in requests))

    def labels(self, requests: Sequence[ScoreRequest]) -> torch.Tensor:
        """``[N, num_labels]`` int64; id 0 where a request has fewer."""
        labels = torch.zeros(sum(request.num_scored for request in requests), self.num_labels, dtype=torch.int64)
        start = 0
        for request in requests:
            if request.num_labels:
                rows = slice(start, start + request.num_scored)
                labels[rows, : request.num_labels] = torch.tensor(request.label_token_ids, dtype=torch.int64)
            start += request.num_scored
        return labels

    def answer(self, request: ScoreRequest, rows: torch.Tensor) -> Score:
        """What the rows ``[len - 1, 1 + num_labels + 2 num_draws]`` of a request say."""
        log_probs, labels, ids, drawn = rows.split([1, self.num_labels, self.num_draws, self.num_draws], dim=1)
        return Score(
            log_probs.squeeze(1).tolist(),
            labels[:, : request.num_labels].tolist() if request.num_labels else None,
            ids[:, : request.sample_n].long().tolist() if request.sample_n else None,
            drawn[:, : request.sample_n].tolist() if request.sample_n else None,
        )
