"""One rank of the log-prob server: the trainer's model without an optimizer, which scores sequences.

An actor of ``slime.ray.logprob_server`` calls it on all ranks at once. It knows neither HTTP nor the queue. It uses the
trainer's forward pass, so that a teacher's log-probs equal those a trainer would compute.

The vocabulary is divided among tensor ranks: rank k holds the ids ``[k V/tp, (k+1) V/tp)``. Columns from ``vocab_size``
on are padding and are never sampled. Rows are handled in chunks, so that one fp32 copy of ``[chunk, V/tp]`` exists at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.process_groups import init_distributed, rank_place, tensor_group
from slime.backends.megatron_utils.server.queue import Score, ScoreRequest
from slime.backends.megatron_utils.setup import build_model_state
from slime.backends.megatron_utils.step import outputs_of_last_stage
from slime.backends.training.arguments import ParallelArgs, TrainerArgs
from slime.backends.training.checkpoint_source import find_start, inspect_checkpoint
from slime.backends.training.data import MicroBatch, TrainBatch
from slime.backends.training.loss import response_log_probs
from slime.config.groups import from_args
from slime.utils import accelerator
from slime.utils.errors import ConfigError, SlimeError

# The dummy of a rank without requests while other ranks have some.
_NOTHING = ScoreRequest([0, 0])


class MegatronScorer(MegatronTrainer):
    """One rank of the server. Inherits the trainer's model, its place among the ranks, and the loading of weights."""

    _generator: torch.Generator | None = None

    def setup(self) -> int:
        """Build the model and load its weights: those that a trainer would start with. Returns 0."""
        init_distributed(from_args(ParallelArgs, self._args), from_args(TrainerArgs, self._args))
        self._place = rank_place()
        self._ready = build_model_state(self._run, self._shape)
        self._fill(self._readable(find_start(self._checkpoint, self._args.hf_checkpoint)))
        device = accelerator.current().device()
        # Ranks draw independently of each other.
        self._generator = torch.Generator(device).manual_seed(self._args.seed + self._rank)
        return 0

    def load(self, path: str) -> None:
        """Take the weights of a checkpoint of Megatron or Hugging Face.

        Raises:
            ConfigError: the path has no readable checkpoint. The weights have not changed.
            SlimeError: it does not fit the model. The weights are unusable.
        """
        source = inspect_checkpoint("model_path", path)
        if source is None:
            raise ConfigError(f"model_path {path} does not exist or holds no checkpoint.")
        source = self._readable(source)
        try:
            self._fill(source)
        except ConfigError as error:  # a ConfigError would mean that the weights have not changed
            raise SlimeError(str(error)) from error

    def score(self, micro_batches: Sequence[Sequence[ScoreRequest]]) -> list[list[Score]] | None:
        """Score requests. A collective over all ranks, each with the same number of micro-batches.

        Args:
            micro_batches: of this data-parallel rank. An empty one still takes part in collectives.

        Returns:
            The answers, at the same positions, on one of the ranks that share the requests. None on the others.
        """
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
    """The layout of one row per token with all its results: rows are sent between ranks.

        log-prob | those of the labels | ids that were drawn | their log-probs

    In float64, which holds every id exactly. Requests that ask for less than others leave the rest of a part unused.
    """

    num_labels: int
    num_draws: int

    @classmethod
    def of(cls, requests: Sequence[ScoreRequest]) -> _Layout:
        return cls(max(request.num_labels for request in requests), max(request.sample_n for request in requests))

    def labels(self, requests: Sequence[ScoreRequest]) -> torch.Tensor:
        """``[N, num_labels]`` int64, padded with id 0."""
        labels = torch.zeros(sum(request.num_scored for request in requests), self.num_labels, dtype=torch.int64)
        start = 0
        for request in requests:
            if request.num_labels:
                rows = slice(start, start + request.num_scored)
                labels[rows, : request.num_labels] = torch.tensor(request.label_token_ids, dtype=torch.int64)
            start += request.num_scored
        return labels

    def answer(self, request: ScoreRequest, rows: torch.Tensor) -> Score:
        """The answer in the rows ``[len - 1, 1 + num_labels + 2 num_draws]`` of a request."""
        log_probs, labels, ids, drawn = rows.split([1, self.num_labels, self.num_draws, self.num_draws], dim=1)
        return Score(
            log_probs.squeeze(1).tolist(),
            labels[:, : request.num_labels].tolist() if request.num_labels else None,
            ids[:, : request.sample_n].long().tolist() if request.sample_n else None,
            drawn[:, : request.sample_n].tolist() if request.sample_n else None,
        )


@dataclass(frozen=True)
class Vocabulary:
    """The ids and the temperature of the distribution that logits describe.

    Attributes:
        size: real token ids.
        temperature: of the rollout: logits are divided by it.
        group: ranks that share the ids, or None.
    """

    size: int
    temperature: float
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True)
class _Rows:
    """Some rows of the logits.

    Attributes:
        part: which rows of all.
        logits: fp32 ``[c, ids of this rank]``, divided by the temperature.
        masses: ``[ranks, c]``: log of the sum of exp over each rank's ids.
    """

    part: slice
    logits: torch.Tensor
    masses: torch.Tensor

    @property
    def normalizer(self) -> torch.Tensor:
        """``[c, 1]``: log of the sum of exp over the vocabulary."""
        return self.masses.logsumexp(0).unsqueeze(1)


def label_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, *, chunk_size: int
) -> torch.Tensor:
    """``log softmax(logits / temperature)`` at several ids of each row: fp32 ``[n, k]``.

    Args:
        logits: ``[n, V/tp]``.
        labels: ``[n, k]`` int64, global ids.
    """
    out = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    first = vocabulary.rank * logits.shape[1]
    for rows in _chunks(logits, vocabulary, chunk_size):
        local = labels[rows.part] - first
        found = _at(rows.logits, local, (local >= 0) & (local < rows.logits.shape[1]))
        out[rows.part] = _largest(found, vocabulary) - rows.normalizer
    return out


def sample(
    logits: torch.Tensor, num: int, vocabulary: Vocabulary, *, chunk_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """``num`` independent draws from each row's distribution: ids int64 ``[n, num]`` and their log-probs fp32.

    Draws have two stages, so that no rank needs the whole row: first the rank that owns the id, then one of its ids.
    """
    ids = torch.full((logits.shape[0], num), -1, dtype=torch.int64, device=logits.device)
    log_probs = torch.full(ids.shape, -math.inf, dtype=torch.float32, device=logits.device)
    first = vocabulary.rank * logits.shape[1]
    for rows in _chunks(logits, vocabulary, chunk_size):
        owners = _draw(rows.masses.T, num, generator)  # by the probability of all ids of a rank
        if vocabulary.group is not None:
            # Each rank has drawn other owners: those of rank 0 count.
            dist.broadcast(owners, group=vocabulary.group, group_src=0)
        if rows.logits.shape[1]:  # a rank may hold padding only
            local = _draw(rows.logits, num, generator)
            is_mine = owners == vocabulary.rank
            ids[rows.part] = torch.where(is_mine, local + first, -1)
            log_probs[rows.part] = _at(rows.logits, local, is_mine) - rows.normalizer
    return _largest(ids, vocabulary), _largest(log_probs, vocabulary)


def _chunks(logits: torch.Tensor, vocabulary: Vocabulary, chunk_size: int) -> Iterator[_Rows]:
    width = logits.shape[1]
    num_ids = max(0, min(width, vocabulary.size - vocabulary.rank * width))
    for start in range(0, logits.shape[0], chunk_size):
        part = slice(start, min(start + chunk_size, logits.shape[0]))
        scaled = logits[part, :num_ids].float() / vocabulary.temperature
        yield _Rows(part, scaled, _masses(scaled, vocabulary.group))


def _masses(scaled: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    mine = scaled.logsumexp(1) if scaled.shape[1] else scaled.new_full((scaled.shape[0],), -math.inf)
    if group is None:
        return mine.unsqueeze(0)
    masses = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(masses, mine, group=group)
    return torch.stack(masses)


def _draw(logits: torch.Tensor, num: int, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(logits.softmax(1), num, replacement=True, generator=generator)


def _at(logits: torch.Tensor, local: torch.Tensor, is_mine: torch.Tensor) -> torch.Tensor:
    """Values at this rank's ids, -inf for those of others."""
    if not logits.shape[1]:
        return logits.new_full(local.shape, -math.inf)
    return torch.where(is_mine, logits.gather(1, local.clamp(0, logits.shape[1] - 1)), -math.inf)


def _largest(values: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    # Each value has one owner among the ranks. The others hold -inf or -1.
    if vocabulary.group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=vocabulary.group)
    return values
