"""Tasks in Harbor's format, without the package: ``harbor:FOLDER``, one task folder or a folder of them.

    task.toml          time limits, ``docker_image``, variables of the verifier
    instruction.md     the prompt
    environment/       Dockerfile, built if ``task.toml`` names no image
    tests/test.sh      runs as /tests/test.sh, and writes /logs/verifier/reward.txt or reward.json

The policy gets one tool, which runs commands in a sandbox. Then the tests are copied there and run.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import subprocess
import threading
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from slime.agent.sandbox import Sandbox, exec_and_wait
from slime.environments import Model, Task, as_tool, converse
from slime.hooks.load import load_function
from slime.utils.errors import ConfigError, DeadlineExceeded

_MOST_OUTPUT = 10_000
_building: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
_RUN = as_tool(
    "run",
    "Run a command in bash, and return its exit code and output.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


class Harbor:
    """Task folders of Harbor.

    Args:
        folder: of one task, or of task folders.
        sandbox: ``module:Class`` that implements :class:`slime.agent.sandbox.Sandbox`. Called with the image.
        sandbox_options: its keyword arguments, such as ``{"run_args": ["--memory=2g"]}``.
        max_turns: replies of an episode.
        command_timeout: seconds for one command of the policy.
    """

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        folder: str,
        sandbox: str = "slime.agent.docker_sandbox:DockerSandbox",
        sandbox_options: Mapping[str, Any] | None = None,
        max_turns: int = 50,
        command_timeout: int = 120,
    ) -> None:
        place = Path(folder)
        self._folders = sorted(file.parent for depth in ("", "*/") for file in place.glob(f"{depth}task.toml"))
        if not self._folders:
            raise ConfigError(f"harbor:{folder}: there is no task.toml in it or in a folder of it")
        self._sandbox, self._options = load_function(sandbox), dict(sandbox_options or {})
        self._max_turns, self._command_timeout = max_turns, command_timeout

    def __len__(self) -> int:
        return len(self._folders)

    def task(self, index: int) -> Task:
        folder = self._folders[index]
        prompt = (folder / "instruction.md").read_text(encoding="utf-8")
        return Task([{"role": "user", "content": prompt}], data=folder)

    async def play(self, task: Task, model: Model) -> float:
        folder: Path = task.data
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        place = settings.get("environment", {})
        build = folder, self._options.get("command", "docker"), place.get("build_timeout_sec", 600)
        image = place.get("docker_image") or await asyncio.to_thread(_image, *build)
        async with self._sandbox(image, **self._options) as box:

            async def call(name: str, arguments: dict[str, Any]) -> str:
                return await _run(box, name, arguments, self._command_timeout)

            # Also cancels a request to the engine, which would generate to the end.
            try:
                async with asyncio.timeout(settings.get("agent", {}).get("timeout_sec")) as limit:
                    await converse(model, task.prompt, [_RUN], call, max_turns=self._max_turns)
            except TimeoutError:
                if not limit.expired():
                    raise  # of the sandbox: it has failed, not the policy
            # Also after the limit: the state that the policy reached is graded.
            return await _graded(box, folder, settings.get("verifier", {}))


async def _run(box: Sandbox, name: str, arguments: dict[str, Any], timeout: int) -> str:
    command = arguments.get("command")
    if name != "run" or not isinstance(command, str):
        return "the only tool is run, with the argument command"
    # Not idempotent: sent again after a broken connection, it would run twice.
    try:
        code, out, err = await box.exec(command, timeout=timeout, idempotent=False)
    except DeadlineExceeded:
        return f"the command took more than {timeout} s"
    text = f"exit code {code}\n{out}{err}"
    return text if len(text) <= _MOST_OUTPUT else f"{text[: _MOST_OUTPUT // 2]}\n...\n{text[-_MOST_OUTPUT // 2 :]}"


async def _graded(box: Sandbox, folder: Path, verifier: Mapping[str, Any]) -> float:
    """Run the tests, and read their reward.

    Raises:
        ValueError: they took too long, or wrote no number.
    """
    # After the episode: the policy must not see the tests, nor leave a reward.
    await box.exec("rm -rf /tests /logs/verifier; mkdir -p /tests /logs/verifier", check=True)
    tests = folder / "tests"
    for file in sorted(path for path in tests.rglob("*") if path.is_file()):
        await box.write_file(f"/tests/{file.relative_to(tests).as_posix()}", file)
    budget, env = math.ceil(verifier.get("timeout_sec", 600)), {k: str(v) for k, v in verifier.get("env", {}).items()}
    # By bash: files lose their mode on the way.
    tag = f"harbor-{uuid4().hex}"
    code, _ = await exec_and_wait(box, cmd="bash /tests/test.sh", time_budget_sec=budget, tag=tag, env=env)
    found: dict[str, str] = {}
    for name in ("reward.txt", "reward.json"):
        try:
            found[name] = await box.read_file(f"/logs/verifier/{name}")
        except FileNotFoundError:
            continue
        break
    try:
        reward = _reward(found)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}: tests/test.sh ended with {code} (-1: more than {budget} s) and wrote no reward to "
            f"/logs/verifier: {found or 'no reward.txt and no reward.json'}"
        ) from error
    return reward


def _reward(found: Mapping[str, str]) -> float:
    """A number alone, or the value ``reward`` or the only one of an object."""
    # With both files Harbor takes this one.
    if "reward.txt" in found:
        return float(found["reward.txt"])
    values = json.loads(found["reward.json"])
    return float(values["reward"] if len(values) > 1 else next(iter(values.values())))


def _image(folder: Path, command: str, timeout_s: float) -> str:
    """The image of ``environment/Dockerfile``, built once: the episodes of a task start at the same time."""
    with _building[folder]:
        return _built(folder, command, timeout_s)


@functools.lru_cache(maxsize=1024)
def _built(folder: Path, command: str, timeout_s: float) -> str:
    # Another process builds again, but the builder keeps layers, so that is quick.
    place = folder / "environment"
    if not (place / "Dockerfile").is_file():
        raise ConfigError(
            f"{folder}: task.toml has no [environment] docker_image, and there is no environment/Dockerfile. "
            "Several containers (docker-compose.yaml) are not supported: name one image."
        )
    words = [command, "build", "--quiet", str(place)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{folder}: {command} build took more than {timeout_s:g} s ([environment] build_timeout_sec of task.toml)"
        ) from None
    if done.returncode != 0:
        raise ConfigError(f"{folder}: {command} build ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()
