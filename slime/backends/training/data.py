"""The batch of one rank, packed into micro-batches on the device, and the place of the rank.

Called by the backends' ``step``. ``slime.batch`` schedules the micro-batches of training steps. Those of passes without
gradients are made here, because they may hold more tokens (``--log-probs-max-tokens-per-gpu``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.logprobs import SamplingMask
from slime.backends.training.attention import AttentionPlan, plan_attention
from slime.backends.training.context_parallel import ShardedSequences, Sharding, gather_responses, shard
from slime.backends.training.media import Media, MediaTokens, merge_inputs, place_media
from slime.batch.arguments import CUDA_ROW_MULTIPLE, BatchArgs
from slime.batch.balance import expand_bins_by_splitting, first_fit_pack
from slime.batch.packing import PackedSequences, copy_to, pack
from slime.batch.prefixes import PrefixTree, prefix_tree
from slime.utils import accelerator
from slime.utils.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of the rank, packed.

    Attributes:
        indices: their positions in the rank's batch.
        part: the tokens this rank holds and where its response tokens' logits are.
        response_lengths: R_i, of whole responses.
        sharding: how the samples are divided among ranks.
        all_rows: every row goes through the LM head, not only those that predict response tokens.
        trained: fp32 ``[1, t]``, 1 if a row predicts a token that is trained on. None unless requested.
        sampling: the ids that this rank's response tokens were sampled from. None for the whole vocabulary.
        media: images and videos among the tokens of the whole micro-batch. None for text alone.
    """

    indices: Sequence[int]
    part: ShardedSequences
    response_lengths: list[int]
    sharding: Sharding
    all_rows: bool = False
    trained: torch.Tensor | None = None
    sampling: SamplingMask | None = None
    media: Media | None = None

    @property
    def packed(self) -> PackedSequences:
        """The tokens on this rank: whole samples without context parallelism."""
        return self.part.local

    @property
    def head_rows(self) -> torch.Tensor | None:
        """``[n]`` rows of this rank that go through the LM head. None means all."""
        return None if self.all_rows else self.packed.response_rows

    @functools.cached_property
    def plan(self) -> AttentionPlan:
        """The attention plan, one for all layers."""
        packed, sharding = self.packed, self.sharding
        return plan_attention(
            packed.borders, sharding.cp_rank, sharding.cp_size, device=packed.tokens.device, shared=packed.shared
        )

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's values, one per row in ``packed.response_rows`` -> ``[N]`` of the whole responses."""
        if self.packed.response_pairs is not None:
            return local.index_select(0, self.packed.response_pairs)
        return gather_responses(local, self.part, self.sharding.cp_group)


class TrainBatch:
    """The per-rank dictionary with the columns of ``slime.data.columns``, and views of it.

    Columns hold whole samples on every rank, also under context parallelism. Only the model's inputs are divided.

    Attributes:
        sharding: how it is divided.
        prefixes: of its samples, if a prefix that samples of a micro-batch share passes the model once.

    Raises:
        DataError: the batch has images, but ``media_tokens`` is missing.
    """

    def __init__(
        self,
        columns: dict[str, Any],
        device: torch.device,
        sharding: Sharding | None = None,
        media_tokens: MediaTokens | None = None,
        *,
        shares_prefixes: bool = False,
        prefixes: PrefixTree | None = None,
    ) -> None:
        self.columns = columns
        self._device = device
        self.sharding = sharding or Sharding()
        self._media_tokens = media_tokens
        if media_tokens is None and any(columns.get("multimodal_train_inputs") or ()):
            raise DataError(
                "the rollout has samples with images, which the model is built to train without: it has a vision tower "
                "with --multimodal-keys and --train-backend megatron"
            )
        ends = list(accumulate(columns["num_microbatches"], initial=0))
        micro_batches = columns["micro_batch_indices"]
        if ends[-1] != len(micro_batches):
            raise ValueError(f"{len(micro_batches)} micro-batches, but the steps have {ends[-1]}")
        if sorted(index for indices in micro_batches for index in indices) != list(range(len(columns["tokens"]))):
            raise ValueError(f"the schedule must name each of the {len(columns['tokens'])} samples exactly once")
        self._steps = [micro_batches[a:b] for a, b in pairwise(ends)]
        self.prefixes = prefix_tree(columns) if shares_prefixes and prefixes is None else prefixes

    def with_micro_batches(self, micro_batches: list[list[int]]) -> TrainBatch:
        """The same samples in one step of other micro-batches, for a pass over all of them."""
        schedule = {"micro_batch_indices": micro_batches, "num_microbatches": [len(micro_batches)]}
        columns = self.columns | schedule
        return TrainBatch(columns, self._device, self.sharding, self._media_tokens, prefixes=self.prefixes)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def num_samples(self) -> int:
        return len(self.columns["tokens"])

    def num_micro_batches(self, step: int) -> int:
        return len(self._steps[step])

    def indices(self, step: int) -> list[list[int]]:
        """The positions of each micro-batch's samples."""
        return list(self._steps[step])

    def num_rollouts(self, step: int) -> int:
        """Rollouts of the step over all ranks: the divisor of the loss."""
        return int(self.columns["global_batch_sizes"][step])

    @property
    def num_rollouts_in_all(self) -> int:
        return sum(self.columns["global_batch_sizes"])

    def micro_batches(self, step: int, *, all_rows: bool = False, with_trained: bool = False) -> Iterator[MicroBatch]:
        """The micro-batches of a step, in order.

        Args:
            all_rows: every row goes through the LM head, not only those that predict response tokens.
            with_trained: fill ``MicroBatch.trained``.
        """
        sharding = self.sharding
        for indices in self._steps[step]:
            ordered, shared = ([], []) if self.prefixes is None else self.prefixes.arrange(indices)
            if any(shared):
                indices = ordered
            response_lengths = self.select("response_lengths", indices)
            packed = pack(
                self.select("tokens", indices),
                response_lengths,
                segment_multiple=sharding.segment_multiple,
                pad_multiple=sharding.pad_multiple,
                device="cpu",  # indices are computed there, where nothing waits
                shared=shared if any(shared) else None,
                # equal targets of a row may have been sampled from different cuts of the vocabulary
                joins_targets=self.columns.get("rollout_top_p_token_offsets") is None,
            )
            host = shard(packed, sharding)
            part = host.to(self._device)
            trained = self._trained(indices, part) if with_trained else None
            sampling = self._sampling(indices, host)
            media = self._media(indices, packed)
            yield MicroBatch(indices, part, response_lengths, sharding, all_rows, trained, sampling, media)

    def media_inputs(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Processor outputs of some samples, concatenated. Empty without images."""
        if self.columns.get("multimodal_train_inputs") is None:
            return {}
        return merge_inputs(self.select("multimodal_train_inputs", indices))

    def _media(self, indices: Sequence[int], packed: PackedSequences) -> Media | None:
        inputs = self.media_inputs(indices)
        if not inputs or self._media_tokens is None:
            return None
        try:
            return place_media(inputs, packed.tokens, packed.cu_seqlens, self._media_tokens, self._device)
        except DataError as error:
            raise DataError(f"samples {self.select('sample_indices', indices)}: {error}") from None

    def _sampling(self, indices: Sequence[int], part: ShardedSequences) -> SamplingMask | None:
        if self.columns.get("rollout_top_p_token_offsets") is None:
            return None
        mask = SamplingMask.of(
            self.select("rollout_top_p_token_ids", indices),
            self.select("rollout_top_p_token_offsets", indices),
            # without context parallelism the rank has all rows, and nothing is cut
            select=part.response_index if self.sharding.cp_size > 1 else None,
        )
        ids, rows, is_cut = (copy_to(one, self._device) for one in (mask.ids, mask.rows, mask.is_cut))
        return replace(mask, ids=ids, rows=rows, is_cut=is_cut)

    def _trained(self, indices: Sequence[int], part: ShardedSequences) -> torch.Tensor:
        """fp32 ``[1, t]``: 1 if this rank's row predicts a token that is trained on."""
        trained = torch.zeros(part.local.tokens.shape, device=self._device)
        mask = torch.cat(self.masks(indices)).float()
        # the mask belongs to the token that a row predicts, not to the row's token
        trained[0, part.local.response_rows] = mask[part.response_index]
        return trained

    def select(self, name: str, indices: Sequence[int]) -> list[Any]:
        column = self.columns[name]
        return [column[index] for index in indices]

    def flat(self, name: str, indices: Sequence[int]) -> torch.Tensor | None:
        """A per-response-token column of some samples, concatenated: ``[N]`` on the device. None if absent."""
        if self.columns.get(name) is None:
            return None
        return copy_to(torch.cat(self.select(name, indices)), self._device)

    def masks(self, indices: Sequence[int]) -> list[torch.Tensor]:
        masks = self.select("loss_masks", indices)
        if not masks:
            return []
        return list(torch.split(copy_to(torch.cat(masks), self._device), [len(mask) for mask in masks]))

    def mask_sums(self, indices: Sequence[int]) -> torch.Tensor:
        sums: torch.Tensor = self.columns["rollout_mask_sums"]
        return copy_to(sums[torch.as_tensor(indices, dtype=torch.int64)], self._device)


def row_multiple(settings: BatchArgs) -> int:
    """``--data-pad-size-multiplier``: on CUDA, sizes that repeat keep the allocator's memory in one piece."""
    if settings.data_pad_size_multiplier is not None:
        return settings.data_pad_size_multiplier
    return 1 if accelerator.current().is_cpu else CUDA_ROW_MULTIPLE


@dataclass(frozen=True)
class RankPlace:
    """One rank.

    Attributes:
        dp_rank, dp_size: data-parallel ranks, context parallelism not counted. ``dp_group`` is their group.
        cp_size: ranks that share every sequence.
        tensor_group: ranks that share the vocabulary. None for one rank, which needs no collectives.
        is_main: the one rank that reports the steps.
        keeps_batch: the one rank of those with the same samples that writes them down.
    """

    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup | None
    cp_size: int = 1
    is_main: bool = True
    keeps_batch: bool = True
    tensor_group: dist.ProcessGroup | None = None


def has_own_micro_batches(settings: BatchArgs) -> bool:
    """Whether passes without gradients may hold more tokens, or fewer, than training steps."""
    limit = settings.log_probs_max_tokens_per_gpu
    return settings.use_dynamic_batch_size and limit is not None and limit != settings.max_tokens_per_gpu


def forward_batch(batch: TrainBatch, settings: BatchArgs, *, context_parallel_size: int, multiple: int) -> TrainBatch:
    """The batch with the micro-batches of a pass without gradients. A collective over all ranks.

    Args:
        multiple: divides the number of micro-batches (interleaved pipelines).
    """
    if not has_own_micro_batches(settings):
        return batch
    assert settings.log_probs_max_tokens_per_gpu is not None, "has_own_micro_batches looked"
    lengths = [len(tokens) for tokens in batch.columns["tokens"]]
    # the flag counts tokens per rank, and context-parallel ranks share every sequence
    cap = settings.log_probs_max_tokens_per_gpu * context_parallel_size
    bins = first_fit_pack(lengths, cap) if batch.prefixes is None else batch.prefixes.pack(range(len(lengths)), cap)
    largest, fewest_samples = _over_all_ranks(len(bins), len(lengths))
    # all ranks run equally many micro-batches, because each ends in collectives
    target = math.ceil(largest / multiple) * multiple
    if target > fewest_samples:
        return batch  # some rank has too few samples for its share
    if batch.prefixes is None:
        expand_bins_by_splitting(bins, target, lengths)
    else:
        batch.prefixes.expand(bins, target)
    return batch.with_micro_batches(bins)


def _over_all_ranks(num_bins: int, num_samples: int) -> tuple[int, int]:
    """Most micro-batches and fewest samples of a rank."""
    # negative: one MAX finds the largest and the smallest
    values = torch.tensor([num_bins, -num_samples], device=accelerator.current().device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    most, fewest = values.tolist()
    return int(most), -int(fewest)
