"""The log of a rollout: by slime, by the user in addition, by the user instead. Turns and right samples."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.config.groups import RunConfig
from slime.data.dump_file import save_debug_rollout_data
from slime.data.sample import Sample
from slime.hooks import check_hooks
from slime.observability import logging_utils
from slime.observability.rollout_metrics import log_eval_rollout_data, log_rollout_data
from slime.ray.rollout import RolloutManager
from slime.utils.errors import ConfigError, DataError
from tests.unit.config.tiny_command import make_command
from tests.unit.observability import user_logs

USER = "tests.unit.observability.user_logs"


def settings(**more: Any) -> Namespace:
    values: dict[str, Any] = {
        "reward_key": None,
        "advantage_estimator": "grpo",
        "log_reward_category": None,
        "log_passrate": False,
        "log_multi_turn": False,
        "log_correct_samples": False,
        "rollout_num_gpus": 2,
        "rollout_max_response_len": 8,
        "n_samples_per_prompt": 2,
        "n_samples_per_eval_prompt": 2,
        "eval_datasets": [],
    }
    return Namespace(**(values | more))


def sample(length: int, reward: float = 0.0, group: int = 0, **more: Any) -> Sample:
    return Sample(group_index=group, response_length=length, reward=reward, status=Sample.Status.COMPLETED, **more)


def test_what_the_user_logs_comes_on_top_of_our_metrics() -> None:
    metrics = log_rollout_data(4, settings(), [sample(3), sample(5)], {"drops": 2.0}, 1.5, user_logs.beside)
    assert (metrics["rollout/mine"], metrics["rollout/drops"], metrics["drops"]) == (2, 2.0, 2.0)
    assert metrics["rollout/response_len/mean"] == 4.0
    assert metrics["perf/rollout_time"] == 1.5
    assert "rollout/step" not in metrics


def test_a_true_result_leaves_our_metrics_out() -> None:
    assert log_rollout_data(4, settings(), [sample(3)], {}, 1.0, user_logs.instead) == {"rollout/only": 4}
    data = {"a": {"rewards": [1.0, 1.0]}}
    assert log_eval_rollout_data(0, settings(), data, {"x": 1.0}, user_logs.eval_instead) == {"eval/a/count": 2}
    both = log_eval_rollout_data(0, settings(), data, {"x": 1.0}, user_logs.eval_beside)
    assert both == {"eval/a": 1.0, "x": 1.0, "eval/a/count": 2}
    assert log_eval_rollout_data(0, settings(), data, None) == {"eval/a": 1.0}


def test_collecting_ends_with_its_block_also_after_an_error() -> None:
    def fails() -> None:
        with logging_utils.collecting():
            raise KeyError

    with logging_utils.collecting() as outer:
        with logging_utils.collecting() as inner:
            logging_utils.log(Namespace(), {"a": 1, "s": 0}, "s")
        with pytest.raises(KeyError):
            fails()
        logging_utils.log(Namespace(), {"b": 1, "s": 0}, "s")
    logging_utils.log(Namespace(), {"c": 1, "s": 0}, "s")
    assert (inner, outer) == ({"a": 1}, {"b": 1})


def test_metrics_without_a_tracker_are_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging_utils, "_HAS_WARNED", False)
    for _ in range(2):
        logging_utils.log(Namespace(), {"a": 1, "s": 0}, "s")
    assert [record.getMessage() for record in caplog.records] == [
        "metrics are lost, because this process has no tracker: a"
    ]


def test_turns_are_measured_with_and_without_the_environments_words() -> None:
    samples = [
        sample(8, loss_mask=[1, 1, 0, 0, 0, 0, 1, 1], metadata={"round_number": 3}),
        sample(4, loss_mask=[1, 0, 0, 1], metadata={"round_number": 1}),
    ]
    metrics = log_rollout_data(0, settings(log_multi_turn=True), samples, None, 1.0)
    found = {name.removeprefix("multi_turn/"): value for name, value in metrics.items() if "multi_turn/" in name}
    assert found == {
        "raw_response_length/response_length_mean": 6.0,
        "raw_response_length/response_length_max": 8.0,
        "raw_response_length/response_length_min": 4.0,
        "raw_response_length/response_length_clip_ratio": 0.5,
        "wo_obs_response_length/response_length_mean": 3.0,
        "wo_obs_response_length/response_length_max": 4.0,
        "wo_obs_response_length/response_length_min": 2.0,
        "multi_turn_metric/round_number_mean": 2.0,
        "multi_turn_metric/round_number_max": 3.0,
        "multi_turn_metric/round_number_min": 1.0,
    }
    plain = log_rollout_data(0, settings(log_multi_turn=True), [sample(4)], None, 1.0)
    assert not [name for name in plain if "round_number" in name]
    assert log_rollout_data(0, settings(log_multi_turn=True), [], None, 1.0) == {"perf/rollout_time": 1.0}


def test_right_samples_are_counted_by_quarters_of_the_longest_response() -> None:
    lengths = [(0, 1.0), (2, 1.0), (3, 1.0), (8, 1.0), (5, 0.0), (6, 0.5)]
    samples = [sample(length, reward) for length, reward in lengths]
    samples.append(sample(7, -1.0, metadata={"raw_reward": 1.0}))  # the reward was shaped
    metrics = log_rollout_data(0, settings(log_correct_samples=True), samples, None, 1.0)
    quarters = [metrics[f"rollout/correct_length/p{end}"] for end in (25, 50, 75, 100)]
    assert quarters == [0.4, 0.2, 0.0, 0.4]
    assert metrics["rollout/correct_response_lengths"] == 4.0
    wrong = log_rollout_data(0, settings(log_correct_samples=True), [sample(3)], None, 1.0)
    assert not [name for name in wrong if "correct" in name]


def test_the_pass_rate_counts_complete_groups_only() -> None:
    samples = [sample(1, 1.0, 0), sample(1, 0.0, 1), sample(1, 0.0, 0), sample(1, 0.0, 1), sample(1, 1.0, 2)]
    metrics = log_rollout_data(0, settings(log_passrate=True), samples, None, 1.0)
    assert metrics["passrate/pass@1"] == 0.25
    assert metrics["passrate/pass@2"] == 0.5


def manager(directory: Path, *flags: str) -> RolloutManager:
    """A started rollout manager that replays a dump of two samples."""
    dump = str(directory / "dump_{rollout_id}.pt")
    samples = [sample(1, 1.0, tokens=[5, 6], rollout_id=0), sample(1, 0.0, tokens=[5, 7], rollout_id=1)]
    save_debug_rollout_data(dump, samples, rollout_id=0, evaluation=False)
    command = make_command(directory)
    flags = ("--output-dir", str(directory / "outputs"), "--experiment-name", "run", *flags)
    args = command.resolve("--load-debug-rollout-data", dump, "--eval-function-path", f"{USER}.evaluate", *flags)
    args.debug_rollout_only = True  # the samples go nowhere
    assert check_hooks(args) == []
    made = RolloutManager(RunConfig.of(args), slots=None, data_buffer=None)  # type: ignore[arg-type]
    made.start()
    return made


def test_the_rollout_manager_calls_the_users_functions(tmp_path: Path) -> None:
    flags = ("--custom-rollout-log-function-path", f"{USER}.beside")
    flags += ("--custom-eval-rollout-log-function-path", f"{USER}.eval_instead", "--log-correct-samples")
    made = manager(tmp_path, *flags)
    metrics = made.generate(0).metrics
    assert (metrics["rollout/mine"], metrics["rollout/drops"]) == (2, -1)
    assert metrics["rollout/correct_response_lengths"] == 1.0
    assert made.eval(0) == {"eval/gsm8k/count": 2}
    made.dispose()
    recorded = sorted(path.name for path in (tmp_path / "outputs" / "run" / "samples").iterdir())
    assert recorded == ["eval_000000.parquet", "rollout_000000.parquet"]


def test_the_rollout_manager_takes_statuses_as_text_and_names_a_function_without_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager(tmp_path)
    returned: list[Any] = [sample(1, 1.0, tokens=[5, 6])]
    returned[0].status = "truncated"

    def evaluate(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
        return {"gsm8k": {"rewards": [1.0], "samples": returned}, "none": {"rewards": [0.0], "samples": None}}

    monkeypatch.setattr(made, "_eval_function", evaluate)
    assert made.eval(0)["eval/gsm8k/truncated_ratio"] == 1.0
    returned[:] = ["text"]
    with pytest.raises(DataError, match=r"--eval-function-path: .*evaluate must return samples in lists: .* got str"):
        made.eval(0)
    made.dispose()


@pytest.mark.parametrize(
    ("attempts", "scored"),
    [(["2", "23", "3"], 2), (["23", "3", "4"], 3), (["23", "34", "4"], 4), (["23", "23", "3"], 2)],
)
def test_an_evaluation_with_two_versions_is_repeated_while_newer_weights_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[str], scored: int
) -> None:
    made, left = manager(tmp_path), iter(attempts)

    def evaluate(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
        return {"gsm8k": {"rewards": [1.0], "samples": [sample(1, 1.0, tokens=[5, 6], weight_versions=[*next(left)])]}}

    monkeypatch.setattr(made, "_eval_function", evaluate)
    assert made.eval(0)["eval/weight_version"] == scored
    made.dispose()


@pytest.mark.parametrize("flag", ["--custom-rollout-log-function-path", "--custom-eval-rollout-log-function-path"])
def test_a_log_function_of_another_shape_is_refused_at_the_start(tmp_path: Path, flag: str) -> None:
    _, problems = make_command(tmp_path).run(flag, f"{USER}.log")
    assert flag in problems
    assert "signature" in problems


def test_a_log_function_that_raises_is_shown_and_the_metrics_are_logged_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> bool:
        raise ZeroDivisionError("my plot")

    metrics = log_rollout_data(0, settings(), [sample(2, 1.0)], None, 1.0, broken)
    assert metrics["rollout/response_len/mean"] == 2
    assert "my plot" in caplog.text
    assert "--custom-rollout-log-function-path failed" in caplog.text


def test_a_category_that_no_reward_has_is_named() -> None:
    with pytest.raises(ConfigError, match="--log-reward-category kind"):
        log_rollout_data(0, settings(log_reward_category="kind"), [sample(2, 1.0)], None, 1.0)
    rewards = [sample(2, {"kind": "a", "score": 1.0}), sample(2, {"score": 0.0})]
    metrics = log_rollout_data(0, settings(log_reward_category="kind", reward_key="score"), rewards, None, 1.0)
    assert metrics["rollout/error_cat/a"] == 0.5
