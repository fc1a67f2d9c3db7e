"""Every trained token was made by weights that the loop sent: anything else is refused before it is trained on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from slime.ray import train_actor
from slime.ray.shards import Box, check_provenance, process_rollout_data
from slime.ray.train_actor import TrainActor
from slime.rollout.arguments import DEFAULT_ROLLOUT_FUNCTION
from slime.utils.errors import DataError


def test_tokens_of_the_version_that_generated_the_rollout_are_trained():
    check_provenance(4, {"sample_indices": [7, 8], "weight_versions": [["3"], ["3", "3"]]}, "3")


@pytest.mark.parametrize("versions", [["2"], ["3", "2"], ["default"]])
def test_tokens_of_foreign_weights_are_refused_with_sample_and_versions(versions: list[str]):
    batch = {"sample_indices": [7, 8], "weight_versions": [["3"], versions]}
    with pytest.raises(DataError, match=r"sample 8 of rollout 4 .* held version 3"):
        check_provenance(4, batch, "3")


def test_replayed_rollouts_have_no_version_to_check():
    check_provenance(4, {"sample_indices": [7], "weight_versions": [["2"]]}, None)


def test_a_continued_response_may_have_begun_with_older_weights_but_not_with_newer_ones():
    check_provenance(4, {"sample_indices": [7], "weight_versions": [["2", "4"]]}, "4", allows_older=True)
    for versions in (["2", "5"], ["default", "4"]):
        with pytest.raises(DataError, match="sample 7"):
            check_provenance(4, {"sample_indices": [7], "weight_versions": [versions]}, "4", allows_older=True)


@pytest.mark.parametrize(("partial_rollout", "is_refused"), [(False, True), (True, False)])
def test_a_rank_checks_its_batch_before_it_trains(
    partial_rollout: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
):
    batch = {"sample_indices": [7], "weight_versions": [["2"]]}
    monkeypatch.setattr(train_actor, "process_rollout_data", lambda *arguments: batch)
    rank = object.__new__(TrainActor)
    rank._args = SimpleNamespace(
        partial_rollout=partial_rollout, rollout_function_path=DEFAULT_ROLLOUT_FUNCTION, train_timeout=1.0
    )
    rank._trainer = SimpleNamespace(data_parallel=(0, 1), train=lambda rollout_id, batch: batch["generated_by"])
    if is_refused:
        with pytest.raises(DataError, match="sample 7"):
            rank.train(4, [], ("4", "4"))
    else:
        assert rank.train(4, [], ("4", "4")) == "4"


def test_a_rank_sees_its_own_raw_rewards_beside_those_of_the_batch(monkeypatch: pytest.MonkeyPatch):
    shards = [{"partition": [0, 2], "raw_reward": [0.5, 1.0, 0.0]}, {"partition": [1]}]
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    columns = process_rollout_data(None, [Box(shard) for shard in shards], 0, 2)
    assert (columns["raw_reward"], columns["local_raw_reward"]) == ([0.5, 1.0, 0.0], [0.5, 0.0])
    assert "local_raw_reward" not in process_rollout_data(None, [Box(shard) for shard in shards], 1, 2)


def test_the_wait_for_a_shard_has_the_deadline_of_the_flag_or_its_default(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(ray, "get", lambda ref, timeout: seen.append(timeout) or ref)
    for args in (SimpleNamespace(train_timeout=3.0), SimpleNamespace()):
        process_rollout_data(args, [Box({})], 0, 1)
    assert seen == [3.0, 14400.0]
