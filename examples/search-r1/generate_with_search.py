"""Question answering with a search engine: the model asks, the server's passages come back as text it did not write.

    question -> <think>..</think><search>query</search>     the model stops here
                <information>passages</information>         appended by this file, loss mask 0
                <think>..</think><answer>short answer</answer>

The form of Search-R1 (Jin et al. 2025, arXiv:2503.09516, sec. 3.2): retrieved tokens are context, never a target.

    --custom-generate-function-path examples.search-r1.generate_with_search.generate
    --custom-rm-path examples.search-r1.generate_with_search.reward_func
    --custom-config-path examples/search-r1/search.yaml

Knows neither engine nor tokenizer details: ``slime.rollout.sglang_rollout.generate`` continues a sample from the tokens
it has, and ``Sample.append_response_tokens`` keeps tokens, mask and log-probs aligned.
"""

from __future__ import annotations

import asyncio
import re
import string
import time
import weakref
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from slime.data.sample import Sample
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as generate_turn
from slime.utils.errors import ConfigError, EngineError
from slime.utils.http_utils import post

__all__ = ["exact_match", "generate", "is_well_formed", "normalized", "observation", "reward_func", "search"]

STOP = ["</search>", "</answer>"]
DEFAULT_MAX_TURNS = 3
SEARCH_RETRIES = 3

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_WELL_FORMED = re.compile(
    r"(\s*(<think>[^<]*</think>)?\s*<search>[^<]*</search>\s*<information>.*?</information>)*"
    r"\s*(<think>[^<]*</think>)?\s*<answer>[^<]*</answer>\s*",
    re.DOTALL,
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# By event loop: a semaphore belongs to the loop that first waits on it.
_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turn after turn until there is an answer, ``--max-turns`` searches were made, or the response is full.

    Raises:
        ConfigError: no ``search_url``.
        EngineError: the search server refused, or is gone.
    """
    params = {**sampling_params, "stop": [*(sampling_params.get("stop") or []), *STOP]}
    max_turns = args.max_turns or DEFAULT_MAX_TURNS
    tokenizer = GenerateState(args).tokenizer
    while True:
        start = len(sample.response)
        sample = await generate_turn(args, sample, params)
        action = _ACTION.search(sample.response, _turn_start(sample, start))
        searches = sample.metadata.get("searches", 0)
        # Truncated and aborted samples end here too. A later rollout continues aborted ones from their tokens.
        is_search = action is not None and action[1] == "search"
        if sample.status is not Sample.Status.COMPLETED or not is_search or searches >= max_turns:
            return sample
        began = time.monotonic()
        passages = await search(args, action[2].strip())
        sample.non_generation_time += time.monotonic() - began
        text = observation(passages)
        ids = tokenizer.encode(text, add_special_tokens=False)[: args.search_max_tokens]
        # The text is decoded from the cut ids, so that text and tokens agree.
        sample.append_response_tokens(args, tokens=ids, text=tokenizer.decode(ids), trainable=False)
        sample.metadata["searches"] = searches + 1
        if GenerateState(args).aborted:  # the rollout has its samples
            sample.status = Sample.Status.ABORTED
            return sample
        sample.status = Sample.Status.PENDING


def _turn_start(sample: Sample, start: int) -> int:
    """The beginning of the turn's text. A continued sample was cut off in the middle of a turn."""
    return sample.response.rfind("</information>", 0, start) + len("</information>") if start else 0


async def search(args: Namespace, query: str) -> list[str]:
    """Passages of the server at ``search_url``, best first, at most ``search_topk``."""
    url = getattr(args, "search_url", None)
    if not url:
        raise ConfigError(
            "searching needs the server's address: put search_url into the file of --custom-config-path "
            "(examples/search-r1/search.yaml)"
        )
    loop = asyncio.get_running_loop()
    places = _places.setdefault(loop, asyncio.Semaphore(args.search_concurrency))
    payload = {"queries": [query], "topk": args.search_topk, "return_scores": True}
    async with places:
        reply = await post(url, payload, max_retries=SEARCH_RETRIES, timeout_s=args.search_timeout)
    try:
        passages = [hit["document"]["contents"] for hit in reply["result"][0]]
        if not all(isinstance(text, str) for text in passages):
            raise TypeError("contents must be texts")
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(f"search_url {url}: the reply is not that of a retriever: {str(reply)[:200]}") from error
    return passages[: args.search_topk]


def observation(passages: Iterable[str]) -> str:
    """The passages as the model gets them, without tags that look like actions."""
    lines = [f"doc {number}: {_plain(text)}" for number, text in enumerate(passages, 1)]
    return f"<information>{chr(10).join(lines) or 'nothing found.'}</information>"


def _plain(text: str) -> str:
    # A tag inside a passage would pass for an action of the model.
    return re.sub(r"</?(information|search|answer|think)>", "", text).strip()


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """``score`` for ``--reward-key score``: 1 for the right answer in the right form.

    A wrong answer in the right form has ``search_format_score``. A right one in the wrong form loses as much, so that
    the form is worth the same in both cases (Jin et al. 2025, arXiv:2505.15117, eq. 1).
    """
    answer = _final_answer(sample.response)
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    right = answer is not None and exact_match(answer, map(str, labels))
    formed = is_well_formed(sample.response)
    bonus = args.search_format_score
    score = (1.0 if formed else 1.0 - bonus) if right else (bonus if formed else 0.0)
    return {"score": score, "exact_match": float(right), "searches": float(sample.metadata.get("searches", 0))}


def _final_answer(response: str) -> str | None:
    answers = [match[2] for match in _ACTION.finditer(response) if match[1] == "answer"]
    return answers[-1] if answers else None


def is_well_formed(response: str) -> bool:
    """Whether the response is searches with their passages, then one answer, and nothing else but thoughts."""
    return _WELL_FORMED.fullmatch(response) is not None


def exact_match(answer: str, labels: Iterable[str]) -> bool:
    """Equal to one of the labels, up to case, punctuation, articles and white space."""
    return normalized(answer) in {normalized(label) for label in labels}


def normalized(text: str) -> str:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())
