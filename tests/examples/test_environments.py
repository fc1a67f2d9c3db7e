"""Sandboxes, shops and other places that the examples' agents act in, without an engine."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import random
from argparse import Namespace
from pathlib import Path

import pytest

from examples.coding_agent_rl.generate import generate, grade
from examples.coding_agent_rl.local_sandbox import LocalSandbox
from examples.coding_agent_rl.run_tiny import SETTINGS, make_repository
from examples.geo3k_vlm.reward_geo3k import is_right
from examples.geo3k_vlm_multi_turn.env_geo3k import build_env
from examples.strands_sglang.generate_with_strands import calculator, with_strands
from examples.tiny.vision import area_problem
from slime.agent.sandbox import Sandbox
from slime.data.sample import Sample
from slime.utils.errors import ConfigError, DataError, DeadlineExceeded

tau = importlib.import_module("examples.tau-bench.generate_with_tau")
shop = importlib.import_module("examples.tau-bench.tiny_retail")
PATCH = "--- a/answer.py\n+++ b/answer.py\n@@ -1 +1 @@\n-answer = 0\n+answer = 47\n"
CHEAT = "--- /dev/null\n+++ b/test.py\n@@ -0,0 +1 @@\n+pass\n"
TEST = {"test.py": "from answer import answer\nassert answer == 47\n"}


@pytest.fixture
def repository(tmp_path: Path) -> str:
    return make_repository(tmp_path / "repository")


@pytest.mark.parametrize(
    ("patch", "command", "reward"),
    [
        (PATCH, "python3 -S test.py", 1.0),
        (PATCH.replace("47", "48"), "python3 -S test.py", 0.0),
        (CHEAT, "python3 -S test.py", 0.0),  # the task's own test replaces the agent's
        ("", "true", 0.0),
        ("no patch", "true", 0.0),
        (PATCH, "sleep 60", 0.0),
    ],
)
def test_a_patch_is_worth_what_the_tasks_command_says_of_a_clean_copy(repository, patch, command, reward):
    args = Namespace(**SETTINGS | {"coding_eval_timeout": 1 if "sleep" in command else 60})
    task = {"image": repository, "workdir": ".", "eval_cmd": command, "eval_files": TEST}
    assert asyncio.run(grade(args, task, patch)) == reward
    assert (Path(repository) / "answer.py").read_text() == "answer = 0\n"


def test_a_local_sandbox_is_a_copy_that_ends_with_its_processes(repository):
    async def use() -> Path:
        async with LocalSandbox(repository) as sandbox:
            assert isinstance(sandbox, Sandbox)
            await sandbox.write_file("a/b.txt", "text")
            assert await sandbox.exec("cat a/b.txt; exit 3") == (3, "text", "")
            assert await sandbox.read_file("a/b.txt") == "text"
            with pytest.raises(RuntimeError, match="ended with 3"):
                await sandbox.exec("exit 3", check=True)
            with pytest.raises(DeadlineExceeded):
                await sandbox.exec("sleep 60", timeout=0.2)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="outside of the sandbox"):
                await sandbox.write_file("../x", "")
            return sandbox.root

    assert not asyncio.run(use()).exists()


def test_a_task_without_its_keys_is_an_error_with_the_flag():
    with pytest.raises(DataError, match=r"image, workdir, eval_cmd \(--metadata-key\)"):
        asyncio.run(generate(Namespace(), Sample(index=1, metadata={}), {}))


def test_the_shop_rewards_the_wanted_order_alone():
    def play(*actions: tuple[str, dict]) -> tuple[float, bool]:
        env = shop.get_env(None, 1)
        env.reset(task_index=1)
        for name, values in actions:
            result = env.step(shop.Action(name, values))
        return result.reward, result.done

    ask, stop = ("respond", {"content": shop.ASK}), ("respond", {"content": "done"})
    assert play(ask) == (0.0, False)
    assert play(("cancel", {"name": "basil"}), stop) == (1.0, True)
    assert play(("cancel", {"name": "amber"}), stop) == (0.0, True)
    assert play(("cancel", {"name": "basil"}), ("cancel", {"name": "mint"}), stop) == (0.0, True)
    assert play(("unknown", {}), stop) == (0.0, True)


def test_packages_that_are_not_installed_are_named_with_the_command_that_installs_them():
    if importlib.util.find_spec("tau_bench") is None:
        with pytest.raises(ConfigError, match="pip install git"):
            tau.make_env(Namespace(tau_env="retail"), 0)
    if importlib.util.find_spec("strands") is None:
        with pytest.raises(ConfigError, match="pip install strands-agents openai"):
            asyncio.run(with_strands(Namespace(), "q", "http://127.0.0.1:1", "sid"))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("47*83", "3901"),
        ("-(1+2)/4", "-0.75"),
        ("1/0", "ZeroDivisionError: division by zero"),
        ("9**9", "ValueError: only numbers, + - * / and parentheses are allowed"),
        ("__import__('os')", "ValueError: only numbers, + - * / and parentheses are allowed"),
        ("(", "SyntaxError: '(' was never closed (<unknown>, line 1)"),
    ],
)
def test_the_calculator_works_out_arithmetic_and_nothing_else(expression, result):
    assert calculator(expression) == result


def test_the_environment_shows_the_picture_again_larger_until_the_answer_is_right():
    image, area = area_problem(random.Random(0))
    env = build_env(Sample(label=area, multimodal_inputs={"images": [image]}), Namespace(geo3k_enlargement=2))
    observation, done, info = env.step("12")
    assert (done, info) == (False, {"is_right": False})
    items = env.format_observation(observation)["content"]
    assert [item["type"] for item in items] == ["image", "text"]
    assert items[0]["image"].size == (32, 32)
    assert env.step(area)[1:] == (True, {"is_right": True})


def test_the_last_number_or_the_box_is_the_answer():
    assert is_right("so it is 3, no, 6.", 6)
    assert is_right(r"6 or \boxed{7}", "7")
    assert not is_right("6 or 7", "6")
    assert not is_right("", "6")
