"""Drafts from history on a CPU, in a real server: the tokens and log-probs are those without drafts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import server_env
from tests.e2e.engines import make_engine

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
NEW = 40


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
def test_drafts_change_no_token_and_no_log_probability(tiny_task, tmp_path):
    flags = ["--speculative-algorithm", "NGRAM", "--enable-deterministic-inference"]
    model = AutoModelForCausalLM.from_pretrained(tiny_task.model, dtype=torch.float32)
    fork_server = ForkServer(tmp_path / "fork.log", server_env())
    engine = make_engine(tiny_task, fork_server, tmp_path / "log", *flags)
    try:
        engine.start()
        for sampling in ({}, {"top_p": 0.9}):
            # A request with a bias is decoded by SGLang itself, without drafts. The prefill samples the first token.
            without = epoch(engine.url, seed=1, logit_bias={"5": 0.0}, **sampling)
            assert {length for _, _, length in without} == {NEW / (NEW - 1)}
            drafted = epoch(engine.url, seed=1, **sampling)
            assert [tokens for tokens, _, _ in drafted] == [tokens for tokens, _, _ in without]
            assert min(length for _, _, length in drafted) > 3
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
        fork_server.stop()
