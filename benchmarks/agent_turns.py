"""Time to render the prompts of an agent's conversation, compared with the time to generate its turns.

    python benchmarks/agent_turns.py

A real engine with a tiny model answers an agent through the adapter for OpenAI's clients, over HTTP. The agent sends
its whole history with every request, and tool results fill the conversation up to ``--tokens``. Every turn ends after
``--new-tokens`` sampled tokens. Prints the seconds of all turns: generation (the engine's requests), rendering (chat
template and tokenizer), the rest of the requests, and rendering if every prompt is the whole conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.one_engine import one_engine
from slime.agent.adapters import OpenAIAdapter, common
from slime.agent.rendering import TurnRenderer
from slime.agent.service import run_app_in_thread
from slime.data.processing import load_tokenizer
from slime.data.sample import Sample
from slime.new.tiny_model import ModelShape, make_tiny_model

TEXT = "the file has 12 lines. line 3 calls the function with 2 values, and the test expects 5. "


class Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **values: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **values)
            finally:
                self.seconds[name] += time.perf_counter() - began

        async def wait(*args: Any, **values: Any) -> Any:
            began = time.perf_counter()
            try:
                return await function(*args, **values)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return wait if inspect.iscoroutinefunction(function) else call


def converse(client: httpx.Client, num_turns: int, result_tokens: int) -> None:
    messages = [{"role": "user", "content": TEXT}]
    result = (TEXT * (result_tokens // len(TEXT) + 1))[:result_tokens]
    for _ in range(num_turns):
        reply = client.post("/v1/chat/completions", json={"messages": messages})
        reply.raise_for_status()
        # The tiny model's template knows no tools: a result is a message of the user.
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": result}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=60_000, help="of the whole conversation")
    parser.add_argument("--new-tokens", type=int, default=100, help="sampled in a turn")
    options = parser.parse_args()
    clock, conversations = Clock(), []
    with tempfile.TemporaryDirectory() as folder:
        length = options.tokens + 1000
        model = make_tiny_model(Path(folder) / "model", shape=ModelShape(max_positions=length))
        tokenizer = load_tokenizer(model)
        flags = ("--context-length", str(length), "--max-total-tokens", str(2 * length))
        with one_engine(Path(folder), model, *flags) as engine:
            adapter = OpenAIAdapter(
                tokenizer=tokenizer,
                sglang_url=engine.url,
                debug_callback=lambda sid, messages, *_: conversations.append(messages),
            )
            adapter._renderer.prompt_ids = clock.timed("rendering", adapter._renderer.prompt_ids)  # type: ignore[method-assign]
            common.call_sglang_generate = clock.timed("generation", common.call_sglang_generate)
            end = {"min_new_tokens": options.new_tokens - 1, "logit_bias": {str(tokenizer.eos_token_id): 1000.0}}
            adapter.open_session("s", sampling_defaults=end | {"max_new_tokens": options.new_tokens})
            server = run_app_in_thread(adapter.app)
            url, key = f"http://127.0.0.1:{server.port}", {"Authorization": "Bearer s"}
            between = len(tokenizer.apply_chat_template([{"role": "user", "content": ""}], return_dict=False)) + 3
            with httpx.Client(base_url=url, headers=key, timeout=600, trust_env=False) as client:
                result_tokens = options.tokens // options.turns - options.new_tokens - between
                clock.timed("requests", converse)(client, options.turns, result_tokens)
            (sample,) = asyncio.run(adapter.finish_session("s", base_sample=Sample(index=0)))
            server.stop()
    assert sum(sample.loss_mask or ()) == options.turns * options.new_tokens, "a sampled token is not trained"
    whole = TurnRenderer(tokenizer)
    for messages in conversations:
        clock.timed("whole", whole.prompt_ids)(messages, None)
    seconds = clock.seconds
    result = {
        "turns": options.turns,
        "tokens": len(sample.tokens),
        "generation_s": round(seconds["generation"], 2),
        "rendering_s": round(seconds["rendering"], 3),
        "rendering_percent_of_generation": round(100 * seconds["rendering"] / seconds["generation"], 3),
        "rest_of_requests_s": round(seconds["requests"] - seconds["generation"] - seconds["rendering"], 2),
        "whole_conversations_s": round(seconds["whole"], 2),
        "whole_conversations_percent_of_generation": round(100 * seconds["whole"] / seconds["generation"], 2),
        "whole_turns": sample.metadata.get("rendered_whole", {}),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
