"""``slime doctor env``: a healthy environment has no finding, and each planted defect is named."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import subprocess
import sys
import time
from argparse import Namespace

import pytest

from slime.doctor import environment_checks
from slime.doctor.environment_command import findings_of
from slime.environments import Model, Task, converse

HERE = __name__
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find the code of a name.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


class Sums:
    """Healthy: one turn, and the whole reply is the answer."""

    reward_range = (0.0, 1.0)

    def __len__(self) -> int:
        return 50

    def task(self, index: int) -> Task:
        draw = random.Random(index)
        a, b = draw.randrange(100, 500), draw.randrange(100, 500)
        prompt = [{"role": "user", "content": self.question(a, b)}]
        return Task(prompt, str(a + b), (str(a + b),), {"answer": a + b})

    def question(self, a: int, b: int) -> str:
        return f"Add {a} and {b}. Reply with the number."

    async def play(self, task: Task, model: Model) -> float:
        return self.grade((await model.reply(task.prompt)).get("content") or "", task)

    def grade(self, text: str, task: Task) -> float:
        return float(text.strip() == task.answer)


class Tools(Sums):
    """Healthy: two turns, with a tool."""

    tools = (LOOK_UP,)
    max_turns = 4

    def task(self, index: int) -> Task:
        code = str(random.Random(f"code {index}").randrange(1000, 9999))
        call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"name": "it"}'}}
        prompt = [{"role": "user", "content": f"What is the code of name {index}?"}]
        return Task(prompt, code, ({"content": "", "tool_calls": [call]}, code), code)

    async def play(self, task: Task, model: Model) -> float:
        async def call(name: str, arguments: dict[str, str]) -> str:
            return task.data if arguments else "name is missing"

        episode = await converse(model, task.prompt, self.tools, call, max_turns=self.max_turns)
        return self.grade(episode.text, task)


class NewPromptAtEachCall(Sums):
    def question(self, a: int, b: int) -> str:
        return f"{random.random()}: add {a} and {b}."


class OtherPromptInAnotherProcess(Sums):
    def question(self, a: int, b: int) -> str:
        return f"{hash(str(a))}: add {a} and {b}."


class OneTask(Sums):
    def question(self, a: int, b: int) -> str:
        return "Add the numbers."


class EmptyPrompt(Sums):
    def question(self, a: int, b: int) -> str:
        return ""


class UnknownRole(Sums):
    def task(self, index: int) -> Task:
        task = super().task(index)
        return Task([{"role": "human", "content": task.prompt[0]["content"]}], task.answer, task.good)


class AnswerInPrompt(Sums):
    def question(self, a: int, b: int) -> str:
        return f"Add {a} and {b}. (Answer: {a + b})"


class AnswerInSystemMessage(Sums):
    async def play(self, task: Task, model: Model) -> float:
        system = {"role": "system", "content": f"solution={task.answer}"}
        return self.grade((await model.reply([system, *task.prompt])).get("content") or "", task)


class AnswerInTool(Tools):
    async def play(self, task: Task, model: Model) -> float:
        function = LOOK_UP["function"] | {"description": f"Returns the code, {task.answer}."}
        self_tools = [{"type": "function", "function": function}]

        async def call(name: str, arguments: dict[str, str]) -> str:
            return task.data

        return self.grade((await converse(model, task.prompt, self_tools, call, max_turns=4)).text, task)


class GoodIsRejected(Sums):
    def grade(self, text: str, task: Task) -> float:
        return float(text == f"The answer is {task.answer}.")


class AllIsRewarded(Sums):
    def grade(self, text: str, task: Task) -> float:
        return 1.0


class EmptyReplyIsRewarded(Sums):
    def grade(self, text: str, task: Task) -> float:
        return float(text.strip() in ("", task.answer))


class SubstringGrader(Sums):
    def grade(self, text: str, task: Task) -> float:
        return float(str(task.answer) in text)


class AnyNumberIsRight(Sums):
    def grade(self, text: str, task: Task) -> float:
        return float(text.strip().isdecimal())


class NotANumber(Sums):
    def grade(self, text: str, task: Task) -> float:
        return super().grade(text, task) or math.nan


class OutOfRange(Sums):
    def grade(self, text: str, task: Task) -> float:
        return 2 * super().grade(text, task) - 1


class NoReward(Sums):
    def grade(self, text: str, task: Task) -> float:
        return super().grade(text, task) or None


class RandomReward(Sums):
    def grade(self, text: str, task: Task) -> float:
        return random.uniform(0.8, 1.0) if super().grade(text, task) else 0.0


class SharedEpisode(Sums):
    """The object holds the episode, so that episodes at the same time mix."""

    async def play(self, task: Task, model: Model) -> float:
        self.current = task
        text = (await model.reply(task.prompt)).get("content") or ""
        return self.grade(text, self.current)


class RemembersEpisodes(Sums):
    def __init__(self) -> None:
        self.number = itertools.count()

    def grade(self, text: str, task: Task) -> float:
        return super().grade(text, task) if next(self.number) < 10 else 0.0


class Hangs(Sums):
    async def play(self, task: Task, model: Model) -> float:
        await asyncio.Event().wait()
        return 0.0


class IgnoresCancellation(Sums):
    async def play(self, task: Task, model: Model) -> float:
        for _ in range(100):
            with contextlib.suppress(asyncio.CancelledError):
                text = (await model.reply(task.prompt)).get("content") or ""
                return self.grade(text, task)
        return 0.0


class Blocks(Sums):
    """Blocks the event loop while several episodes run, so that the test waits for it once."""

    running = 0

    async def play(self, task: Task, model: Model) -> float:
        self.running += 1
        text = (await model.reply(task.prompt)).get("content") or ""
        if self.running == 4:
            time.sleep(3.0)
        self.running -= 1
        return self.grade(text, task)


class NeverEnds(Tools):
    max_turns = 10_000


class HugeObservation(Tools):
    async def play(self, task: Task, model: Model) -> float:
        async def call(name: str, arguments: dict[str, str]) -> str:
            return task.data + " x" * 40_000

        return self.grade((await converse(model, task.prompt, self.tools, call, max_turns=4)).text, task)


class RewritesHistory(Tools):
    async def play(self, task: Task, model: Model) -> float:
        await model.reply(task.prompt, self.tools)
        summary = [{"role": "user", "content": f"{task.prompt[0]['content']} The tool replied {task.data}."}]
        return self.grade((await model.reply(summary)).get("content") or "", task)


class NeverAsks(Sums):
    async def play(self, task: Task, model: Model) -> float:
        return 1.0


class HidesEngineFailures(Sums):
    async def play(self, task: Task, model: Model) -> float:
        with contextlib.suppress(Exception):
            return await super().play(task, model)
        return 0.0


class RaisesOnOddReplies(Sums):
    def grade(self, text: str, task: Task) -> float:
        return float(int(text) == task.data["answer"])


class LeavesProcess(Sums):
    async def play(self, task: Task, model: Model) -> float:
        if not hasattr(self, "child"):
            self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
        return await super().play(task, model)


class LeavesTask(Sums):
    async def play(self, task: Task, model: Model) -> float:
        self.poll = asyncio.create_task(asyncio.sleep(3600))
        return await super().play(task, model)


class BadToolSchema(Tools):
    tools = ({"name": "look_up", "parameters": {}},)


class ChangesTask(Sums):
    def grade(self, text: str, task: Task) -> float:
        task.data["replies"] = text
        return super().grade(text, task)


class OneAtATime(Sums):
    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    async def play(self, task: Task, model: Model) -> float:
        async with self.lock:
            return await super().play(task, model)


DEFECTS = {
    NewPromptAtEachCall: "tasks repeat",
    OtherPromptInAnotherProcess: "tasks repeat",
    OneTask: "tasks differ",
    EmptyPrompt: "prompts",
    UnknownRole: "prompts",
    AnswerInPrompt: "leaks",
    AnswerInSystemMessage: "leaks",
    AnswerInTool: "leaks",
    GoodIsRejected: "known-good replies",
    AllIsRewarded: "known-bad replies",
    EmptyReplyIsRewarded: "known-bad replies",
    SubstringGrader: "known-bad replies",
    AnyNumberIsRight: "known-bad replies",
    NotANumber: "reward",
    OutOfRange: "reward",
    NoReward: "reward",
    RandomReward: "isolation",
    SharedEpisode: "isolation",
    RemembersEpisodes: "isolation",
    Hangs: "time",
    IgnoresCancellation: "cancellation",
    Blocks: "event loop",
    NeverEnds: "turns",
    HugeObservation: "tokens",
    RewritesHistory: "history",
    NeverAsks: "replies",
    HidesEngineFailures: "engine failures",
    RaisesOnOddReplies: "replies",
    LeavesProcess: "isolation",
    LeavesTask: "isolation",
    BadToolSchema: "tools",
    ChangesTask: "isolation",
    OneAtATime: "concurrency",
}
# Defects that show as several findings.
ALSO = {
    RandomReward: {"known-good replies"},
    OneTask: {"known-bad replies"},
    EmptyPrompt: {"known-bad replies", "tasks differ"},
    NeverAsks: {"known-bad replies"},
    SharedEpisode: {"known-good replies"},
}


def findings(kind: type, timeout: float = 60.0) -> dict[str, tuple[str, str]]:
    """Subject -> (status, value) of the findings."""
    options = Namespace(
        name=f"{HERE}:{kind.__name__}", options={}, tasks=4, timeout=timeout, max_turn_tokens=8192, hf_checkpoint=None
    )
    found, _ = findings_of(options)
    return {finding.what: (finding.status, finding.value) for finding in found}


@pytest.fixture
def no_other_process(monkeypatch):
    """Without the check that takes seconds for its process."""
    monkeypatch.setattr(
        environment_checks,
        "_digest_elsewhere",
        lambda trial: (environment_checks.digest(trial.environment, trial.indices), ""),
    )


@pytest.mark.parametrize("kind", [Sums, Tools])
def test_a_healthy_environment_has_no_problem(kind):
    assert {status for status, _ in findings(kind).values()} == {"ok"}, findings(kind)


@pytest.mark.parametrize("kind", DEFECTS)
def test_a_planted_defect_is_named(kind, request):
    if kind is not OtherPromptInAnotherProcess:
        request.getfixturevalue("no_other_process")
    found = findings(kind, timeout={Hangs: 1.0, OneAtATime: 20.0}.get(kind, 60.0))
    problems = {what for what, (status, _) in found.items() if status != "ok"}
    assert DEFECTS[kind] in problems, found
    if kind is OtherPromptInAnotherProcess:
        assert found[DEFECTS[kind]][1] == "another process has other tasks"
    assert problems - ALSO.get(kind, set()) == {DEFECTS[kind]}, found
