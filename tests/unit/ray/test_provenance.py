"""Every trained token was made by weights that the loop sent: anything else is refused before it is trained on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.ray import train_actor
from slime.ray.train_actor import TrainActor, check_provenance
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
