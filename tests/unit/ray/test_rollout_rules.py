"""Requirements of slime's rollout functions are reported before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.config.tiny_command import TinyCommand, make_command

_FULLY_ASYNC = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"
_SUPERVISED = "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout:generate_rollout"
_READ_ONLY = "--data-source-path slime.rollout.data_source.RolloutDataSource"
_EVALUATES = "--eval-prompt-data held {dir}/prompts.jsonl --eval-interval 1"


@pytest.fixture
def tiny(tmp_path: Path) -> TinyCommand:
    made = make_command(tmp_path)
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    made.write("chat.jsonl", json.dumps({"messages": messages, "label": "2"}) + "\n")
    return made


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (f"{_FULLY_ASYNC} {_EVALUATES}", "cannot evaluate: its worker never stops. Give --eval-function-path slime.r"),
        (_SUPERVISED, "--n-samples-per-prompt 4 must be 1"),
        (f"{_SUPERVISED} --n-samples-per-prompt 1 --apply-chat-template", "--apply-chat-template makes text of the"),
        (f"{_SUPERVISED} --disable-rollout-global-dataset", "drop --disable-rollout-global-dataset"),
        ("--trace-endpoint collector:4318", "--trace-endpoint collector:4318 must be an address such as http://"),
        ("--trace-share 1.5", "--trace-share 1.5 must be from 0 to 1"),
        (
            "--trace-endpoint http://c:4318 --router-enable-trace",
            "--router-enable-trace with --trace-endpoint: the router",
        ),
        (f"--partial-rollout {_READ_ONLY}", "is read-only, but --partial-rollout returns unfinished groups to it"),
        (f"{_FULLY_ASYNC} {_READ_ONLY}", "is read-only, but --rollout-function-path slime.rollout.fully_async"),
        (
            "--eval-prompt-data held {dir}/chat.jsonl --eval-interval 1 --eval-input-key messages",
            "evaluation set held: {dir}/chat.jsonl: prompts are lists of messages",
        ),
    ],
)
def test_what_a_rollout_function_would_refuse_is_a_problem_of_the_command(
    tiny: TinyCommand, flags: str, problem: str
) -> None:
    assert problem.replace("{dir}", str(tiny.directory)) in tiny.run(*flags.split())[1]


@pytest.mark.parametrize(
    "flags",
    [
        f"{_FULLY_ASYNC} {_EVALUATES} --eval-function-path slime.rollout.sglang_rollout.generate_rollout",
        f"{_FULLY_ASYNC} --partial-rollout",
        f"{_SUPERVISED} --n-samples-per-prompt 1 --prompt-data {{dir}}/chat.jsonl --input-key messages",
        _READ_ONLY,
        "--prompt-data {dir}/chat.jsonl --input-key messages",
        "--eval-prompt-data held {dir}/chat.jsonl --eval-interval 1 --eval-input-key messages "
        "--custom-generate-function-path slime.environments.rollout.generate",
    ],
)
def test_what_works_is_no_problem_of_a_rollout_function(tiny: TinyCommand, flags: str) -> None:
    assert tiny.run(*flags.split())[1] == ""


@pytest.mark.parametrize(
    ("flags", "is_used"),
    [
        ("--prompt-data {dir}/chat.jsonl --input-key messages", True),
        (f"--prompt-data {{dir}}/chat.jsonl --input-key messages {_FULLY_ASYNC}", True),
        ("--prompt-data {dir}/chat.jsonl --input-key messages --custom-generate-function-path a.b", False),
        (f"--prompt-data {{dir}}/chat.jsonl --input-key messages {_SUPERVISED}", False),
        ("", False),
    ],
)
def test_prompts_that_are_messages_get_the_template_unless_something_else_takes_them(
    tiny: TinyCommand, flags: str, is_used: bool
) -> None:
    args, _ = tiny.run(*flags.split())
    assert args is not None
    assert args.apply_chat_template is is_used
    told = "--apply-chat-template: not given, but prompts are lists of messages: the template is used"
    assert (told in tiny.warnings(*flags.split())) is is_used


@pytest.mark.parametrize(("own", "is_ignored"), [("", True), (", custom_rm_path: null", False)])
def test_the_reward_type_of_an_evaluation_set_that_another_reward_replaces_is_named(
    tiny: TinyCommand, own: str, is_ignored: bool
) -> None:
    entry = f"{{name: held, path: {tiny.directory}/prompts.jsonl, rm_type: f1{own}}}"
    file = tiny.write("sets.yaml", f"datasets: [{entry}]\n")
    reward = "slime.rollout.on_policy_distillation.reward_func"
    told = tiny.warnings("--eval-config", file, "--eval-interval", "1", "--custom-rm-path", reward)
    assert (f"f1: no effect, because {reward} scores the set" in told) is is_ignored
