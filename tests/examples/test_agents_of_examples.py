"""Conversations of the examples' agents with an engine that is played: the calculator, the shop, the coding agent."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util

import pytest

from examples.coding_agent_rl import generate as coding
from examples.coding_agent_rl.run_tiny import SETTINGS as CODING_SETTINGS
from examples.coding_agent_rl.run_tiny import make_repository
from examples.strands_sglang import generate_with_strands as strands
from examples.strands_sglang.run_tiny import SETTINGS as STRANDS_SETTINGS
from examples.tiny.tools import END, call, make_tool_model
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import close_http_client
from tests.unit.rollout.fake_engine import FakeEngine, completion, make_args

tau = importlib.import_module("examples.tau-bench.generate_with_tau")
WORDS = ("calculator", "expression", "write", "path", "text", "which?", "saved")
QUESTION = [{"role": "user", "content": "47*83="}]
AGENTS = ["plain", *(["strands"] if importlib.util.find_spec("strands") else [])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("tools"), WORDS)


@pytest.fixture
def play(model):
    """``play(function, sample, replies, **settings)``: the samples that an example makes of ``replies``."""
    engines, services = [], (strands.AdapterService, coding._AdapterService)

    def run(function, sample, replies, reasons=(), **settings):
        def reply(payload, number):
            text = replies[number]
            ids = GenerateState(args).tokenizer.encode(text, add_special_tokens=False)
            return 200, completion(payload, ids, text=text, reason=(*reasons, *["stop"] * len(replies))[number])

        engines.append(FakeEngine(reply))
        names = {"sglang_tool_call_parser": None, "sglang_reasoning_parser": None, "rollout_max_context_len": None}
        args = make_args(model, engines[-1].port, **(names | {"max_turns": 6} | settings))

        async def once():
            try:
                return await function(args, sample, {"max_new_tokens": 64, "temperature": 1.0})
            finally:
                await close_http_client()

        return asyncio.run(once())

    yield run
    for service in services:
        if service in type(service)._instances:
            service(None).server.stop()
        service.clear_instances()
    for engine in engines:
        engine.close()


def num_tokens(text: str) -> int:
    return len(GenerateState(None).tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_with_a_calculator_leaves_one_sample_with_its_turns_trained(play, agent, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # for the outside: nothing answers there
    use = call("calculator", expression="47*83") + END
    sample = Sample(index=0, prompt=QUESTION, label="3901")
    settings = STRANDS_SETTINGS | {"strands_agent": agent}
    (made,) = play(strands.generate, sample, [use, f"3901{END}"], **settings)
    assert made.response == f"{use}\n<|im_start|>tool\n3901{END}\n<|im_start|>assistant\n3901"
    assert sum(made.loss_mask) == num_tokens(use) + num_tokens(f"3901{END}")
    assert (made.reward, made.metadata["answer"].strip()) == (1.0, "3901")


def test_an_agent_that_runs_out_of_turns_has_no_answer(play):
    use = call("calculator", expression="1+1") + END
    settings = STRANDS_SETTINGS | {"strands_agent": "plain", "strands_max_turns": 1}
    (made,) = play(strands.generate, Sample(index=0, prompt=QUESTION, label="2"), [use], **settings)
    assert (made.reward, made.metadata["answer"]) == (0.0, "")
    assert "429" in made.metadata["agent_error"]


def test_a_coding_agents_changes_are_a_patch_and_the_test_of_the_task_decides(play, tmp_path):
    edit = call("write", path="answer.py", text="answer = 47") + END
    test = {"test.py": "from answer import answer\nassert answer == 47\n"}
    task = {"image": make_repository(tmp_path / "r"), "workdir": ".", "eval_cmd": "python3 -S test.py"}
    sample = Sample(index=0, prompt=[{"role": "user", "content": "47"}], metadata=task | {"eval_files": test})
    (made,) = play(coding.generate, sample, [edit, f"4{END}"], **CODING_SETTINGS)
    assert made.reward == 1.0
    assert "+answer = 47" in made.metadata["patch"]
    assert ".harness" not in made.metadata["patch"]
    assert "saved" in made.response


def test_a_conversation_in_the_shop_has_the_words_of_user_and_tools_masked(play):
    turns = [f"which?{END}", call("cancel", name="amber") + END, f"4{END}"]
    made = play(tau.generate, Sample(index=0, prompt="0"), turns, tau_env="examples.tau-bench.tiny_retail")
    told = ["\n<|im_start|>user\namber<|im_end|>\n<|im_start|>assistant\n"]
    told += ["\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"]
    assert made.response == turns[0] + told[0] + turns[1] + told[1] + turns[2].removesuffix(END)
    assert (made.reward, made.metadata["turns"], made.status) == (1.0, 3, Sample.Status.COMPLETED)
    written = [num_tokens(text) for text in turns]
    assert sum(made.loss_mask) == sum(written)
    assert made.loss_mask[: written[0] + 1] == [1] * written[0] + [0]


def test_a_conversation_that_is_cut_off_begins_anew_and_one_without_turns_is_truncated(play):
    shop = {"tau_env": "examples.tau-bench.tiny_retail"}
    made = play(tau.generate, Sample(index=0, prompt="0"), [f"which?{END}", ""], ("stop", "abort"), **shop)
    assert (made.status, made.prompt, made.tokens) == (Sample.Status.ABORTED, "0", [])
    made = play(tau.generate, Sample(index=0, prompt="0"), [f"which?{END}"], **(shop | {"max_turns": 1}))
    assert (made.status, made.reward) == (Sample.Status.TRUNCATED, 0.0)
