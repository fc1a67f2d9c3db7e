"""What earlier rollouts tell about a prompt: its lengths give the order of a rollout, its responses give drafts.

A rollout ends with its longest response. If that begins last, engines wait for it. Responses to a prompt have similar
lengths from epoch to epoch, so a prompt's last responses predict its next ones. Prompts that were drawn for an earlier
rollout come first: with over-sampling, those of short responses would otherwise be left over by every rollout.

Drafts (``--sglang-speculative-algorithm NGRAM``): an engine remembers its own responses, but in the next epoch another
one may get the prompt. Which one, the router decides later, so all engines get the responses
(``/add_external_corpus``). Each draft is verified: without them an engine only generates more slowly.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from argparse import Namespace
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import httpx

from slime.data.sample import Sample, iter_samples
from slime.utils.async_utils import call_in_thread

logger = logging.getLogger(__name__)

_MOST_PROMPTS = 200_000  # whose lengths are remembered: about 30 MB
_TAIL_SHARE = 0.05

_MOST_TOKENS = 2**28  # of remembered responses: 1 GB
_MOST_RESPONSES = 8  # to a prompt
# SGLang builds an automaton in 2.4 µs and 465 bytes per token, in each process of an engine, which waits meanwhile.
_MOST_SENT = 2_000_000
_MOST_AT_ONCE = 16  # engines that receive them
_SEND_TIMEOUT_S = 120.0
_CORPUS = "slime"
SEPARATOR = -(2**31)  # kSeparatorToken of SGLang's suffix automaton
# Generated tokens per verification. With fewer, drafts of older weights do not pay.
_LEAST_GAIN = 1.05

Fetch = Callable[[int], Sequence[Any]]
Submit = Callable[[list[Any]], list[asyncio.Task[Any]]]


class LongTail:
    """Expected lengths of prompts, and end times of samples, for the rollouts of one process.

    Args:
        most: number of prompts whose length is remembered. The oldest is forgotten.
    """

    def __init__(self, most: int = _MOST_PROMPTS) -> None:
        self._longest_first = False
        self._most = most
        self._lengths: dict[bytes, float] = {}
        self._ends: list[float] | None = None
        self._newest = -1  # largest sample index drawn so far

    def begin(self, fetch: Fetch, *, longest_first: bool) -> Fetch:
        """Begin a rollout. Returns ``fetch``, the source of its prompts, in the order to generate.

        Args:
            longest_first: by expected length (``--rollout-longest-first``). Otherwise the order stays.
        """
        self._longest_first, self._ends = longest_first, []
        return (lambda count: self._ordered(fetch(count))) if longest_first else fetch

    def note_sample(self, *, counts: bool) -> None:
        """Note that a sample is finished, if it ``counts``. Without effect outside a rollout."""
        if counts and self._ends is not None:
            self._ends.append(time.monotonic())

    def end(self, groups: Sequence[Any]) -> dict[str, float]:
        """End the rollout with these finished groups. Returns its metrics."""
        if self._longest_first:
            self._remember(groups)
        ends, self._ends = self._ends, None
        return {"perf/tail_time": tail_time(ends)} if ends else {}

    def _ordered(self, groups: Sequence[Any]) -> list[Any]:
        # A prompt without history counts as the mean. Without any history, the order is that of the data source.
        mean = sum(self._lengths.values()) / max(1, len(self._lengths))
        newest = self._newest

        def place(group: Any) -> float:
            sample = next(iter_samples(group))
            if isinstance(sample.index, int):
                self._newest = max(self._newest, sample.index)
                if sample.index <= newest:
                    return -math.inf
            return -self._lengths.get(prompt_key(sample), mean)

        return sorted(groups, key=place)

    def _remember(self, groups: Sequence[Any]) -> None:
        for group in groups:
            samples = list(iter_samples(group))
            key = prompt_key(samples[0])
            self._lengths.pop(key, None)  # the newest are at the end
            self._lengths[key] = sum(sample.response_length for sample in samples) / len(samples)
        while len(self._lengths) > self._most:
            del self._lengths[next(iter(self._lengths))]


def prompt_key(sample: Sample) -> bytes:
    """Identifies the prompt of a sample across rollouts."""
    text = sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt, default=str, sort_keys=True)
    return blake2b(text.encode(), digest_size=8).digest()


def tail_time(ends: Sequence[float]) -> float:
    """Seconds between the end of the first 95 % of the samples and that of the last one.

    Args:
        ends: time at which each sample was finished.
    """
    times = sorted(ends)
    return times[-1] - times[math.ceil((1 - _TAIL_SHARE) * len(times)) - 1]


class DraftHistory:
    """The newest responses to each prompt, of the rollouts of one process.

    Args:
        most_tokens: number of tokens that are kept, four bytes each. The prompts that were generated longest ago are
            forgotten first.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self.num_tokens = 0
        self._most_tokens = most_tokens
        self._prompts: OrderedDict[bytes, tuple[array[int], deque[array[int]]]] = OrderedDict()
        self._is_used = False
        self._refusal = ""
        self._keys: list[bytes] = []  # of this rollout's prompts
        self._sending: asyncio.Task[None] | None = None

    def begin(self, args: Namespace, submit: Submit) -> Submit:
        """Begin a rollout. Returns ``submit``, which also sends the earlier responses to the groups, in a thread."""
        flags = vars(args)  # those of a user's test lack the engine's
        self._is_used = flags.get("sglang_speculative_algorithm") == "NGRAM" and not self._refusal
        self._keys = []
        router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        room = min(_MOST_SENT, flags.get("sglang_speculative_ngram_external_corpus_max_tokens") or _MOST_SENT)

        def send_and_submit(groups: list[Any]) -> list[asyncio.Task[Any]]:
            self._keys += [prompt_key(next(iter_samples(group))) for group in groups]
            # SGLang divides its budget of draft tokens among corpora, so there is one, of all prompts of the rollout.
            if chunks := self.corpus(self._keys, room):
                earlier = self._sending
                self._sending = asyncio.create_task(self._send(router, chunks, earlier))
            return submit(groups)

        return send_and_submit if self._is_used else submit

    def end(self, groups: Sequence[Any]) -> None:
        """End the rollout, and remember the responses of these groups."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        if not self._is_used:
            return
        sent = {key for key in self._keys if key in self._prompts}
        gain = _gain(sample for group in groups for sample in iter_samples(group) if prompt_key(sample) in sent)
        if gain is not None and gain < _LEAST_GAIN:
            logger.info("drafts: %.2f tokens per verification, so the responses of older weights are forgotten", gain)
            self._prompts.clear()
            self.num_tokens = 0
        for group in groups:
            self.remember(group)

    def remember(self, group: Any) -> None:
        """Remember the finished responses of a group."""
        for sample in iter_samples(group):
            is_finished = sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
            prompt = array("i", sample.tokens[: -sample.response_length]) if sample.response_length else array("i")
            if not is_finished or not prompt:
                continue
            key = prompt_key(sample)
            known, responses = self._prompts.setdefault(key, (prompt, deque()))
            self._prompts.move_to_end(key)
            if known != prompt:  # a part of an agent's conversation, which does not continue the prompt
                continue
            self.num_tokens += sample.response_length + (0 if responses else len(prompt))
            responses.appendleft(array("i", sample.tokens[-sample.response_length :]))
            if len(responses) > _MOST_RESPONSES:
                self.num_tokens -= len(responses.pop())
        while self.num_tokens > self._most_tokens:
            _, (prompt, responses) = self._prompts.popitem(last=False)
            self.num_tokens -= len(prompt) + sum(map(len, responses))

    def corpus(self, keys: Iterable[bytes], most_tokens: int) -> list[list[int]]:
        """Prompts, each after a separator, and responses in turns. The newest, which SGLang prefers, is the last one.

        Args:
            keys: :func:`prompt_key` of the prompts.
            most_tokens: the newest response to each prompt has priority over the second newest.
        """
        found = [self._prompts[key] for key in dict.fromkeys(keys) if key in self._prompts]
        pairs: list[tuple[array[int], array[int]]] = []
        for age in range(_MOST_RESPONSES):
            for prompt, responses in found:
                if age < len(responses) and (size := 1 + len(prompt) + len(responses[age])) <= most_tokens:
                    most_tokens -= size
                    pairs.append((prompt, responses[age]))
        return [chunk for prompt, one in reversed(pairs) for chunk in ([SEPARATOR, *prompt], list(one))]

    async def _send(self, router: str, chunks: list[list[int]], earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        try:
            refusal = await call_in_thread(_replace_corpus, router, chunks)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            logger.warning("drafts: earlier responses did not reach the engines, which generate without: %r", error)
            return
        if refusal:  # by its configuration, so it would refuse the next corpus, too
            logger.info("drafts: earlier responses are not sent to the engines: %s", refusal)
            self._refusal, self._is_used, self.num_tokens = refusal, False, 0
            self._prompts.clear()


def _gain(samples: Iterable[Sample]) -> float | None:
    """Generated tokens per verification, or None without a verification."""
    infos = [sample.spec_info for sample in samples]
    steps = sum(info.spec_verify_ct for info in infos)
    return sum(info.completion_token_num for info in infos) / steps if steps else None


def _replace_corpus(router: str, chunks: list[list[int]]) -> str:
    """Replace the corpus of every engine. Returns why one refused it, or nothing."""
    body = json.dumps({"corpus_id": _CORPUS, "token_chunks": chunks}, separators=(",", ":")).encode()
    with httpx.Client(trust_env=False, timeout=_SEND_TIMEOUT_S) as client, ThreadPoolExecutor(_MOST_AT_ONCE) as pool:

        def replace(url: str) -> str:
            client.post(f"{url}/remove_external_corpus", json={"corpus_id": _CORPUS})  # an engine may have none
            reply = client.post(f"{url}/add_external_corpus", content=body)
            if reply.status_code == httpx.codes.BAD_REQUEST:
                return f"{url}: {reply.text}"
            reply.raise_for_status()
            return ""

        urls = [worker["url"] for worker in client.get(f"{router}/workers").json()["workers"]]
        return next(filter(None, pool.map(replace, urls)), "")
