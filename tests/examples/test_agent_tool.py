"""The external agent: its program against an engine that is played."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from examples.agent_tool.generate_with_agent import AdapterService, generate, run_program
from examples.agent_tool.run_tiny import WORDS
from examples.tiny.tools import make_tool_model
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.errors import DataError, EngineError
from tests.doc_commands import ROOT
from tests.unit.rollout.fake_engine import FakeEngine, completion, make_args

AGENT = ROOT / "examples" / "agent_tool" / "agent.py"
CALL = "<tool_call><function=look_up><parameter=name>amber</parameter></function></tool_call><|im_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    output = tmp_path_factory.mktemp("agent")
    (output / "facts.json").write_text(json.dumps({"amber": "47"}))
    return make_tool_model(output, WORDS)


@pytest.fixture
def play(model, tmp_path_factory):
    """``play(replies)``: one sample whose program meets an engine that gives ``replies`` in order."""
    engines = []

    def run(replies, command=None, evaluation=False, on_reply=lambda args: None, **changes):
        def reply(payload, number):
            on_reply(args)
            ids = GenerateState(args).tokenizer.encode(replies[number], add_special_tokens=False)
            return 200, completion(payload, ids, text=replies[number])

        engine = FakeEngine(reply)
        engines.append(engine)
        facts = str(model).replace("tiny/model", "facts.json")
        settings = {
            "sglang_tool_call_parser": None,
            "sglang_reasoning_parser": None,
            "agent_processes": 2,
            "agent_timeout": 20.0,
            "agent_max_turns": 3,
        }
        settings["agent_command"] = command or [sys.executable, str(AGENT), facts]
        args = make_args(model, engine.port, **(settings | {"rollout_max_context_len": None} | changes))
        sample = Sample(index=0, prompt=[{"role": "user", "content": "code of amber?"}], label="47")
        AdapterService.clear_instances()
        result = asyncio.run(generate(args, sample, {"max_new_tokens": 40, "temperature": 1.0}, evaluation))
        return result, engine

    yield run
    if AdapterService in type(AdapterService)._instances:
        AdapterService(None).server.stop()
    AdapterService.clear_instances()
    for engine in engines:
        engine.close()


def test_a_program_that_uses_its_tool_leaves_one_sample_with_both_turns_trained(play):
    (sample,), engine = play([CALL, "47<|im_end|>"])
    assert sample.response == CALL + "\n<|im_start|>tool\n47<|im_end|>\n<|im_start|>assistant\n47"
    assert engine.requests[1]["input_ids"] == sample.tokens[:-3]
    called = len(GenerateState(SimpleNamespace()).tokenizer.encode(CALL, add_special_tokens=False))
    assert sample.loss_mask[:called] == [1] * called
    assert sample.loss_mask[-3:] == [1] * 3
    assert sum(sample.loss_mask) == called + 3, "the tool's words are context"
    assert (sample.reward, sample.metadata["answer"]) == (1.0, "47")
    assert engine.requests[0]["sampling_params"]["temperature"] == 1.0


def test_a_wrong_answer_earns_nothing_and_an_evaluation_has_one_sample(play):
    answer, _ = play(["12<|im_end|>"], evaluation=True)
    assert isinstance(answer, Sample)
    assert (answer.reward, answer.response) == (0.0, "12")


def test_a_program_that_never_asks_is_a_failure_and_one_that_hangs_is_ended(play):
    with pytest.raises(EngineError, match="without a request"):
        play([], command=[sys.executable, "-c", "pass"])
    with pytest.raises(EngineError, match="without a request"):
        play([], command=[sys.executable, "-c", "import time; time.sleep(60)"], agent_timeout=0.3)


def test_a_program_that_is_cut_off_at_the_end_of_a_rollout_is_begun_anew(play):
    def end_rollout(args):
        GenerateState(args).aborted = True

    sample, _ = play(["12<|im_end|>"], on_reply=end_rollout)
    assert (sample.status, sample.reward, sample.tokens) == (Sample.Status.ABORTED, None, [])


def test_a_program_that_fails_gives_no_answer():
    args = SimpleNamespace(agent_command=[sys.executable, "-c", "print(1); raise SystemExit(3)"], agent_timeout=20.0)
    assert asyncio.run(run_program(args, "q", "http://127.0.0.1:1", "sid")) is None


def test_a_prompt_that_is_text_already_is_an_error_with_the_flag():
    with pytest.raises(DataError, match="--apply-chat-template"):
        asyncio.run(generate(SimpleNamespace(), Sample(index=1, prompt="text"), {}))
