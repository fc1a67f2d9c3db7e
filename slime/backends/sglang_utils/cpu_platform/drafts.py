"""SGLang's speculation on a CPU with drafts from the run's own history (``--sglang-speculative-algorithm NGRAM``).

SGLang's worker needs CUDA kernels, and on a CPU replaces samples by the most probable token. Here each position of a
draft is sampled with the engine's own sampler from the model's logits, and the draft is kept up to the first token that
differs. The tokens are therefore samples of the model for any draft. With seeds they are the tokens that the engine
samples without drafts, because the sampler's noise depends on seed and position alone.

:class:`History` holds responses to the same prompts from earlier in the run, as drafts of the next ones.
"""

from __future__ import annotations

import copy
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.cpp_ngram.external_corpus import SEPARATOR_TOKEN
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

_MOST_TOKENS = 16 << 20  # 64 MB


def replace_kernels() -> None:
    """Replace the triton kernels that SGLang starts around a speculating worker."""
    # It copies keys of accepted branches of a tree. A chain needs no copy.
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: setattr(pool, "_kv_copy_config", None)
    allocation.assign_req_to_token_pool_func = write_slots


def write_slots(
    rows: torch.Tensor, table: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, slots: torch.Tensor, size: int
) -> None:
    """Write ``slots`` one after another to the columns from ``begin`` to ``end`` of the ``rows`` of ``table``."""
    counts = (end - begin).long()
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    column = torch.arange(len(owner)) - (torch.cumsum(counts, 0) - counts)[owner] + begin.long()[owner]
    table[rows.long()[owner], column] = slots[: len(owner)].to(table.dtype)


class DraftRows(SpecInput):
    """Rows of one verification. Row 0 of a sequence is its last token, the others are its draft.

    Attributes:
        lengths: int64 [B], rows of each sequence.
        owner: int64 [R], the sequence of each row.
        positions: int64 [R], position of each row in its sequence.
    """

    def __init__(self, width: int, lengths: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.draft_token_num = self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = width
        self.future_indices = self.custom_mask = None
        if lengths is None or seq_lens is None:
            return
        self.lengths = lengths
        self.starts = torch.cumsum(lengths, 0) - lengths
        self.owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        self.depth = torch.arange(len(self.owner)) - self.starts[self.owner]
        self.positions = seq_lens[self.owner] + self.depth

    def filter_batch(self, new_indices: Any, new_indices_cpu: Any = None) -> None:
        """Nothing is kept from step to step."""

    def merge_batch(self, other: Any) -> None:
        """Nothing is kept from step to step."""


class HistoryWorker(BaseSpecWorker):
    """Decodes with drafts from finished responses to the same prompt, in place of SGLang's worker of ``NGRAM``."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.speculative_num_draft_tokens: int = get_spec().speculative_num_draft_tokens
        self._history = History(_MOST_TOKENS)
        self._running: dict[str, tuple[Any, Cursor]] = {}

    @property
    def target_worker(self) -> Any:
        """The worker of the model."""
        return self._target_worker

    @property
    def draft_worker(self) -> None:
        """None: no model drafts."""

    def alloc_memory_pool(self, **_: Any) -> None:
        """Nothing to allocate."""

    def clear_cache_pool(self) -> None:
        """Keep the history: responses of older weights are drafts as well, and are verified."""

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        """Remember responses of other engines (``slime/rollout/prompt_history.py``). Returns their number of tokens."""
        prompts, responses = token_chunks[::2], token_chunks[1::2]
        if len(prompts) != len(responses) or any(prompt[0] != SEPARATOR_TOKEN for prompt in prompts):
            raise ValueError("an engine on a CPU accepts no texts as a corpus, only prompts and responses in turns")
        for prompt, response in zip(prompts, responses, strict=True):
            self._history.add(self._history.begin(prompt[1:]), response)
        return sum(map(len, token_chunks))

    def commit_corpus_load(self, *_: Any) -> None:
        """Nothing to commit."""

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Keep the responses: :class:`History` forgets the oldest."""

    def on_verify_complete_cpu(self, *_: Any, **__: Any) -> None:
        """Nothing to adapt: :class:`History` has the widths."""

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """One step of the scheduler: a prefill as usual, or a verification."""
        if not batch.forward_mode.is_decode():
            result = self._target_worker.forward_batch_generation(batch)
            accepted = torch.ones(len(batch.reqs), dtype=torch.int32)
            return self._result(result.logits_output, result.next_token_ids, accepted, batch.seq_lens.clone())
        drafts = self._drafts(batch)
        slots = batch.req_to_token_pool.req_to_token
        if all(len(one) == 1 for one in drafts):
            return self._decode(batch, torch.tensor(drafts).flatten(), slots)
        rows = DraftRows(self.speculative_num_draft_tokens, torch.tensor([len(one) for one in drafts]), batch.seq_lens)
        ids = torch.tensor([token for one in drafts for token in one])
        batch.forward_mode, batch.spec_info, batch.input_ids = ForwardMode.TARGET_VERIFY, rows, ids
        batch.out_cache_loc = slots[batch.req_pool_indices[rows.owner], rows.positions].long()
        output = self._target_worker.forward_batch_generation(batch, is_verify=True).logits_output
        tokens = self._sample(output.next_token_logits, batch.sampling_info, rows)
        accepted, index = _accepted(ids, tokens, rows)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, tokens, accept_index=index)
        for req, one, count in zip(batch.reqs, drafts, accepted.tolist(), strict=True):
            self._history.note(self._running[req.rid][1], len(one) - 1, count - 1)
        batch.forward_mode = ForwardMode.DECODE
        return self._result(output, tokens[index.clamp(min=0)].flatten(), accepted, batch.seq_lens + accepted)

    def _decode(self, batch: Any, ids: torch.Tensor, slots: torch.Tensor) -> GenerationBatchResult:
        """A step without drafts: SGLang's own decoding, all of whose sampling options work."""
        batch.input_ids, batch.spec_info = ids, None
        batch.out_cache_loc = slots[batch.req_pool_indices, batch.seq_lens].long()
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens, int(batch.seq_lens.sum())
        result = self._target_worker.forward_batch_generation(batch)
        output = result.logits_output
        if batch.return_logprob:
            output.next_token_logprobs = output.next_token_logprobs[:, None]
        for req in batch.reqs:
            self._history.note(self._running[req.rid][1], 0, 0)
        return self._result(output, result.next_token_ids, torch.ones_like(ids, dtype=torch.int32), batch.seq_lens, 1)

    def _result(
        self, output: Any, tokens: Any, accepted: Any, seq_lens: Any, width: int | None = None
    ) -> GenerationBatchResult:
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=tokens,
            can_run_cuda_graph=False,
            accept_lens=accepted,
            new_seq_lens=seq_lens,
            next_draft_input=DraftRows(self.speculative_num_draft_tokens),
            speculative_num_draft_tokens=width or self.speculative_num_draft_tokens,
        )

    def _drafts(self, batch: Any) -> list[list[int]]:
        """The last token of each sequence and its draft. Sequences that left the batch become history."""
        now = {req.rid for req in batch.reqs}
        for rid in [rid for rid in self._running if rid not in now]:
            req, cursor = self._running.pop(rid)
            self._history.add(cursor, req.output_ids_through_stop)
        longest = self.speculative_num_draft_tokens - 1 if _is_plain(batch) else 0
        drafts = []
        for req in batch.reqs:
            if req.rid not in self._running:
                self._running[req.rid] = req, self._history.begin(req.origin_input_ids)
            # one token follows the draft
            room = min(req.sampling_params.max_new_tokens - len(req.output_ids) - 1, longest)
            draft = self._history.draft(self._running[req.rid][1], req.output_ids, room)
            drafts.append([req.output_ids[-1], *draft])
        return drafts

    def _sample(self, logits: torch.Tensor, info: Any, rows: DraftRows) -> torch.Tensor:
        """The next token after every row, by the engine's sampler: int32 [R]."""
        if info.is_all_greedy:
            return logits.argmax(-1).to(torch.int32)
        wide = copy.copy(info)
        wide.temperatures, wide.top_ps = info.temperatures[rows.owner], info.top_ps[rows.owner]
        wide.top_ks, wide.min_ps = info.top_ks[rows.owner], info.min_ps[rows.owner]
        wide.sampling_seed = None if info.sampling_seed is None else info.sampling_seed[rows.owner]
        is_plain = not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling)
        probs = torch.softmax(logits / wide.temperatures, -1)
        tokens, _ = self._target_worker.model_runner.sampler._sample_from_probs(probs, wide, rows.positions, is_plain)
        return tokens.to(torch.int32)


def _is_plain(batch: Any) -> bool:
    """Whether the distribution of a token depends on the tokens before it through the model alone."""
    info = batch.sampling_info
    return not (
        batch.has_grammar
        or info.has_custom_logit_processor
        or info.logit_bias is not None
        or (info.penalizer_orchestrator is not None and info.penalizer_orchestrator.is_required)
    )


def _accepted(ids: torch.Tensor, tokens: torch.Tensor, rows: DraftRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that each sequence gains, int32 [B], and their rows, int64 [B, width] filled up with -1.

    Args:
        ids: int64 [R], tokens of the rows.
        tokens: int32 [R], sampled tokens after the rows.
    """
    is_right = torch.zeros(len(rows.lengths), int(rows.lengths.max()), dtype=torch.bool)
    # a draft is right if it is the sample after the row before it
    is_right[rows.owner[1:], rows.depth[1:]] = ids[1:] == tokens[:-1]
    is_right[:, 0] = True  # the last token of a sequence is not a draft
    accepted = is_right.int().cumprod(1).sum(1).to(torch.int32)
    places = torch.arange(rows.draft_token_num)[None]
    index = torch.where(places < accepted[:, None], rows.starts[:, None] + places, -1)
    return accepted, index


_MOST_PER_PROMPT = 32
_CONTEXT = 3  # tokens that a place in a response has in common with the sequence
_BYTES = array("i").itemsize
# A sequence whose drafts fail this often in a row gets no more of them.
_MOST_MISSES = 3
# A search reads all responses to the prompt. One for each token would take longer than the model does.
_LONGEST_PAUSE = 64


@dataclass
class Cursor:
    """The place of one sequence in its prompt's responses.

    Attributes:
        source: response that the last draft was taken from.
        at: index in it of the next token of the sequence.
        width: tokens of the next draft. Doubles after a draft that was accepted as a whole.
        misses: drafts in a row of which no token was accepted.
        pause: tokens until the responses are searched again. ``next_pause`` doubles if a search finds nothing.
    """

    key: bytes
    source: array[int] | None = None
    at: int = 0
    width: int = 2
    misses: int = 0
    pause: int = 0
    next_pause: int = 1


@dataclass
class History:
    """Responses by prompt, newest first. The oldest prompts are forgotten.

    Args:
        most_tokens: number of tokens that are kept, four bytes each.
    """

    most_tokens: int
    num_tokens: int = 0
    _prompts: OrderedDict[bytes, list[array[int]]] = field(default_factory=OrderedDict)

    def begin(self, prompt: Sequence[int]) -> Cursor:
        """The cursor of a new sequence."""
        return Cursor(blake2b(array("i", prompt).tobytes(), digest_size=16).digest())

    def add(self, cursor: Cursor, response: Sequence[int]) -> None:
        """Remember the response of a finished sequence, once."""
        found = self._prompts.setdefault(cursor.key, [])
        self._prompts.move_to_end(cursor.key)
        new = array("i", response)
        if new in found:
            found.remove(new)
            self.num_tokens -= len(new)
        found.insert(0, new)
        self.num_tokens += len(new)
        if len(found) > _MOST_PER_PROMPT:
            self.num_tokens -= len(found.pop())
        while self.num_tokens > self.most_tokens:
            _, oldest = self._prompts.popitem(last=False)
            self.num_tokens -= sum(map(len, oldest))

    def draft(self, cursor: Cursor, response: array[int], room: int) -> Sequence[int]:
        """At most ``room`` tokens that may follow the unfinished ``response``. Often none."""
        if cursor.misses >= _MOST_MISSES or room <= 0:
            return ()
        source = cursor.source
        if source is None or cursor.at >= len(source) or source[cursor.at - 1] != response[-1]:
            source = self._search(cursor, response)
        if source is None:
            return ()
        return source[cursor.at : cursor.at + min(room, cursor.width)]

    def note(self, cursor: Cursor, drafted: int, accepted: int) -> None:
        """Note how many of the ``drafted`` tokens the model sampled as well."""
        cursor.at += accepted + 1
        if drafted:
            cursor.misses = 0 if accepted else cursor.misses + 1
            cursor.next_pause = 1 if accepted else cursor.next_pause
            cursor.width = 2 * cursor.width if accepted == drafted else accepted + 1

    def _search(self, cursor: Cursor, response: array[int]) -> array[int] | None:
        cursor.source = None
        cursor.pause -= 1
        if cursor.pause < 0:
            self._find(cursor, response)
            if cursor.source is None:
                cursor.pause, cursor.next_pause = cursor.next_pause, min(2 * cursor.next_pause, _LONGEST_PAUSE)
        return cursor.source

    def _find(self, cursor: Cursor, response: array[int]) -> None:
        responses = self._prompts.get(cursor.key, ())
        for source in responses:
            if len(source) > len(response) and source[: len(response)] == response:
                cursor.source, cursor.at = source, len(response)
                return
        tail = array("i", response[-_CONTEXT:]).tobytes()
        for source in responses:
            at = source.tobytes().find(tail)
            end = at + len(tail)
            if at >= 0 and at % _BYTES == 0 and end // _BYTES < len(source):
                cursor.source, cursor.at = source, end // _BYTES
                return
