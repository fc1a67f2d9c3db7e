"""--custom-config-path: keys are arguments or flags, values have the flag's type, and nothing is lost in silence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.tiny_command import TinyCommand


def run(command: TinyCommand, text: str, *flags: Any, without: tuple[str, ...] = ()) -> tuple[Any, str]:
    return command.run("--custom-config-path", command.write("c.yaml", text), *flags, without=without)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("rollout_global_dataset: false", "rollout_global_dataset", False),
        ("disable_rollout_global_dataset: true", "rollout_global_dataset", False),
        ("disable-rollout-global-dataset: false", "rollout_global_dataset", True),
        ("norm-epsilon: 1e-6", "layernorm_epsilon", 1e-6),
        ("no_offload_train: true", "offload_train", False),
        ("rollout_stop: end", "rollout_stop", ["end"]),
        ("rollout_stop_token_ids: ['5', 6]", "rollout_stop_token_ids", [5, 6]),
        ("train_env_vars: {A: b}", "train_env_vars", {"A": "b"}),
        ('train_env_vars: \'{"A": "b"}\'', "train_env_vars", {"A": "b"}),
        ("lr: null", "lr", 1e-6),
        ("experiment_name: 2026-01-02", "experiment_name", "2026-01-02"),
    ],
)
def test_a_key_is_the_name_of_an_argument_or_of_its_flag(text: str, name: str, value: Any, command: TinyCommand):
    args, problems = run(command, text)
    assert getattr(args, name) == value
    assert problems == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lr: [1, 2]", "key lr: [1, 2] is not one value"),
        ("lr: {a: 1}", "key lr: {'a': 1} is not one value"),
        ("lr: fast", "key lr: 'fast' is not a number"),
        ("num_epoch: 1.5", "key num_epoch: 1.5 is not a whole number"),
        ("rollout_stop: {a: 1}", "key rollout_stop: {'a': 1} is not one value"),
        ("eval_prompt_data: {a: b}", "key eval_prompt_data: {'a': 'b'} is not one value"),
        ("label_key: yes", "key label_key: True is a truth value in YAML: write the word in quotes"),
        ("train_env_vars: 3", "key train_env_vars: '3' must be a JSON object"),
        ("rope_type: other", "key rope_type: 'other' is not one of rope, yarn"),
        ("plan: true", "key plan has no effect in the file: use it on the command line"),
        ("world_size: 17", "key world_size: 17 cannot be set, it follows from the flags (2)"),
        ("given: [lr]", "key given: ['lr'] cannot be set"),
    ],
)
def test_a_key_that_cannot_be_taken_is_named_with_its_value(text: str, problem: str, command: TinyCommand):
    assert problem in run(command, text)[1]


def test_all_wrong_values_come_in_one_message(command: TinyCommand):
    problems = run(command, "lr: fast\nnum_epoch: many\n")[1]
    assert "key lr" in problems
    assert "key num_epoch" in problems


def test_a_key_close_to_a_flag_is_a_warning_and_one_of_the_user_s_own_is_not(command: TinyCommand):
    args, problems = run(command, "rollout_batchsize: 3\nsearch_concurrency: 4\n")
    assert problems == ""
    assert (args.rollout_batchsize, args.search_concurrency) == (3, 4)
    (warning,) = [notice.text for notice in args.notices if notice.level == "warning"]
    assert warning == "nothing of slime reads the key rollout_batchsize; did you mean rollout_batch_size?"


def test_the_flag_of_an_alias_beats_the_file(command: TinyCommand):
    args, _ = run(command, "disable_rollout_global_dataset: false\n", "--disable-rollout-global-dataset")
    assert args.rollout_global_dataset is False


@pytest.mark.parametrize("flag", ["--custom-config-path", "--eval-config", "--megatron-config-path", "--sglang-config"])
def test_a_binary_file_is_no_yaml_file(flag: str, command: TinyCommand):
    (command.directory / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    _, problems = command.run(flag, "{dir}/binary.yaml")
    assert f"{flag} {command.directory}/binary.yaml is not a text file in UTF-8" in problems
