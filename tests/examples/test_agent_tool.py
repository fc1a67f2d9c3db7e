"""The external agent: its program against an engine that is played, and the README's command on the real stack."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from examples.agent_tool.generate_with_agent import AdapterService, generate, run_program
from examples.agent_tool.run_tiny import WORDS
from examples.tiny.tools import make_tool_model
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.errors import DataError, EngineError
from tests.e2e.running import ROOT, metrics, run_train, values
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


TWO_TURNS = """
import os, sys, httpx
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
messages = [{"role": "user", "content": sys.argv[-1]}]
with httpx.Client(headers={"Authorization": "Bearer " + key}, timeout=600, trust_env=False, verify=False) as client:
    for _ in range(2):
        reply = client.post(url + "/chat/completions", json={"messages": messages})
        reply.raise_for_status()
        message = reply.json()["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "sure?"}]
print(message["content"])
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_what_an_agent_said_is_trained_on_with_the_very_probabilities_it_was_sampled_with(tiny_task, tmp_path):
    """Two rollouts on the real stack, by a program of two turns, sampled from a part of the vocabulary."""
    settings = {"agent_command": [sys.executable, "-c", TWO_TURNS], "agent_processes": 4}
    config = tmp_path / "agent.yaml"
    config.write_text(json.dumps(settings | {"agent_timeout": 60.0, "agent_max_turns": 2}))
    flags = [
        *("--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train, "--label-key", "label"),
        *("--num-rollout", 2, "--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 6),
        *("--custom-generate-function-path", "examples.agent_tool.generate_with_agent.generate"),
        *("--custom-config-path", config, "--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 1, "--fp32"),
        *("--sglang-context-length", 256, "--sglang-max-total-tokens", 16384, "--lr", "1e-4", "--rollout-top-p", 0.9),
        *("--save-debug-rollout-data", tmp_path / "{rollout_id}.pt", "--output-dir", tmp_path),
        *("--experiment-name", "run"),
    ]
    finished = run_train(flags, tmp_path)
    assert finished.status == 0, finished.output[-4000:]
    assert finished.survivors() == []
    differences = values(metrics(tmp_path / "run"), "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert max(differences) < 1e-4
    (first, _) = (torch.load(tmp_path / f"{i}.pt", weights_only=True)["samples"] for i in range(2))
    assert {sample["rollout_id"] for sample in first} == set(range(8))
    assert all("sure?" in sample["response"] or sample["response_length"] <= 6 for sample in first)
    assert any(0 in sample["loss_mask"] and 1 in sample["loss_mask"] for sample in first)
    assert all(len(sample["rollout_top_p_token_ids"]) >= sum(sample["loss_mask"]) for sample in first)
