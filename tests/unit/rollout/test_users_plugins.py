"""Code written for slime runs unchanged: through the real manager, with an engine that answers at once."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from slime.batch import ship
from slime.config.groups import RunConfig
from slime.data.sample import iter_samples
from slime.hooks import check_hooks, load_function
from slime.ray import rollout as manager_module
from slime.ray.arguments import parse_only
from slime.ray.rollout import RolloutManager
from slime.rollout.data_source import make_data_source
from tests.unit.rollout.fake_engine import completion

HERE = "tests.unit.rollout.users_plugins"


class Buffer:
    """The Data Buffer without its process."""

    def __init__(self, args) -> None:
        self.source = make_data_source(load_function(args.data_source_path, "data_source"), args)
        self.used = []

    def settle(self, rollout_id, used, keeps_others):
        self.used.append(sorted(used))

    def __getattr__(self, name):
        return getattr(self.source, name)


@pytest.fixture
def play(engine, tiny_task, monkeypatch):
    """``play(*flags)`` gives a started manager whose engine answers every request with two tokens."""
    server = engine(lambda payload, number: (200, completion(payload, [5, 6], text=" 7" * (1 + number % 3))))
    monkeypatch.setattr(manager_module, "boxed", lambda batches, transport: list(batches))

    def start(*flags):
        basis = ["--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train, "--label-key", "label"]
        basis += ["--apply-chat-template", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
        basis += ["--global-batch-size", "4", "--rollout-max-response-len", "16", "--num-rollout", "1"]
        basis += ["--rollout-num-gpus", "1", "--actor-num-gpus-per-node", "1", "--debug-rollout-only"]
        args, problems = parse_only([*basis, *flags])
        assert problems == []
        assert check_hooks(args) == []
        args.debug_train_only, args.debug_rollout_only = True, False  # no engine processes, but the batch is made
        args.sglang_router_ip, args.sglang_router_port, args.world_size = "127.0.0.1", server.port, 1
        args.rm_type = args.rm_type or "random"
        manager = RolloutManager(RunConfig.of(args), slots=None, data_buffer=Buffer(args))
        manager.start()
        return manager

    return start


def rollout(manager, monkeypatch):
    """Rollout 0: its samples, the columns made of them, the result."""
    seen = SimpleNamespace(samples=[])
    original = ship.compile_train_data

    def compile_train_data(groups, **values):
        seen.samples, seen.data = list(iter_samples(groups)), original(groups, **values)
        return seen.data

    monkeypatch.setattr(ship, "compile_train_data", compile_train_data)
    seen.result = manager.generate(0)
    return seen


def generate_flags(name):
    return ("--custom-generate-function-path", f"{HERE}.{name}")


# --- what must be true of the batch, beyond that there is one


def has_tool_turns(seen, manager):
    for sample in seen.samples:
        assert sample.tool_call_count == 2
        assert sample.metadata["round_number"] == 3
        assert sample.loss_mask[:2] == sample.loss_mask[-2:] == [1, 1]
        assert sum(sample.loss_mask) == 6 < sample.response_length
        assert all((p == 0.0) == (m == 0) for p, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True))
    assert seen.data["rollout_mask_sums"] == [6] * 4
    assert seen.data["round_number"] == [3] * 4


def has_two_turns(seen, manager):
    assert [s.rollout_log_probs for s in seen.samples] == [[-0.1, -0.2, -0.1, -0.2]] * 4
    assert all(s.tokens[-4:] == [5, 6, 5, 6] and s.status is s.Status.COMPLETED for s in seen.samples)


def has_text_and_rewards(seen, manager):
    assert all(s.tokens and s.response_length > 0 and 0 <= s.reward < 1 for s in seen.samples)
    assert all(mask.all() for mask in seen.data["loss_masks"])


def has_rows(seen, manager):
    assert seen.data["rollout_ids"] == [0, 1, 1, 2, 3, 3]
    assert seen.data["rollout_mask_sums"] == [2, 4, 4, 2, 4, 4]


def has_one_reward_model(seen, manager):
    assert users_plugins().CustomRewardModel.made == 1
    assert all(0 < raw < 1 for raw in seen.data["raw_reward"])


def has_ranks(seen, manager):
    assert sorted(seen.data["raw_reward"][:2]) == sorted(seen.data["raw_reward"][2:]) == [0.0, 1.0]


def has_rewards_of_rows(seen, manager):
    assert seen.data["raw_reward"] == [0, 1, 0, 0, 1, 0]


def has_categories(seen, manager):
    assert seen.result.metrics["rollout/error_cat/other"] == 1.0


def drew_its_own(seen, manager):
    assert [s.label for s in seen.samples] == ["1", "1", "2", "2"]


def drew_levels(seen, manager):
    assert {s.metadata["level"] for s in seen.samples} == {1}
    assert manager._data_buffer.get_metadata() == {"level": 1}


def gave_back(seen, manager):
    assert manager._data_buffer.used == [sorted({s.group_index for s in seen.samples})]
    drawn = set(range(manager._data_buffer.sample_group_index))
    waiting = {group[0].group_index for group in manager._data_buffer.buffer}
    assert waiting == drawn - set(manager._data_buffer.used[0])


def trains_on_one_each(seen, manager):
    assert [bool(mask.any()) for mask in seen.data["loss_masks"]].count(True) == 2


def saw_groups(seen, manager):
    assert manager._data_buffer.get_metadata()["seen"] >= 2


def was_hooked(seen, manager):
    assert all(s.metadata["noted"] == (0, False) and s.metadata["shortened"] for s in seen.samples)


def is_centered(seen, manager):
    assert abs(sum(seen.data["rewards"])) < 1e-6


def has_own_columns(seen, manager):
    assert seen.data["rewards"] == [1.0] * 4
    assert seen.data["total_lengths"] == [len(tokens) for tokens in seen.data["tokens"]]


def has_own_metrics(seen, manager):
    assert seen.result.metrics["rollout/mine"] == 2
    metrics = manager.eval(0)
    assert metrics["eval/mine"] == 1.0
    assert 0 <= metrics["eval/sums"] <= 1


def is_evaluated(seen, manager):
    metrics = manager.eval(0)
    assert (metrics["eval/sums"], metrics["eval/sums-truncated_ratio"]) == (0.5, 0.5)


def users_plugins():
    return sys.modules[HERE]


PLUGINS = [
    ("--custom-generate-function-path {}.generate_with_tool", has_tool_turns),
    ("--custom-generate-function-path {}.generate_by_hand", has_two_turns),
    ("--custom-generate-function-path {}.custom_generate", has_text_and_rewards),
    ("--custom-generate-function-path {}.custom_generate_batch", has_text_and_rewards),
    ("--custom-generate-function-path {}.generate_rows", has_rows),
    ("--custom-rm-path {}.CustomRewardModel", has_one_reward_model),
    ("--custom-rm-path {}.CustomRewardModel --group-rm", has_one_reward_model),
    ("--custom-rm-path {}.group_rm --group-rm --reward-key score", has_ranks),
    (
        "--custom-rm-path {}.group_rm --group-rm --reward-key acc --custom-generate-function-path {}.generate_rows",
        has_rewards_of_rows,
    ),
    ("--custom-rm-path {}.rm_with_metadata --reward-key score --log-reward-category category", has_categories),
    ("--data-source-path {}.ListSource", drew_its_own),
    ("--data-source-path {}.LongestFirst --over-sampling-batch-size 6", gave_back),
    ("--data-source-path {}.Curriculum", drew_levels),
    ("--buffer-filter-path {}.newest_first --over-sampling-batch-size 6", gave_back),
    ("--dynamic-sampling-filter-path {}.not_too_short --over-sampling-batch-size 4", gave_back),
    ("--rollout-sample-filter-path {}.longest_only", trains_on_one_each),
    ("--rollout-all-samples-process-path {}.count_all --over-sampling-batch-size 4", saw_groups),
    ("--rollout-sample-hook-path {}.note_rollout --rollout-sample-hook-path {}.shorten", was_hooked),
    ("--custom-reward-post-process-path {}.post_process", is_centered),
    ("--custom-convert-samples-to-train-data-path {}.convert", has_own_columns),
    ("--rollout-function-path {}.generate_rollout --eval-function-path {}.evaluate", has_own_metrics),
    ("--rollout-function-path {}.generate_rollout_plain --eval-function-path {}.evaluate_plain", is_evaluated),
]


@pytest.mark.parametrize(("flags", "holds"), PLUGINS, ids=lambda value: getattr(value, "__name__", None))
def test_a_plugin_works_unchanged(play, monkeypatch, flags, holds):
    manager = play(*flags.replace("{}", HERE).split())
    holds(rollout(manager, monkeypatch), manager)
