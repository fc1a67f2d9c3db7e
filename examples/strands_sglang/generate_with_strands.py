"""An agent of the Strands SDK (``pip install strands-agents openai``) as the policy's body, with a calculator.

    sample -> a session of slime's OpenAI adapter -> strands.Agent(OpenAIModel(base_url=adapter), tools=[calculator])
           <- loss-masked samples of everything that was said

    --custom-generate-function-path examples.strands_sglang.generate_with_strands.generate
    --custom-config-path examples/strands_sglang/strands.yaml

Prompts stay messages (no ``--apply-chat-template``). The adapter keeps the sampled token ids, so the SDK may render and
parse as it likes.
"""

from __future__ import annotations

import ast
import asyncio
import json
import operator
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from slime.agent.service import AgentService, Outcome
from slime.data.sample import Sample
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.utils.errors import ConfigError, DataError

__all__ = ["AGENTS", "calculator", "generate"]

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Work out an expression of numbers, + - * / and parentheses.

    Args:
        expression: for example 47*83.
    """
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


def _value(node: ast.expr) -> Any:
    match node:
        # Bounded numbers and no powers: the result's size grows with the length of the expression only.
        case ast.Constant(value=int() | float() as number) if abs(number) < 1e15:
            return number
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, + - * / and parentheses are allowed")


class AdapterService(AgentService):
    """The adapter of this process, made by the first sample."""

    def __init__(self, args: Namespace) -> None:
        self.max_turns = args.strands_max_turns
        super().__init__(args)


async def with_strands(args: Namespace, question: str, url: str, sid: str) -> str:
    """The answer of an agent of the SDK."""
    try:
        from strands import Agent, tool
        from strands.models.openai import OpenAIModel
    except ImportError as error:
        raise ConfigError(
            f"strands_agent: strands needs the Strands SDK ({error}): pip install strands-agents openai, or set "
            "strands_agent: plain for the same loop without it"
        ) from error
    async with _client(args, url, sid) as client:
        agent = Agent(
            model=OpenAIModel(client=client, model_id="slime-actor"),
            tools=[tool(calculator)],
            system_prompt=args.strands_system_prompt or None,
            callback_handler=None,
        )
        return str(await agent.invoke_async(question))


async def plain(args: Namespace, question: str, url: str, sid: str) -> str:
    """The same loop and the same HTTP client, without the SDK."""
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    function = {"name": "calculator", "description": calculator.__doc__, "parameters": parameters}
    system = [{"role": "system", "content": args.strands_system_prompt}] if args.strands_system_prompt else []
    messages: list[Any] = [*system, {"role": "user", "content": question}]
    async with _client(args, url, sid) as client:
        while True:
            reply = await client.chat.completions.create(
                model="slime-actor", messages=messages, tools=[{"type": "function", "function": function}]
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                expression = json.loads(call.function.arguments).get("expression", "")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": calculator(str(expression))})


AGENTS: dict[str, Callable[[Namespace, str, str, str], Awaitable[str]]] = {"strands": with_strands, "plain": plain}


def _client(args: Namespace, url: str, sid: str) -> openai.AsyncOpenAI:
    """A client with the session's id as key. It tries again while the adapter answers 503 because weights change."""
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=sid,
        timeout=args.strands_seconds,
        max_retries=3,
        # a proxy of the environment cannot reach the adapter
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Let the agent answer one prompt. An agent that fails or runs out of turns or time has no answer.

    Raises:
        ConfigError: the SDK is not installed, or ``strands_agent`` names no agent.
        DataError: the prompt is a text.
    """
    if not isinstance(sample.prompt, list):
        raise DataError(f"sample {sample.index}: the agent needs messages: drop --apply-chat-template")
    if args.strands_agent not in AGENTS:
        raise ConfigError(f"strands_agent: {args.strands_agent!r} is not one of {', '.join(AGENTS)}")
    service, question = AdapterService(args), str(sample.prompt[-1]["content"])

    async def work(sid: str) -> Outcome:
        try:
            asking = AGENTS[args.strands_agent](args, question, service.url, sid)
            answer = await asyncio.wait_for(asking, args.strands_seconds)
        except ConfigError:
            raise
        except Exception as error:  # of the agent's loop, whose turns are trained on
            return 0.0, {"answer": "", "agent_error": f"{type(error).__name__}: {error}"[:200]}
        # Symbolic comparison takes time, and the event loop serves all other samples.
        return await asyncio.to_thread(_score, answer, sample.label), {"answer": answer}

    return await service.run(args, sample, sampling_params, work, evaluation=evaluation)


def _score(answer: str, label: Any) -> float:
    boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer.strip()}}}"
    return float(grade_answer_verl(boxed, label))
