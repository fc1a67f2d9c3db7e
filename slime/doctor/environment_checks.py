"""Checks of an environment, with a scripted model: tasks, rewards, grading, time, isolation, tokens.

To add a check, write a function ``(Trial) -> findings``, its row in ``CHECKS``, and an environment with the defect in
its test.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from slime.doctor import Finding, fail, ok, warn
from slime.doctor.environment_play import CANCEL_S, MAX_TURNS, Gate, Played, Script, play, watch_loop
from slime.environments import Environment, Message, Task

_ROLES = ("system", "developer", "user", "assistant", "tool")
_CANCEL_AFTER_S = 0.5
_SAME = 1e-6
_CHARACTERS_PER_TOKEN = 4
_FAILED_MODEL = "an engine that fails"
_MARKER = r"(?:answer|solution|label|correct|expected|target|gold)\w*\W*(?:is|are|be)?\W{0,5}"


@dataclass
class Trial:
    """The input of the checks: an environment, some of its tasks, and the episodes played on them.

    Attributes:
        good: per task the episode with known-good replies, or with a wrong one if none are known.
        again: the same, played once more after all wrong ones.
        bad: kind of wrong reply -> task -> episode.
        together: the episodes of ``good``, all at once.
        at_once: how many of them ran at the same time.
        blocked: place in the code that blocked the event loop.
        failing: an episode whose model fails. talking: one whose model never stops calling tools. cancelled: one that
            was cancelled while its model was generating.
        left: descriptions of tasks and processes that the episodes left.
        count_tokens: of a text.
    """

    name: str
    options: dict[str, Any]
    environment: Environment
    indices: list[int]
    tasks: list[Task]
    timeout_s: float
    max_turn_tokens: int
    count_tokens: Callable[[str], int] = lambda text: math.ceil(len(text) / _CHARACTERS_PER_TOKEN)
    good: list[Played] = field(default_factory=list)
    again: list[Played] = field(default_factory=list)
    bad: dict[str, dict[int, Played]] = field(default_factory=dict)
    together: list[Played] = field(default_factory=list)
    at_once: int = 0
    blocked: list[str] = field(default_factory=list)
    failing: Played = field(default_factory=Played)
    talking: Played = field(default_factory=Played)
    cancelled: Played = field(default_factory=Played)
    left: list[str] = field(default_factory=list)

    @property
    def episodes(self) -> Iterator[Played]:
        """All that were played with an engine that works, and with time to end."""
        yield from (*self.good, *self.again, *self.together)
        for played in self.bad.values():
            yield from played.values()

    def where(self, number: int) -> str:
        return f"task {self.indices[number]}"


async def run_episodes(trial: Trial) -> None:
    """Play all episodes that the checks need. Stops at the first one that is late: others would be late as well."""
    tasks, environment, limit = trial.tasks, trial.environment, trial.timeout_s
    process = psutil.Process()
    children, pending = set(process.children(recursive=True)), set(asyncio.all_tasks())
    replies = [task.good or (task.answer or "I do not know.",) for task in tasks]

    async def one(number: int, said: Sequence[str | Message], **kinds: Any) -> Played:
        return await play(environment, tasks[number], Script(said, **kinds), limit)

    for number, said in enumerate(replies):
        trial.good.append(await one(number, said))
        if trial.good[-1].is_late:
            return
    for kind, wrong in wrong_replies(tasks).items():
        trial.bad[kind] = {}
        for number, text in wrong.items():
            trial.bad[kind][number] = await one(number, (text,))
    trial.again = [await one(number, said) for number, said in enumerate(replies)]
    gate = Gate(len(tasks), limit / 2)
    with watch_loop() as trial.blocked:
        trial.together = await asyncio.gather(*(one(i, said, gate=gate) for i, said in enumerate(replies)))
    trial.at_once = gate.most
    trial.failing = await one(0, ("",), fails=True)
    tools = next((offered for one_of in trial.good for r in one_of.requests if (offered := r.get("tools"))), None)
    trial.talking = await one(0, (_call(tools[0]) if tools else "And now?",))
    trial.cancelled = await play(environment, tasks[0], Script(("",), hangs=True), _CANCEL_AFTER_S)
    await asyncio.sleep(0)  # tasks that are done leave the set
    trial.left = [f"the asyncio task {task.get_name()}" for task in asyncio.all_tasks() - pending]
    _, alive = psutil.wait_procs(set(process.children(recursive=True)) - children, timeout=1.0)
    trial.left += [f"the process {' '.join(child.cmdline())[:60]}" for child in alive if child.is_running()]


def _call(tool: Message) -> Message:
    """A message that calls ``tool`` without arguments."""
    name = tool.get("function", {}).get("name", "tool")
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return {"content": "", "tool_calls": [call]}


def wrong_replies(tasks: Sequence[Task]) -> dict[str, dict[int, str]]:
    """Kind -> task -> a reply that must not earn the highest reward."""
    kinds: dict[str, dict[int, str]] = {
        "an empty reply": dict.fromkeys(range(len(tasks)), ""),
        "a reply without an answer": dict.fromkeys(range(len(tasks)), "I do not know. {[<(\\0 \u2603"),
        "the text of the prompt": {i: "\n".join(_texts(task.prompt)) for i, task in enumerate(tasks)},
    }
    last = {i: task.good[-1] for i, task in enumerate(tasks) if task.good}
    texts = {i: text for i, text in last.items() if isinstance(text, str)}
    others = {i: [text for text in texts.values() if text != own] for i, own in texts.items()}
    kinds["the answer of another task"] = {i: found[0] for i, found in others.items() if found}
    kinds["the answers of all tasks"] = {}
    for i in texts:
        own, wrong = tasks[i].answer, sorted({t.answer for t in tasks if t.answer and t.answer != tasks[i].answer})
        if own and wrong:
            # The right one is in the middle: a grader may read the first or the last one.
            every = " ".join([*wrong, own, *wrong])
            kinds["the answers of all tasks"][i] = texts[i].replace(own, every, 1)
    return kinds


def _texts(messages: Sequence[Message]) -> list[str]:
    found = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        found += [str(part["text"]) for part in parts if isinstance(part, dict) and part.get("text")]
    return found


def same_tasks(trial: Trial) -> Iterator[Finding]:
    """The same index gives the same task, in this process and in another one."""
    fix = "derive everything in task(index) from the index and a fixed seed: random.Random(f'{seed}-{index}')"
    for number, index in enumerate(trial.indices):
        if trial.environment.task(index).prompt != trial.tasks[number].prompt:
            yield fail("tasks repeat", f"{trial.where(number)} has another prompt at the second call", fix)
            return
    there, error = _digest_elsewhere(trial)
    if error:
        yield fail("tasks repeat", f"another process cannot make the tasks: {error[:200]}", "import what it needs")
    elif there == digest(trial.environment, trial.indices):
        yield ok("tasks repeat", f"{len(trial.tasks)} tasks are the same in another process")
    else:
        yield fail("tasks repeat", "another process has other tasks", f"{fix}; hash() and sets differ per process")


def digest(environment: Environment, indices: Sequence[int]) -> str:
    text = json.dumps([environment.task(index).prompt for index in indices], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_elsewhere(trial: Trial) -> tuple[str, str]:
    """(digest, error) of a process with another hash seed."""
    code = (
        "import json, sys; from slime.doctor.environment_checks import digest; from slime.environments import load; "
        "name, options, indices = json.loads(sys.argv[1]); print(digest(load(name, **options), indices))"
    )
    given = json.dumps([trial.name, trial.options, trial.indices])
    env = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
    done = subprocess.run([sys.executable, "-c", code, given], env=env, capture_output=True, text=True, timeout=300)
    if done.returncode == 0:
        return done.stdout.split()[-1], ""
    return "", (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def different_tasks(trial: Trial) -> Iterator[Finding]:
    prompts = [json.dumps(task.prompt, sort_keys=True, default=str) for task in trial.tasks]
    first = {prompt: number for number, prompt in reversed(list(enumerate(prompts)))}
    copies = [f"{trial.where(i)} = {trial.where(first[p])}" for i, p in enumerate(prompts) if first[p] != i]
    if 2 * len(copies) > len(prompts) or len(copies) == len(prompts) - 1 > 0:
        yield fail("tasks differ", ", ".join(copies[:4]), "give the tasks different prompts, or declare fewer tasks")
    elif copies:
        yield warn("tasks differ", ", ".join(copies[:4]), "a small generator repeats itself: raise its size or range")
    else:
        yield ok("tasks differ", f"{len(prompts)} different prompts")


def prompt_form(trial: Trial) -> Iterator[Finding]:
    """A prompt is a list of messages that ends before the turn of the model, and JSON can hold it."""
    for number, task in enumerate(trial.tasks):
        problem = _prompt_problem(task.prompt)
        if problem:
            yield fail("prompts", f"{trial.where(number)}: {problem}", "return messages of OpenAI's chat format")
            return
    yield ok("prompts", "lists of messages")


def _prompt_problem(prompt: Any) -> str:
    if not isinstance(prompt, list) or not prompt:
        return f"the prompt is {type(prompt).__name__} {str(prompt)[:40]!r}, not a list of messages"
    for message in prompt:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            return f"the message {str(message)[:60]} has no role of {', '.join(_ROLES)}"
    if not "".join(_texts(prompt)).strip():
        return "the messages have no text"
    if prompt[-1]["role"] == "assistant":
        return "the last message is the assistant's, and the model would continue it"
    try:
        json.dumps(prompt)
    except TypeError as error:
        return f"JSON cannot hold it: {error}"
    return ""


def leaks(trial: Trial) -> Iterator[Finding]:
    """The answer must not be in the messages and tools of the first turn. Compared with the answers of other tasks."""
    known = {i: task.answer.strip() for i, task in enumerate(trial.tasks) if task.answer and task.answer.strip()}
    if len(known) < 2 or len(set(known.values())) < 2:
        return
    seen = {i: _shown(trial, i) for i in known}
    own = [i for i in known if _contains(seen[i], known[i])]
    pairs = [(i, j) for i in known for j in known if known[i] != known[j]]
    chance = sum(_contains(seen[i], known[j]) for i, j in pairs) / len(pairs)
    marked = [i for i in known if re.search(_MARKER + re.escape(known[i]) + r"(?!\w)", seen[i], re.IGNORECASE)]
    value = f"the answer of {len(own)} of {len(known)} tasks is in the first request"
    if 2 * len(marked) > len(known):
        yield fail("leaks", f"{value}, such as {trial.where(marked[0])}: {known[marked[0]][:40]!r}", "remove it")
    elif len(own) / len(known) - chance > 0.5:
        fix = "remove it, unless the tasks are choices or ask for a part of the prompt"
        yield warn("leaks", f"{value}, and answers of other tasks are in {chance:.0%}", fix)
    else:
        yield ok("leaks", f"{value}, answers of other tasks are in {chance:.0%}")


def _shown(trial: Trial, number: int) -> str:
    """All that the model sees in the first turn."""
    requests = trial.good[number].requests if number < len(trial.good) else []
    first = requests[0] if requests else {}
    texts = [
        *_texts(trial.tasks[number].prompt),
        *_texts(first.get("messages", [])),
        json.dumps(first.get("tools", "")),
    ]
    return "\n".join(texts)


def _contains(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def time_outs(trial: Trial) -> Iterator[Finding]:
    late = [played for played in (*trial.episodes, trial.failing, trial.talking) if played.is_late]
    if late:
        turns = len(late[0].requests)
        value = f"an episode did not return within {trial.timeout_s:g} s, after {turns} replies"
        yield fail("time", value, "give every wait a limit: asyncio.timeout()")
    if any(played.is_stuck for played in (*late, trial.cancelled)):
        value = f"an episode did not end within {CANCEL_S:g} s of its cancellation"
        yield fail("cancellation", value, "do not catch asyncio.CancelledError, and give threads a limit")
    if len(trial.talking.requests) > MAX_TURNS:
        value = f"an episode made more than {MAX_TURNS} requests of a model that never finishes"
        yield fail("turns", value, "limit the turns of an episode")
    if trial.blocked:
        value = f"the event loop did not run for a second: {trial.blocked[0]}"
        yield fail("event loop", value, "call it with asyncio.to_thread: all episodes of the process wait for it")
    if not late and not trial.blocked:
        yield ok("time", f"all episodes returned within {trial.timeout_s:g} s")


def errors(trial: Trial) -> Iterator[Finding]:
    """No reply of the model makes an episode raise, and every episode asks the model."""
    kinds = [("a known-good reply", dict(enumerate(trial.good))), *trial.bad.items()]
    kinds += [("a known-good reply, among other episodes", dict(enumerate(trial.together)))]
    for kind, played in kinds:
        for number, one in played.items():
            if one.error is not None:
                value = f"{trial.where(number)}, {kind}: {type(one.error).__name__}: {str(one.error)[:120]}"
                yield fail("replies", value, "a reply of any form earns a reward: catch the error, return the lowest")
                break
    if trial.good and not any(played.requests or played.is_late for played in trial.good):
        yield fail("replies", "the episodes never ask the model", "call model.reply(), or model.client, in play()")
    failing = trial.failing
    if failing.requests and failing.error is None and not failing.is_late:
        value = f"{_FAILED_MODEL} became the reward {failing.reward}"
        yield fail("engine failures", value, "raise errors of the client: the run tries the episode again")


def reward_range(trial: Trial) -> Iterator[Finding]:
    low, high = trial.environment.reward_range
    rewards = [played.reward for played in trial.episodes if played.error is None and not played.is_late]
    for reward in rewards:
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            yield fail("reward", f"{type(reward).__name__} {str(reward)[:40]}", "return a finite number")
            return
        if not low - _SAME <= reward <= high + _SAME:
            value = f"{reward:g} is outside of reward_range, {low:g} to {high:g}"
            yield fail("reward", value, "correct the reward, or reward_range")
            return
    if rewards:
        yield ok("reward", f"{min(rewards):g} to {max(rewards):g}, within {low:g} to {high:g}")


def grading(trial: Trial) -> Iterator[Finding]:
    """Known-good replies earn the highest reward, and wrong ones less."""
    if not any(task.good for task in trial.tasks):
        yield warn("known-good replies", "no task has any", "set Task.good, so that the grader can be tested")
    known = [i for i, played in enumerate(trial.good) if trial.tasks[i].good and played.is_number]
    if not known:
        return
    high = trial.environment.reward_range[1]
    poor = [i for i in known if trial.good[i].reward < high - _SAME]
    if poor:
        rewards = ", ".join(f"{trial.where(i)}: {trial.good[i].reward:g}" for i in poor[:4])
        yield fail("known-good replies", f"earn less than {high:g}: {rewards}", "correct the grader, or Task.good")
    else:
        yield ok("known-good replies", f"earn {high:g} in {len(known)} tasks")
    for kind, played in trial.bad.items():
        compared = [i for i in known if i not in poor and i in played and played[i].is_number]
        right = [i for i in compared if played[i].reward >= trial.good[i].reward - _SAME]
        if 2 * len(right) > len(compared):
            value = f"earn as much as known-good ones: {kind}, in {len(right)} of {len(compared)} tasks"
            yield fail("known-bad replies", value, "make the grader stricter, and let it read the answer only")


def repetition(trial: Trial) -> Iterator[Finding]:
    """The same replies earn the same reward: again, after wrong replies, and among other episodes."""
    fix = "keep the state of an episode in local variables of play(), and draw random numbers from a fixed seed"
    first = [played.reward for played in trial.good]
    for kind, episodes in (("after other episodes", trial.again), ("among other episodes", trial.together)):
        pairs = enumerate(zip(first, (played.reward for played in episodes), strict=False))
        differ = [f"{trial.where(i)}: {a} and {b}" for i, (a, b) in pairs if repr(a) != repr(b)]
        if differ:
            yield fail("isolation", f"the same replies earn other rewards {kind}: {'; '.join(differ[:3])}", fix)
            return
    openings = [[r["messages"] for r in played.requests[:1]] for played in trial.good]
    if trial.again and openings != [[r["messages"] for r in played.requests[:1]] for played in trial.again]:
        yield fail("isolation", "the first messages differ when an episode is played again", fix)
        return
    if any(played.has_changed_task for played in trial.episodes):
        yield fail("isolation", "an episode changed its task in place", "copy task.data before you change it")
        return
    if trial.left and not trial.cancelled.is_stuck:
        yield fail("isolation", f"episodes left {', '.join(trial.left[:3])}", "end them in a finally clause of play()")
        return
    if trial.together:
        yield ok("isolation", f"{len(trial.together)} episodes at once earn the same as one by one")
    if 0 < trial.at_once < len(trial.together):
        value = f"only {trial.at_once} of {len(trial.together)} ran at once"
        yield warn("concurrency", value, "a rollout plays hundreds of episodes at once: remove the limit or raise it")


def tool_schemas(trial: Trial) -> Iterator[Finding]:
    offered = [tool for played in trial.good for r in played.requests[:1] for tool in r.get("tools") or []]
    for tool in offered:
        problem = _tool_problem(tool)
        if problem:
            yield fail("tools", f"{str(tool)[:80]}: {problem}", "describe tools in OpenAI's format, with a JSON schema")
            return
    if offered:
        yield ok("tools", ", ".join(sorted({tool["function"]["name"] for tool in offered})))


def _tool_problem(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not re.fullmatch(r"[\w-]{1,64}", str(function.get("name", ""))):
        return "it has no type 'function' with a name of letters, digits, _ and -"
    parameters = function.get("parameters", {"type": "object"})
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        return "its parameters are not a JSON schema of the type object"
    missing = set(parameters.get("required", ())) - set(parameters.get("properties", {}))
    return f"it requires {', '.join(sorted(missing))}, and has no such property" if missing else ""


def tokens(trial: Trial) -> Iterator[Finding]:
    """Tokens that the environment adds per turn, and whether it keeps the history as the model saw it."""
    most, total, turns = 0, 0, 0
    for played in (*trial.good, trial.talking):
        history: list[Message] = []
        for request in played.requests:
            messages = request["messages"]
            if messages[: len(history)] != history:
                value = f"the messages of turn {turns + 1} do not continue those before"
                fix = "append to the history: a turn with another history becomes a separate sample"
                yield warn("history", value, fix)
                return
            added = [message for message in messages[len(history) :] if message["role"] != "assistant"]
            new = trial.count_tokens("\n".join(_texts(added)))
            most, total, turns, history = max(most, new), total + new, turns + 1, messages
    value = f"{total / max(turns, 1):.0f} tokens per turn from the environment, at most {most}"
    if most > trial.max_turn_tokens:
        fix = "cut observations, or raise --max-turn-tokens if the context of the engines has room"
        yield fail("tokens", f"{value}, and {trial.max_turn_tokens} are allowed", fix)
    elif turns:
        yield ok("tokens", value)


CHECKS: tuple[Callable[[Trial], Iterator[Finding]], ...] = (
    prompt_form,
    same_tasks,
    different_tasks,
    leaks,
    time_outs,
    errors,
    reward_range,
    grading,
    repetition,
    tool_schemas,
    tokens,
)
