"""A customer's agent between a user and tools: the conversations of tau-bench (Yao et al. 2024, arXiv:2406.12045).

    system: the shop's rules, user: a wish
    the model calls a tool   -> the environment's result, loss mask 0
    the model says something -> the simulated user's reply, loss mask 0
    ...                         until the user stops. The reward compares the shop's data with the task's

    --custom-generate-function-path examples.tau-bench.generate_with_tau.generate --max-turns 30
    --custom-config-path examples/tau-bench/tau.yaml

A row's prompt is the number of a task. No turn of the model is rendered again: replies are appended to the sampled
tokens.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
from argparse import Namespace
from typing import Any

from slime.agent.parsing import ParsedModelOutput, parse_model_output
from slime.data.processing import render_chat, render_continuation
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as generate_turn
from slime.utils.errors import ConfigError

__all__ = ["generate", "make_env"]

DEFAULT_MAX_TURNS = 30
RESPOND = "respond"


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One conversation. A rollout that ends in the middle of it gives the sample back, and it begins anew."""
    tokenizer = GenerateState(args).tokenizer
    index = int(sample.prompt)  # type: ignore[arg-type]  # text or a number
    # The simulated user may be a language model: its calls block for seconds.
    env, make_action = await asyncio.to_thread(make_env, args, index)
    told = await asyncio.to_thread(env.reset, task_index=index)
    tools = list(env.tools_info)
    # An aborted conversation must leave no trace in the sample, because the shop's state cannot be restored.
    played = copy.deepcopy(sample)
    messages = [{"role": "system", "content": env.wiki}, {"role": "user", "content": told.observation}]
    played.prompt = render_chat(tokenizer, messages, tools=tools, add_generation_prompt=True)
    played.reward = 0.0
    for turn in range(args.max_turns or DEFAULT_MAX_TURNS):
        begin = played.response_length
        played = await generate_turn(args, played, sampling_params)
        if played.status is Sample.Status.ABORTED:
            sample.status = Sample.Status.ABORTED
            return sample
        if played.status is not Sample.Status.COMPLETED:
            break
        said = _said(args, tokenizer, played.tokens[len(played.tokens) - played.response_length + begin :], tools)
        result = await asyncio.to_thread(env.step, make_action(**_action(said)))
        played.reward = float(result.reward)
        played.metadata["turns"] = turn + 1
        if result.done:
            break
        reply = {"role": "tool" if said.tool_uses else "user", "content": result.observation}
        text = render_continuation(tokenizer, [reply], tokens=played.tokens, tools=tools)
        ids = tokenizer.encode(text, add_special_tokens=False)
        played.append_response_tokens(args, tokens=ids, text=text, trainable=False)
        played.status = Sample.Status.PENDING
    if played.status is Sample.Status.PENDING:
        played.status = Sample.Status.TRUNCATED  # out of turns
    return played


def make_env(args: Namespace, index: int) -> tuple[Any, Any]:
    """(environment, class of its actions). ``tau_env`` is an environment of tau_bench, or a module with ``get_env``.

    Raises:
        ConfigError: tau_bench is not installed.
    """
    if "." in args.tau_env:
        module = importlib.import_module(args.tau_env)
        return module.get_env(args, index), module.Action
    try:
        from tau_bench.envs import get_env
        from tau_bench.types import Action
    except ImportError as error:
        raise ConfigError(
            f"tau_env: {args.tau_env} needs tau_bench ({error}): "
            "pip install git+https://github.com/sierra-research/tau-bench, or name a module with get_env"
        ) from error
    user = {"user_strategy": args.tau_user_strategy, "user_model": args.tau_user_model}
    user["user_provider"] = args.tau_user_provider
    return get_env(args.tau_env, task_split=args.tau_task_split, task_index=index, **user), Action


def _said(args: Namespace, tokenizer: Any, ids: list[int], tools: list[dict[str, Any]]) -> ParsedModelOutput:
    # Tags of tool calls may be special tokens, so they are kept and only the end mark is removed.
    text = tokenizer.decode(ids, skip_special_tokens=False).removesuffix(tokenizer.eos_token or "")
    return parse_model_output(
        text,
        tools_schema=tools,
        tool_parser_name=args.sglang_tool_call_parser,
        reasoning_parser_name=args.sglang_reasoning_parser,
    )


def _action(said: ParsedModelOutput) -> dict[str, Any]:
    """The first tool call of a turn. A turn without one goes to the user."""
    if said.tool_uses:
        return {"name": said.tool_uses[0]["name"], "kwargs": said.tool_uses[0]["input"]}
    return {"name": RESPOND, "kwargs": {"content": said.text}}
