"""A team of agents on one model: every prompt becomes many training samples, each agent's turn one of them.

    problem -> solver 1..n              solutions
            -> rewriter 1..n            each reads all solutions and writes a better one
            -> selector                 names the rewritten solution that is the team's answer

    --custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents
    --custom-config-path examples/multi_agent/multi_agent.yaml

The function returns a list. Its samples come from one execution, so they have one ``rollout_id``: a loss that averages
over executions counts the team once, regardless of the number of agents. Prompts stay messages (no
``--apply-chat-template``), because every role wraps the problem in a different prompt. Rewards are those of --rm-type
or --custom-rm-path.
"""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.data.processing import render_chat
from slime.data.sample import Sample
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.errors import DataError

__all__ = ["choice", "generate_with_multi_agents", "team_rewards"]

_NUMBER = re.compile(r"\d+")


async def generate_with_multi_agents(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """The samples of all agents. In an evaluation only the one that is the team's answer."""
    problem = _problem(sample)
    count = args.multi_agent_num_parallel

    async def ask(role: str, **values: str) -> Sample:
        text = getattr(args, f"multi_agent_{role}").format(problem=problem, **values)
        agent = _agent(args, sample, role, text)
        # A copy: the agents run at the same time and must not share a dict that a call changes.
        return await generate(args, agent, dict(sampling_params))

    solvers = await asyncio.gather(*(ask("solver") for _ in range(count)))
    solutions = _listed(solvers)
    rewriters = await asyncio.gather(*(ask("rewriter", solutions=solutions) for _ in range(count)))
    selector = await ask("selector", solutions=_listed(rewriters))
    team = [*solvers, *rewriters, selector]
    if any(agent.status is Sample.Status.ABORTED for agent in team):
        # Nothing of a half-finished team is kept: it begins anew.
        sample.status = Sample.Status.ABORTED
        return sample
    picked = choice(_text(selector), len(rewriters))
    if evaluation:
        return selector if picked is None else rewriters[picked]
    rewards = [_value(args, await async_rm(args, agent)) for agent in (*solvers, *rewriters)]
    weights = (args.multi_agent_wrong_team_weight, args.multi_agent_right_team_weight)
    for agent, reward in zip(team, team_rewards(rewards, count, picked, weights), strict=True):
        agent.reward = {args.reward_key: reward} if args.reward_key else reward
    return team


def team_rewards(rewards: Sequence[float], count: int, picked: int | None, weights: tuple[float, float]) -> list[float]:
    """Rewards of solvers, rewriters and selector.

    Each agent has the reward of its text, the selector that of the answer that it picked, times ``weights[1]`` if the
    team is right (the picked answer has a positive reward), else ``weights[0]``.

    Args:
        rewards: of ``count`` solvers, then of ``count`` rewriters.
        picked: number of a rewriter, from 0. None if the selector named none.
    """
    answer = 0.0 if picked is None else rewards[count + picked]
    weight = weights[1] if answer > 0 else weights[0]
    return [weight * reward for reward in (*rewards, answer)]


def choice(text: str, count: int) -> int | None:
    """The candidate that a selector named, from 0: the last number in its text. None if it does not exist."""
    # The last number: a selector may quote candidates before it decides.
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) - 1 if numbers and 1 <= int(numbers[-1]) <= count else None


def _problem(sample: Sample) -> str:
    if not isinstance(sample.prompt, list) or not sample.prompt or "content" not in sample.prompt[-1]:
        raise DataError(
            f"sample {sample.index}: the agents need the problem as a list of messages: drop --apply-chat-template"
        )
    return str(sample.prompt[-1]["content"])


def _agent(args: Namespace, sample: Sample, role: str, text: str) -> Sample:
    """A sample for one agent's turn, with the place of ``sample`` in the batch."""
    prompt = render_chat(
        GenerateState(args).tokenizer, [{"role": "user", "content": text}], tools=None, add_generation_prompt=True
    )
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        # One id for the team: the loss counts an execution once, however many samples it has.
        rollout_id=sample.index if sample.rollout_id is None else sample.rollout_id,
        prompt=prompt,
        label=sample.label,
        metadata=sample.metadata | {"role": role},
        session_id=sample.session_id,
        custom_rm_path=sample.custom_rm_path,
    )


def _text(agent: Sample) -> str:
    return agent.response.strip()


def _listed(agents: Sequence[Sample]) -> str:
    return "\n".join(f"{number}: {_text(agent)}" for number, agent in enumerate(agents, 1))


def _value(args: Namespace, reward: Any) -> float:
    return float(reward[args.reward_key] if args.reward_key else reward)
