"""The contract tests for plugin authors: good functions pass, and each mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

import slime.testing
from slime.testing import check_command, check_plugin
from slime.testing.__main__ import main
from slime.utils.errors import ConfigError

PLUGINS = str(Path(__file__).with_name("plugins.py"))

GOOD = [
    ("--custom-generate-function-path", "post_yourself"),
    ("--custom-generate-function-path", "fan_out"),
    ("--custom-generate-function-path", "whole_group"),
    ("--rollout-function-path", "rollout"),
    ("--buffer-filter-path", "best_samples"),
    ("--buffer-filter-path", "best_groups"),
    ("--data-source-path", "Source"),
    ("--data-source-path", "SourceWithoutNumbers"),
    ("--rollout-sample-hook-path", "hook_that_marks"),
    ("--rollout-sample-filter-path", "filter_removes"),
    ("--rollout-all-samples-process-path", "see_all"),
    ("--custom-reward-post-process-path", "post_process"),
    ("--custom-convert-samples-to-train-data-path", "convert"),
    ("--custom-rollout-log-function-path", "log_rollout"),
    ("--custom-advantage-function-path", "advantage"),
    ("--custom-pg-loss-reducer-function-path", "reducer"),
]

BAD = [
    ("--custom-generate-function-path", "text_only", "rollout_log_probs are missing"),
    ("--custom-generate-function-path", "short_mask", "loss_mask has 1 entries"),
    ("--custom-generate-function-path", "nothing", "returned NoneType"),
    ("--custom-generate-function-path", "group_loses_one", "returned 1 samples for a group of 2"),
    ("--custom-generate-function-path", "reward_signature", "is called with"),
    ("--custom-generate-function-path", "no_such_function", "no_such_function"),
    ("--rollout-function-path", "rollout_without_rewards", "returned 1 groups; --rollout-batch-size is 2"),
    ("--rollout-function-path", "rollout_without_rewards", "sample 0 has no reward"),
    ("--rollout-function-path", "rollout_with_other_names", "its first parameters are a, b, c"),
    ("--custom-rm-path", "reward_nan", "nan"),
    ("--custom-rm-path", "reward_dict", "--reward-key does not say"),
    ("--custom-rm-path", "rewards_too_few", "1"),
    ("--custom-rm-path", "reward_raises", "ground_truth"),
    ("--custom-rm-path", "reward_signature", "is called with"),
    ("--dynamic-sampling-filter-path", "filter_none", "returned NoneType"),
    ("--buffer-filter-path", "buffer_keeps", "still in the buffer"),
    ("--buffer-filter-path", "too_many_samples", "returned 4 samples where 1 was asked for"),
    ("--data-source-path", "SourceWithEqualIndices", "different indices"),
    ("--data-source-path", "NoSource", "it has no get_samples"),
    ("--rollout-sample-hook-path", "hook_of_text", "expected Sample or None, got str"),
    ("--rollout-sample-filter-path", "filter_deletes", "changed which samples there are"),
    ("--custom-reward-post-process-path", "post_process_flat", "must return (raw rewards, rewards)"),
    ("--custom-convert-samples-to-train-data-path", "convert_ragged", "rewards"),
    ("--custom-eval-rollout-log-function-path", "log_eval_text", "returned str"),
    ("--custom-advantage-function-path", "advantage_scalar", "'returns'] has rows of nothing"),
    ("--custom-tis-function-path", "tis_detached", "lost its gradient"),
    ("--custom-tis-function-path", "tis_detached", "metric 'm' must have one value per token"),
    ("--custom-pg-loss-reducer-function-path", "reducer_of_nothing", "must return a scalar"),
    ("--rollout-data-postprocess-path", "postprocess_drops", "not equally long"),
]


@pytest.fixture
def more(tiny_task) -> list[str]:
    data = ["--prompt-data", tiny_task.train, "--label-key", "label", "--apply-chat-template"]
    return ["--hf-checkpoint", tiny_task.model, *data]


def test_a_function_that_never_returns_is_named_and_does_not_stop_the_check(monkeypatch):
    monkeypatch.setattr(slime.testing, "_PATIENCE_S", 0.3)
    (problem,) = check_plugin("--rollout-all-samples-process-path", f"{PLUGINS}:waits_for_ever")
    assert problem.endswith("plugins.py:waits_for_ever: it did not return within 0.3 s")


@pytest.mark.parametrize(("flag", "name"), GOOD)
def test_a_good_function_passes(flag, name, more):
    assert check_plugin(flag, f"{PLUGINS}:{name}", *more) == []


@pytest.mark.parametrize(("flag", "name", "problem"), BAD)
def test_a_mistake_is_named(flag, name, problem, more):
    problems = check_plugin(flag, f"{PLUGINS}:{name}", *more)
    assert any(problem in text for text in problems), problems
    assert all(flag in text for text in problems)


def test_an_error_shows_the_users_lines_and_the_message_once():
    (problem,) = check_plugin("--custom-rm-path", f"{PLUGINS}:reward_raises")
    assert "raised KeyError: 'ground_truth'" in problem.splitlines()[0]
    assert problem.count("--custom-rm-path") == 1
    assert f'File "{PLUGINS}", line' in problem
    assert "in reward_raises" in problem
    assert "/slime/" not in problem.replace(PLUGINS, "")


def test_a_library_that_raises_is_shown_with_the_users_line_that_called_it():
    (problem,) = check_plugin("--rollout-sample-filter-path", f"{PLUGINS}:filter_parses")
    lines = problem.splitlines()
    assert "raised JSONDecodeError: " in lines[0]
    assert any("in filter_parses" in line for line in lines)
    assert 'json/decoder.py"' in lines[-2] or 'json/decoder.py"' in lines[-3]


def test_messages_name_the_file_of_a_function_and_not_the_module_it_is_loaded_as(more):
    (problem,) = check_plugin("--custom-generate-function-path", f"{PLUGINS}:nothing", *more)
    assert f"{PLUGINS}:nothing returned NoneType" in problem
    (problem,) = check_plugin("--custom-generate-function-path", f"{PLUGINS}:gone", *more)
    assert f"{PLUGINS} has no 'gone'" in problem


def test_a_model_that_is_missing_is_an_error_of_the_command():
    with pytest.raises(ConfigError, match="--hf-checkpoint /none: no such directory"):
        check_plugin("--custom-rm-path", f"{PLUGINS}:reward_raises", "--hf-checkpoint", "/none", "--prompt-data", "x")


def test_our_own_functions_pass_their_contracts(more):
    sampled = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    outcomes = check_command(
        [
            *(*more, "--eval-prompt-data", "set", more[3] + "@[0:2]"),
            *("--rollout-function-path", "slime.rollout.sglang_rollout.generate_rollout"),
            *("--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout"),
            *("--custom-rm-path", "examples/custom_reward/custom_rm.py", "--group-rm"),
            *("--custom-generate-function-path", "examples.custom_generate.custom_generate.custom_generate"),
            *("--dynamic-sampling-filter-path", sampled, "--buffer-filter-path", "slime.rollout.data_source.pop_first"),
            *("--data-source-path", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
            *("--custom-tis-function-path", "examples/train_infer_mismatch_helper/mis.py:compute_mis_weights_with_cp"),
            *("--custom-config-path", "examples/train_infer_mismatch_helper/mis.yaml"),
        ]
    )
    assert len(outcomes) == 8
    assert {outcome.kind for outcome in outcomes} == {"ok"}, outcomes


def test_what_needs_a_model_is_only_compared_with_its_signature_and_says_so():
    (generated,) = check_command(["--custom-generate-function-path", f"{PLUGINS}:post_yourself"])
    assert (generated.kind, generated.problems) == ("signature", [])
    assert "--hf-checkpoint" in generated.note
    (trained,) = check_command(["--custom-megatron-init-path", f"{PLUGINS}:megatron_init"])
    assert "trainer's model" in trained.note


def test_a_flag_that_names_no_function_is_an_error():
    with pytest.raises(ConfigError, match="--lr names no user function"):
        check_plugin("--lr", "1")
    with pytest.raises(ConfigError, match="n-samples-per-prompt"):
        check_plugin("--custom-rm-path", f"{PLUGINS}:reward_dict", "--n-samples-per-prompt", "many")


def test_the_command_line_says_what_is_wrong_and_with_what_status(capsys):
    assert main(["--custom-rm-path", f"{PLUGINS}:reward_dict", "--reward-key", "score"]) == 0
    assert capsys.readouterr().out.startswith("ok  --custom-rm-path")
    assert main(["--custom-rm-path", f"{PLUGINS}:reward_raises"]) == 1
    printed = capsys.readouterr().out
    assert "KeyError: 'ground_truth'" in printed
    assert printed.count("--custom-rm-path") == 1
    assert main(["--lr", "1e-6"]) == 2
    assert main(["--n-samples-per-prompt", "many"]) == 2
    assert main(["--help"]) == 0
