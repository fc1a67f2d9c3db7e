"""Drafts from history on a CPU, in real servers: the tokens and log-probs are those without drafts."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from slime.data.sample import Sample
from slime.rollout.direct_engines import Load, loads_of
from slime.rollout.prompt_history import DraftHistory
from tests.e2e.engines import make_engine
from tests.unit.rollout.fake_engine import FakeEngine

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
NEW = 40


def of_other_engine(engines: list[str], answers: list[list[int]]) -> None:
    """What the rollout manager does in the next epoch: the engines get these responses before the prompts."""
    groups = [
        [
            Sample(prompt=str(i), tokens=[*prompt, *tokens], response_length=NEW, status=Sample.Status.COMPLETED)
            for tokens in answers[2 * i : 2 * i + 2]
        ]
        for i, prompt in enumerate(PROMPTS)
    ]
    router, history = FakeEngine(), DraftHistory()
    router.workers = [{"url": url} for url in engines]
    args = Namespace(
        sglang_speculative_algorithm="NGRAM",
        sglang_speculative_ngram_external_corpus_max_tokens=None,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=router.port,
    )

    async def rollout() -> None:
        history.begin(args, lambda groups: [])(groups)
        if history._sending is not None:
            await history._sending
        history.end(groups)

    idle = [Load(url, 0, 0) for url in engines]
    with closing(router):
        assert asyncio.run(loads_of(f"{router.url}/workers")) == idle, "the rollout also reads the load of the engines"
        asyncio.run(rollout())  # learns the responses
        asyncio.run(rollout())  # sends them
    assert history.num_tokens, "no engine refused them"


def epoch(url: str, seed: int, **sampling: Any) -> list[tuple[list[int], list[float], float]]:
    """Tokens, log-probs and tokens per verification of two samples of every prompt, all at once."""

    def one(number: int) -> tuple[list[int], list[float], float]:
        parameters = {"max_new_tokens": NEW, "ignore_eos": True, "sampling_seed": seed + number % 2, **sampling}
        body = {"input_ids": PROMPTS[number // 2], "sampling_params": parameters, "return_logprob": True}
        answer = httpx.post(f"{url}/generate", json=body, timeout=600).raise_for_status().json()
        pairs = answer["meta_info"]["output_token_logprobs"]
        assert [pair[1] for pair in pairs] == answer["output_ids"]
        return answer["output_ids"], [pair[0] for pair in pairs], NEW / answer["meta_info"]["spec_verify_ct"]

    with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        return list(pool.map(one, range(2 * len(PROMPTS))))


@torch.no_grad()
def test_drafts_change_no_token_and_no_log_probability(tiny_task, fork_server, tmp_path):
    flags = ["--speculative-algorithm", "NGRAM", "--enable-deterministic-inference"]
    model = AutoModelForCausalLM.from_pretrained(tiny_task.model, dtype=torch.float32)
    engine, other_engine = (make_engine(tiny_task, fork_server, tmp_path / name, *flags) for name in ("log", "log2"))
    try:
        engine.start()
        other_engine.start()
        for sampling in ({}, {"top_p": 0.9}):
            # A request with a bias is decoded by SGLang itself, without drafts. The prefill samples the first token.
            without = epoch(engine.url, seed=1, logit_bias={"5": 0.0}, **sampling)
            assert {length for _, _, length in without} == {NEW / (NEW - 1)}
            drafted = epoch(engine.url, seed=1, **sampling)
            assert [tokens for tokens, _, _ in drafted] == [tokens for tokens, _, _ in without]
            assert min(length for _, _, length in drafted) > 3
        # An engine that never saw the prompts drafts from the responses of the other one.
        of_other_engine([other_engine.url], [tokens for tokens, _, _ in drafted])
        elsewhere = epoch(other_engine.url, seed=1, **sampling)
        assert [tokens for tokens, _, _ in elsewhere] == [tokens for tokens, _, _ in drafted]
        assert min(length for _, _, length in elsewhere) > 3
        texts = {"corpus_id": "texts", "documents": ["1 + 1 = 2", "2 + 2 = 4"]}
        reply = httpx.post(f"{other_engine.url}/add_external_corpus", json=texts, timeout=600)
        assert (reply.status_code, "an engine on a CPU accepts no texts" in reply.text) == (400, True)
        # other seeds: drafts are wrong
        other = epoch(engine.url, seed=3)
        assert [tokens for tokens, _, _ in epoch(engine.url, seed=3, logit_bias={"5": 0.0})] == [
            tokens for tokens, _, _ in other
        ]
        for prompt, (tokens, log_probs, _) in zip([one for one in PROMPTS for _ in range(2)], other, strict=True):
            logits = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
            expected = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (expected - torch.tensor(log_probs)).abs().max() < 1e-5
    finally:
        engine.stop()
        other_engine.stop()
